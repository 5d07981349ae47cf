"""Forward bench: how near the CPU's compiled forward comes to the least time that reading its weights and K/V takes.

Weights are random and of the sizes of real models; their packed form is made directly, so no checkpoint is needed. All sizes of
a model, and a plain read of as many bytes, run in turn, so that a machine whose speed drifts does so for all alike.
"""

from __future__ import annotations

import concurrent.futures
import statistics
import time
from collections.abc import Sequence
from typing import Annotated as A
from typing import Any

import numpy as np
import torch
from rich.console import Console

from paceline.bench.common.result_file import ResultFile
from paceline.bench.common.terminal import interval_text, new_table, number_text, progress, say_file
from paceline.bench.shapes.kernel_shapes import Shape
from paceline.bootstrap import interval, resampled
from paceline.errors import ConfigError
from paceline.kernels.cpu.library import NativeDecoder, NativeLayer, PackedLinear, choose_isa
from paceline.kernels.cpu.memory import pool_zeros
from paceline.records import JsonFile, Setting, record

SHAPES = {
    "7m": Shape(model="7m", num_layers=32, heads=4, kv_heads=2, head_dim=32, hidden_size=128, ffn_size=384, vocab_size=4096),
    "88m": Shape(model="88m", num_layers=12, heads=12, kv_heads=4, head_dim=64, hidden_size=768, ffn_size=2048, vocab_size=16384),
    "qwen3-0.6b": Shape(model="qwen3-0.6b", num_layers=28, heads=16, kv_heads=8, head_dim=128, hidden_size=1024, ffn_size=3072, vocab_size=151936),
}  # fmt: skip
"""The bundled target's sizes, a small model's, and those of Qwen/Qwen3-0.6B."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}
_READ_BYTES = 2**28
"""Of the plain read: more than any cache holds."""


@record()
class ForwardOptions:
    """The compiled CPU forward at the sizes of real models, over the memory floor: weights and K/V read once at the speed at
    which this machine reads memory. The floor of a model that fits the caches is not the memory's: see its time.

    Example: paceline bench forward --models 88m --rows 1,9,17 --threads 1,2 --json forward.json. docs/serve.md.
    """

    models: A[tuple[str, ...], Setting("Comma list of sizes.", choices=tuple(SHAPES), non_empty=True)] = ("7m", "88m")
    rows: A[tuple[int, ...], Setting("Comma list of rows of a request.", ge=1, non_empty=True)] = (1, 9, 17)
    batches: A[tuple[int, ...], Setting("Comma list of requests.", flag="batch", ge=1, non_empty=True)] = (1,)
    contexts: A[tuple[int, ...], Setting("Comma list of committed tokens of a request.", ge=0, non_empty=True)] = (100,)
    threads: A[tuple[int, ...], Setting("Comma list of threads.", ge=1, non_empty=True)] = (1,)
    dtypes: A[
        tuple[str, ...],
        Setting("Comma list of the weights' types: bfloat16 | float32 | int8; they take turns.", flag="dtype", choices=tuple(DTYPES), non_empty=True),
    ] = ("bfloat16",)  # fmt: skip
    repeats: A[int, Setting("Times that each size runs.", ge=2)] = 15
    json: JsonFile = None

    def __post_init__(self) -> None:
        if choose_isa() is None:
            raise ConfigError("the compiled forward must be built: python -m paceline.kernels.cpu.build")


def run_forward_bench(options: ForwardOptions, console: Console) -> dict[str, Any]:
    """Time every size of every model; prints a table, returns (and keeps on disk) the document."""
    result = ResultFile(options.json, command="bench forward", options=options, extra={"isa": choose_isa()})
    before, cells = torch.get_num_threads(), []
    with progress(console, "forwards", len(options.models) * len(options.threads)) as bar:
        for name in options.models:
            most = max(options.contexts) + max(options.rows)
            models = [RandomModel(SHAPES[name], DTYPES[dtype], num_positions=most) for dtype in options.dtypes]
            for num_threads in options.threads:
                bar.name(f"{name}, {num_threads} threads")
                torch.set_num_threads(num_threads)
                cells += timed_cells(models, num_threads, options)
                result.update(cells=cells)
                bar.step()
    torch.set_num_threads(before)
    document = result.close()
    print_cells(document, console)
    say_file(console, "result", options.json)
    return document


class RandomModel:
    """A decoder of some sizes with random weights, its K/V, and forwards of any batch."""

    def __init__(self, shape: Shape, dtype: torch.dtype, *, num_positions: int) -> None:
        """num_positions: of a request's tokens, at most; the compiled forward reads the angles of each unchecked."""
        s, self.shape = shape, shape
        self.rope = torch.rand(num_positions, s.head_dim)
        width, inner = s.heads * s.head_dim, 2 * s.kv_heads * s.head_dim
        self.number_type = torch.float32 if dtype == torch.float32 else torch.bfloat16

        def linear(num_in: int, num_out: int) -> PackedLinear:
            weight = torch.empty(num_out, num_in).normal_(std=num_in**-0.5)
            if dtype != torch.int8:
                return PackedLinear.pack(weight.to(dtype))
            scale = weight.abs().amax(1) / 127
            return PackedLinear.pack((weight / scale[:, None]).round().to(torch.int8), scale)

        ones = torch.ones(s.hidden_size)
        layers = [
            NativeLayer(
                qkv=linear(s.hidden_size, width + inner), attention_out=linear(width, s.hidden_size),
                gate_up=linear(s.hidden_size, 2 * s.ffn_size), down=linear(s.ffn_size, s.hidden_size), norm1=ones, norm2=ones,
            )
            for _ in range(s.num_layers)
        ]  # fmt: skip
        head = linear(s.hidden_size, s.vocab_size)
        weights = [w for x in layers for w in (x.qkv, x.attention_out, x.gate_up, x.down)] + [head]
        self.weight_bytes = sum(w.weight.numel() * w.weight.element_size() for w in weights)
        isa = choose_isa()
        assert isa is not None
        self.decoder = NativeDecoder(
            layers=layers, head=head, final_norm=ones, num_logits=s.vocab_size, rope=self.rope,
            embedding=torch.rand(s.vocab_size, s.hidden_size).to(self.number_type), num_heads=s.heads,
            num_kv_heads=s.kv_heads, head_dim=s.head_dim, eps=1e-6, scale=s.head_dim**-0.5, isa=isa,
        )  # fmt: skip

    def kv_bytes(self, context: int, batch: int) -> int:
        """Bytes of the committed K/V that a forward reads."""
        return batch * context * self.shape.num_layers * self.shape.kv_width * self.number_type.itemsize

    def new_pool(self, num_rows: int) -> torch.Tensor:
        """K/V of so many rows, touched."""
        s = self.shape
        return pool_zeros((s.num_layers, num_rows, 2, s.kv_heads, s.head_dim), self.number_type, "cpu").fill_(0.01)

    def forward_s(self, pool: torch.Tensor, rows: int, context: int, batch: int) -> float:
        """Seconds of one forward; a request's rows are a chain behind its context."""
        per, num = rows + context, rows * batch
        start = (torch.arange(batch) * per)[:, None]
        positions = (context + torch.arange(rows)).repeat(batch)
        arguments = (
            torch.arange(num) % self.shape.vocab_size, positions, torch.arange(0, num + 1, rows),
            torch.full((batch,), context), start + torch.arange(max(context, 1)),
            (start + context + torch.arange(rows)).reshape(-1), None, None, pool,
        )  # fmt: skip
        begin = time.perf_counter()
        self.decoder.run(*arguments)
        return time.perf_counter() - begin


