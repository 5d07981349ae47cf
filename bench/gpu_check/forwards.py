"""Stages without an engine: the machine, its kernels, and verify forwards of real size against the memory floor."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.bench.gpu_check.stages import NO_GPU, Check, reason_of
from paceline.errors import PacelineError

if TYPE_CHECKING:  # what may be missing is imported by the stages themselves, `machine` first: it says what
    from paceline.bench.shapes.kernel_cases import Bench
    from paceline.bench.shapes.kernel_shapes import Shape
    from paceline.serving.target_model.kv_cache import KVPool
    from paceline.serving.target_model.model import TargetBatch, TargetModel

CHAIN = (
    "numpy", "safetensors", "transformers", "triton", "paceline.contracts", "paceline.records", "paceline.config",
    "paceline.kernels.gpu.tree_attention", "paceline.serving.target_model.model", "paceline.serving.loading.families",
    "paceline.serving.engine.engine", "paceline.serving.sampling.grammar", "paceline.bench.shapes.kernels",
    "paceline.bench.engine.shapes", "paceline.bench.gpu_check.rounds", "paceline.adapt.online.trainer",
)  # fmt: skip
"""Modules in the order in which stages come to need them."""
OPTIONAL = ("pytest", "llguidance", "scipy")
"""Needed for tests marked gpu, for answers in a grammar, and for the gate of a training job."""
MAX_ERROR = 1e-2
"""Root mean square of a bfloat16 kernel's error over that of the result: a few roundings of 2^-9."""
ROWS, BATCHES, CONTEXTS = (1, 9, 17, 61), (1, 4, 16, 64), (1024, 8192)
_TEST = re.compile(r"\S+\.py::.*?(?= - | PASSED| FAILED| ERROR| SKIPPED|$)")
_OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b")
_PAGE_TOKENS = 16
_FREE_SHARE = 0.85
"""Of the free device memory that K/V may take; activations and graphs need the rest."""


def machine(check: Check) -> None:
    """Versions, device, copy bandwidth, and which modules can be imported."""
    chain = [_imported(name) for name in (*CHAIN, *OPTIONAL)]
    missing = sorted({row["error"] for row in chain if row["error"] and row["module"] not in OPTIONAL})
    check.save("; ".join(missing), imports=chain, torch=torch.__version__, python=sys.version)
    from paceline.bench.common.result_file import machine_facts

    device = check.device()
    check.save(machine=machine_facts(), device=_device_facts(device))
    from paceline.bench.engine.shapes import copy_bandwidth

    rate = copy_bandwidth(device, 2**24 if check.is_dry else None)
    words = (
        f"{torch.cuda.get_device_name(device)}, a copy moves {rate / 1e9:.0f} GB/s" if device.type == "cuda" else NO_GPU
    )
    words = "; ".join([f"torch {torch.__version__}, {words}", *(missing or ["every import works"])])
    check.save(words, copy_bytes_per_s=round(rate))


def _imported(name: str) -> dict[str, Any]:
    began, error = time.perf_counter(), ""
    try:
        importlib.import_module(name)
    except Exception as e:
        error = reason_of(e)
    return {"module": name, "import_s": round(time.perf_counter() - began, 2), "error": error}


def _device_facts(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"type": "cpu"}
    found = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "type": "cuda", "name": found.name, "capability": f"{found.major}.{found.minor}", "memory_bytes": total,
        "free_bytes": free, "num_multiprocessors": found.multi_processor_count, "cuda": torch.version.cuda, "driver": driver_version(),
        "has_c_compiler": any(map(shutil.which, ("cc", "gcc", "clang"))),  # Triton compiles its launchers with it
    }  # fmt: skip


