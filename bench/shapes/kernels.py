"""Kernel benchmark: the speed of each kernel on this device, beside the memory's.

Every kernel is timed per shape of an 8B target; its bytes (formula by formula, bench/shapes/kernel_cases.py) over its time are
compared with what a plain copy on the same device reaches. On a CUDA device times are CUDA events around a graph replay
with the cache flushed in between; on a CPU the references run on scaled-down shapes, which checks the benchmark and says
nothing about a GPU.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated as A
from typing import Any

import torch
from rich.console import Console

from paceline.bench.common.result_file import write_json
from paceline.bench.common.terminal import new_table, progress, say_file
from paceline.bench.shapes.kernel_cases import CASES, Bench, Case
from paceline.bench.shapes.kernel_shapes import MODELS, Models, Shape, floor_bytes, kv_bytes, weight_bytes
from paceline.kernels.dispatch import select_kernels
from paceline.records import Device, JsonFile, Setting, record, require

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LIMITS = {"context": 131072, "requests": 256, "nodes": 256}
_CPU_SECONDS = 0.05
"""A cell on the CPU is repeated until it has taken so long, or `repeats` times."""
_FLUSH_BYTES = 2**28
"""More than any GPU's last-level cache."""


@record()
class KernelBenchOptions:
    """Time of every kernel per shape of an 8B target, its bytes, and its share of the bandwidth that a plain copy reaches on
    the same device; then the floor of a round: weights and K/V read once. With a CUDA device the kernels that serve there
    are timed by CUDA events; without one the CPU references run on scaled-down shapes (a check of the command, not of a
    GPU). Shapes are the product of --contexts, --requests and --nodes.

    Example: paceline bench kernels --kernels tree_attention --contexts 1024,32768 --requests 1,16 --json k.json
    """

    kernels: A[
        tuple[str, ...], Setting(f"Comma list of all, {', '.join(CASES)}.", choices=("all", *CASES), non_empty=True)
    ] = ("all",)
    models: Models = tuple(MODELS)
    contexts: A[
        tuple[int, ...], Setting("Comma list of committed tokens per request.", ge=1, le=131072, non_empty=True)
    ] = (1024, 8192, 32768)
    requests: A[tuple[int, ...], Setting("Comma list of requests in a round.", ge=1, le=256, non_empty=True)] = (
        1,
        8,
        64,
    )
    nodes: A[
        tuple[int, ...],
        Setting("Comma list of draft nodes per request; one row more is verified.", ge=1, le=256, non_empty=True),
    ] = (1, 16, 64)
    repeats: A[int, Setting("Timed calls per cell, of which the median counts.", ge=1, le=10_000)] = 20
    device: Device = "auto"
    dtype: A[
        str,
        Setting("auto (bfloat16 on cuda, float32 on cpu) | float32 | bfloat16 | float16.", choices=("auto", *_DTYPES)),
    ] = "auto"
    seed: A[int, Setting("Seed of inputs.", ge=0)] = 0
    json: JsonFile = None

    def __post_init__(self) -> None:
        usable = self.device != "cuda" or torch.cuda.is_available()
        require(usable, "device must be auto or cpu where torch sees no GPU; use --device cpu", self.device)

    @property
    def kernel_names(self) -> tuple[str, ...]:
        return tuple(CASES) if "all" in self.kernels else tuple(n for n in CASES if n in self.kernels)


@dataclass(kw_only=True, slots=True)
class _Cell:
    """One kernel at one shape, for every model that gives it the same work."""

    kernel: str
    models: list[str]
    shape: Shape


def plan_cells(options: KernelBenchOptions) -> list[_Cell]:
    """Every kernel with every shape that differs in what its work depends on."""
    cells: dict[tuple[Any, ...], _Cell] = {}
    sizes = (options.contexts, options.requests, options.nodes)
    for name, model, context, requests, nodes in itertools.product(options.kernel_names, options.models, *sizes):
        shape = replace(MODELS[model], context=context, requests=requests, nodes=nodes)
        key = (name, *(getattr(shape, field) for field in CASES[name].depends))
        cell = cells.setdefault(key, _Cell(kernel=name, models=[], shape=shape))
        if model not in cell.models:
            cell.models.append(model)
    return list(cells.values())


def time_call(call: Callable[[], Any], bench: Bench, repeats: int) -> tuple[float, str]:
    """Median seconds of a call, and how it was timed."""
    if bench.device.type != "cuda":
        call()
        seconds: list[float] = []
        while len(seconds) < repeats and sum(seconds) < _CPU_SECONDS:
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds), "perf_counter"
    for _ in range(3):  # compiles, and fills the allocator
        call()
    torch.cuda.synchronize()
    how = "events, eager"
    if bench.kernels.is_capturable:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        call, how = graph.replay, "events, graph"
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=bench.device)
    seconds = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()  # weights of the layers between flush the cache in a real round, too
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds), how


