"""An engine whose rounds run by padded graphs emits the tokens of an engine without graphs."""

from __future__ import annotations

import functools

import pytest
import torch

from paceline.kernels.cpu.library import ISA_VARIABLE
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.target_model.model import TargetModel
from tests.helpers.fakes import greedy_continuation, tiny_model, tiny_tokenizer
from tests.helpers.graph_engines import (
    CONTEXT,
    NUM_TOKENS,
    TREE,
    CountingGraphs,
    generate,
    make_engine,
    parallel_head,
    specblock,
)
from tests.helpers.launch_count import LaunchCount
from tests.helpers.scripted_drafters import OracleDrafter
from tests.helpers.static_kernels import STATIC_KERNELS
from tests.helpers.trees import DevicePolicy

MAX_EAGER = {"specblock": 160, "jetspec": 144, "dflash": 121}
"""Launches of a round beside those inside of graphs, replays included."""


@functools.cache
def make_target(kernels=None):
    model = tiny_model("qwen3", layers=4, context=CONTEXT)
    target = TargetModel.from_model(model, tiny_tokenizer(), fast_path=False, version="tiny")
    if kernels is not None:
        target.kernels = kernels
    return target


def make_prompts(count, temperatures):
    rng = torch.Generator().manual_seed(count)
    lengths = torch.randint(2, 30, (count,), generator=rng).tolist()
    prompts = [torch.randint(3, 64, (n,), generator=rng).tolist() for n in lengths]
    return [(p, temperatures[i % len(temperatures)]) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("temperatures", [(0.0,), (0.9, 0.0, 0.7)], ids=["greedy", "sampled"])
def test_tokens_are_those_of_an_engine_without_graphs(count, temperatures):
    prompts, plain, target = make_prompts(count, temperatures), make_target(), make_target(STATIC_KERNELS)
    build, _ = specblock(target)
    backend = CountingGraphs()
    graphed = make_engine(target, DrafterSlots(build(), "v1", first=build(), spawn=build), backend)
    assert graphed.stats()["num_graphs"] == graphed.graphs.num_graphs > 100
    expected = generate(make_engine(plain, DrafterSlots(specblock(plain)[0](), "v1")), prompts)
    assert generate(graphed, prompts) == expected
    assert [len(t) for t in expected.values()] == [NUM_TOKENS - i for i in range(count)]
    rounds = graphed.stats()["num_rounds"]
    assert backend.num_replays >= 2 * rounds, "block 1 and verify of every round were replayed"


@pytest.mark.parametrize("is_causal", [True, False], ids=["jetspec", "dflash"])
@pytest.mark.parametrize("count", [1, 3])
def test_parallel_heads_draft_by_graph_and_the_tokens_are_the_target_s(count, is_causal, monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, "none")  # compiled drafting has nothing to capture
    prompts, target = make_prompts(count, (0.0, 0.8)), make_target(STATIC_KERNELS)
    build, backend = parallel_head(target, is_causal=is_causal), CountingGraphs()
    policy = DevicePolicy(TREE, vocab_size=target.vocab_size)
    engine = make_engine(target, DrafterSlots(build(), "v1", first=build(), spawn=build), backend, policy)
    assert generate(engine, prompts) == generate(make_engine(make_target(), DrafterSlots()), prompts)
    assert engine.stats()["num_drafter_failures"] == 0
    assert backend.num_replays >= 2 * engine.stats()["num_rounds"], "the block and verify of every round were replayed"


class UncountedGraphs(CountingGraphs):
    """Graphs whose replays count as one launch each."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def capture(self, run):
        def replay():
            self.count.names["replay"] += 1
            with self.count.paused():
                run()

        return super().capture(replay)


@pytest.mark.parametrize("family", ["specblock", "jetspec", "dflash"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_round_launches_little_beside_its_graphs(count, family, monkeypatch):
    """Copies into static tensors, the draws, acceptance, the commit: as many whatever the batch."""
    monkeypatch.setenv(ISA_VARIABLE, "none")
    launches, rounds = LaunchCount(), []
    kernels = launches.kernels(STATIC_KERNELS)
    target = make_target(kernels)
    build = specblock(target)[0] if family == "specblock" else parallel_head(target, is_causal=family == "jetspec")
    policy = DevicePolicy(TREE, vocab_size=target.vocab_size, kernels=kernels)
    engine = make_engine(target, DrafterSlots(build(), "v1"), UncountedGraphs(launches), policy)

    def note(_):
        rounds.append(launches.names.copy())
        launches.names.clear()

    with launches:
        generate(engine, make_prompts(count, (0.0,)), note)
    steady = [names for names in rounds[2:] if names["replay"] >= 3]
    assert steady, "rounds by graphs"
    assert max(names.total() for names in steady) <= MAX_EAGER[family], sorted(
        max(steady, key=lambda names: names.total()).items(), key=lambda x: -x[1]
    )


@pytest.mark.parametrize("count", [1, 4])
def test_graphs_and_drafting_with_one_read_work_together(count):
    prompts, target = make_prompts(count, (0.0, 0.8)), make_target(STATIC_KERNELS)
    build, _ = specblock(target)
    policy = DevicePolicy(TREE, vocab_size=target.vocab_size)
    engine = make_engine(target, DrafterSlots(build(), "v1"), CountingGraphs(), policy)
    assert generate(engine, prompts) == generate(make_engine(make_target(), DrafterSlots()), prompts)
    assert engine.stats()["num_drafter_failures"] == 0


def test_accepted_drafts_come_through_the_graphs():
    target, plain = make_target(STATIC_KERNELS), make_target()
    prompts = make_prompts(3, (0.0,))
    texts = {f"r{i}": [*p, *greedy_continuation(plain, list(p), NUM_TOKENS + 8)] for i, (p, _) in enumerate(prompts)}
    engine = make_engine(target, DrafterSlots(OracleDrafter(texts, num_slots=4), "oracle"), CountingGraphs())
    got = generate(engine, prompts)
    assert all(texts[name][len(p) :][: len(got[name])] == got[name] for name, (p, _) in zip(got, prompts, strict=True))
    assert engine.stats()["num_rounds"] <= 6, "drafts were accepted"


def test_a_swap_to_the_prepared_twin_drafts_by_its_own_graphs():
    target = make_target(STATIC_KERNELS)
    (build, _), (other, state) = specblock(target), specblock(target, seed=1)
    backend = CountingGraphs()
    slots = DrafterSlots(build(), "v1", spawn=build)
    engine = make_engine(target, slots, backend)
    assert slots.versions() == {"A": "v1"}, "a twin without weights of a version is no version"
    prompts = make_prompts(2, (0.0,))
    before = generate(engine, prompts)
    assert slots.stage("v2", state)
    slots.publish("v2")
    backend.num_replays = 0
    assert generate(engine, prompts) == before, "drafters never change greedy tokens"
    assert slots.versions() == {"A": "v1", "B": "v2"} and backend.num_replays >= 2 * NUM_TOKENS // 9
    drafter = slots.drafter("B")
    fresh = other()
    assert all(torch.equal(drafter.forward.weights[k], t) for k, t in fresh.forward.weights.items())
    assert drafter._graphs is not None and drafter._is_graphed


def test_no_graphs_are_made_on_the_cpu_by_default():
    engine = make_engine(make_target(), DrafterSlots())
    assert engine.graphs is None and engine.stats()["num_graphs"] == 0