def driver_version() -> str | None:
    """The driver's version; None where its tool is not there or fails, which it says where the version would stand."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(found.stdout.split()), None)  # a line for each GPU


def kernels(check: Check) -> None:
    """Every kernel against its reference on float64 inputs, its speed at one shape, and the tests marked gpu."""
    from paceline.bench.shapes.kernel_cases import CASES, Bench
    from paceline.bench.shapes.kernel_shapes import MODELS
    from paceline.kernels.dispatch import select_kernels

    device = check.device()
    backend = "reference" if check.is_dry else "triton"
    bench = Bench(device=device, dtype=torch.bfloat16, kernels=select_kernels(device, backend))
    shape = dataclasses.replace(MODELS["qwen3-8b"], context=1000, requests=3, nodes=16)
    shape = shape.scaled_down() if check.is_dry else shape
    rows: list[dict[str, Any]] = []
    for name in CASES:
        try:
            with torch.inference_mode():
                rows.append({"kernel": name, **kernel_errors(name, shape, bench)})
        except Exception as e:  # of Triton's compiler, of the driver: the other kernels may run
            rows.append({"kernel": name, "is_right": False, "error": reason_of(e)})
        check.save(backend=backend, correctness=rows)
    wrong = [row["kernel"] for row in rows if not row["is_right"]]
    words = f"{len(rows) - len(wrong)} of {len(rows)} kernels right" + (f" (not: {', '.join(wrong)})" if wrong else "")
    check.save(words, speed=_speeds(check, bench))
    tests = _gpu_tests(check)
    check.save(f"{words}; gpu tests: {tests['words']}", gpu_tests=tests)
    check.fault("a kernel is wrong" if wrong else "a test marked gpu failed" if tests.get("bad") else "")


def kernel_errors(name: str, shape: Shape, bench: Bench) -> dict[str, Any]:
    """How far a kernel's results are from those of the reference on the same numbers in float64."""
    from paceline.bench.shapes.kernel_cases import CASES, Bench
    from paceline.kernels.dispatch import select_kernels

    class SameNumbers(Bench):
        """Inputs that are the same bfloat16 numbers whatever their type."""

        __slots__ = ()

        def randn(self, *shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=self.device).bfloat16().to(self.dtype)

    results = []
    exact = select_kernels(bench.device, "reference")
    for dtype, chosen in ((bench.dtype, bench.kernels), (torch.float64, exact)):
        torch.manual_seed(0)
        run = CASES[name].prepare(shape, SameNumbers(device=bench.device, dtype=dtype, kernels=chosen))
        results.append(list(_tensors(run())))
    worst, num_different = 0.0, 0
    for got, expected in zip(*results, strict=True):
        if not expected.is_floating_point():
            num_different += int((got != expected).sum())
            continue
        finite, infinite = expected.isfinite(), expected.isinf()
        num_different += int((got.isfinite() != finite).sum())
        num_different += int((got.double() != expected.double())[infinite & ~got.isfinite()].sum())
        difference = (got.double() - expected.double())[finite]
        scale = expected.double()[finite].norm().clamp_min(1e-30)
        worst = max(worst, float(difference.norm() / scale))
    is_right = num_different == 0 and worst <= MAX_ERROR
    return {"relative_error": worst, "num_different": num_different, "is_right": is_right, "error": ""}


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif dataclasses.is_dataclass(found):
        for field in dataclasses.fields(found):
            yield from _tensors(getattr(found, field.name))
    elif isinstance(found, tuple | list):
        for item in found:
            yield from _tensors(item)


def _speeds(check: Check, bench: Bench) -> list[dict[str, Any]] | None:
    """Rows of `paceline bench kernels` for few shapes; None on a CPU."""
    if check.is_dry:
        return None
    from paceline.bench.shapes.kernels import KernelBenchOptions, measure_cell, measure_copy, plan_cells

    options = KernelBenchOptions(models=("qwen3-8b",), contexts=(1024,), requests=(1, 16), nodes=(16, 60), repeats=10)
    rate, rows = measure_copy(bench, 5), []
    end = 0.4 * check.left_s()
    began = time.monotonic()
    with torch.inference_mode():
        for cell in plan_cells(options):
            if time.monotonic() - began > end:
                break
            try:
                rows.append(measure_cell(cell, bench, rate, options))
            except Exception as e:  # of Triton's compiler, of the driver: other cells may run
                rows.append({"kernel": cell.kernel, "error": reason_of(e)})
    return rows


