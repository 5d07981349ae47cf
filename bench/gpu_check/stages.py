"""Stages: parts of a check that run one after the other, each in a process of its own and not longer than its share.

A stage that raises, hangs in a CUDA call or takes its process down ends alone: the next one runs. Its figures are written
whenever they grow, so that a stage that ran out of time leaves what it had. This module needs the standard library only:
what a machine lacks is found inside a stage, and said there.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paceline
from paceline.errors import PacelineError
from paceline.paths import write_atomic

if TYPE_CHECKING:
    import torch

SUMMARY = "summary.json"
NO_GPU = "no CUDA device: a dry run of small shapes on the CPU"
TIMES = ("_s", "_ms", "_us", "_ratio", "_share")
"""Ends of the names of times, rates and their ratios: None in a dry run, whose times say nothing about a GPU."""
LOG_LINES = 30
"""Lines of a stage's output that are kept where it did not end well."""
_GRACE_S = 3.0
"""A process that does not end by itself at its limit is killed so much later, and waited for as long."""
_LEAST_S = 1.0
"""With less left of the budget no stage is begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One part of the check."""

    name: str
    entry: str
    """'module:function'; the function takes a Check."""
    share: float
    """Of the budget, as seconds of 540; the time that earlier stages leave goes to all later ones in these proportions."""
    question: str
    imports: tuple[str, ...] = ()
    """Modules that its process imports while the stage before it runs."""


_MEASURE = "paceline.bench.gpu_check.measure"


def _stage(name: str, module: str, share: float, question: str) -> Stage:
    imports = () if name == "machine" else (_MEASURE,)
    entry = f"paceline.bench.gpu_check.{module}:{name}"
    return Stage(name=name, entry=entry, share=share, question=question, imports=imports)


STAGES = (
    _stage("machine", "forwards", 60, "versions, device, copy bandwidth, which modules can be imported"),
    _stage("kernels", "forwards", 75, "kernels against the references in float64; tests marked gpu"),
    _stage("engine", "rounds", 80, "bundled models: tokens of eager, captured and reference rounds; graphs"),
    _stage("forward", "forwards", 100, "verify forwards of Qwen3-8B's shape: eager, replayed, share of the floor"),
    _stage("drafters", "rounds", 85, "four drafters at 8B size: device and host ms, launches, waits of a round"),
    _stage("idle", "rounds", 45, "share of a round in which the device does nothing"),
    _stage("swap", "rounds", 35, "rounds while weights are staged, against rounds without"),
    _stage("traces", "rounds", 30, "rounds with traces at a vocabulary of 151,936, against rounds without"),
    _stage("training", "rounds", 30, "one training job on the device"),
)


class Check:
    """What a stage is told, and where it leaves its figures. Lives in the stage's process."""

    def __init__(self, result: Path, *, is_dry: bool, limit_s: float) -> None:
        """result: file for the figures, replaced whole. is_dry: small shapes on the CPU."""
        self.is_dry, self._result = is_dry, result
        self._end = time.monotonic() + limit_s
        self._values: dict[str, Any] = {"headline": "", "data": {}}

    def device(self) -> torch.device:
        """Where the stage runs. Raises: PacelineError where there is no GPU to check."""
        import torch

        if self.is_dry:
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise PacelineError("torch sees no CUDA device; --dry-run runs the stages with small shapes on the CPU")
        return torch.device("cuda", torch.cuda.current_device())

    def left_s(self) -> float:
        """Seconds until the process is ended."""
        return self._end - time.monotonic()

    def save(self, headline: str | None = None, **figures: Any) -> None:
        """Add figures to the stage's data and write all of it; in a dry run without times, and with the reason.

        headline: one line for the table at the end; without figures that only a GPU has in a dry run.
        """
        if headline is not None:
            self._values["headline"] = headline
        data = self._values["data"]
        data |= _plain(figures, TIMES if self.is_dry else ())
        if self.is_dry:
            data["null_because"] = NO_GPU
        write_atomic(self._result, json.dumps(self._values, allow_nan=False))

    def fault(self, reason: str) -> None:
        """Write why the stage is not done well; the first reason counts, an empty one is none."""
        if reason and "reason" not in self._values:
            self._values["reason"] = reason
            self.save()


