"""The engine's round over the kernels gives the tokens, trees, proposals and accepted paths of the round over references.

Kernels run in triton's interpreter; "spec" cases run the references behind the same wiring (`STATIC_KERNELS`).
"""

import dataclasses
import functools
import os

import numpy as np
import pytest
import torch
from triton.runtime.errors import OutOfResources

from paceline.errors import ConfigError
from paceline.kernels.dispatch import select_kernels
from paceline.kernels.gpu import draft_ingest, rope_scatter, slot_attention, topk_lse, tree_accept, tree_build
from paceline.serving.budget.cost_model import CostCurve
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.eagle3.drafter import EagleDrafter
from paceline.serving.loading import calibration as engine_calibration
from paceline.serving.loading.target_graphs import GraphedTarget
from paceline.serving.parallel_head.drafter import ParallelHeadDrafter
from paceline.serving.specblock.drafter import SpecBlockDrafter
from paceline.serving.target_model.kv_cache import PageAllocator
from paceline.serving.target_model.model import TargetModel
from paceline.serving.trees.device import DeviceCandidates, LargestTrees
from paceline.serving.trees.policy import TreePolicy
from paceline.serving.trees.verify import accept
from tests.helpers.drafters import make_inputs, new_requests, tiny_eagle, tiny_head, tiny_specblock
from tests.helpers.fakes import prefill, tiny_model, tiny_tokenizer
from tests.helpers.graph_engines import TREE, CountingGraphs, generate, make_engine, specblock
from tests.helpers.launches import launches
from tests.helpers.rounds import TOLERANCE
from tests.helpers.scripted_drafters import RandomDrafter
from tests.helpers.static_kernels import STATIC_KERNELS, StrictGraphs
from tests.helpers.trees import (
    VOCAB,
    DevicePolicy,
    EdgedDrafter,
    TwinDrafter,
    groups_with_a_broken_drafter,
    make_policy,
    nodes_of,
    on_host,
    random_round,
    tree_batch,
    trees_of,
)


@pytest.fixture(params=["spec", "triton"])
def kernels(request):
    if request.param == "spec":
        return STATIC_KERNELS
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    return dataclasses.replace(select_kernels("cpu", "triton"), is_capturable=True)  # for a dry run of the graphs


