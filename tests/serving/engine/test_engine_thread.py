"""The engine in its thread: many submitters, shutting down, and a target that fails."""

from __future__ import annotations

import threading

import pytest

from paceline.errors import CapacityError, EngineStoppedError, RequestError
from paceline.serving.engine.thread import EngineThread
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from tests.helpers.engines import PROMPT, VOCAB, Run, finish, greedy, make_engine, target
from tests.helpers.scripted_drafters import RandomDrafter, RepeatDrafter


def test_the_thread_serves_many_submitters_and_drains_on_stop():
    engine = make_engine(RandomDrafter(VOCAB), max_running=4)
    thread = EngineThread(engine)
    thread.start()
    done = threading.Semaphore(0)
    answers: dict[str, list[int]] = {}

    def submit(i: int) -> None:
        def on_event(event):
            answers.setdefault(event.request_id, []).extend(event.token_ids)
            if event.finish_reason is not None:
                done.release()

        engine.submit(
            GenerationRequest(
                request_id=f"r{i}",
                prompt_token_ids=PROMPT,
                params=SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
            ),
            on_event,
        )

    submitters = [threading.Thread(target=submit, args=(i,)) for i in range(12)]
    for t in submitters:
        t.start()
    for _ in range(6):
        assert done.acquire(timeout=60)
    for t in submitters:
        t.join()
    assert thread.stop(drain=True, timeout_s=60) and thread.error is None
    assert all(tuple(a) == greedy()[:12] for a in answers.values()) and len(answers) == 12
    with pytest.raises(EngineStoppedError):
        Run(engine, "late")


def test_stopping_without_drain_ends_requests_with_an_error():
    engine = make_engine(RepeatDrafter())
    thread = EngineThread(engine)
    run = Run(engine, max_tokens=100)
    assert thread.heartbeat_age_s() < 60
    thread.start(is_warmed_up=True)
    assert thread.stop(drain=False, timeout_s=60)
    assert run.last.finish_reason in ("error", "length")
    assert engine.allocator.num_free_pages == engine.allocator.num_pages


class LostDevice:
    """The target, whose device is lost after the prompt."""

    def __init__(self, inner) -> None:
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def forward(self, batch, kv):
        if batch.ancestors is not None:
            raise RuntimeError("device lost")
        return self._inner.forward(batch, kv)


def test_a_failing_target_ends_every_request_with_an_error_and_stops_the_thread():
    engine = make_engine(RepeatDrafter(), model=LostDevice(target()))
    ended = threading.Event()
    events = []

    def on_event(event):
        events.append(event)
        if event.finish_reason is not None:
            ended.set()

    thread = EngineThread(engine)
    thread.start(is_warmed_up=True)
    engine.submit(GenerationRequest(request_id="r", prompt_token_ids=PROMPT, params=SamplingParams()), on_event)
    assert ended.wait(60)
    assert events[-1].finish_reason == "error"
    assert "device lost" not in events[-1].error, "what went wrong may quote other requests: it belongs in the log"
    assert isinstance(thread.error, RuntimeError)
    with pytest.raises(EngineStoppedError):
        Run(engine, "late")


def test_several_requests_are_taken_all_or_none():
    engine = make_engine(max_waiting=3)

    def ask(*ids: str) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=2)
        engine.submit_all(
            [GenerationRequest(request_id=i, prompt_token_ids=PROMPT, params=params) for i in ids], ends.append
        )

    ends: list = []
    ask("a", "b")
    with pytest.raises(CapacityError, match="room for 1 of 2"):
        ask("c", "d")
    with pytest.raises(RequestError, match="at most 3"):
        ask("c", "d", "e", "f")
    with pytest.raises(RequestError, match="unique"):
        ask("b")
    ask("c")
    finish(engine)
    assert sorted(e.request_id for e in ends if e.finish_reason) == ["a", "b", "c"]
    engine.check_integrity()
