"""An engine whose rounds run by padded graphs emits the tokens of an engine without graphs."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch

from paceline.config import EngineConfig
from paceline.contracts import Group
from paceline.kernels.cpu.library import ISA_VARIABLE
from paceline.kernels.reference.tree_build import BuiltTrees
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.loading.target_graphs import GraphedTarget
from paceline.serving.sampling import draw
from paceline.serving.target_model.model import TargetModel
from tests.helpers.covering import pairwise
from tests.helpers.engines import Sinks
from tests.helpers.fakes import greedy_continuation, tiny_model, tiny_tokenizer
from tests.helpers.graph_engines import (
    CONTEXT,
    NUM_TOKENS,
    TREE,
    CountingGraphs,
    StaticOracle,
    eagle,
    generate,
    make_engine,
    parallel_head,
    specblock,
)
from tests.helpers.launch_count import LaunchCount, WaitCount
from tests.helpers.scripted_drafters import OracleDrafter
from tests.helpers.static_kernels import STATIC_KERNELS, StrictGraphs
from tests.helpers.trees import DevicePolicy

MAX_EAGER = 10
"""Launches of a round beside those inside of graphs, replays and the download of what the host reads included."""
FAMILIES = ("specblock", "jetspec", "dflash", "eagle3", "eagle3 by twos")
COUNTS = (1, 3, 8)
TEMPERATURES = {"greedy": (0.0,), "sampled": (0.9, 0.0, 0.7)}
ROUNDS = pytest.mark.parametrize("temperatures", TEMPERATURES.values(), ids=TEMPERATURES)


@functools.cache
def make_target(kernels=None, layers=4):
    model = tiny_model("qwen3", layers=layers, context=CONTEXT)
    target = TargetModel.from_model(model, tiny_tokenizer(), fast_path=False, version="tiny")
    if kernels is not None:
        target.kernels = kernels
    return target


def make_prompts(count, temperatures):
    rng = torch.Generator().manual_seed(count)
    lengths = torch.randint(2, 30, (count,), generator=rng).tolist()
    prompts = [torch.randint(3, 64, (n,), generator=rng).tolist() for n in lengths]
    return [(p, temperatures[i % len(temperatures)]) for i, p in enumerate(prompts)]


@functools.cache
def plain_tokens(count, temperatures, **params):
    """What an engine without a drafter answers to these prompts."""
    return generate(make_engine(make_target(), DrafterSlots()), make_prompts(count, temperatures), **params)


@pytest.mark.parametrize("count", COUNTS)
@ROUNDS
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
    assert generate(engine, prompts) == plain_tokens(count, (0.0, 0.8))
    assert engine.stats()["num_drafter_failures"] == 0
    assert backend.num_replays >= 2 * engine.stats()["num_rounds"], "the block and verify of every round were replayed"


class UncountedGraphs(CountingGraphs):
    """Graphs whose replays count as one launch each and no wait, whatever the references do inside."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def capture(self, run):
        def replay():
            self.count.names["replay"] += 1
            with self.count.paused(), torch._C.DisableTorchFunction():
                run()

        return super().capture(replay)


def build_family(family, target):
    """A function that makes equal drafters."""
    if family.startswith("eagle3"):
        return eagle(target, num_slots=2 if family.endswith("twos") else 1)
    return specblock(target)[0] if family == "specblock" else parallel_head(target, is_causal=family == "jetspec")


