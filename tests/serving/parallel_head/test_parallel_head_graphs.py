"""JetSpec's and DFlash's captured block proposes what the eager drafter proposes, whatever the padding around it."""

import numpy as np
import pytest
import torch

from paceline.kernels.cpu.library import ISA_VARIABLE
from paceline.serving.parallel_head.drafter import ParallelHeadDrafter
from paceline.serving.target_model.graph_capture import EagerGraphs, capture_all
from tests.helpers.drafters import assert_rounds_agree, scattered_requests, tiny_head
from tests.helpers.static_kernels import STATIC_KERNELS, StrictGraphs

LENGTH = 60
KINDS = pytest.mark.parametrize("is_causal", [True, False], ids=["jetspec", "dflash"])


@pytest.fixture(autouse=True)
def torch_forward(monkeypatch):
    """Compiled drafting has nothing to capture."""
    monkeypatch.setenv(ISA_VARIABLE, "none")


def make_pair(made, count, backend, *, num_jobs=None, dtype=torch.float32, **limits):
    """An eager drafter and a graphed one with the same weights."""
    model, embed, head = made
    eager, graphed = (ParallelHeadDrafter(model, embed, head, num_candidates=4, dtype=dtype) for _ in range(2))
    for drafter in (eager, graphed):
        drafter.alloc(count * LENGTH)
    limits = {"max_requests": count, "max_context": LENGTH, **limits}
    graphs = graphed.make_graphs(STATIC_KERNELS, max_leaves=3, **limits)
    jobs = graphs.jobs("drafter")[:num_jobs]
    assert capture_all(jobs, backend, budget_s=600.0) == len(jobs) == graphs.num_graphs
    return eager, graphed, graphs


@KINDS
@pytest.mark.parametrize(("count", "scattered"), [(1, False), (3, True), (5, True)])
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"edge_rank": 3}, {"num_layers": 3, "num_kv_heads": 1, "num_slots": 1}, {"draft_vocab_size": 30, "edge_rank": 3},
        {"is_shifted": True, "corrects_first": True, "edge_rank": 3},
    ],
)  # fmt: skip
def test_replayed_drafting_equals_eager_drafting_over_rounds(is_causal, count, scattered, changes):
    rng = np.random.default_rng(7)
    eager, graphed, graphs = make_pair(tiny_head(is_causal, **changes), count, EagerGraphs())
    assert_rounds_agree(eager, graphed, scattered_requests(rng, count, scattered, LENGTH), rng, 6)
    assert graphed.is_graphed and graphs.num_graphs > 0
    torch.testing.assert_close(graphed.pool, eager.pool, atol=1e-4, rtol=1e-4)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_block_can_be_captured(is_causal, dtype):
    backend = StrictGraphs()
    _, _, graphs = make_pair(
        tiny_head(is_causal, edge_rank=3, draft_vocab_size=30), 2, backend, num_jobs=3, dtype=dtype
    )
    assert backend.num_captured == 3 == graphs.num_graphs


def test_graphs_draft_with_new_weights_after_they_were_copied_in_place():
    rng, first, other = np.random.default_rng(8), tiny_head(seed=0), tiny_head(seed=1)
    eager, graphed, _ = make_pair(first, 2, EagerGraphs())
    addresses = [t.data_ptr() for t in graphed.forward.weights.values()]  # what a CUDA graph reads
    assert_rounds_agree(eager, graphed, scattered_requests(rng, 2, True, LENGTH), rng, 2)
    for drafter in (eager, graphed):
        drafter.load_state(other[0].state_dict())
    assert [t.data_ptr() for t in graphed.forward.weights.values()] == addresses
    fresh, _, _ = make_pair((other[0], *first[1:]), 2, EagerGraphs(), num_jobs=0)
    assert_rounds_agree(fresh, graphed, scattered_requests(rng, 2, True, LENGTH), rng, 3)
    assert graphed.is_graphed


def test_rounds_that_no_graph_holds_are_drafted_eagerly():
    rng = np.random.default_rng(9)
    eager, graphed, _ = make_pair(tiny_head(), 4, EagerGraphs(), max_requests=2, max_context=30)
    assert_rounds_agree(eager, graphed, scattered_requests(rng, 4, True, LENGTH), rng, 5)
    assert not graphed.is_graphed
