"""Measures: what a call does on the device, rounds under a steady load, and models of real size with random weights.

What only a GPU has is None on a CPU; `null_because` says why a figure of a GPU is missing.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType

from paceline.bench.engine.arms import new_engine, random_prompts, wait
from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group
from paceline.errors import PacelineError
from paceline.serving.drafters.family import TrainedDrafter
from paceline.serving.drafters.interface import Drafter
from paceline.serving.drafters.network import DrafterModel
from paceline.serving.engine.engine import Engine
from paceline.serving.loading.families import FAMILIES
from paceline.serving.sampling.request import GenerationRequest, RoundEvent, SamplingParams
from paceline.serving.target_model.model import TargetModel

NO_EVENTS = "torch.profiler saw no kernels: this machine may not let CUPTI in"
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_DEVICE_ONLY = ("device_ms", "wait_ms", "num_launches", "num_graph_launches", "num_waits", "num_copies", "num_kernels")
_COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync")
_DRAFT_IDS = 32_000
"""Tokens of the own heads of SpecBlock and EAGLE-3, as they are published."""
_TABLE_LAYERS, _TABLE_SLOTS = 5, 15
"""Layers, tapped target layers and draft tokens of DFlash and JetSpec, as they are published."""


def profile(call: Callable[[], Any], device: torch.device, repeats: int, num_top: int = 0) -> dict[str, Any]:
    """What one call does, as torch.profiler sees it, the mean of some: device time, launches, waits, kernels.

    device_ms is the time in which at least one kernel or copy ran, wait_ms the host's time inside waits; a profiled host
    is slower than another one, so spans between kernels are not told here. On a CPU: operators that nobody called but
    the program itself, and their number.
    Args:
        num_top: kernels (on a CPU operators) that are listed, those with most time.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    call()
    wait(device)
    with torch.profiler.profile(activities=kinds) as seen:
        for _ in range(repeats):
            call()
        wait(device)
    events = list(seen.events() or ())
    if device.type != "cuda":
        own = [e for e in events if e.cpu_parent is None and e.name.startswith("aten::")]
        top = _top(((e.name, e.time_range.elapsed_us()) for e in own), repeats, num_top)
        nulls = dict.fromkeys(_DEVICE_ONLY)
        return {**nulls, "num_operators": round(len(own) / repeats, 1), "top_operators": top}
    return device_figures(events, repeats, num_top)


def device_figures(events: Sequence[Any], repeats: int, num_top: int) -> dict[str, Any]:
    """What `profile` says of a device, from torch.profiler's events (name, device_type, time_range in us)."""
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)]
    host = Counter[str]()
    wait_us = 0.0
    for e in events:
        if e.device_type == DeviceType.CPU:
            host[e.name] += 1
            wait_us += e.time_range.elapsed_us() if e.name in _WAITS else 0.0
    busy_us = union((e.time_range.start, e.time_range.end) for e in kernels)
    found: dict[str, Any] = {
        "device_ms": round(busy_us / 1e3 / repeats, 4) if kernels else None, "wait_ms": round(wait_us / 1e3 / repeats, 4),
        "num_launches": round(sum(host[n] for n in _LAUNCHES) / repeats, 1),
        "num_graph_launches": round(host["cudaGraphLaunch"] / repeats, 1),
        "num_waits": round(sum(host[n] for n in _WAITS) / repeats, 1),
        "num_copies": round(sum(host[n] for n in _COPIES) / repeats, 1), "num_kernels": round(len(kernels) / repeats, 1),
        "top_kernels": _top(((e.name, e.time_range.elapsed_us()) for e in kernels), repeats, num_top),
    }  # fmt: skip
    return found if kernels else {**found, "null_because": NO_EVENTS}


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Length of what the spans cover together."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _top(times: Iterable[tuple[str, float]], repeats: int, count: int) -> list[dict[str, Any]]:
    calls, spent = Counter[str](), Counter[str]()
    for name, us in times:
        calls[name] += 1
        spent[name] += us  # type: ignore[assignment]
    return [
        {"name": name[:160], "num_calls": round(calls[name] / repeats, 1), "total_us": round(us / repeats, 2)}
        for name, us in spent.most_common(count)
    ]