@functools.cache
def steady_rounds(family, count, temperatures, *, has_traces, policy):
    """What rounds launch and how often they wait, of those before and behind which the same requests run."""
    launches, waits, found, running = LaunchCount(), WaitCount(), [], []
    kernels = launches.kernels(STATIC_KERNELS)
    target = make_target(kernels)
    build = build_family(family, target)
    tree = dataclasses.replace(TREE, policy=policy)
    trees = DevicePolicy(tree, vocab_size=target.vocab_size, kernels=kernels)
    traces = Sinks() if has_traces else None
    slots = DrafterSlots(build(), "v1")
    engine = make_engine(target, slots, UncountedGraphs(launches), trees, traces, tree=tree)

    def note(_):
        running.append(engine.stats()["num_running"])
        found.append((launches.names.copy(), waits.names.copy()))
        launches.names.clear()
        waits.names.clear()

    with launches, waits:
        generate(engine, make_prompts(count, temperatures), note, max_tokens=NUM_TOKENS)
    assert engine.stats()["num_drafter_failures"] == 0
    assert traces is None or len(traces.traces) == count
    return [f for f, a, b, c in zip(found[2:], running, running[1:], running[2:], strict=False) if a == b == c > 0]


@pytest.mark.parametrize(
    ("family", "count", "draws", "sinks"), pairwise(FAMILIES, COUNTS, TEMPERATURES, ("no traces", "traces"))
)
def test_a_round_launches_little_beside_its_graphs(family, count, draws, sinks, monkeypatch):
    """One upload, a replay for the drafter and three for the target, one download: as many whatever the batch."""
    monkeypatch.setenv(ISA_VARIABLE, "none")
    rounds = steady_rounds(family, count, TEMPERATURES[draws], has_traces=sinks == "traces", policy="fixed")
    assert len(rounds) >= 2 and all(names["replay"] >= 3 for names, _ in rounds)
    assert max(names["replay"] for names, _ in rounds) >= 4, "a drafter's replay"
    most = max((names for names, _ in rounds), key=lambda names: names.total())
    assert most.total() + 1 <= MAX_EAGER, most


@pytest.mark.parametrize(
    ("family", "count", "policy", "draws"), pairwise(FAMILIES, COUNTS, ("fixed", "bastion", "adaptive"), TEMPERATURES)
)
def test_a_round_waits_once(family, count, policy, draws, monkeypatch):
    """Masses, checks and what calibration learns from come with the accepted paths."""
    monkeypatch.setenv(ISA_VARIABLE, "none")
    rounds = steady_rounds(family, count, TEMPERATURES[draws], has_traces=True, policy=policy)
    assert len(rounds) >= 2 and all(waits == {"cpu": 1} for _, waits in rounds), [waits for _, waits in rounds]


@pytest.mark.parametrize("count", [1, 4])
def test_graphs_and_drafting_with_one_read_work_together(count):
    prompts, target = make_prompts(count, (0.0, 0.8)), make_target(STATIC_KERNELS)
    build, _ = specblock(target)
    policy = DevicePolicy(TREE, vocab_size=target.vocab_size)
    engine = make_engine(target, DrafterSlots(build(), "v1"), CountingGraphs(), policy)
    assert generate(engine, prompts) == plain_tokens(count, (0.0, 0.8))
    assert engine.stats()["num_drafter_failures"] == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_every_graph_of_an_engine_can_be_captured(family, monkeypatch):
    """No host read and no shape that depends on data in any of them; the tree kernel's reference, which has both, is out."""
    monkeypatch.setenv(ISA_VARIABLE, "none")

    def no_trees(*, scores, max_nodes, **_):
        built = BuiltTrees.empty(len(scores), max_nodes + 1, scores.device)
        for field in dataclasses.fields(built):
            getattr(built, field.name).zero_()
        return built

    target = make_target(dataclasses.replace(STATIC_KERNELS, build_trees=no_trees), layers=2)
    policy = DevicePolicy(TREE, vocab_size=target.vocab_size, kernels=target.kernels)
    slots, backend = DrafterSlots(build_family(family, target)(), "v1"), StrictGraphs()
    small = {"max_running": 1, "tree": dataclasses.replace(TREE, max_draft_tokens=3), "prefill_chunk_tokens": 20}
    progress = []
    config = EngineConfig(
        **{"kv_bytes": 2**20, "page_tokens": 4, "max_context_tokens": 40, "capture_s": 600.0, **small}
    )
    engine = Engine(target, slots, config, graph_backend=backend, policy=policy, traces=Sinks())
    engine.graphs.capture(progress=lambda done, planned: progress.append((done, planned)))
    assert progress[-1] == (backend.num_captured,) * 2 and backend.num_captured == engine.graphs.num_graphs > 20