def _gpu_tests(check: Check) -> dict[str, Any]:
    """Outcomes of the tests marked gpu, as far as there is time; a few seconds remain to write them down."""
    import paceline

    root = Path(paceline.__file__).resolve().parent.parent
    if not (root / "tests").is_dir():
        return {"words": "not run: there is no folder tests/ beside the package"}
    if importlib.util.find_spec("pytest") is None:
        return {"words": "not run: needs pytest: carry its wheel (--wheels DIR)"}
    marked = [p for p in sorted((root / "tests").rglob("*.py")) if "mark.gpu" in p.read_text(encoding="utf-8")]
    places = [str(p.parent if p.name == "conftest.py" else p) for p in marked if "gpu_check" not in p.parts]
    if check.is_dry:
        return {"words": "not run: no CUDA device", "places": [str(Path(p).relative_to(root)) for p in places]}
    # Without the checkout's own options: they are quiet, and strict about the marks of plugins that may be missing.
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider", *places]
    command += ["-o", "addopts=--import-mode=importlib", "--continue-on-collection-errors", "-W", "ignore"]
    if importlib.util.find_spec("xdist") is not None and (os.cpu_count() or 1) >= 8:
        command += ["-n", "6"]  # most of the time goes into compiling
    torch.cuda.empty_cache()  # the tests are other processes
    limit_s = max(check.left_s() - 5.0, 1.0)
    is_whole = True
    with tempfile.TemporaryFile() as sink:  # a pipe would wait for workers that outlive a test run that is ended
        try:
            subprocess.run(command, cwd=root, stdout=sink, stderr=subprocess.STDOUT, timeout=limit_s)
        except subprocess.TimeoutExpired:
            is_whole = False
        sink.seek(0)
        output = sink.read()
    lines = output.decode(errors="replace").splitlines()
    counts, bad = outcomes(lines)
    words = ", ".join(f"{number} {word}" for word, number in counts.items()) or "none ran"
    if not is_whole:
        words += f" when {limit_s:.0f} s were over"
    return {"words": words, "counts": counts, "is_whole": is_whole, "bad": bad[:40], "output": lines[-60:]}


