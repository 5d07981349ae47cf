"""Versions that are deltas of one base, in an engine: the target's tokens, one drafting pass for all, each with its own drafts."""

from __future__ import annotations

import functools

import pytest
import torch

from paceline.contracts import Group
from paceline.kernels.cpu.library import ISA_VARIABLE
from paceline.serving.drafters.deltas import DOWN, LINEARS, UP, merge
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.loading.families import build_drafter
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from paceline.serving.target_model.model import TargetModel
from tests.helpers.drafters import eagle_for, head_for, specblock_for
from tests.helpers.engines import Sinks
from tests.helpers.fakes import tiny_model, tiny_tokenizer
from tests.helpers.graph_engines import CONTEXT, TREE, CountingGraphs, make_engine
from tests.helpers.static_kernels import STATIC_KERNELS
from tests.helpers.trees import DevicePolicy

BUCKETS = ("math", "code", "chat", "law", "")
NUM_DELTAS, RANK = 3, 5


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
    g, deltas = torch.Generator().manual_seed(3), []
    for _ in range(NUM_DELTAS):
        factors = {}
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in LINEARS:
                num_out, num_in = module.weight.shape
                factors[name + DOWN] = torch.randn(RANK, num_in, generator=g) * num_in**-0.5
                factors[name + UP] = torch.randn(num_out, RANK, generator=g) * 0.5
        deltas.append(factors)
    return functools.partial(build_drafter, settings, target=target, target_version=target.version), state, deltas


def generate(engine, temperatures, on_round=lambda: None):
    """Tokens of two requests of each bucket."""
    g, tokens = torch.Generator().manual_seed(0), {}
    for i in range(2 * len(BUCKETS)):
        params = SamplingParams(
            temperature=temperatures[i % len(temperatures)], max_tokens=10 + i, ignore_eos=True, seed=i
        )
        request = GenerationRequest(
            request_id=f"r{i}", prompt_token_ids=tuple(torch.randint(3, 64, (3 + 2 * i,), generator=g).tolist()),
            params=params, bucket=BUCKETS[i % len(BUCKETS)], group=Group.ADAPTIVE,
        )  # fmt: skip
        tokens[f"r{i}"] = []
        engine.submit(request, lambda e: tokens[e.request_id].extend(e.token_ids))
    while engine.step():
        on_round()
    engine.check_integrity()
    assert engine.stats()["num_drafter_failures"] == 0
    return tokens


def route(slots):
    slots.route({bucket: f"v{i + 2}" for i, bucket in enumerate(BUCKETS[:NUM_DELTAS])})


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("temperatures", [(0.0,), (0.9, 0.0, 0.7)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["specblock", "eagle3", "jetspec", "dflash"])
def test_classes_with_deltas_get_the_targets_tokens_and_the_drafts_of_their_own_weights(
    family, temperatures, is_compiled, monkeypatch
):
    if not is_compiled:
        monkeypatch.setenv(ISA_VARIABLE, "none")
    target = make_target()
    expected = generate(make_engine(target, DrafterSlots()), temperatures)
    build, state, deltas = make_drafters(target, family)
    first = build(state)
    first.hold_deltas(NUM_DELTAS, RANK)
    calls = []
    propose = first.propose
    first.propose = lambda inputs: calls.append(inputs) or propose(inputs)
    beside = DrafterSlots(build(state), "v1", first=first, spawn=lambda: build(state))
    whole = DrafterSlots(build(state), "v1", first=build(state), spawn=lambda: build(state), num_class_slots=NUM_DELTAS)
    accepted = []
    for slots in (beside, whole):
        sinks = Sinks()
        engine = make_engine(target, slots, traces=sinks, max_running=16)
        engine.output.feedback = sinks
        route(slots)
        for i, factors in enumerate(deltas):
            if slots is beside:
                assert slots.load_delta(f"v{i + 2}", lambda factors=factors: factors)
            else:
                assert slots.load(f"v{i + 2}", lambda factors=factors: merge(state, factors))
        rounds = []

        def note(rounds=rounds):
            rounds.append(len(calls))

        assert generate(engine, temperatures, note) == expected
        rows = [(r["request_id"], r["drafter_version"], r["num_accepted_tokens"]) for r in sinks.rows]
        accepted.append(sorted(rows))
        if slots is beside:
            per_round = [b - a for a, b in zip([0, *rounds], rounds, strict=False)]
            assert max(per_round) == 1, "all versions draft in one pass"
            assert any(len(set(c.deltas.tolist())) == NUM_DELTAS + 1 for c in calls if c.deltas is not None)
    assert accepted[0] == accepted[1], "each request drafted as with whole weights of its own"
    assert {version for _, version, _ in accepted[0]} == {"v1", "v2", "v3", "v4"}


@pytest.mark.parametrize("temperatures", [(0.0,), (0.9, 0.0, 0.7)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["specblock", "eagle3", "jetspec", "dflash"])
def test_by_graphs_too(family, temperatures, monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, "none")
    expected = generate(make_engine(make_target(), DrafterSlots()), temperatures)
    target = make_target(STATIC_KERNELS)
    build, state, deltas = make_drafters(target, family)
    found = []
    for has_graphs in (False, True):
        first = build(state)
        first.hold_deltas(NUM_DELTAS, RANK)
        slots = DrafterSlots(build(state), "v1", first=first, spawn=lambda: build(state))
        backend = CountingGraphs() if has_graphs else None
        policy = DevicePolicy(TREE, vocab_size=target.vocab_size)
        sinks = Sinks()
        engine = make_engine(target, slots, backend, policy, max_running=16)
        engine.output.feedback = sinks
        route(slots)
        for i, factors in enumerate(deltas):
            assert slots.load_delta(f"v{i + 2}", lambda factors=factors: factors)
        assert generate(engine, temperatures) == expected
        assert backend is None or backend.num_replays > 0
        found.append(sum(r["num_accepted_tokens"] for r in sinks.rows))
    assert found[0] == found[1] > 0