def crowd(temperatures):
    """Two prompts of one chunk and three long ones."""
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 64, (n,), generator=rng).tolist() for n in (5, 4, 70, 61, 33)]
    return [(p, temperatures[i % len(temperatures)]) for i, p in enumerate(prompts)]


CHUNKS = {"prefill_chunk_tokens": 24, "min_prefill_tokens": 12}


@functools.cache
def plain_crowd(temperatures):
    return generate(make_engine(make_target(), DrafterSlots(), **CHUNKS), crowd(temperatures), max_tokens=20)


@pytest.mark.parametrize("family", FAMILIES)
@ROUNDS
def test_rounds_with_prompt_rows_stay_on_the_device(family, temperatures, monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, "none")
    launches, waits, found = LaunchCount(), WaitCount(), []
    target = make_target(launches.kernels(STATIC_KERNELS))
    policy = DevicePolicy(TREE, vocab_size=target.vocab_size, kernels=target.kernels)
    slots = DrafterSlots(build_family(family, target)(), "v1")
    engine = make_engine(target, slots, UncountedGraphs(launches), policy, **CHUNKS)

    def note(_):
        counts = engine.stats()["num_prefill_rows"], engine.scheduler.num_running
        found.append((launches.names.copy(), waits.names.copy(), *counts))
        launches.names.clear()
        waits.names.clear()

    with launches, waits:
        got = generate(engine, crowd(temperatures), note, max_tokens=20)
    assert got == plain_crowd(temperatures)
    assert engine.stats()["num_drafter_failures"] == 0
    windows = zip(found, found[1:], found[2:], strict=False)
    mixed = [
        (names, held)
        for (*_, before), (*_, rows, running), (names, held, rows_after, running_after) in windows
        if rows_after > rows and running_after == running == before > 0
    ]
    assert len(mixed) >= 3, "rounds with prompt rows, no prompt completed in them or in the one before"
    behind = [
        (names, held)
        for (*_, running), (names, held, _, running_after) in itertools.pairwise(found)
        if running_after == running > 0
    ]
    chunks = -(-70 // CHUNKS["prefill_chunk_tokens"])
    assert all(names.total() + 1 <= MAX_EAGER + 2 * chunks and held == {"cpu": 1} for names, held in behind), behind
    assert min(names["replay"] for names, _ in mixed) == 4
    for names, held in mixed:  # up to two more where a drafter still catches up with a prompt
        assert names.total() + 1 <= MAX_EAGER and 4 <= names["replay"] <= 6 and held == {"cpu": 1}, names


FILTERS = ({}, {"top_p": 0.7}, {"top_k": 5, "min_p": 0.05})


@functools.cache
def plain_traces(**filters):
    """Tokens and traces of an engine without a drafter."""
    sinks = Sinks()
    engine = make_engine(make_target(), DrafterSlots(), traces=sinks)
    return generate(engine, make_prompts(5, TEMPERATURES["sampled"]), **filters), sinks


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("filters", FILTERS, ids=["plain", "top-p", "top-k"])
def test_sampled_rounds_that_stay_on_the_device_draw_the_same_tokens_and_traces(family, filters, monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, "none")
    prompts, target, ours = make_prompts(5, TEMPERATURES["sampled"]), make_target(STATIC_KERNELS), Sinks()
    policy = DevicePolicy(TREE, vocab_size=target.vocab_size)
    backend = CountingGraphs()
    engine = make_engine(target, DrafterSlots(build_family(family, target)(), "v1"), backend, policy, ours)
    expected_tokens, theirs = plain_traces(**filters)
    assert generate(engine, prompts, **filters) == expected_tokens
    assert engine.stats()["num_drafter_failures"] == 0 and backend.num_replays >= 4 * engine.stats()["num_rounds"] - 4
    for got, expected in zip(*(sorted(s.traces, key=lambda t: t.request_id) for s in (ours, theirs)), strict=True):
        assert got.token_ids == expected.token_ids and torch.equal(got.topk_ids[:, 0], expected.topk_ids[:, 0])
        torch.testing.assert_close(got.topk_logprobs, expected.topk_logprobs, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got.features, expected.features, atol=1e-4, rtol=1e-4)


def test_draws_that_need_more_of_the_vocabulary_are_made_again(monkeypatch):
    """Filters look at the likeliest tokens only; where those do not suffice, the host draws before anything is emitted."""
    prompts, target = make_prompts(5, (0.9, 0.0, 0.7)), make_target(STATIC_KERNELS)
    texts = [[*p, *greedy_continuation(make_target(), list(p), NUM_TOKENS + 8)] for p, _ in prompts]
    filters = {"top_p": 0.95, "top_k": 40}
    expected = generate(make_engine(make_target(), DrafterSlots()), prompts, **filters)
    monkeypatch.setattr(draw, "_PROBE", 8)
    again = []
    judge = GraphedTarget.judge_again
    monkeypatch.setattr(GraphedTarget, "judge_again", lambda *args: (again.append(1), judge(*args)))
    policy = DevicePolicy(TREE, vocab_size=target.vocab_size)
    slots = DrafterSlots(StaticOracle(texts, target.vocab_size), "oracle")
    engine = make_engine(target, slots, CountingGraphs(), policy)
    assert generate(engine, prompts, **filters) == expected and len(again) > 3


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("pages", [None, 26], ids=["", "few pages"])
def test_accepted_drafts_are_committed_on_the_device(count, pages):
    """Right drafts, wrong siblings: what later rounds read is what the accepted rows left behind."""
    target, plain = make_target(STATIC_KERNELS), make_target()
    prompts = make_prompts(count, (0.0,))
    texts = [[*p, *greedy_continuation(plain, list(p), NUM_TOKENS + 8)] for p, _ in prompts]
    policy = DevicePolicy(TREE, vocab_size=target.vocab_size)
    changes = {} if pages is None else {"kv_bytes": pages * 4 * target.kv_row_bytes}
    oracle = StaticOracle(texts, target.vocab_size)
    engine = make_engine(target, DrafterSlots(oracle, "oracle"), CountingGraphs(), policy, **changes)
    got = generate(engine, prompts)
    assert list(got.values()) == [
        t[len(p) :][: NUM_TOKENS - i] for i, (t, (p, _)) in enumerate(zip(texts, prompts, strict=True))
    ]
    assert pages is not None or engine.stats()["num_rounds"] <= 6, "drafts were accepted"


def test_more_requests_than_graphs_hold_lines_for_catch_up_without_them(monkeypatch):
    monkeypatch.setattr("paceline.serving.loading.target_graphs.MAX_GRAPH_ROWS", 4)
    target = make_target(STATIC_KERNELS)
    build, _ = specblock(target)
    rng = torch.Generator().manual_seed(0)
    prompts = [(torch.randint(3, 64, (60,), generator=rng).tolist(), 0.0) for _ in range(14)]
    slots = DrafterSlots(build(), "v1", first=build(), spawn=build)
    policy = DevicePolicy(TREE, vocab_size=target.vocab_size)
    engine = make_engine(target, slots, CountingGraphs(), policy, max_running=14)
    expected = generate(make_engine(make_target(), DrafterSlots(), max_running=14), prompts, max_tokens=12)
    assert generate(engine, prompts, max_tokens=12) == expected
    assert engine.stats()["num_drafter_failures"] == 0


def test_trees_may_reach_beyond_the_longest_context():
    """What is read of positions there is nothing's; an index out of bounds would end a process on CUDA."""
    target, plain = make_target(STATIC_KERNELS), make_target()
    prompts = [(list(range(3, 63)) + list(range(3, 20)), 0.0)]  # its last round begins 5 positions before the end
    expected = generate(make_engine(plain, DrafterSlots()), prompts, max_tokens=CONTEXT)
    texts, deepest = [[*prompts[0][0], *expected["r0"], *[7] * 8]], []
    policy = DevicePolicy(TREE, vocab_size=target.vocab_size)
    oracle = StaticOracle(texts, target.vocab_size)
    engine = make_engine(target, DrafterSlots(oracle, "oracle"), CountingGraphs(), policy)
    got = generate(
        engine, prompts, lambda _: deepest.append(int(engine.graphs.target._positions.max())), max_tokens=CONTEXT
    )
    assert got == expected and len(texts[0]) - 8 == CONTEXT and engine.stats()["num_drafter_failures"] == 0
    assert max(deepest) >= engine.graphs.target.tables.lines.shape[1]


def test_accepted_drafts_come_through_the_graphs():
    target, plain = make_target(STATIC_KERNELS), make_target()
    prompts = make_prompts(3, (0.0,))
    texts = {f"r{i}": [*p, *greedy_continuation(plain, list(p), NUM_TOKENS + 8)] for i, (p, _) in enumerate(prompts)}
    engine = make_engine(target, DrafterSlots(OracleDrafter(texts, num_slots=4), "oracle"), CountingGraphs())
    got = generate(engine, prompts)
    assert all(texts[name][len(p) :][: len(got[name])] == got[name] for name, (p, _) in zip(got, prompts, strict=True))
    assert engine.stats()["num_rounds"] <= 6, "drafts were accepted"


@ROUNDS
def test_requests_of_several_drafters_share_a_round_on_the_device(temperatures):
    """Adaptive, hold-back and plain requests side by side, and after a swap the twin's graphs."""
    target, groups = make_target(STATIC_KERNELS), (Group.ADAPTIVE, Group.STATIC, Group.PLAIN)
    (build, _), (_, state) = specblock(target), specblock(target, seed=1)
    launches, found = LaunchCount(), []
    slots = DrafterSlots(build(), "v1", first=build(), spawn=build)
    policy = DevicePolicy(TREE, vocab_size=target.vocab_size)
    engine = make_engine(target, slots, UncountedGraphs(launches), policy)
    prompts = make_prompts(6, temperatures)
    expected = plain_tokens(6, temperatures)

    def note(_):
        found.append(launches.names["replay"])
        launches.names.clear()

    assert generate(engine, prompts, note, groups) == expected
    assert slots.stage("v2", state)
    slots.publish("v2")
    assert generate(engine, prompts, note, groups) == expected
    assert engine.stats()["num_drafter_failures"] == 0
    assert max(found) == 5, "two drafters and three for the target"


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


@pytest.mark.parametrize("family", FAMILIES)
@ROUNDS
def test_rounds_of_a_text_drafter_come_between_those_by_graph(family, temperatures, monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, "none")
    prompts, target = make_prompts(3, temperatures), make_target(STATIC_KERNELS)
    tree, backend = dataclasses.replace(TREE, mix="suffix"), CountingGraphs()
    policy = DevicePolicy(tree, vocab_size=target.vocab_size, kernels=target.kernels)
    asked, propose = [], policy.text.propose
    monkeypatch.setattr(policy.text, "propose", lambda inputs: asked.append(1) or propose(inputs))
    slots = DrafterSlots(build_family(family, target)(), "v1")
    engine = make_engine(target, slots, backend, policy, tree=tree)
    replays = backend.num_replays
    assert generate(engine, prompts, max_tokens=40) == plain_tokens(3, temperatures, max_tokens=40)
    assert engine.stats()["num_drafter_failures"] == 0
    assert asked and backend.num_replays > replays


def test_no_graphs_are_made_on_the_cpu_by_default():
    engine = make_engine(make_target(), DrafterSlots())
    assert engine.graphs is None and engine.stats()["num_graphs"] == 0