def memory_s(data: np.ndarray, room: np.ndarray, num_threads: int) -> tuple[float, float]:
    """Seconds in which the threads together read the data once, and in which they copy it."""
    parts, targets = np.array_split(data, num_threads), np.array_split(room, num_threads)
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(np.add.reduce, parts))  # the threads are there
        begin = time.perf_counter()
        list(pool.map(np.add.reduce, parts))
        middle = time.perf_counter()
        list(pool.map(np.copyto, targets, parts))
        return middle - begin, time.perf_counter() - middle


def timed_cells(models: Sequence[RandomModel], num_threads: int, options: ForwardOptions) -> list[dict[str, Any]]:
    """A cell for every (dtype, context, batch, rows): milliseconds, times one row, the floor and the first dtype."""
    shapes = [(c, b, r) for c in options.contexts for b in options.batches for r in options.rows]
    pools = [model.new_pool(max(b * (c + r) for c, b, r in shapes)) for model in models]
    data, room = np.ones(_READ_BYTES // 8, dtype=np.int64), np.ones(_READ_BYTES // 8, dtype=np.int64)
    sizes = [(i, *shape) for shape in shapes for i in range(len(models))]
    times: dict[tuple[int, int, int, int], list[float]] = {size: [] for size in sizes}
    reads: list[float] = []
    copies: list[float] = []
    for repeat in range(options.repeats + 1):
        read, copy = memory_s(data, room, num_threads)
        found = {(i, c, b, r): models[i].forward_s(pools[i], r, c, b) for i, c, b, r in sizes}
        if repeat:  # the first warms up
            reads.append(read / _READ_BYTES)
            copies.append(copy / (2 * _READ_BYTES))
            for size, seconds in found.items():
                times[size].append(seconds)
    cells = []
    for (i, context, batch, rows), own in times.items():
        model = models[i]
        num_bytes = model.weight_bytes + model.kv_bytes(context, batch)
        one, bare = times.get((i, context, batch, 1)), times.get((i, 0, batch, rows))
        kv_s = None if bare is None or context == 0 else [model.kv_bytes(context, batch) * copy for copy in copies]
        cells.append(
            {
                "model": model.shape.model, "dtype": options.dtypes[i], "threads": num_threads, "context": context, "batch": batch, "rows": rows,
                "ms": statistics.median(own) * 1e3, "weight_bytes": model.weight_bytes, "bytes": num_bytes,
                "read_gb_per_s": 1e-9 / statistics.median(reads),
                "over_floor": _ratio(own, [num_bytes * r for r in reads]),
                "over_one_row": None if one is None or rows == 1 else _ratio(own, one),
                "kv_over_copy": None if kv_s is None or bare is None else _ratio(kv_s, own, bare),
                "over_first_dtype": _ratio(own, times[0, context, batch, rows]) if i else None,
            }
        )  # fmt: skip
    return cells


def _ratio(times: list[float], others: list[float], less: list[float] | None = None) -> dict[str, Any] | None:
    """Of the sums, with its interval over repeats; `less` is taken off the divisor. None: it may leave nothing."""
    rows = np.array([times, others, less or [0.0] * len(times)])
    value, values = resampled(rows, lambda sums: sums[0] / (sums[1] - sums[2]))
    if np.quantile(1 / values, 0.025) <= 0:
        return None
    return {
        "ratio": round(value, 3),
        "interval": interval(value, values, len(times), is_positive=less is None, digits=3),
    }


def print_cells(document: dict[str, Any], console: Console) -> None:
    """One line a cell."""
    title = f"Compiled forward ({document['isa']})"
    columns = (
        "model",
        "weights",
        "threads",
        "context",
        "batch",
        "rows",
        "ms",
        "over one row",
        "over the floor",
        "K/V over a copy",
        "over the first type",
        "floor reads GB/s",
    )
    table = new_table(
        title,
        columns,
        caption="over: ratio and 95% interval; floor: weights and K/V read once from memory; K/V over a copy: speed at which a "
        "context is read, by the time that it adds, over that of a copy, reads and writes counted (--contexts 0,N; -: it adds no sure time)",
    )
    for c in document["cells"]:
        ratios = [
            "-" if (found := c[name]) is None else f"{found['ratio']:.2f} ({interval_text(found['interval'])})"
            for name in ("over_one_row", "over_floor", "kv_over_copy", "over_first_dtype")
        ]
        sizes = [str(c[name]) for name in ("model", "dtype", "threads", "context", "batch", "rows")]
        table.add_row(*sizes, number_text(c["ms"], 2), *ratios, number_text(c["read_gb_per_s"], 1))
    console.print(table)