def outcomes(lines: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """How the tests in pytest's verbose output ended, and the names of those that did not end well.

    A run that was cut short has no summary at its end, so every test's own line counts, with or without workers.
    """
    ended: dict[str, str] = {}
    for line in lines:
        test, word = _TEST.search(line), _OUTCOME.search(line)
        if test and word:
            ended[test.group().strip()] = word.group()
    counts = Counter(ended.values())
    rows = {word.lower(): counts[word] for word in ("PASSED", "FAILED", "ERROR", "SKIPPED") if counts[word]}
    return rows, [test for test, word in ended.items() if word in ("FAILED", "ERROR")]


def forward(check: Check) -> None:
    """Verify forwards of a random Qwen3-8B: eager and replayed ms, the share of the memory floor, the longest kernels."""
    from paceline.bench.engine.shapes import copy_bandwidth, floor_bytes, random_target

    device = check.device()
    rate = copy_bandwidth(device, 2**24 if check.is_dry else None)
    target = random_target("qwen3-8b", device, is_scaled_down=check.is_dry)
    sizes = ((1, 9), (1, 2), (64,)) if check.is_dry else (ROWS, BATCHES, CONTEXTS)
    shapes = [(n, b, c) for c, b, n in itertools.product(sizes[2], sizes[1], sizes[0])]
    num_scratch = max(n * b for n, b, _ in shapes)
    room = max(b * c for _, b, c in shapes)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # weights were joined: the parts' memory is torch's
        free = torch.cuda.mem_get_info(device)[0] * _FREE_SHARE - num_scratch * target.vocab_size * 8
        fits = int(free / target.kv_row_bytes) - num_scratch
        room = max((b * c for _, b, c in shapes if b * c <= fits), default=0)
        if room == 0:
            raise PacelineError(f"{free / 2**30:.1f} GiB are left beside the weights, too few for the smallest cell")
    kv = target.new_kv_pool(room // _PAGE_TOKENS, _PAGE_TOKENS, num_scratch)
    check.save(copy_bytes_per_s=round(rate), forward=target.forward_name)
    rows: list[dict[str, Any]] = []
    profiles: dict[str, Any] = {}
    best = ""
    for num_rows, batch, context in shapes:
        row: dict[str, Any] = {"rows": num_rows, "batch": batch, "context": context}
        if check.left_s() < 8.0:
            check.save(cells_left=len(shapes) - len(rows))
            break
        if batch * context > room:
            gib = batch * context * target.kv_row_bytes / 2**30
            rows.append(row | {"skipped": f"needs {gib:.0f} GiB of K/V, more than is free"})
            continue
        weights, kv_bytes = floor_bytes(target, batch, context)
        floor_ms = 1e3 * (weights + kv_bytes) / rate
        row["floor_ms"] = round(floor_ms, 4)
        try:
            run = _verify(target, kv, num_rows, batch, context)
            call = _timed(run, target, row, repeats=3 if check.is_dry else 10)
            if row["graph_ms"] is not None:
                row["floor_share"] = round(floor_ms / row["graph_ms"], 4)
                best = (
                    best or f"{num_rows} row {row['graph_ms']:.2f} ms, of which the floor is {row['floor_share']:.0%}"
                )
            if batch == 1 and num_rows in (1, 9) and context == sizes[2][0]:
                profiles[f"rows={num_rows} batch=1 context={context}"] = _profiled(call, device)
            del run, call
        except Exception as e:  # out of memory, a shape that a kernel refuses: other cells may run
            row["error"] = reason_of(e)
            if device.type == "cuda":
                torch.cuda.empty_cache()
        rows.append(row)
        ran = f"{sum('eager_ms' in r for r in rows)} of {len(rows)} forwards ran ({target.forward_name})"
        check.save("; ".join([ran, NO_GPU if check.is_dry else best]), rows=rows, profiles=profiles)
    check.fault(next((row["error"] for row in rows if "error" in row), ""))


def _verify(target: TargetModel, kv: KVPool, num_rows: int, batch: int, context: int) -> Callable[[], torch.Tensor]:
    """A verify forward of `num_rows` rows (a binary tree) for each of `batch` requests over `context` committed rows."""
    from paceline.serving.target_model.model import TargetBatch

    device, count = target.device, num_rows * batch
    own = torch.eye(num_rows, dtype=torch.bool)
    for row in range(1, num_rows):
        own[row] |= own[(row - 1) // 2]
    own = own.to(device)
    packed: TargetBatch = TargetBatch(
        token_ids=torch.arange(count, device=device) % target.vocab_size,
        positions=context + (own.sum(1) - 1).repeat(batch),
        cu_rows=torch.arange(batch + 1, device=device) * num_rows,
        context_lens=torch.full((batch,), context, dtype=torch.int64, device=device),
        slot_table=torch.arange(batch * context, device=device).view(batch, context),
        out_rows=kv.scratch_rows(count),
        ancestors=own.repeat(batch, 1),
    )
    return lambda: target.forward(packed, kv).logits


def _timed(
    run: Callable[[], torch.Tensor], target: TargetModel, row: dict[str, Any], repeats: int
) -> Callable[[], Any]:
    """Put the median ms of an eager call and of its replayed graph into the row; the replay, or the call without one."""
    from paceline.bench.shapes.kernel_cases import Bench
    from paceline.bench.shapes.kernels import time_call
    from paceline.serving.target_model.graph_capture import CudaGraphs

    as_it_is = dataclasses.replace(target.kernels, is_capturable=False)
    bench = Bench(device=target.device, dtype=target.dtype, kernels=as_it_is)
    with torch.inference_mode():
        row |= {"eager_ms": round(1e3 * time_call(run, bench, repeats)[0], 4), "graph_ms": None, "floor_share": None}
        if target.device.type != "cuda":
            return run

        def work() -> None:
            run()

        graph = CudaGraphs(target.device).capture(work)
        row["graph_ms"] = round(1e3 * time_call(graph.replay, bench, repeats)[0], 4)
    return graph.replay


def _profiled(call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    from paceline.bench.gpu_check.measure import profile

    with torch.inference_mode():
        return profile(call, device, 1, num_top=30)
