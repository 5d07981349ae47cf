"""By-products may fail, an answer may not: sinks that raise, and proposals that no tree can be made of."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from paceline.config import EngineConfig
from paceline.contracts import RoundStats
from paceline.kernels.cpu.trees import load_trees
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.sampling.request import GenerationRequest, RoundEvent, SamplingParams
from tests.helpers.fakes import greedy_continuation, tiny_target
from tests.helpers.scripted_drafters import RandomDrafter, RepeatDrafter

TARGET = tiny_target(context=128)
PROMPTS = ((10, 11, 12, 13, 14), (20, 21, 22))


@functools.cache
def answers() -> list[list[int]]:
    return [greedy_continuation(TARGET, list(p), 12) for p in PROMPTS]


class Sink:
    """Raises in one of its methods, or hands out rows that cannot be stored."""

    def __init__(self, broken: str) -> None:
        self.broken, self.calls = broken, 0

    def _call(self, name: str) -> None:
        self.calls += name == self.broken
        if name == self.broken:
            raise OSError("disk full")

    def record_rounds(self, rows: RoundStats) -> None:
        self._call("record_rounds")

    def wants(self, request_id: str, bucket: str) -> bool:
        self._call("wants")
        return True

    def record_trace(self, trace: object) -> None:
        self._call("record_trace")


def run(engine: Engine, num_requests: int = 2) -> list[list[int]]:
    """Every request's answer; asserts that it came to its end."""
    events: list[list[RoundEvent]] = [[] for _ in PROMPTS[:num_requests]]
    for i, own in enumerate(events):
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        engine.submit(GenerationRequest(request_id=f"r{i}", prompt_token_ids=PROMPTS[i], params=params), own.append)
    while engine.step():
        engine.check_integrity()
    assert [own[-1].finish_reason for own in events] == ["length"] * num_requests
    return [[t for e in own for t in e.token_ids] for own in events]


def make_engine(drafter: object = None, sink: Sink | None = None) -> Engine:
    return Engine(
        TARGET,
        DrafterSlots(drafter or RandomDrafter(TARGET.vocab_size), "v0"),  # type: ignore[arg-type]
        EngineConfig(kv_bytes=2**22, max_running=4),
        feedback=sink,
        traces=sink,
        rng=np.random.default_rng(0),
    )


@pytest.mark.parametrize("broken", ["record_rounds", "wants", "record_trace"])
def test_a_sink_that_raises_is_counted_and_logged_once(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink(broken)
    engine = make_engine(sink=sink)
    assert run(engine) == answers() and run(engine) == answers()
    assert engine.stats()["num_callback_errors"] == sink.calls >= 4
    assert sum("disk full" in str(r.exc_info) for r in caplog.records) == 1


@pytest.mark.parametrize("name", ["ranking", "_record"])
def test_a_trace_that_cannot_be_put_together_costs_the_trace_only(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    sink = Sink("")
    engine = make_engine(sink=sink)
    monkeypatch.setattr(engine.output.traces, name, fail)
    assert run(engine) == answers()
    assert engine.stats()["num_callback_errors"] == 2


@pytest.mark.parametrize("num_requests", [1, 2])
@pytest.mark.parametrize("where", ["budget", "serving.trees.host.HostBlocks.ranked", "pack"])
def test_trees_that_cannot_be_built_cost_the_drafter_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str, num_requests: int
) -> None:
    def fail(*_: object) -> None:
        raise IndexError("no such node")

    engine = make_engine()
    if where == "budget":
        monkeypatch.setattr(engine.policy.budget, "choose", fail)
    else:
        packs = "serving.trees.host.pack_trees" if load_trees() is None else "kernels.cpu.trees.TreeMaker.cut"
        monkeypatch.setattr(f"paceline.{packs if where == 'pack' else where}", fail)
    assert run(engine, num_requests) == answers()[:num_requests]
    assert engine.stats()["drafter_failures"] == {"v0": "IndexError: no such node"}
    assert sum("decode plainly" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize("num_requests", [1, 2])
@pytest.mark.parametrize("how", ["float ids", "more ids", "no dimension", "double", "other batch"])
def test_proposals_of_a_wrong_form_cost_the_drafter_only(how: str, num_requests: int) -> None:
    class WrongDrafter(RepeatDrafter):
        def propose(self, inputs):
            found = super().propose(inputs)
            if how == "float ids":
                found.token_ids = found.token_ids.float()
            elif how == "more ids":
                found.token_ids = found.token_ids.repeat(1, 1, 2)
            elif how == "no dimension":
                found.token_ids = found.token_ids[..., 0]
            elif how == "double":
                found.logprobs = found.logprobs.double()
            else:
                found.logprobs = found.logprobs.repeat(2, 1, 1)
            return found

    engine = make_engine(WrongDrafter(num_slots=3))
    assert run(engine, num_requests) == answers()[:num_requests]


@pytest.mark.parametrize("where", ["propose", "ingest"])
def test_where_there_is_no_memory_to_draft_for_the_longest_the_others_are_drafted_for(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Hungry(RepeatDrafter):
        def propose(self, inputs):
            self.look(inputs, "propose")
            return super().propose(inputs)

        def ingest(self, inputs):
            self.look(inputs, "ingest")
            super().ingest(inputs)

        def look(self, inputs, place):
            if where == place and int(inputs.context_lens.max()) > 60:  # all others are padded to it
                raise torch.OutOfMemoryError("CUDA out of memory")

    engine = make_engine(Hungry(num_slots=3))
    prompts = [*PROMPTS, tuple(i % 60 for i in range(70))]
    events: list[list[RoundEvent]] = [[] for _ in prompts]
    for i, own in enumerate(events):
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        engine.submit(GenerationRequest(request_id=f"r{i}", prompt_token_ids=prompts[i], params=params), own.append)
    while engine.step():
        engine.check_integrity()
    texts = [[t for e in own for t in e.token_ids] for own in events]
    assert texts == [greedy_continuation(TARGET, list(p), 12) for p in prompts]
    drafted = [own[-1].stats.num_draft_tokens for own in events]
    assert engine.stats()["drafter_failures"] == {}, "it is no fault of the version"
    assert drafted[0] > 0 < drafted[1] and drafted[2] == 0
    assert sum("no memory to draft" in r.getMessage() for r in caplog.records) == 1
