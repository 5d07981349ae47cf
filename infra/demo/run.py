"""Demo run: the whole loop on this computer under drifting traffic, with a live view and a report."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import os
import platform
import queue
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated as A
from typing import Any, Protocol

import httpx
import msgspec
import numpy as np
from rich.console import Console
from rich.live import Live

from paceline.bench.common.lossless import LosslessChecker, LosslessReport
from paceline.bench.common.padded import TARGET_NAME, copy_drafter, pad_target
from paceline.bench.common.result_file import write_json
from paceline.bench.common.workloads import Prompt, asked_text, load_prompts, question_text, read_questions
from paceline.config import (
    POLICIES,
    POLICY_HELP,
    PolicyConfig,
    RolloutConfig,
    ServeOptions,
    ServiceConfig,
    TraceConfig,
)  # fmt: skip
from paceline.errors import PacelineError
from paceline.infra.controller.snapshot import Snapshot
from paceline.infra.demo import report as demo_report
from paceline.infra.demo import view as demo_view
from paceline.infra.demo.client import MAX_TOKENS, DemoClient
from paceline.infra.demo.day_report import day_dict, kind_table
from paceline.infra.demo.diary import Diary
from paceline.infra.demo.scenario import (
    DAY_GROUPS,
    GROUP_PATTERN,
    Phase,
    PlannedRequest,
    Traffic,
    day_scenario,
    shifting_scenario,
    steady_scenario,
)  # fmt: skip
from paceline.infra.demo.stats import Answer, DemoStats, own_version_s
from paceline.infra.service.stop_signals import StopSignals
from paceline.paths import BUNDLED_TARGET, bundled, resolve_model
from paceline.records import DataFolder, Drafter, HtmlFile, JsonFile, Model, Setting, record, require

log = logging.getLogger(__name__)

START_S = 25.0
"""What Ray, Redis and a replica take to start on two cores, about."""
NUM_KINDS = 8
"""Kinds of text of a day, if the data has as many."""
NUM_CHECKED = 200
"""Greedy answers of another target than the bundled one that are checked: each takes it a second."""


@record()
class DemoOptions:
    """Ends with a table; exit code 1 if an answer was not the target's own or a request was lost.

    The bundled target gets more neurons, all of weight zero: it says the same at the speed of a model of 24 M parameters. vLLM serves
    the bundled one itself.

    Examples: paceline demo. paceline demo --scenario day --model smollm2 --minutes 120 --data DIR --data-dir day (goes on where it
    stopped).
    """

    minutes: A[
        float, Setting("Minutes of traffic; start and closing checks add about one.", ge=0.2, le=600)
    ] = 6.0  # fmt: skip
    replicas: A[int, Setting("Serving replicas.", ge=1)] = 1
    policy: A[str, Setting(POLICY_HELP, choices=POLICIES)] = "payoff"
    model: Model = "bundled"
    drafter: Drafter = "bundled"
    scenario: A[
        str,
        Setting(
            "shift: known -> unseen -> other unseen -> the first unseen traffic again; steady: known only; day: eight kinds of "
            "text that come, go and return, to a service with its default settings.",
            choices=("shift", "steady", "day"),
        ),
    ] = "shift"
    kinds: A[tuple[str, ...], Setting("Kinds of text of a day; default: the eight of which --data has most.")] = ()
    trainer_price: A[
        float,
        Setting(
            "What a second of the trainer's core counts in seconds of serving; 1: as if it could serve.", ge=0, le=100
        ),
    ] = 0.25  # it would idle; what serving loses beside it is measured and comes on top
    engine: A[
        str,
        Setting(
            "paceline: our own engine; vllm: a real vLLM with our plugin, on the CPU.", choices=("paceline", "vllm")
        ),
    ] = "paceline"
    vllm_python: A[Path | None, Setting("Python of the environment with vLLM; default: .venv-vllm/bin/python.")] = None
    deltas: A[
        int, Setting("Classes whose versions are deltas of the first drafter; 0: they are whole weights.", ge=0, le=64)
    ] = 0
    concurrency: A[int | None, Setting("Requests in flight; default: 1, on vLLM 4.", ge=1, le=64)] = None
    seed: A[int, Setting("Seed of traffic and sampling.", ge=0)] = 0
    data: DataFolder = None
    json: JsonFile = None
    html: HtmlFile = None
    verbose: A[bool, Setting("Show the processes' logs.", short="-v")] = False
    known: tuple[str, ...] = ("tools", "code")
    """Buckets that the first drafter was trained on."""
    shifted: tuple[str, ...] = ("math",)
    brief: tuple[str, ...] = ("facts",)
    """Unseen, too, but gone before learning it could pay."""
    data_dir: A[
        Path | None,
        Setting(
            "Keep stores, logs and answers in this folder, where the same command goes on if it was stopped; default: a temporary "
            "one.",
        ),
    ] = None  # fmt: skip

    def __post_init__(self) -> None:
        require(not self.deltas or self.engine == "paceline", "--deltas must be 0 on another engine", self.deltas)
        for name, value, usual in (
            ("model", self.model, ("bundled",)),
            ("scenario", self.scenario, ("shift", "steady")),
        ):
            require(
                self.engine == "paceline" or value in usual, f"--{name} must be of {usual} on another engine", value
            )
        require(not self.kinds or self.scenario == "day", "--kinds must be those of --scenario day", self.scenario)

    @property
    def num_clients(self) -> int:
        return self.concurrency or (4 if self.engine == "vllm" else 1)

    def told(self) -> dict[str, Any]:
        """What must be the same where a run goes on; one that lasts longer begins like a shorter one."""
        names = (
            "model",
            "drafter",
            "policy",
            "scenario",
            "kinds",
            "trainer_price",
            "deltas",
            "concurrency",
            "replicas",
            "seed",
        )
        lasts = {} if self.scenario == "day" else {"minutes": self.minutes}
        return {name: msgspec.to_builtins(getattr(self, name)) for name in names} | lasts


def _residual_s(options: DemoOptions) -> float:
    """Mean time from a random moment to the end of its phase: the sum of squared lengths over twice their sum."""
    return options.minutes * 60 * sum(p.share**2 for p in _phases(options)) / 2


def with_end(config: ServiceConfig, options: DemoOptions, begins_at: float) -> ServiceConfig:
    """The configuration that knows when the demo will end: what is learned last could not pay back."""
    end = datetime.datetime.fromtimestamp(begins_at + options.minutes * 60, datetime.UTC)
    return replace(config, policy=replace(config.policy, ends_at=end.isoformat()))


def _phases(options: DemoOptions) -> tuple[Phase, ...]:
    if options.scenario == "steady":
        return steady_scenario(options.known)
    if options.scenario == "day":
        return day_scenario(options.kinds, options.minutes, options.seed)
    return shifting_scenario(options.known, options.shifted, options.brief)


def with_kinds(options: DemoOptions) -> DemoOptions:
    """The options with the kinds of a day named. Raises: ConfigError."""
    if options.scenario != "day":
        return options
    found = read_questions(options.data)
    kinds = options.kinds or tuple(sorted(sorted(found), key=lambda kind: -len(found[kind]))[:NUM_KINDS])
    for kind in kinds:
        require(kind in found, f"--kinds must be of {', '.join(sorted(found))}", kind)
    require(len(kinds) >= 2, "--kinds must be at least 2", kinds)
    return replace(options, kinds=kinds)


def prompts_of(
    options: DemoOptions, tokenizer: Any = None, room: int | None = None
) -> Callable[[str, int], list[Prompt]]:
    """What a Traffic asks for prompts. tokenizer: of a target that is asked through its chat template. room: most tokens of one."""
    if options.scenario != "day":

        def loaded(bucket: str, seed: int) -> list[Prompt]:
            prompts = load_prompts(bucket, options.data, 240, seed=seed)
            return prompts if tokenizer is None else [replace(p, text=asked_text(p.text, tokenizer)) for p in prompts]

        return loaded
    found = read_questions(options.data)
    texts = {
        kind: [Prompt(prompt_id=q.question_id, bucket=kind, text=question_text(q, tokenizer)) for q in found[kind]]
        for kind in options.kinds
    }
    fitting = {
        kind: [p for p in ps if room is None or len(tokenizer(p.text)["input_ids"]) <= room]
        for kind, ps in texts.items()
    }
    for kind, prompts in fitting.items():
        require(bool(prompts), f"--kinds must have texts of at most {room} tokens", kind)
    return lambda kind, seed: random.Random(f"{seed}-{kind}").sample(fitting[kind], len(fitting[kind]))


def demo_config(options: DemoOptions, data_dir: Path) -> ServiceConfig:
    """The service's configuration: one thread for serving and one for training; but for a day, short decision epochs."""
    base = ServeOptions(changes={} if options.model == "bundled" else {"model": options.model}).service()
    engine = replace(base.engine, num_threads=1, max_running=16, max_class_deltas=options.deltas)
    config = replace(
        base,
        drafter=base.drafter if options.drafter == "bundled" else options.drafter,
        # its own keys, should PACELINE_REDIS_URL name a shared Redis
        model_name=f"paceline-demo-{os.getpid() if options.data_dir is None else data_dir.name}",
        num_replicas=options.replicas,
        data_dir=str(data_dir),
        port=0,
        trainer_threads=1,
        engine=engine,
    )
    # the demo's client draws the groups
    policy = PolicyConfig(
        policy=options.policy, trainer_price=options.trainer_price, trusts_groups=True, seed=options.seed
    )
    if options.scenario == "day":
        return replace(config, policy=policy)
    return replace(
        config,
        trace=TraceConfig(shard_rows=512, flush_interval_s=2.0),
        policy=replace(
            policy,
            epoch_s=5.0,
            bank_s=30.0,
            interval_s=max(20.0, options.minutes * 60 / 8),
            min_rows=3200,  # some 32 requests: the learner learns 16 before any is scored, and fewer scores are not sure
            horizon_s=_residual_s(options),
            holdback_percent=25,
        ),
        rollout=RolloutConfig(min_requests=4, freeze_s=60.0, quiet_s=1.0),
    )


