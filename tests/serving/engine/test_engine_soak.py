"""A thousand requests through one engine: nothing leaks, neither pages nor pins nor memory."""

from __future__ import annotations

import ctypes
import gc
import sys

import numpy as np
import psutil
import pytest

from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group, RoundStats
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.loading.kv_size import pool_row_bytes
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from tests.helpers.fakes import tiny_target
from tests.helpers.scripted_drafters import RandomDrafter, RepeatDrafter

VOCAB = 64
NUM_REQUESTS, WARM_REQUESTS = 1000, 300
MAX_GROWTH_BYTES = 2**20
"""Between request 300 and 1,000: 1.5 KB a request. Keeping the traces or the events would cost twice as much; the
allocator's noise is a fifth of it."""


class CountingSinks:
    """Takes rows and traces as the real sinks do, and keeps none."""

    def __init__(self) -> None:
        self.num_rows = self.num_traces = 0
        self.buckets: set[str] = set()

    def record_rounds(self, rows: RoundStats) -> None:
        self.num_rows += rows.num_rows
        self.buckets.update(rows.bucket)

    def wants(self, request_id: str, bucket: str) -> bool:
        return int(request_id) % 3 == 0

    def record_trace(self, trace) -> None:
        self.num_traces += 1


def resident_bytes() -> int:
    """What the process holds after collecting garbage and giving free heap pages back."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


@pytest.mark.slow
def test_a_thousand_mixed_requests_leave_nothing_behind():
    target, sinks, rng = (
        tiny_target(vocab=VOCAB, layers=2, width=16, context=128),
        CountingSinks(),
        np.random.default_rng(0),
    )
    slots = DrafterSlots(RandomDrafter(VOCAB), "v0", first=RepeatDrafter(), first_version="v0")
    row_bytes, _ = pool_row_bytes(target, slots, has_traces=True)
    config = EngineConfig(
        page_tokens=4, kv_bytes=40 * 4 * row_bytes, max_running=6, max_waiting=32, prefill_chunk_tokens=32, max_buckets=8,
        tree=TreeConfig(max_draft_tokens=6),
    )  # fmt: skip
    engine = Engine(target, slots, config, feedback=sinks, traces=sinks)
    ends: dict[str, int] = {}
    last_event: dict[str, bool] = {}

    def on_event(event) -> None:
        if event.finish_reason is not None:
            assert event.request_id not in last_event, "one last event per request"
            last_event[event.request_id] = True
            ends[event.finish_reason] = ends.get(event.finish_reason, 0) + 1

    def submit(i: int) -> None:
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.8])), max_tokens=int(rng.integers(1, 16)), seed=i, ignore_eos=bool(i % 2),
            stop=("a", "zz") if i % 5 == 0 else (), logprobs=2 if i % 7 == 0 else None,
            repetition_penalty=1.2 if i % 11 == 0 else 1.0,
        )  # fmt: skip
        prompt = rng.integers(3, VOCAB, int(rng.integers(1, 60))).tolist()
        group = (Group.ADAPTIVE, Group.STATIC, Group.PLAIN)[int(rng.integers(3))]
        request = GenerationRequest(request_id=str(i), prompt_token_ids=tuple(prompt), params=params, bucket=f"b{i % 40}", group=group)  # fmt: skip
        engine.submit(request, on_event)
        if rng.random() < 0.1:
            engine.abort(str(rng.integers(max(0, i - 8), i + 1)))

    def drain() -> None:
        while engine.step():
            pass
        engine.check_integrity()

    base = num_swaps = 0
    for i in range(NUM_REQUESTS):
        while engine.stats()["num_waiting"] >= config.max_waiting:
            engine.step()
        submit(i)
        if rng.random() < 0.7:
            engine.step()
        if i % 100 == 99:  # new drafter versions come and go; a busy slot refuses
            is_staged = slots.stage(f"v{i}", RandomDrafter(VOCAB, seed=i))
            if is_staged:
                engine.call_between_rounds(lambda: slots.publish())
                num_swaps += 1
        if i == WARM_REQUESTS - 1:
            drain()
            base = resident_bytes()
    drain()
    growth = resident_bytes() - base

    assert engine.is_idle and len(last_event) == NUM_REQUESTS
    assert engine.allocator.num_free_pages == engine.allocator.num_pages
    assert engine.stats()["num_preemptions"] > 0 and engine.stats()["num_callback_errors"] == 0
    assert set(ends) == {"stop", "length", "abort"} and min(ends.values()) > 30, ends
    assert num_swaps > 3 and sinks.num_traces > 100 and len(sinks.buckets) == 8, (num_swaps, sinks.num_traces)
    assert growth < MAX_GROWTH_BYTES, f"resident memory grew by {growth} bytes"
