"""Deadlines end requests wherever they are; a drain finishes what was taken."""

from __future__ import annotations

import threading

import pytest

from paceline.config import EngineConfig
from paceline.errors import EngineStoppedError
from paceline.machine import ManualClock
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.engine.thread import EngineThread
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from tests.helpers.engines import TREE, VOCAB, Run, finish, greedy, make_engine, target
from tests.helpers.scripted_drafters import RandomDrafter
from tests.helpers.shared_prefix import PROMPTS, SYSTEM, submit


def timed_engine(clock: ManualClock, **config) -> Engine:
    row_bytes = target().kv_row_bytes
    values = {"page_tokens": 4, "kv_bytes": 64 * 4 * row_bytes, "tree": TREE, **config}
    return Engine(target(), DrafterSlots(RandomDrafter(VOCAB), "v0"), EngineConfig(**values), clock=clock)


def test_a_deadline_ends_a_request_in_the_queue_in_prefill_and_while_it_decodes():
    clock = ManualClock(100.0)
    engine = timed_engine(clock, max_running=2, prefill_chunk_tokens=8)
    events: dict[str, list] = {}
    for name, prompt in (("decodes", (5, 6)), ("prefills", SYSTEM), ("waits", (7, 8))):
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        request = GenerationRequest(request_id=name, prompt_token_ids=prompt, params=params, deadline_s=101.0)
        engine.submit(request, events.setdefault(name, []).append)
    engine.step()
    assert [engine.output.by_id[n].status for n in events] == ["running", "prefill", "waiting"]
    clock.advance(1.0)
    assert not engine.step()
    assert {n: e[-1].finish_reason for n, e in events.items()} == dict.fromkeys(events, "deadline")
    assert events["decodes"][-1].stats.num_emitted_tokens > 0
    stats = engine.stats()
    assert (stats["num_expired"], stats["num_aborted"]) == (3, 3) and stats["num_free_pages"] == 64
    assert engine.is_idle
    engine.check_integrity()


def test_a_request_without_a_deadline_or_before_it_is_left_alone():
    clock = ManualClock(0.0)
    engine = timed_engine(clock)
    a, b = submit(engine, "a", deadline_s=50.0), submit(engine, "b")
    clock.advance(100.0)
    assert not engine.step() and a[-1].finish_reason == b[-1].finish_reason == "length"


def test_a_drain_finishes_the_queue_and_keeps_deadlines():
    clock = ManualClock(0.0)
    engine = timed_engine(clock, max_running=1)
    runs = [Run(engine, f"r{i}", PROMPTS[i]) for i in range(3)]
    late: list = []
    params = SamplingParams(temperature=0.0, max_tokens=4)
    engine.submit(GenerationRequest(request_id="late", prompt_token_ids=(5,), params=params, deadline_s=1.0, priority=9), late.append)  # fmt: skip
    engine.close_inbox("shutting down")
    with pytest.raises(EngineStoppedError, match="shutting down"):
        engine.submit(GenerationRequest(request_id="refused", prompt_token_ids=(5,), params=params), late.append)
    engine.step()
    clock.advance(2.0)
    finish(engine)
    assert engine.is_idle and late[-1].finish_reason == "deadline"
    assert [r.tokens for r in runs] == [greedy(p, 12) for p in PROMPTS[:3]]


def test_a_thread_says_that_it_drains_until_preempted_and_queued_requests_are_done():
    engine = make_engine(RandomDrafter(VOCAB), num_pages=24, max_running=3, prefix_caching=False)
    thread = EngineThread(engine)
    started, seen = threading.Event(), []
    runs = [Run(engine, f"r{i}", PROMPTS[i % 4], max_tokens=40) for i in range(7)]
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)

    def on_event(event) -> None:
        seen.append(thread.is_draining)
        started.set()

    engine.submit(GenerationRequest(request_id="urgent", prompt_token_ids=(5,), params=params, priority=-1), on_event)
    assert not thread.is_draining
    thread.start(is_warmed_up=True)
    assert started.wait(60)
    assert thread.stop(drain=True, timeout_s=60) and thread.is_draining and thread.error is None
    assert engine.is_idle and engine.stats()["num_preemptions"] > 0
    assert all(r.tokens == greedy(PROMPTS[i % 4], 40) for i, r in enumerate(runs))
