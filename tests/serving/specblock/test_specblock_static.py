"""Drafting passes of fixed shape propose what the eager drafter proposes, whatever the padding around them."""

import numpy as np
import pytest
import torch

from paceline.kernels.cpu.library import ISA_VARIABLE
from paceline.serving.drafters.interface import Frontier
from paceline.serving.specblock.drafter import SpecBlockDrafter
from paceline.serving.target_model.graph_capture import EagerGraphs, capture_all
from tests.helpers.drafters import assert_rounds_agree, make_inputs, scattered_requests, tiny_specblock
from tests.helpers.static_kernels import STATIC_KERNELS, StrictGraphs

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}  # float32 sums in another order
LENGTH = 60


@pytest.fixture(autouse=True)
def torch_forward(monkeypatch):
    """Graphs are compared with eager drafting over the same K/V: the compiled forward turns keys otherwise."""
    monkeypatch.setenv(ISA_VARIABLE, "none")


def make_pair(model, embed, count, backend, *, max_leaves=3, num_jobs=None, dtype=torch.float32, **limits):
    """An eager drafter and a graphed one with the same weights."""
    eager, graphed = (SpecBlockDrafter(model, embed, num_candidates=6, dtype=dtype) for _ in range(2))
    for drafter in (eager, graphed):
        drafter.alloc(count * LENGTH)
    limits = {"max_requests": count, "max_context": LENGTH, **limits}
    graphs = graphed.make_graphs(STATIC_KERNELS, max_leaves=max_leaves, **limits)
    jobs = graphs.jobs("drafter")[:num_jobs]
    assert capture_all(jobs, backend, budget_s=600.0) == len(jobs) == graphs.num_graphs
    return eager, graphed, graphs


@pytest.mark.parametrize(("count", "scattered"), [(1, False), (1, True), (3, True), (5, False)])
@pytest.mark.parametrize(
    "changes", [{}, {"num_layers": 1}, {"num_layers": 3, "num_kv_heads": 1}, {"compat_rope": True}]
)
def test_replayed_drafting_equals_eager_drafting_over_rounds(count, scattered, changes):
    rng = np.random.default_rng(7)
    model, embed = tiny_specblock(**changes)
    eager, graphed, graphs = make_pair(model, embed, count, EagerGraphs())
    graphed.pool[:, count * LENGTH :] = float("nan")  # what padding leaves behind must not be read
    requests = scattered_requests(rng, count, scattered, LENGTH)
    assert_rounds_agree(eager, graphed, requests, rng, 6)
    assert graphed._is_graphed and graphs.num_graphs > 0
    torch.testing.assert_close(graphed.pool[:, : count * LENGTH], eager.pool, **TOLERANCE)


def test_replayed_bfloat16_drafting_stays_close_to_eager_drafting():
    rng = np.random.default_rng(10)
    model, embed = tiny_specblock()
    eager, graphed, _ = make_pair(model, embed, 2, EagerGraphs(), dtype=torch.bfloat16)
    requests = scattered_requests(rng, 2, True, LENGTH)
    inputs = make_inputs(requests, [(0, r.context) for r in requests])
    first, expected = graphed.propose(inputs), eager.propose(inputs)
    assert graphed._is_graphed
    torch.testing.assert_close(first.logprobs, expected.logprobs, atol=0.3, rtol=0)  # as bfloat16 against float32
    frontier = Frontier(request=torch.tensor([0, 1]), slot=torch.tensor([1, 3]), token_ids=torch.tensor([4, 5]))
    second, expected = graphed.expand(inputs, first, frontier), eager.expand(inputs, expected, frontier)
    torch.testing.assert_close(second.logprobs, expected.logprobs, atol=0.3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_blocks_can_be_captured(dtype):
    model, embed = tiny_specblock(draft_vocab_size=30)
    backend = StrictGraphs()
    _, _, graphs = make_pair(model, embed, 2, backend, num_jobs=3, dtype=dtype)
    assert backend.num_captured == 3 == graphs.num_graphs


def test_graphs_draft_with_new_weights_after_they_were_copied_in_place():
    rng = np.random.default_rng(8)
    (model, embed), (other, _) = (tiny_specblock(seed, draft_vocab_size=30) for seed in (0, 1))
    with torch.no_grad():
        other.draft_token_ids.copy_(torch.arange(30) + 15)
        other.log_coverage.fill_(-0.25)
    eager, graphed, _ = make_pair(model, embed, 2, EagerGraphs())
    tensors = list(graphed.forward.weights.values())
    addresses = [t.data_ptr() for t in tensors]  # what a CUDA graph reads
    requests = scattered_requests(rng, 2, True, LENGTH)
    assert_rounds_agree(eager, graphed, requests, rng, 2)
    for drafter in (eager, graphed):
        drafter.load_state(other.state_dict())
    held = list(graphed.forward.weights.values())
    assert [t.data_ptr() for t in held] == addresses
    fresh, _, _ = make_pair(other, embed, 2, EagerGraphs(), num_jobs=0)
    requests = scattered_requests(rng, 2, True, LENGTH)
    assert_rounds_agree(fresh, graphed, requests, rng, 3)
    assert graphed._is_graphed


def test_rounds_that_no_graph_holds_are_drafted_eagerly():
    rng = np.random.default_rng(9)
    model, embed = tiny_specblock()
    eager, graphed, _ = make_pair(model, embed, 4, EagerGraphs(), max_requests=2, max_context=30)
    requests = scattered_requests(rng, 4, True, LENGTH)
    assert_rounds_agree(eager, graphed, requests, rng, 5)
    assert not graphed._is_graphed


def test_a_frontier_wider_than_the_graphs_is_refused():
    model, embed = tiny_specblock()
    _, graphed, _ = make_pair(model, embed, 1, EagerGraphs(), max_leaves=2)
    inputs = make_inputs(scattered_requests(np.random.default_rng(1), 1, False, LENGTH), [(0, 3)])
    proposal, three = graphed.propose(inputs), torch.tensor([0, 0, 0])
    with pytest.raises(ValueError, match="at most 2 leaves"):
        graphed.expand(inputs, proposal, Frontier(request=three, slot=three, token_ids=three))
