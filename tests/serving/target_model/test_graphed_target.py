"""A round replayed from a padded graph gives what the same round gives eagerly."""

import functools

import numpy as np
import pytest
import torch

from paceline.serving.loading.graphed import GraphedTarget
from paceline.serving.sampling.draw import SamplingBatch, TokenCounts
from paceline.serving.sampling.request import SamplingParams
from paceline.serving.target_model.graph_capture import EagerGraphs, capture_all
from paceline.serving.target_model.kv_cache import PageAllocator
from paceline.serving.target_model.model import TargetBatch, TargetModel
from paceline.serving.trees.tree import TreeBatch
from paceline.serving.trees.verify import AcceptPlan, accept, accept_rows, draw_all
from tests.helpers.fakes import prefill, tiny_model, tiny_tokenizer
from tests.helpers.static_kernels import STATIC_KERNELS, StrictGraphs

WIDTH, VOCAB = 7, 64
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}  # float32 sums in another order


@functools.cache
def make_target(kind="qwen3", layers=6):
    made = TargetModel.from_model(tiny_model(kind, layers=layers), tiny_tokenizer(), fast_path=False)
    made.kernels = STATIC_KERNELS
    return made


def random_tree(rng, size):
    parents = [-1, *(int(rng.integers(0, i)) for i in range(1, size))]
    ancestors = np.eye(size, dtype=bool)
    for i in range(1, size):
        ancestors[i] |= ancestors[parents[i]]
    tokens, taken = [int(rng.integers(VOCAB))], set()
    for i in range(1, size):
        token = next(t for t in rng.permutation(6).tolist() if (parents[i], t) not in taken)
        taken.add((parents[i], token))
        tokens.append(token)
    return parents, tokens, ancestors


def random_trees(rng, sizes):
    trees = [random_tree(rng, n) for n in sizes]
    width = max(sizes)
    ancestors = torch.zeros(sum(sizes), width, dtype=torch.bool)
    cu = np.concatenate([[0], np.cumsum(sizes)])
    for start, (_, _, own) in zip(cu, trees, strict=False):
        ancestors[start : start + len(own), : len(own)] = torch.from_numpy(own)
    return TreeBatch(
        token_ids=torch.tensor([t for _, tokens, _ in trees for t in tokens]),
        parents=torch.tensor([p for parents, _, _ in trees for p in parents]),
        depths=ancestors.sum(1) - 1,
        scores=torch.zeros(sum(sizes)),
        cu_nodes=torch.from_numpy(cu),
        ancestors=ancestors,
    )


def assert_same_plan(got: AcceptPlan, expected: AcceptPlan, tree):
    assert got.on_host() == expected.on_host()
    assert got.accepted_tokens(tree) == expected.accepted_tokens(tree)


def test_acceptance_without_host_reads_takes_the_same_paths():
    rng = np.random.default_rng(0)
    deepest = 0
    for _ in range(60):
        tree = random_trees(rng, rng.integers(1, 8, size=rng.integers(1, 6)).tolist())
        drawn = torch.from_numpy(rng.integers(6, size=tree.token_ids.numel()))
        expected = accept(tree, drawn)
        deepest = max(deepest, int(expected.num_accepted_tokens.max()))
        got = accept_rows(tree.token_ids, tree.cu_nodes, tree.ancestors, drawn)
        assert_same_plan(got, expected, tree)
    assert deepest >= 2


def test_draws_at_every_node_do_not_depend_on_what_the_host_knows_of_the_tree():
    rng = np.random.default_rng(3)
    sizes = [3, 1, 5]
    tree = random_trees(rng, sizes)
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(temperature=0.9, top_p=0.8),
        SamplingParams(temperature=0.0),
        SamplingParams(presence_penalty=1.0),
    ]
    counts = [None, None, TokenCounts([1, 2], VOCAB)]
    batch, lens = SamplingBatch.from_params(params, [1, 2, 3], counts), torch.tensor([4, 5, 6])
    expected = draw_all(tree, logits, batch, lens)
    tree.counts = sizes
    assert torch.equal(draw_all(tree, logits, batch, lens), expected)