def measure_copy(bench: Bench, repeats: int) -> float:
    """Bytes per second of a device copy, read and write counted."""
    size = 2**30 if bench.device.type == "cuda" else 2**26
    source = torch.ones(size, dtype=torch.int8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * size / time_call(lambda: target.copy_(source), bench, repeats)[0]


def measure_cell(cell: _Cell, bench: Bench, copy_rate: float, options: KernelBenchOptions) -> dict[str, Any]:
    """The row of a cell: times and rates, or why there are none."""
    case = CASES[cell.kernel]
    shape = cell.shape.scaled_down() if bench.device.type != "cuda" else cell.shape
    row: dict[str, Any] = {
        "kernel": cell.kernel,
        "models": cell.models,
        **{n: getattr(cell.shape, n) if n in case.depends or _is_counted(n, case) else None for n in _LIMITS},
        "bytes": case.count_bytes(cell.shape, 4 if options.dtype == "float32" else 2),
        "measured_shape": asdict(shape),
    }
    moved = case.count_bytes(shape, bench.element_bytes)
    if bench.device.type == "cuda" and 1.3 * moved > torch.cuda.mem_get_info(bench.device)[0]:
        return row | {"skipped": f"needs about {1.3 * moved / 2**30:.0f} GiB, more than is free"}
    torch.manual_seed(options.seed)
    try:
        seconds, how = time_call(case.prepare(shape, bench), bench, options.repeats)
    except (ValueError, torch.OutOfMemoryError) as e:  # beyond what the kernel takes, or the device holds
        return row | {"skipped": str(e).splitlines()[0]}
    return row | {
        "measured_bytes": moved,
        "time_us": seconds * 1e6,
        "gb_per_s": moved / seconds / 1e9,
        "share_of_copy": moved / seconds / copy_rate,
        "timing": how,
    }


def _is_counted(name: str, case: Case) -> bool:
    return name != "context" and "num_new_rows" in case.depends


def floors(options: KernelBenchOptions, copy_rate: float | None) -> list[dict[str, Any]]:
    """Least bytes of a verify forward in bfloat16, and the seconds that a copy of as many bytes takes (None on CPU)."""
    shapes = [
        replace(MODELS[model], context=context, requests=requests)
        for model, requests, context in itertools.product(options.models, options.requests, options.contexts)
    ]
    return [
        {
            "model": s.model, "requests": s.requests, "context": s.context, "weight_bytes": weight_bytes(s),
            "kv_bytes": kv_bytes(s), "floor_bytes": floor_bytes(s),
            "floor_ms": None if copy_rate is None else floor_bytes(s) / copy_rate * 1e3,
        }
        for s in shapes
    ]  # fmt: skip


def run_bench_kernels(options: KernelBenchOptions, console: Console) -> dict[str, Any]:
    """Measure every cell; prints tables, returns the document."""
    has_gpu = torch.cuda.is_available() and options.device != "cpu"
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    dtype = _DTYPES["bfloat16" if has_gpu else "float32"] if options.dtype == "auto" else _DTYPES[options.dtype]
    bench = Bench(device=device, dtype=dtype, kernels=select_kernels(device, "auto" if has_gpu else "reference"))
    cells = plan_cells(options)
    copy_rate = measure_copy(bench, options.repeats)
    rows = []
    with progress(console, "kernels", len(cells)) as bar:
        for cell in cells:
            bar.name(cell.kernel)
            with torch.inference_mode():
                rows.append(measure_cell(cell, bench, copy_rate, options))
            bar.step()
    result = {
        "format": 1,
        "device": torch.cuda.get_device_name(device) if has_gpu else "cpu",
        "backend": bench.kernels.backend,
        "dtype": str(dtype).removeprefix("torch."),
        "is_scaled_down": not has_gpu,
        "copy_gb_per_s": copy_rate / 1e9,
        "formulas": {name: CASES[name].formula for name in options.kernel_names},
        "rows": rows,
        "floors": floors(options, copy_rate if has_gpu else None),
    }
    print_result(result, console)
    if options.json:
        write_json(options.json, result)
    say_file(console, "JSON", options.json)
    return result


def print_result(result: dict[str, Any], console: Console) -> None:
    """One table of kernels, one of floors, and what they mean."""
    table = new_table(
        f"{result['device']}, {result['backend']} kernels, {result['dtype']}; "
        f"a copy moves {result['copy_gb_per_s']:.1f} GB/s",
        ("kernel", "models", "context", "requests", "nodes", "bytes", "time", "GB/s", "share"),
        2,
        caption="SCALED-DOWN shapes on a CPU: a check of the benchmark, not of a GPU's speed. bytes are those of the "
        "full shape in 16 bits; time and GB/s are of the scaled-down one, which may lie in a cache (share above 100%)."
        if result["is_scaled_down"]
        else "bytes: least that the kernel must move (docs/gpu.md); share: of the rate of the copy.",
    )
    for row in result["rows"]:
        models = (
            "all" if len(row["models"]) == len({f["model"] for f in result["floors"]}) else ", ".join(row["models"])
        )
        sizes = ["-" if row[n] is None else str(row[n]) for n in _LIMITS]
        if "skipped" in row:
            measured = [row["skipped"], "", ""]
        else:
            measured = [f"{row['time_us']:.1f} us", f"{row['gb_per_s']:.2f}", _percent(row["share_of_copy"])]
        table.add_row(row["kernel"], models, *sizes, _size(row["bytes"]), *measured)
    console.print(table)
    title = "Floor of a verify forward in bfloat16: weights once, committed K and V once"
    floor = new_table(title, ("model", "requests", "context", "weights", "K and V", "floor"))
    for row in result["floors"]:
        at_copy = "" if row["floor_ms"] is None else f" = {row['floor_ms']:.2f} ms"
        floor.add_row(row["model"], str(row["requests"]), str(row["context"]), _size(row["weight_bytes"]), _size(row["kv_bytes"]), _size(row["floor_bytes"]) + at_copy)  # fmt: skip
    console.print(floor)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.095 else f"{share:.2%}"


def _size(count: int) -> str:
    """Bytes in the largest unit that keeps them above 1."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"