def _plain(value: Any, hidden: tuple[str, ...]) -> Any:
    """The value as JSON has it: None for numbers without a word, and under names that end as the hidden ones."""
    if isinstance(value, dict):
        return {str(k): None if hidden and str(k).endswith(hidden) else _plain(v, hidden) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, hidden) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def reason_of(error: BaseException) -> str:
    """One sentence; a package that is not installed is named as what to carry."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            return f"needs {package}: carry its wheel (--wheels DIR)"
    return f"{type(error).__name__}: {str(error).strip()[:500]}"


def run_child(entry: str, imports: Sequence[str], result: Path, *, is_dry: bool) -> int:
    """The process of a stage: import what it needs, wait for the word, run it; the exit code.

    The word is one line on standard input, the end of its time on the clock of `time.monotonic`, which all processes
    share. Imports happen before it, beside the stage that is running; nothing touches the device until then. The end of
    standard input means that nobody wants the result.
    """
    function: Callable[[Check], None] | None = None
    failure: Exception | None = None
    try:
        for needed in imports:
            importlib.import_module(needed)
        module, name = entry.split(":")
        function = getattr(importlib.import_module(module), name)
    except Exception as e:  # said when it is the stage's turn
        failure = e
    line = sys.stdin.readline()
    if not line:
        return 0
    limit_s = max(float(line) - time.monotonic(), 0.1)
    # Threads, and calls into a driver that do not return, end with the process at this time.
    faulthandler.dump_traceback_later(limit_s, exit=True)
    check = Check(result, is_dry=is_dry, limit_s=limit_s)
    check.save()
    try:
        if function is None:
            assert failure is not None
            raise failure
        function(check)
    except Exception as e:
        traceback.print_exception(e)
        with contextlib.suppress(OSError):  # a full disk may be what it was; the lines printed tell
            check.fault(reason_of(e))
        return 1
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckOptions:
    """A whole check."""

    out: Path
    budget_s: float = 540.0
    is_dry: bool = False
    wheels: Path | None = None
    """Folder of wheels that the stages may import from."""


@dataclass(slots=True)
class _Process:
    """A stage's process, importing or running."""

    stage: Stage
    handle: subprocess.Popen[bytes]
    result: Path
    log: Path
    limit_s: float = 0.0

    def end(self) -> bool:
        """End it and all that it started; whether it is gone (a process inside the driver may not be)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.handle.pid, signal.SIGKILL)
        try:
            self.handle.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return False
        finally:
            if self.handle.stdin is not None:
                with contextlib.suppress(OSError):
                    self.handle.stdin.close()
        return True


@dataclass(slots=True)
class _Run:
    """One check under way."""

    options: CheckOptions
    stages: Sequence[Stage]
    folder: Path
    began: float = field(default_factory=time.monotonic)

    def left_s(self) -> float:
        return self.options.budget_s - (time.monotonic() - self.began)

    def start(self, index: int) -> _Process | None:
        """The process of a stage, which begins to import; None behind the last."""
        if index >= len(self.stages):
            return None
        stage = self.stages[index]
        result, log = self.options.out / f"{index}_{stage.name}.json", self.folder / f"{index}_{stage.name}.log"
        result.unlink(missing_ok=True)
        command = [sys.executable, "-m", "paceline.bench.gpu_check", "--stage-entry", stage.entry]
        command += ["--stage-imports", *stage.imports]
        command += ["--stage-result", str(result), *(["--dry-run"] if self.options.is_dry else [])]
        with log.open("wb") as sink:
            handle = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
                env=self._environment(),
            )  # fmt: skip
        return _Process(stage=stage, handle=handle, result=result, log=log)

    def _environment(self) -> dict[str, str]:
        root = Path(paceline.__file__).resolve().parent.parent
        paths = [str(self.folder / "site"), str(root), os.environ.get("PYTHONPATH", "")]
        values = {
            **os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TMPDIR": str(self.folder),
        }  # fmt: skip
        if self.options.is_dry:
            values["PACELINE_CPU_ISA"] = "none"  # a GPU's rounds are torch's
            values["OMP_NUM_THREADS"] = "1"  # a second process imports meanwhile: more threads would wait for cores
        else:
            values["TRITON_INTERPRET"] = "0"
        return values

    def limit_s(self, index: int) -> float:
        """Seconds of a stage: its part of what is left for it and the later ones."""
        weights = [stage.share for stage in self.stages[index:]]
        return self.left_s() * weights[0] / sum(weights)

    def finish(self, process: _Process, limit_s: float) -> dict[str, Any]:
        """Let a stage run to its end or its limit; what came of it."""
        began = time.monotonic()
        process.limit_s = limit_s
        assert process.handle.stdin is not None
        with contextlib.suppress(OSError):  # it died while importing
            process.handle.stdin.write(f"{began + limit_s:.3f}\n".encode())
            process.handle.stdin.flush()
        try:
            code: int | None = process.handle.wait(limit_s + _GRACE_S)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - began
        is_gone = process.end()
        row: dict[str, Any] = {"stage": process.stage.name, "question": process.stage.question}
        row |= {"state": "done", "seconds": round(seconds, 2), "limit_s": round(limit_s, 2)}
        row |= _read(process.result)
        if code == 0 and "reason" not in row:
            return row
        row["state"] = "failed"
        if seconds >= limit_s - 0.05:
            row |= {"state": "timed out", "reason": f"took longer than its {limit_s:.0f} s; what it had is kept"}
        row.setdefault("reason", f"its process ended with code {code}")
        if not is_gone:
            row["reason"] += "; its process could not be ended and may still hold the device"
        row["log"] = process.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return row


def _read(path: Path) -> dict[str, Any]:
    """What a stage has left, and its file no more: it becomes a part of the summary."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {"headline": "", "data": {}}
    path.unlink(missing_ok=True)
    return found


