"""A round replayed from a padded graph gives what the same round gives eagerly."""

import functools

import numpy as np
import pytest
import torch

from paceline.serving.loading.target_graphs import GraphedTarget
from paceline.serving.sampling.draw import SamplingBatch, TokenCounts
from paceline.serving.sampling.request import SamplingParams
from paceline.serving.target_model.graph_capture import EagerGraphs, capture_all
from paceline.serving.target_model.kv_cache import PageAllocator
from paceline.serving.target_model.model import TargetModel
from paceline.serving.trees.verify import accept, accept_rows, draw_all
from tests.helpers.fakes import tiny_model, tiny_tokenizer
from tests.helpers.rounds import TOLERANCE, VOCAB, WIDTH, assert_same_plan, make_rounds, random_trees
from tests.helpers.static_kernels import STATIC_KERNELS, StrictGraphs


@functools.cache
def make_target(kind="qwen3", layers=6):
    made = TargetModel.from_model(tiny_model(kind, layers=layers), tiny_tokenizer(), fast_path=False)
    made.kernels = STATIC_KERNELS
    return made


def test_acceptance_without_host_reads_takes_the_same_paths():
    rng = np.random.default_rng(0)
    deepest = 0
    for _ in range(60):
        tree = random_trees(rng, rng.integers(1, 8, size=rng.integers(1, 6)).tolist())
        drawn = torch.from_numpy(rng.integers(6, size=tree.token_ids.numel()))
        expected = accept(tree, drawn)
        deepest = max(deepest, *map(len, expected.accepted_tokens()))
        got = accept_rows(tree.token_ids, tree.cu_nodes, tree.ancestors, drawn)
        assert_same_plan(got, expected)
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


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_padded_replays_equal_eager_rounds(kind):
    rng, target = np.random.default_rng(1), make_target(kind)
    pages = PageAllocator(24, 4)
    kv = target.new_kv_pool(24, 4, 4 * WIDTH)
    graphed = GraphedTarget(target, kv, max_requests=4, max_width=WIDTH, max_context=64)
    planned = graphed.jobs()
    assert capture_all(planned, EagerGraphs(), budget_s=600.0) == len(planned) == graphed.num_graphs
    kv.data[:, kv.scratch_start :] = float("nan")  # a padding row's K/V that somebody read would show
    for _, batch in make_rounds(target, kv, pages, rng):
        expected = target.forward(batch, kv)
        eager_kv = kv.data[:, batch.out_rows].clone()
        got = graphed.forward(batch, kv)
        torch.testing.assert_close(got.logits, expected.logits, **TOLERANCE)
        torch.testing.assert_close(got.features, expected.features, **TOLERANCE)
        torch.testing.assert_close(kv.data[:, batch.out_rows], eager_kv, **TOLERANCE)


def test_all_parts_of_a_round_can_be_captured():
    target = make_target("qwen3", 2)
    kv = target.new_kv_pool(4, 4, 2 * WIDTH)
    graphed = GraphedTarget(target, kv, max_requests=2, max_width=WIDTH, max_context=16)
    backend, planned = StrictGraphs(), graphed.jobs()
    few = planned[:5] + planned[-5:]
    assert capture_all(few, backend, budget_s=600.0) == 10 == backend.num_captured
    assert {job.family for job in few} == {"cut", "verify", "end"}


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
    for _, batch in make_rounds(target, kv, pages, rng):
        before = len(replayed)
        torch.testing.assert_close(graphed.forward(batch, kv).logits, target.forward(batch, kv).logits, **TOLERANCE)
        fits = batch.context_lens.numel() <= 2 and int(batch.context_lens.max()) <= 16
        assert len(replayed) - before == (1 if fits else 0)