@functools.cache  # that its kernels are right is found out by the slow interpreter
def make_target(kind, kernels=None, **changes):
    model = tiny_model(kind, **{"layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "context": 96, **changes})
    fast_path = False if kernels is None else None
    return TargetModel.from_model(model, tiny_tokenizer(), fast_path=fast_path, version="tiny", kernels=kernels)


def test_an_engine_whose_round_is_kernels_emits_the_references_tokens(kernels):
    """Verify and both draft blocks by graph, trees by the tree kernel, greedy and sampled requests, a batch and then one."""
    plain, target = make_target("qwen3"), make_target("qwen3", kernels)
    assert target.forward_name == "kernels"
    prompts = [([9, 30, 4, 17], 0.0), ([5, 6, 40], 0.9)]
    changes = {"tree": dataclasses.replace(TREE, max_draft_tokens=4, max_frontier=2)}
    build, _ = specblock(target)
    policy = DevicePolicy(changes["tree"], vocab_size=target.vocab_size, kernels=kernels)
    backend = CountingGraphs()
    engine = make_engine(target, DrafterSlots(build(), "v1"), backend, policy, max_running=2, **changes)
    watched = (
        rope_scatter._rope_kernel, slot_attention._partial_kernel, topk_lse._block_kernel,
        tree_accept._accept_rows_kernel, tree_build._build_kernel,
    )  # fmt: skip
    with launches(*watched) as ran:
        got = generate(engine, prompts, max_tokens=4)
    assert engine.stats()["num_drafter_failures"] == 0 and backend.num_replays > 0
    assert got == generate(make_engine(plain, DrafterSlots()), prompts, max_tokens=4)
    assert set(ran.names) == (set() if kernels is STATIC_KERNELS else {kernel.fn.__name__ for kernel in watched})


@pytest.mark.parametrize("has_graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.slow
def test_warming_up_launches_every_form_of_the_round_s_own_kernels_and_learns_nothing(kernels, has_graphs, monkeypatch):
    """Trees with and without re-entry, acceptance of every width; rounds then launch no form that is new."""
    target = make_target("qwen3", kernels)
    tree = dataclasses.replace(TREE, max_draft_tokens=20, max_frontier=2)
    build, _ = specblock(target)
    policy = DevicePolicy(tree, vocab_size=target.vocab_size, kernels=kernels)
    backend = CountingGraphs() if has_graphs else None
    changes = {"max_running": 1, "tree": tree, "kv_bytes": 2**18}  # few rows to ingest: the interpreter is slow
    engine = make_engine(target, DrafterSlots(build(), "v1"), backend, policy, **changes)
    monkeypatch.setattr(engine_calibration, "LIMIT_S", 0.0)  # the interpreter is slow: every form is timed once
    monkeypatch.setattr(CostCurve, "calibrate", functools.partialmethod(CostCurve.calibrate, repeats=1))
    seen = []
    with launches(tree_build._build_kernel) as built, launches(tree_accept._accept_rows_kernel) as accepted:
        engine.warm_up(lambda done, planned: seen.append((done, planned)))
    trees, paths = built.constants, accepted.constants
    assert not policy.device_trees._leaf_mass and not policy._calibration._sums
    if kernels is STATIC_KERNELS:
        assert seen == [(1, 3), (2, 3), (3, 3)] and trees == paths == []
        return
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert [t["C"] for t in trees[:2]] == [32, 128] and {t["W"] for t in trees} == {32}
    assert {t["C"] for t in trees} == {32, 128} and (has_graphs or len(trees) == 2), "drafting by graph is timed, too"
    assert [p["W"] for p in paths] == [16] * 5 + [32]
    with launches(tree_build._build_kernel) as built, launches(tree_accept._accept_rows_kernel) as accepted:
        generate(engine, [([9, 30, 4, 17], 0.0)], max_tokens=4)
    assert built.names and bool(accepted.names) == has_graphs  # eager acceptance on the CPU is NumPy
    assert all(t in trees for t in built.constants) and all(p in paths for p in accepted.constants)


@pytest.mark.parametrize(("kind", "dtype"), [("llama", torch.float32), ("qwen3", torch.bfloat16)])
def test_the_target_by_kernels_equals_the_modules(kernels, kind, dtype):
    rng, results = torch.Generator(), []
    plain, fused = make_target(kind, dtype=dtype), make_target(kind, kernels, dtype=dtype)
    assert (fused.forward_name, plain.forward_name) == ("kernels", "modules")
    for target in (plain, fused):
        rng.manual_seed(3)
        pages, kv = PageAllocator(8, 4), target.new_kv_pool(8, 4, 8)
        for name, length in (("a", 9), ("b", 2)):
            prefill(target, kv, pages, name, torch.randint(3, 64, (length,), generator=rng).tolist())
        trees = [[-1, 0, 0, 1], [-1, 0]]
        tokens = torch.randint(3, 64, (6,), generator=rng).tolist()
        out = target.forward(tree_batch(pages, kv, ["a", "b"], [9, 2], trees, tokens), kv)
        results.append((out.logits, out.features, kv.data))
    tolerance = TOLERANCE if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.05}  # a rounding step after 2 layers
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected, **tolerance)


def test_generation_by_transformers_keeps_its_own_attention():
    target, plain = make_target("qwen3", STATIC_KERNELS), make_target("qwen3")
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = plain.model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(target.model(input_ids=ids, use_cache=False).logits, expected, atol=0, rtol=0)


def test_kernels_that_give_other_logits_are_not_used():
    def wrong(query, key, value, pool, rows, positions, cos, sin, **norms):
        return STATIC_KERNELS.rope_scatter(query, key, value, pool, rows, positions, sin, cos, **norms)

    target = make_target("llama", dataclasses.replace(STATIC_KERNELS, rope_scatter=wrong))
    assert target.forward_name == "modules"


@pytest.mark.parametrize("error", [ValueError, OutOfResources], ids=["launcher", "compiler"])
def test_kernels_that_cannot_run_are_not_used_and_the_target_loads(error):
    def broken(*args, **kwargs):
        raise error(2, 1, "shared memory") if error is OutOfResources else error("query must be contiguous")

    target = make_target("qwen3", dataclasses.replace(STATIC_KERNELS, rope_scatter=broken))
    assert target.forward_name == "modules"
    pages, kv = PageAllocator(8, 4), target.new_kv_pool(8, 4, 8)
    prefill(target, kv, pages, "a", [5, 6, 7])  # the modules serve
    with pytest.raises(ConfigError, match="fast_path"):
        TargetModel.from_model(target.model, tiny_tokenizer(), fast_path=True, version="tiny", kernels=target.kernels)


def test_families_with_unknown_attention_keep_their_modules():
    assert make_target("qwen3_moe", STATIC_KERNELS).forward_name == "modules"


def test_a_target_by_kernels_can_be_captured():
    target = make_target("qwen3", STATIC_KERNELS)
    kv = target.new_kv_pool(4, 4, 8)
    graphed = GraphedTarget(target, kv, max_requests=2, max_width=4, max_context=16)
    backend = StrictGraphs()
    job = next(j for j in graphed.jobs() if j.name.startswith("verify"))
    job.run(backend)
    assert backend.num_captured == 1


DRAFTERS = {
    "random": lambda: [RandomDrafter(VOCAB, 1)],
    "equal siblings": lambda: [TwinDrafter(VOCAB, 2)],
    "product table and edges": lambda: [
        RandomDrafter(VOCAB, 3, is_product=True, is_reentrant=False), EdgedDrafter(6), TwinDrafter(VOCAB, 4)
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", DRAFTERS)
def test_trees_of_the_tree_kernel_equal_those_of_the_host_path(kernels, name):
    rng = np.random.default_rng(1)
    host, device = make_policy(TreePolicy), make_policy(DevicePolicy, kernels=kernels)
    assert device.trees_for([], torch.device("cpu"))._kernels is kernels
    for _ in range(2 if kernels.backend == "triton" else 10):  # the interpreter is slow
        groups, keys, anchors = random_round(rng, DRAFTERS[name](), int(rng.integers(2, 6)))
        expected, got = (p.draft(groups, keys, anchors, 10) for p in (host, device))
        assert not got.failures and nodes_of(got) == nodes_of(expected)
        assert got.num_draft_tokens == expected.num_draft_tokens and got.is_drafted == expected.is_drafted
        parents, starts = got.tree.parents, got.tree.cu_nodes[:-1]
        assert (parents[starts] == -1).all() and got.tree.token_ids[starts].tolist() == anchors.tolist()
        for policy, out in ((host, expected), (device, got)):
            drawn = out.tree.token_ids * 0 + 1
            policy.observe(out, accept(out.tree, drawn), verify_s=6e-3, round_s=1e-2)


def test_every_cut_of_the_largest_trees_is_the_tree_of_so_many_nodes(kernels):
    drafter = TwinDrafter(VOCAB, 9)
    groups, _, anchors = random_round(np.random.default_rng(2), [drafter], 3)
    candidates = first_block(drafter.propose(groups[0].inputs))
    largest = LargestTrees.build(kernels, candidates, anchors, 8, drafter.caps.max_depth)
    most = (largest.masses > 0).sum(1).tolist()
    assert min(most) >= 3
    for wanted in ([8, 8, 8], [0, 5, 2], [0, 0, 0], [1, 0, 7]):
        counts = [min(n, m) for n, m in zip(wanted, most, strict=True)]
        got, expected = largest.cut(counts), trees_of(on_host(candidates).ranked(8), anchors, counts)
        for field in dataclasses.fields(expected):
            if isinstance(getattr(expected, field.name), torch.Tensor):
                assert torch.equal(getattr(got, field.name), getattr(expected, field.name)), field.name


def first_block(proposal):
    return DeviceCandidates.of(proposal, False, 8, torch.zeros(*proposal.logprobs.shape[:2], 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_trees_are_built_from_log_probabilities_of_any_float_dtype(kernels, dtype):
    drafter = RandomDrafter(VOCAB, 5)
    groups, _, anchors = random_round(np.random.default_rng(3), [drafter], 2)
    proposal = drafter.propose(groups[0].inputs)
    proposal.logprobs = proposal.logprobs.to(dtype)
    got = LargestTrees.build(kernels, first_block(proposal), anchors, 8, drafter.caps.max_depth)
    proposal.logprobs = proposal.logprobs.float()
    expected = LargestTrees.build(kernels, first_block(proposal), anchors, 8, drafter.caps.max_depth)
    torch.testing.assert_close(
        got.built.scores, expected.built.scores, atol=0.1 if dtype == torch.bfloat16 else 1e-5, rtol=0
    )
    if dtype == torch.float64:
        assert torch.equal(got.built.token_ids, expected.built.token_ids)


def test_trees_that_the_kernel_does_not_take_are_built_on_the_host():
    rng = np.random.default_rng(4)
    deep = RandomDrafter(VOCAB, 1)
    deep.caps = dataclasses.replace(deep.caps, max_depth=65)
    groups, keys, anchors = random_round(rng, [deep], 3)
    expected, got = (make_policy(p, **k).draft(groups, keys, anchors, 10) for p, k in (
        (TreePolicy, {}), (DevicePolicy, {"kernels": STATIC_KERNELS})
    ))  # fmt: skip
    assert nodes_of(got) == nodes_of(expected)
    trees = make_policy(DevicePolicy, kernels=STATIC_KERNELS).device_trees
    assert not trees.takes(deep.caps) and trees.takes(dataclasses.replace(deep.caps, max_depth=64))


@pytest.mark.parametrize("how", ["nan", "3.0", "token"])
def test_a_broken_proposal_reaches_no_tree(kernels, how):
    policy = make_policy(DevicePolicy, kernels=kernels)
    out = policy.draft(groups_with_a_broken_drafter(how), [("b", "x", True)] * 3, torch.tensor([2, 4, 6]), 10)
    assert list(out.failures) == [0] and out.is_drafted == [True, False, True]
    assert out.num_draft_tokens[1] == 0 and min(out.num_draft_tokens[0], out.num_draft_tokens[2]) > 0


def same(got, expected):
    torch.testing.assert_close(got.logprobs, expected.logprobs, **TOLERANCE)
    assert torch.equal(got.token_ids, expected.token_ids)


def draft_twice(drafters, count=3):
    """Proposals of two rounds of the same requests by each of two drafters."""
    for drafter in drafters[1:]:
        new_requests(drafter, count, np.random.default_rng(5), True)
    requests = new_requests(drafters[0], count, np.random.default_rng(5), True)
    for step in range(2):
        inputs = make_inputs(requests, [(0 if step == 0 else r.done, r.context) for r in requests], (0.0, 0.7)[step])
        yield [drafter.propose(inputs) for drafter in drafters]
        for r in requests:
            r.done, r.context = r.context, r.context + 2


@pytest.mark.parametrize("is_causal, draft_vocab", [(True, None), (False, None), (False, 30)])
def test_parallel_heads_ingest_and_rank_by_kernels(kernels, is_causal, draft_vocab):
    model, embed, head = tiny_head(is_causal, num_layers=3, num_kv_heads=1, edge_rank=3, draft_vocab_size=draft_vocab)
    pair = [ParallelHeadDrafter(model, embed, head, num_candidates=6, kernels=k) for k in (None, kernels)]
    with launches(draft_ingest._write_kernel, topk_lse._block_kernel) as ran:
        for expected, got in draft_twice(pair):
            same(got, expected)
            torch.testing.assert_close(got.edge_logprobs, expected.edge_logprobs, **TOLERANCE)
    num_rows = pair[1].pool.shape[1]  # compiled drafting has spare ones
    torch.testing.assert_close(pair[1].pool, pair[0].pool[:, :num_rows], **TOLERANCE)
    expected = [] if kernels is STATIC_KERNELS else ["_block_kernel"] * 2 + ["_write_kernel"] * 2
    assert sorted(ran.names) == expected


def test_eagle_and_eager_specblock_rank_by_kernels(kernels):
    for kind, (model, embed) in (
        (EagleDrafter, tiny_eagle(draft_vocab_size=30)), (SpecBlockDrafter, tiny_specblock(draft_vocab_size=30))
    ):  # fmt: skip
        pair = [kind(model, embed, num_candidates=6, kernels=k) for k in (None, kernels)]
        for expected, got in draft_twice(pair, 2):
            same(got, expected)