def run_stages(
    options: CheckOptions, stages: Sequence[Stage] = STAGES, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Run the stages within the budget; the summary, which is on disk, whole, after every stage.

    say: told a line when a stage has ended. Raises: OSError when nothing can be written to `options.out`.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {
        "format": 1, "command": "gpu_check", "is_dry": options.is_dry, "budget_s": options.budget_s,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "is_complete": False, "stages": [],
    }  # fmt: skip

    def write(**values: Any) -> None:
        summary.update(values)
        write_atomic(options.out / SUMMARY, json.dumps(summary, indent=1, allow_nan=False) + "\n")

    write()
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-check-", ignore_cleanup_errors=True) as folder:
        run = _Run(options=options, stages=stages, folder=Path(folder))
        if options.wheels is not None:
            write(wheels=unpack_wheels(options.wheels, run.folder / "site"))
        process, following = run.start(0), None
        try:
            for i, stage in enumerate(stages):
                limit_s = run.limit_s(i)
                if process is None or limit_s < _LEAST_S:
                    row = {"stage": stage.name, "question": stage.question, "state": "skipped", "seconds": 0.0, "reason": "no time left", "data": {}}  # fmt: skip
                else:
                    following = run.start(i + 1)
                    row = run.finish(process, limit_s)
                    process, following = following, None
                summary["stages"].append(row)
                try:
                    write(seconds=round(time.monotonic() - run.began, 2))
                except OSError as e:  # a full disk: the stages' lines are on the terminal, and room may come
                    say(f"{SUMMARY} could not be written: {e.strerror}")
                say(stage_line(row))
        finally:
            for left in (process, following):
                if left is not None:
                    left.end()
                    left.result.unlink(missing_ok=True)
    write(is_complete=True, seconds=round(time.monotonic() - run.began, 2))
    return summary


def unpack_wheels(wheels: Path, site: Path) -> list[str]:
    """Put the contents of all wheels of a folder where the stages import from; the names of their files.

    A wheel is an archive whose top is what an installation has; extension modules must lie on disk to be loaded.
    """
    names = []
    for path in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(site)
        names.append(path.name)
    return names


def stage_line(row: dict[str, Any]) -> str:
    """One line of the table."""
    words = row.get("headline") or ""
    reason = row.get("reason", "")
    if row["state"] != "done" and reason not in words:
        words = "; ".join(filter(None, (reason, words)))
    return f"{row['stage']:<9} {row['state']:<9} {row['seconds']:>6.1f} s  {words}"


def table(summary: dict[str, Any]) -> str:
    """The lines of all stages under a head, and how many did not end well."""
    rows = summary["stages"]
    bad = [row["stage"] for row in rows if row["state"] != "done"]
    head = f"{'stage':<9} {'state':<9} {'time':>8}  result"
    what = "a dry run on the CPU with small shapes: no figure says anything about a GPU" if summary["is_dry"] else ""
    end = (
        f"{len(rows) - len(bad)} of {len(rows)} stages done in {summary['seconds']:.0f} s of {summary['budget_s']:.0f}"
    )
    lines = [head, "-" * 100, *map(stage_line, rows), "-" * 100, end + (f"; not: {', '.join(bad)}" if bad else "")]
    return "\n".join([*lines, *([what] if what else [])])
