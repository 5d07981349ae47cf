"""Versions that are deltas of one base, in an engine: the target's tokens, one drafting pass for all, each with its own drafts."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from paceline.bench.engine.versions import random_factors
from paceline.contracts import Group
from paceline.kernels.cpu.library import ISA_VARIABLE
from paceline.serving.drafters.deltas import merge
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.loading.families import build_drafter
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from paceline.serving.target_model.model import TargetModel
from tests.helpers.covering import pairwise
from tests.helpers.drafters import eagle_for, head_for, specblock_for
from tests.helpers.engines import Sinks
from tests.helpers.fakes import tiny_model, tiny_tokenizer
from tests.helpers.graph_engines import CONTEXT, TREE, CountingGraphs, make_engine
from tests.helpers.static_kernels import STATIC_KERNELS
from tests.helpers.trees import DevicePolicy

BUCKETS = ("math", "code", "chat", "law", "")
NUM_DELTAS, RANK, NUM_TOKENS = 3, 5, 18
FAMILIES = ("specblock", "eagle3", "jetspec", "dflash")
TEMPERATURES = {"greedy": (0.0,), "sampled": (0.9, 0.0, 0.7)}


@functools.cache
def make_target(kernels=None):
    target = TargetModel.from_model(
        tiny_model("qwen3", layers=4, context=CONTEXT), tiny_tokenizer(), fast_path=False, version="tiny"
    )
    if kernels is not None:
        target.kernels = kernels
    return target


def make_drafters(target, family):
    """A function that makes equal drafters, the base's weights and the factors of every delta."""
    if family == "specblock":
        model = specblock_for(target, is_perturbed=True)
    elif family == "eagle3":
        model = eagle_for(target)
    else:
        model = head_for(target, is_causal=family == "jetspec")
    settings, state = {**model.config.to_dict(), "drafter_type": family}, model.state_dict()
    deltas = [random_factors(model, RANK, seed, 0.5) for seed in range(NUM_DELTAS)]
    return functools.partial(build_drafter, settings, target=target, target_version=target.version), state, deltas


def generate(engine, temperatures, on_round=lambda: None, num_failures=0):
    """Tokens of two requests of each bucket, whose prompts begin alike."""
    g, tokens = torch.Generator().manual_seed(0), {}
    shared = torch.randint(3, 64, (24,), generator=g).tolist()
    for i in range(2 * len(BUCKETS)):
        params = SamplingParams(
            temperature=temperatures[i % len(temperatures)], max_tokens=NUM_TOKENS + i, ignore_eos=True, seed=i
        )
        request = GenerationRequest(
            request_id=f"r{i}", prompt_token_ids=(*shared, *torch.randint(3, 64, (3 + i,), generator=g).tolist()),
            params=params, bucket=BUCKETS[i % len(BUCKETS)], group=Group.ADAPTIVE,
        )  # fmt: skip
        tokens[f"r{i}"] = []
        engine.submit(request, lambda e: tokens[e.request_id].extend(e.token_ids))
    while engine.step():
        on_round()
    engine.check_integrity()
    assert engine.stats()["num_drafter_failures"] == num_failures
    return tokens


@functools.cache
def plain_text(temperatures):
    """What the target writes without a drafter."""
    return generate(make_engine(make_target(), DrafterSlots()), temperatures)


def fill(slots, deltas, state=None):
    """Give the classes their versions: deltas, or with a base's weights whole ones."""
    slots.route({bucket: f"v{i + 2}" for i, bucket in enumerate(BUCKETS[:NUM_DELTAS])})
    for i, factors in enumerate(deltas):
        if state is None:
            assert slots.load_delta(f"v{i + 2}", lambda factors=factors: factors)
        else:
            assert slots.load(f"v{i + 2}", lambda factors=factors: merge(state, factors))


def listening(engine):
    """What becomes of its rounds."""
    engine.output.feedback = sinks = Sinks()
    return sinks


