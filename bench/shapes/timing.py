"""Timing of forwards of real size: modules with random weights, on the device at hand.

On a GPU a whole round (all forwards of a drafter, then the target's) is captured into one CUDA graph and replayed between
events. On a CPU every different part is timed once by itself, one layer for all layers of its kind, and the times are added up:
an estimate. A stack repeats the weights of one layer, which is larger than every cache, so that each pass reads them from
memory as it would read those of the next layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from paceline.bench.shapes.costs import Forward, LayersCost, Part

_EPS = 1e-6


class ShapeLayer(nn.Module):
    """A decoder layer of the counted sizes; norms are present, rotary angles are not (they cost no memory traffic)."""

    def __init__(self, part: LayersCost) -> None:
        super().__init__()
        s = part.shape
        self.part = part
        self.qkv = nn.Linear(part.input_factor * s.hidden_size, (s.heads + 2 * s.kv_heads) * s.head_dim, bias=False)
        self.out = nn.Linear(s.heads * s.head_dim, s.hidden_size, bias=False)
        self.gate_up = nn.Linear(s.hidden_size, 2 * s.ffn_size, bias=False)
        self.down = nn.Linear(s.ffn_size, s.hidden_size, bias=False)
        self.norms = nn.Parameter(torch.ones(part.num_vectors))

    def forward(self, x: torch.Tensor, part: LayersCost, kv: torch.Tensor) -> torch.Tensor:
        """x (rows + K/V-only rows, H), kv (2, requests, Hkv, committed rows, Dh) -> (rows, H); `part` gives the row counts."""
        s = part.shape
        h, queries = s.hidden_size, s.heads * s.head_dim
        y = F.rms_norm(x, (h,), self.norms[:h], _EPS)
        y = torch.cat((y,) * part.input_factor, dim=-1) if part.input_factor > 1 else y
        x, qkv = x[: part.rows], self.qkv(y[: part.rows])
        if part.kv_only_rows:
            F.linear(y[part.rows :], self.qkv.weight[queries:])
        q = qkv[:, :queries].view(s.requests, -1, s.heads, s.head_dim).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, kv[0], kv[1], enable_gqa=True) if kv.shape[3] else q
        x = x + self.out(attended.transpose(1, 2).reshape(part.rows, -1))
        gate, up = self.gate_up(F.rms_norm(x, (h,), self.norms[h : 2 * h], _EPS)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class ShapeLinear(nn.Module):
    """One matrix, and the vectors that are counted with it."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        assert not isinstance(part, LayersCost)
        self.matrix = nn.Linear(part.inputs, part.outputs, bias=False)
        self.vectors = nn.Parameter(torch.ones(part.num_vectors))


def build_part(part: Part) -> nn.Module:
    """A module with the parameters of a part; of a stack, those of one layer. Where and of which type: torch's defaults."""
    return ShapeLayer(part) if isinstance(part, LayersCost) else ShapeLinear(part)


def runner(module: nn.Module, part: Part) -> Callable[[], None]:
    """Inputs of the part's size for `module`, and a call that runs the part on them (a stack: one layer)."""
    weight = next(module.parameters())
    if isinstance(part, LayersCost):
        s = part.shape
        x = torch.randn(part.rows + part.kv_only_rows, s.hidden_size).to(weight)
        kv = torch.randn(2, s.requests, s.kv_heads, part.kv_rows, s.head_dim, dtype=weight.dtype, device=weight.device)
        return lambda: module(x, part, kv)
    assert isinstance(module, ShapeLinear)
    matrix, x = module.matrix, torch.randn(part.rows, part.inputs).to(weight)
    return lambda: matrix(x)


def part_key(part: Part) -> tuple[object, ...]:
    """Parts with equal keys can share one module: only their row counts differ."""
    if isinstance(part, LayersCost):
        s = part.shape
        return ("layer", s.hidden_size, s.ffn_size, s.heads, s.kv_heads, s.head_dim, part.input_factor)
    return ("linear", part.inputs, part.outputs)


def estimate_on_cpu(forwards: Iterable[Forward], repeats: int, on_part: Callable[[str], None]) -> dict[Part, float]:
    """CPU seconds (of all threads) of every part: the best of some runs in float32, a stack's being one layer's times their number.

    CPU seconds and not those of the clock: what else runs on the machine counts only where it takes memory bandwidth.

    Args:
        on_part: told the name of each module before it is built.
    """
    groups: dict[tuple[object, ...], list[Part]] = {}
    for forward in forwards:
        for part in forward.parts:
            mine = groups.setdefault(part_key(part), [])
            if part not in mine:
                mine.append(part)
    seconds: dict[Part, float] = {}
    with torch.inference_mode():
        for parts in groups.values():  # one module at a time: a head of 128256 tokens has 2 GB
            on_part(parts[0].name)
            module = build_part(max(parts, key=lambda p: p.num_vectors))
            calls = {part: runner(module, part) for part in parts}
            best = dict.fromkeys(parts, float("inf"))
            for _ in range(repeats + 1):  # in turn, so that a machine that slows down slows every part
                for part, call in calls.items():
                    began = time.process_time()
                    call()
                    best[part] = min(best[part], time.process_time() - began)
            for part in parts:
                seconds[part] = best[part] * (part.count if isinstance(part, LayersCost) else 1)
    return seconds


def time_on_gpu(forwards: Sequence[Forward], repeats: int) -> float:
    """Seconds of all forwards of a round in bfloat16, replayed as one CUDA graph; the median of `repeats`."""
    device = torch.device("cuda")
    modules: dict[tuple[object, ...], nn.Module] = {}
    calls: list[tuple[Callable[[], None], int]] = []
    with torch.inference_mode(), device:
        for forward in forwards:
            for part in forward.parts:
                if part_key(part) not in modules:
                    same = [p for f in forwards for p in f.parts if part_key(p) == part_key(part)]
                    modules[part_key(part)] = build_part(max(same, key=lambda p: p.num_vectors)).to(torch.bfloat16)
                calls.append((runner(modules[part_key(part)], part), part.count if isinstance(part, LayersCost) else 1))

        def run() -> None:
            for call, count in calls:
                for _ in range(count):
                    call()

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):  # lazily made workspaces must exist before the capture
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times = []
        for _ in range(repeats + 1):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    times = sorted(times[1:])
    return times[len(times) // 2]