class CaptureLog(logging.Handler):
    """What the capture of an engine's graphs said: how many, in which time, and what could not be captured."""

    _LOGGER = "paceline.serving.target_model.graph_capture"

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.facts: dict[str, Any] = {"jobs_done": 0, "jobs_planned": 0, "capture_s": 0.0, "failures": []}

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            self.facts["failures"].append(record.getMessage()[:400])
        elif record.msg.startswith("graphs captured") and isinstance(record.args, tuple):
            done, planned, seconds = record.args
            self.facts |= {"jobs_done": done, "jobs_planned": planned, "capture_s": round(float(str(seconds)), 2)}

    def __enter__(self) -> CaptureLog:
        logger = logging.getLogger(self._LOGGER)
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        return self

    def __exit__(self, *exc: object) -> None:
        logging.getLogger(self._LOGGER).removeHandler(self)


def make_engine(
    target: TargetModel, drafter: Drafter | None, *, batch: int, context: int, num_draft_tokens: int = 8, capture_s: float, **parts: Any
) -> tuple[Engine, dict[str, Any]]:  # fmt: skip
    """An engine with room for `batch` requests of `context` tokens, and what its graphs are.

    capture_s: 0 = eager rounds, as all are on a CPU. parts: as new_engine has them.
    """
    config = EngineConfig(
        max_running=batch, max_waiting=max(256, batch), prefill_chunk_tokens=2048, prefix_caching=False,
        max_context_tokens=context, capture_s=capture_s, tree=TreeConfig(max_draft_tokens=num_draft_tokens, policy="fixed"),
    )  # fmt: skip
    pages = -(-(context + num_draft_tokens + 1) // config.page_tokens) + 1
    before = _reserved_bytes(target.device)
    num_tokens = (batch + 1) * pages * config.page_tokens
    is_warm = target.device.type == "cuda" or drafter is None  # without graphs costs are all that it would give
    with CaptureLog() as log:
        engine = new_engine(
            target, drafter, version="check", num_tokens=num_tokens, config=config, is_warm=is_warm, **parts
        )
    facts = {"num_graphs": engine.stats()["num_graphs"], **log.facts}
    after = _reserved_bytes(target.device)
    pool_bytes = engine.kv.data.numel() * engine.kv.data.element_size()
    facts["reserved_bytes"] = None if after is None or before is None else after - before
    return engine, facts | {"pool_bytes": pool_bytes}


def drafter_faults(engine: Engine, facts: dict[str, Any]) -> list[str]:
    """What could not be captured, and why a drafter was given up: its requests are decoded plainly, and right."""
    return [*facts["failures"], *(f"{name}: {why}" for name, why in engine.stats()["drafter_failures"].items())]


def _reserved_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


class SteadyLoad:
    """Requests of random tokens that all decode at once, so that every step of the engine is a full round."""

    def __init__(self, engine: Engine, *, batch: int, prompt_tokens: int, group: Group = Group.ADAPTIVE, tag: str = "steady") -> None:  # fmt: skip
        """Submits `batch` prompts and prefills them. Raises: PacelineError when one of them does not come to decoding."""
        self.engine, self._tag, self._batch = engine, tag, batch
        self._started: set[str] = set()
        self._ended: dict[str, str] = {}
        max_tokens = engine.max_context_tokens - prompt_tokens - 1
        for i, prompt in enumerate(random_prompts(engine.target, batch, prompt_tokens, seed=batch)):
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=i, ignore_eos=True)
            request = GenerationRequest(request_id=f"{tag}-{i}", prompt_token_ids=prompt, params=params, group=group)
            engine.submit(request, self._note)
        while len(self._started) < batch and not self._ended:
            engine.step()
        self._check()
        for _ in range(2):  # the first full rounds may still compile
            engine.step()

    def _note(self, event: RoundEvent) -> None:
        if event.token_ids:
            self._started.add(event.request_id)
        if event.finish_reason is not None:
            self._ended[event.request_id] = event.error or event.finish_reason

    def _check(self) -> None:
        if self._ended:
            raise PacelineError(
                f"requests must run as long as rounds are measured, got {next(iter(self._ended.items()))}"
            )

    def round_s(self, num_rounds: int) -> list[float]:
        """Seconds of each of the next rounds, on the host's clock; a round ends with its own reads of the device."""
        out = []
        wait(self.engine.target.device)
        for _ in range(num_rounds):
            began = time.perf_counter()
            self.engine.step()
            out.append(time.perf_counter() - began)
        self._check()
        return out

    def figures(self, num_rounds: int, *, num_top: int = 0) -> dict[str, Any]:
        """Rounds timed without a profiler, then some under it: wall, device and idle ms, parts, launches and waits.

        host_ms is the round without the waits of profiled rounds, which are shorter than others: an upper bound.
        """
        before = self.engine.stats()
        seconds = self.round_s(num_rounds)
        after = self.engine.stats()
        rounds = after["num_rounds"] - before["num_rounds"]
        parts = {
            k: round(1e3 * (v - before["round_part_s"].get(k, 0.0)) / rounds, 4)
            for k, v in after["round_part_s"].items()
        }
        wall_ms = 1e3 * statistics.median(seconds)
        row: dict[str, Any] = {
            "round_ms": round(wall_ms, 4),
            "p99_ms": round(1e3 * quantile(seconds, 0.99), 4),
            "part_ms": parts,
        }
        row |= profile(self.engine.step, self.engine.target.device, 3, num_top)
        busy, waiting = row["device_ms"], row["wait_ms"]
        row["idle_share"] = None if busy is None else round(max(0.0, 1 - busy / wall_ms), 4)
        row["host_ms"] = None if waiting is None else round(max(0.0, wall_ms - waiting), 4)
        self._check()
        return row

    def end(self) -> None:
        """Abort what runs; the engine is idle afterwards."""
        for i in range(self._batch):
            self.engine.abort(f"{self._tag}-{i}")
        while self.engine.step():
            pass


def quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(np.asarray(values), share))


def drafter_taps(name: str, num_layers: int) -> tuple[int, ...] | None:
    """Target layers that a drafter of real size reads: five for DFlash and JetSpec, else None, the usual three."""
    if name not in ("dflash", "jetspec"):
        return None
    return tuple(int(i) for i in np.linspace(1, num_layers - 2, _TABLE_LAYERS))


def random_drafter(name: str, target: TargetModel) -> tuple[Callable[[], TrainedDrafter], DrafterModel]:
    """A function that makes equal drafters of a family's published layout for this target, and their random weights."""
    family, config = FAMILIES[name], target.config
    sizes: dict[str, Any] = {
        "drafter_type": name, "hidden_size": target.hidden_size, "intermediate_size": config.intermediate_size,
        "num_heads": target.num_heads, "num_kv_heads": target.num_kv_heads, "head_dim": target.head_dim,
        "vocab_size": target.vocab_size, "feature_size": target.feature_size,
    }  # fmt: skip
    if name in ("dflash", "jetspec"):
        sizes |= {"num_layers": _TABLE_LAYERS, "num_slots": _TABLE_SLOTS}
    else:
        sizes |= {"embed_size": target.hidden_size, "draft_vocab_size": min(_DRAFT_IDS, target.vocab_size // 2)}
    if name == "specblock":
        sizes["num_slots"] = 4
    torch.manual_seed(0)
    with target.device:
        model = family.model(family.config.from_dict(sizes))
    return lambda: family.drafter.make(model, target, version=name), model


def alternating(first: Callable[[], Sequence[float]], second: Callable[[], Sequence[float]], turns: int) -> tuple[list[float], list[float]]:  # fmt: skip
    """What two measurements gave, taken in turn, so that a device that slows down slows both."""
    kept: tuple[list[float], list[float]] = ([], [])
    for i in range(turns):
        for side in (0, 1) if i % 2 == 0 else (1, 0):
            kept[side].extend((first, second)[side]())
    return kept


def ms_summary(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the number of rounds."""
    return {
        "p50_ms": round(1e3 * quantile(seconds, 0.5), 4), "p99_ms": round(1e3 * quantile(seconds, 0.99), 4), "num_rounds": len(seconds),
    }  # fmt: skip