def make_rounds(target, kv, pages, rng):
    """A few rounds over requests with contexts of 3, 11, 20 and 33 rows; yields (tree, batch)."""
    contexts = {"a": 3, "b": 11, "c": 20, "d": 33}
    for name, length in contexts.items():
        prefill(target, kv, pages, name, rng.integers(3, VOCAB, size=length).tolist())
    for names in ("a", "bc", "abcd", "d", "db", "abc"):
        tree = random_trees(rng, rng.integers(1, WIDTH + 1, size=len(names)).tolist())
        lens = torch.tensor([contexts[n] for n in names])
        counts = tree.cu_nodes[1:] - tree.cu_nodes[:-1]
        yield (
            tree,
            TargetBatch(
                token_ids=tree.token_ids,
                positions=tree.depths + lens.repeat_interleave(counts),
                cu_rows=tree.cu_nodes,
                context_lens=lens,
                slot_table=pages.table(list(names), int(lens.max())),
                out_rows=kv.scratch_rows(tree.token_ids.numel()),
                ancestors=tree.ancestors,
            ),
        )


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_padded_replays_equal_eager_rounds(kind):
    rng, target = np.random.default_rng(1), make_target(kind)
    pages = PageAllocator(24, 4)
    kv = target.new_kv_pool(24, 4, 4 * WIDTH)
    graphed = GraphedTarget(target, kv, max_requests=4, max_width=WIDTH, max_context=64)
    planned = graphed.jobs()
    assert capture_all(planned, EagerGraphs(), budget_s=600.0) == len(planned) == graphed.num_graphs
    kv.data[:, kv.scratch_start :] = float("nan")  # a padding row's K/V that somebody read would show
    for tree, batch in make_rounds(target, kv, pages, rng):
        expected = target.forward(batch, kv)
        eager_kv = kv.data[:, batch.out_rows].clone()
        got = graphed.forward(batch, kv)
        torch.testing.assert_close(got.logits, expected.logits, **TOLERANCE)
        torch.testing.assert_close(got.features, expected.features, **TOLERANCE)
        torch.testing.assert_close(kv.data[:, batch.out_rows], eager_kv, **TOLERANCE)
        drawn = torch.from_numpy(rng.integers(6, size=tree.token_ids.numel()))
        assert_same_plan(graphed.accept(tree, drawn), accept(tree, drawn), tree)


def test_trees_that_ran_elsewhere_are_not_judged_by_the_latest_graph():
    rng, target = np.random.default_rng(4), make_target("qwen3", 2)
    pages = PageAllocator(24, 4)
    kv = target.new_kv_pool(24, 4, 4 * WIDTH)
    graphed = GraphedTarget(target, kv, max_requests=4, max_width=WIDTH, max_context=64)
    capture_all(graphed.jobs(), EagerGraphs(), budget_s=600.0)
    for tree, batch in make_rounds(target, kv, pages, rng):
        graphed.forward(batch, kv)
        counts = (tree.cu_nodes[1:] - tree.cu_nodes[:-1]).tolist()
        other = random_trees(rng, counts)  # the same number of rows
        drawn = torch.from_numpy(rng.integers(6, size=tree.token_ids.numel()))
        assert_same_plan(graphed.accept(other, drawn), accept(other, drawn), other)


def test_forward_and_tail_can_be_captured():
    target = make_target("qwen3", 2)
    kv = target.new_kv_pool(4, 4, 2 * WIDTH)
    graphed = GraphedTarget(target, kv, max_requests=2, max_width=WIDTH, max_context=16)
    backend = StrictGraphs()
    few = sorted(graphed.jobs(), key=lambda job: -job.rank)[:4]
    assert capture_all(few, backend, budget_s=600.0) == 4 == backend.num_captured
    assert any(job.name.startswith("verify") for job in few) and any(job.name.startswith("acceptance") for job in few)


def test_rounds_that_no_graph_holds_run_eagerly():
    rng, target = np.random.default_rng(2), make_target("qwen3", 2)
    pages = PageAllocator(24, 4)
    kv = target.new_kv_pool(24, 4, 4 * WIDTH)
    graphed = GraphedTarget(target, kv, max_requests=2, max_width=WIDTH, max_context=16)
    replayed = []

    class Counting(EagerGraphs):
        def capture(self, run):
            return super().capture(lambda: (replayed.append(1), run()))

    capture_all(graphed.jobs(), Counting(), budget_s=600.0)
    replayed.clear()
    for tree, batch in make_rounds(target, kv, pages, rng):
        before = len(replayed)
        torch.testing.assert_close(graphed.forward(batch, kv).logits, target.forward(batch, kv).logits, **TOLERANCE)
        drawn = torch.from_numpy(rng.integers(6, size=tree.token_ids.numel()))
        assert_same_plan(graphed.accept(tree, drawn), accept(tree, drawn), tree)
        fits = batch.context_lens.numel() <= 2 and int(batch.context_lens.max()) <= 16
        assert len(replayed) - before == (2 if fits else 0)