def hardware() -> dict:
    """Processor name and cores of this machine."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return {"cpu": name, "cores": len(os.sched_getaffinity(0)), "platform": f"{platform.system()} {platform.machine()}"}


class Schedule:
    """The phases and what is sent in each, by the time since the demo began. Thread-safe."""

    def __init__(
        self, options: DemoOptions, prompts: Callable[[str, int], list[Prompt]] | None = None, diary: Diary | None = None
    ) -> None:  # fmt: skip
        """diary: of a run that goes on."""
        self.phases = _phases(options)
        self.total_s = options.minutes * 60
        self.ends = list(itertools.accumulate(p.share * self.total_s for p in self.phases))
        before_s = diary.elapsed_s() if diary is not None else 0.0
        self.began = time.monotonic() - before_s
        self._starts = [(before_s, time.time())]
        if diary is not None:
            self._starts = diary.begin(*self._starts[0])
        buckets = tuple(dict.fromkeys(b for p in self.phases for b in p.buckets))
        self._traffic = Traffic(
            buckets, prompts or prompts_of(options), options.seed,
            groups=DAY_GROUPS if options.scenario == "day" else GROUP_PATTERN,
            sent=None if diary is None else Counter(a.bucket for a in diary.answers),
        )  # fmt: skip
        self._lock = threading.Lock()

    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    def at(self, ts: float) -> float:
        """Seconds since the demo began, without those between its parts, of a moment in seconds since the epoch."""
        before_s, began = next((start for start in reversed(self._starts) if start[1] <= ts), self._starts[0])
        return before_s + ts - began

    def current(self) -> Phase | None:
        """The phase of now, None after the last one."""
        now = self.elapsed_s()
        return next((p for p, end in zip(self.phases, self.ends, strict=True) if now < end), None)

    def take(self) -> tuple[Phase, PlannedRequest] | None:
        """The next request, None at the end."""
        with self._lock:
            phase = self.current()
            return None if phase is None else (phase, self._traffic.next(phase))

    def spans(self) -> list[tuple[Phase, float, float]]:
        """(phase, its begin, its end) in seconds since the demo began; the last one ends never."""
        starts, ends = [0.0, *self.ends[:-1]], [*self.ends[:-1], float("inf")]
        return list(zip(self.phases, starts, ends, strict=True))


class Client(Protocol):
    """Who sends requests and reads the state; used by one thread."""

    def send(self, plan: PlannedRequest, phase: str) -> Answer: ...

    def state(self) -> Snapshot | None: ...

    def close(self) -> None: ...


class _Sender(threading.Thread):
    """One closed-loop client: takes the next request when the last one has ended."""

    def __init__(self, client: Client, schedule: Schedule, out: queue.Queue, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._client, self._schedule, self._out, self._stop_event = client, schedule, out, stop

    def run(self) -> None:
        while not self._stop_event.is_set() and (taken := self._schedule.take()) is not None:
            phase, plan = taken
            try:
                self._out.put(self._client.send(plan, phase.name))
            except Exception as e:  # the report counts every failure, whatever it was
                self._out.put(e)
                if self._stop_event.wait(0.2):
                    return


def drive(
    make_client: Callable[[], Client], schedule: Schedule, options: DemoOptions, console: Console, stats: DemoStats,
    signals: StopSignals, diary: Diary | None = None,
) -> None:  # fmt: skip
    """Send the schedule's traffic. diary: notes what comes."""
    stop = threading.Event()
    out: queue.Queue = queue.Queue()
    monitor, *clients = [make_client() for _ in range(options.num_clients + 1)]
    senders = [_Sender(client, schedule, out, stop) for client in clients]
    for s in senders:
        s.start()
    state, polled, lines = Snapshot(), 0.0, demo_view.Lines(console)
    try:
        with Live(console=console, refresh_per_second=2, transient=False, redirect_stderr=False) as live:
            while any(s.is_alive() for s in senders) or not out.empty():
                signals.check()
                with contextlib.suppress(queue.Empty):
                    stats.take(item := out.get(timeout=0.25))
                    if diary is not None and isinstance(item, Answer):
                        diary.note(item)
                now = schedule.elapsed_s()
                if now - polled >= 1.0:
                    polled, state = now, monitor.state() or state
                    phase = schedule.current() or schedule.phases[-1]
                    shown: dict[str, Any] = {
                        "phase": phase.name, "bucket": phase.bucket, "elapsed_s": now, "total_s": schedule.total_s,
                        "answers": stats.of_phase(phase.name), "state": state,
                    }  # fmt: skip
                    if console.is_terminal:
                        live.update(demo_view.render(**shown))
                    else:
                        lines.say(**shown)
    finally:
        stop.set()
        monitor.close()


