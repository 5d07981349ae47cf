"""Padded replays through the triton kernels, in the interpreter, equal eager rounds over the references."""

import os

import numpy as np
import pytest
import torch

from paceline.kernels.dispatch import select_kernels
from paceline.serving.loading.target_graphs import GraphedTarget
from paceline.serving.specblock.drafter import SpecBlockDrafter
from paceline.serving.target_model.graph_capture import EagerGraphs, capture_all
from paceline.serving.target_model.kv_cache import PageAllocator
from paceline.serving.target_model.model import TargetModel
from paceline.serving.trees.verify import accept, accept_rows
from tests.helpers.drafters import assert_rounds_agree, scattered_requests, tiny_specblock
from tests.helpers.fakes import tiny_model, tiny_tokenizer
from tests.helpers.rounds import TOLERANCE, WIDTH, assert_same_plan, make_rounds

LENGTH = 60


@pytest.fixture
def triton():
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    return select_kernels("cpu", "triton")


class LazyGraphs(EagerGraphs):
    """Nothing runs before the first replay: the interpreter is slow."""

    def capture(self, run):
        return type("Lazy", (), {"replay": staticmethod(run)})()


def test_verify(triton):
    target = TargetModel.from_model(tiny_model("qwen3", layers=2), tiny_tokenizer(), fast_path=False)
    rng, pages = np.random.default_rng(1), PageAllocator(24, 4)
    kv = target.new_kv_pool(24, 4, 4 * WIDTH)
    trees, rounds = zip(*list(make_rounds(target, kv, pages, rng))[:4], strict=True)
    expected = [target.forward(batch, kv).logits for batch in rounds]
    target.kernels = triton
    graphed = GraphedTarget(target, kv, max_requests=4, max_width=WIDTH, max_context=64)
    capture_all(graphed.jobs(), LazyGraphs(), budget_s=600.0)
    kv.data[:, kv.scratch_start :] = float("nan")  # what padding leaves behind must not be read
    for tree, batch, logits in zip(trees, rounds, expected, strict=True):
        torch.testing.assert_close(graphed.forward(batch, kv).logits, logits, **TOLERANCE)
        for _ in range(3):
            drawn = torch.from_numpy(rng.integers(6, size=tree.token_ids.numel()))
            got = accept_rows(tree.token_ids, tree.cu_nodes, tree.ancestors, drawn, triton)
            assert_same_plan(got, accept(tree, drawn))


@pytest.mark.parametrize("changes", [{}, {"compat_rope": True, "num_kv_heads": 1}])
def test_drafting(triton, changes):
    rng, count = np.random.default_rng(7), 3
    model, embed = tiny_specblock(**changes)
    eager, graphed = (SpecBlockDrafter(model, embed, num_candidates=6) for _ in range(2))
    for drafter in (eager, graphed):
        drafter.alloc(count * LENGTH)
    graphs = graphed.make_graphs(triton, max_requests=count, max_leaves=3, max_context=LENGTH)
    capture_all(graphs.jobs("drafter"), LazyGraphs(), budget_s=600.0)
    graphed.pool[:, count * LENGTH :] = float("nan")
    assert_rounds_agree(eager, graphed, scattered_requests(rng, count, True, LENGTH), rng, 2)
    assert graphed._is_graphed