@pytest.mark.parametrize(("family", "draws", "forward"), pairwise(FAMILIES, TEMPERATURES, ("compiled", "torch")))
def test_classes_with_deltas_get_the_targets_tokens_and_the_drafts_of_their_own_weights(
    family, draws, forward, monkeypatch
):
    """Also behind a prompt whose drafter KV another version has written: one request after the other, the prefix cached."""
    if forward == "torch":
        monkeypatch.setenv(ISA_VARIABLE, "none")
    target, temperatures = make_target(), TEMPERATURES[draws]
    expected = plain_text(temperatures)
    build, state, deltas = make_drafters(target, family)
    first = build(state)
    first.hold_deltas(NUM_DELTAS, RANK)
    beside = DrafterSlots(build(state), "v1", first=first, spawn=lambda: build(state))
    whole = DrafterSlots(build(state), "v1", first=build(state), spawn=lambda: build(state), num_class_slots=NUM_DELTAS)
    accepted = []
    for slots in (beside, whole):
        fill(slots, deltas, None if slots is beside else state)
        engine = make_engine(target, slots, traces=Sinks(), max_running=1)
        sinks = listening(engine)
        assert generate(engine, temperatures) == expected
        assert engine.stats()["num_cached_pages"] > 0
        accepted.append([(r["request_id"], r["drafter_version"], r["num_accepted_tokens"]) for r in sinks.rows])
    assert accepted[0] == accepted[1], "each request drafted as with whole weights of its own"
    assert {version for _, version, _ in accepted[0]} == {"v1", "v2", "v3", "v4"}
    assert sum(n for *_, n in accepted[0]) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_all_versions_draft_in_one_pass(family):
    target = make_target()
    expected = plain_text((0.0,))
    build, state, deltas = make_drafters(target, family)
    first, calls, rounds = build(state), [], []
    first.hold_deltas(NUM_DELTAS, RANK)
    propose = first.propose
    first.propose = lambda inputs: calls.append(inputs) or propose(inputs)
    slots = DrafterSlots(build(state), "v1", first=first, spawn=lambda: build(state))
    fill(slots, deltas)
    assert generate(make_engine(target, slots), (0.0,), lambda: rounds.append(len(calls))) == expected
    assert max(b - a for a, b in itertools.pairwise([0, *rounds])) == 1
    assert any(len(set(c.deltas.tolist())) == NUM_DELTAS + 1 for c in calls if c.deltas is not None)


class BrokenDelta:
    """A drafter that proposes nonsense for requests of one delta."""

    def __init__(self, inner, broken):
        self._inner, self._broken = inner, broken

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def propose(self, inputs):
        proposal = self._inner.propose(inputs)
        if inputs.deltas is not None:
            proposal.logprobs = proposal.logprobs.masked_fill(
                (inputs.deltas == self._broken)[:, None, None], float("nan")
            )
        return proposal


@pytest.mark.parametrize("family", ["specblock", "jetspec"])
def test_a_delta_that_drafts_nonsense_stops_alone(family):
    """Though it fails in one pass with the others; texts stay the target's."""
    target = make_target()
    expected = plain_text((0.0,))
    build, state, deltas = make_drafters(target, family)
    first = build(state)
    first.hold_deltas(NUM_DELTAS, RANK)
    slots = DrafterSlots(build(state), "v1", first=BrokenDelta(first, 1), spawn=lambda: build(state))
    fill(slots, deltas)
    engine = make_engine(target, slots, traces=Sinks(), max_running=16)
    sinks = listening(engine)
    assert generate(engine, (0.0,), num_failures=1) == expected
    assert list(slots.failures()) == ["v3"] and slots.served() == {"math": "v2", "chat": "v4"}
    drafted = {r["drafter_version"] for r in sinks.rows if r["num_draft_tokens"]}
    assert {"v1", "v2", "v4"} <= drafted


@pytest.mark.parametrize("temperatures", TEMPERATURES.values(), ids=TEMPERATURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_by_graphs_too(family, temperatures, monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, "none")
    expected = plain_text(temperatures)
    target = make_target(STATIC_KERNELS)
    build, state, deltas = make_drafters(target, family)
    found = []
    for has_graphs in (False, True):
        first = build(state)
        first.hold_deltas(NUM_DELTAS, RANK)
        slots = DrafterSlots(build(state), "v1", first=first, spawn=lambda: build(state))
        backend = CountingGraphs() if has_graphs else None
        policy = DevicePolicy(TREE, vocab_size=target.vocab_size)
        fill(slots, deltas)
        engine = make_engine(target, slots, backend, policy, max_running=16)
        sinks = listening(engine)
        assert generate(engine, temperatures) == expected
        assert backend is None or backend.num_replays > 0
        found.append([(r["request_id"], r["num_draft_tokens"], r["num_accepted_tokens"]) for r in sinks.rows])
    assert found[0] == found[1] and sum(n for _, n, _ in found[0]) > 0