def _check_lossless(stats: DemoStats, model: str, console: Console) -> LosslessReport:
    greedy = [(a.prompt_token_ids, a.output_token_ids) for a in stats.answers if a.temperature == 0]
    target_dir = bundled(BUNDLED_TARGET)
    if model != "bundled":
        target_dir, greedy = resolve_model(model), greedy[:: -(-len(greedy) // NUM_CHECKED) or 1]
    with console.status(f"checking {len(greedy)} greedy answers against the target in fp32"):
        return LosslessChecker(target_dir).check(greedy)


def _result(
    options: DemoOptions, stats: DemoStats, schedule: Schedule, state: Snapshot, lossless: LosslessReport
) -> dict:
    """The JSON document."""
    phases = []
    for phase, start, end in schedule.spans():
        spent = [e.seconds for e in state.ledger_entries if e.kind != "saving" and start <= schedule.at(e.ts) < end]
        own_s = own_version_s(stats.of_phase(phase.name), state.first_version, start)
        more = {"started_s": round(start, 1), "own_version_s": None if own_s is None else round(own_s, 2)}
        phases.append(stats.phase_dict(phase.name, phase.bucket, sum(spent)) | more)
    pauses = state.swaps.pause_ms
    plain = msgspec.to_builtins
    return {
        "target": {
            "name": TARGET_NAME if options.model == "bundled" else options.model,
            "version": state.target_version,
        },
        "drafter": {
            "name": options.drafter,
            "first_version": state.first_version,
            "class_versions": state.class_versions,
        },
        "policy": options.policy,
        "trainer_price": options.trainer_price,
        "scenario": options.scenario,
        "seed": options.seed,
        "hardware": hardware(),
        "phases": phases,
        "decisions": [plain(d) | {"t_s": round(schedule.at(d.ts), 2)} for d in state.decisions],
        "ledger": plain(state.ledger),
        "ledger_cells": plain(state.ledger_cells),
        "saved_interval_s": list(state.saved_interval_s),
        "rows": {
            name: (belief.fresh_rows, belief.required_rows)
            for name, belief in (state.bandit.beliefs if state.bandit else {}).items()
        },
        "ledger_entries": [plain(e) | {"t_s": round(schedule.at(e.ts), 2)} for e in state.ledger_entries],
        "swaps": {
            "count": state.swaps.count,
            "pause_ms_p50": float(np.percentile(pauses, 50)) if pauses else None,
            "pause_ms_p99": float(np.percentile(pauses, 99)) if pauses else None,
            "requests_dropped": len(stats.failures),
            "times_s": [round(schedule.at(t), 2) for t in state.swaps.times],
        },
        "lossless": {
            "checked": lossless.checked,
            "near_ties": lossless.near_ties,
            "mismatches": lossless.mismatches,
            "largest_gap_share": round(lossless.largest_gap, 5),
        },
        "feedback": plain(state.feedback),
        "failures": stats.failures[:20],
    } | ({"day": day_dict(stats.answers, state.ledger.spent_s)} if options.scenario == "day" else {})


def run_demo(options: DemoOptions, console: Console) -> dict:
    """Run the demo and return its JSON document; the caller prints nothing else.

    Starts Ray, Redis, the application and the controller, and stops them all at the end, also on Ctrl-C.
    Raises: PacelineError when the service cannot start or no request succeeded.
    """
    from paceline.infra.app import run_service, stop_service
    from paceline.infra.demo.vllm_run import run_vllm_demo
    from paceline.serving.loading.checkpoint import open_checkpoint

    if options.engine == "vllm":
        return run_vllm_demo(options, demo_config(options, Path()), console)
    options = with_kinds(options)
    own_dir = options.data_dir is None
    data_dir = Path(tempfile.mkdtemp(prefix="paceline-demo-")) if options.data_dir is None else options.data_dir
    config = demo_config(options, data_dir)
    diary = Diary.open(data_dir, options.told())
    stats = DemoStats(answers=diary.answers)
    service = None
    # SIGTERM stops like Ctrl-C: processes and folders are cleaned up
    with StopSignals() as signals:
        try:
            with console.status("starting Ray, Redis, the replica and the controller (about 30 s)"):
                tokenizer = None
                if options.model == "bundled":
                    for name in ("target", "drafter"):  # of a run that goes on, or was killed while it wrote them
                        shutil.rmtree(data_dir / name, ignore_errors=True)
                    target = pad_target(data_dir / "target")
                    drafter = copy_drafter(config.drafter, target, data_dir / "drafter")
                    config = replace(config, model=str(target), drafter=drafter)
                if options.model != "bundled" or options.scenario == "day":
                    tokenizer = open_checkpoint(resolve_model(config.model)).tokenizer()
                if options.scenario != "day":  # who serves a day does not know its end
                    config = with_end(config, options, time.time() + START_S)
                service = run_service(config, check=signals.check)
            signals.check()
            url = service.url
            (card,) = httpx.get(f"{url}/v1/models", timeout=60.0).json()["data"]
            schedule = Schedule(options, prompts_of(options, tokenizer, card["max_model_len"] - MAX_TOKENS), diary)
            drive(
                lambda: DemoClient(url, config.model_name, schedule.began),
                schedule,
                options,
                console,
                stats,
                signals,
                diary,
            )
            client = DemoClient(url, config.model_name, time.monotonic())
            with console.status("waiting for the last statistics"):
                state = final_state(client, signals)
            client.close()
            if not stats.answers:
                raise PacelineError(f"no request succeeded; the first failure was: {(stats.failures or ['none'])[0]}")
        finally:
            with console.status("stopping the service"):
                if service is not None:
                    stop_service(service)
                if own_dir:
                    shutil.rmtree(data_dir, ignore_errors=True)
    lossless = _check_lossless(stats, options.model, console)
    result = _result(options, stats, schedule, state, lossless)
    console.print(kind_table(result) if options.scenario == "day" else demo_report.result_table(result))
    for line in demo_report.summary_lines(result):
        console.print(line, highlight=False)
    if options.json:
        write_json(options.json, result)
        console.print(f"JSON: {options.json}")
    if options.html:
        demo_report.write_html(result, stats.answers, options.html)
        console.print(f"HTML report: {options.html}")
    return result


def final_state(client: Client, signals: StopSignals, timeout_s: float = 20.0) -> Snapshot:
    """Wait until produced feedback has been folded and no job runs, or the time is up."""
    deadline, state = time.monotonic() + timeout_s, Snapshot()
    while time.monotonic() < deadline:
        signals.check()
        state = client.state() or state
        sent = state.feedback
        if state.job is None and sent.produced <= sent.delivered + sent.dropped:
            break
        time.sleep(0.5)
    return state
