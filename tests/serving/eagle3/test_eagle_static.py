"""A captured round of EAGLE-3 proposes what the eager drafter proposes, level by level, whatever the padding around it."""

import numpy as np
import pytest
import torch

from paceline.kernels.cpu.library import ISA_VARIABLE
from paceline.serving.eagle3.drafter import EagleDrafter
from tests.helpers.drafters import (
    assert_same_proposal,
    even_frontier,
    first_requests,
    make_inputs,
    padded,
    scattered_requests,
    tiny_eagle,
)
from tests.helpers.static_kernels import STATIC_KERNELS, StrictGraphs

LENGTH, LEAVES = 60, 3
ROWS, REQUESTS, WIDTH = 40, 6, 60


@pytest.fixture(autouse=True)
def torch_forward(monkeypatch):
    """Compiled drafting has nothing to capture."""
    monkeypatch.setenv(ISA_VARIABLE, "none")


def make_pair(count, **changes):
    model, embed = tiny_eagle(max_depth=6, **changes)
    eager, captured = (EagleDrafter(model, embed, num_candidates=4) for _ in range(2))
    for drafter in (eager, captured):
        drafter.alloc(count * LENGTH)
    return eager, captured, captured.make_static(STATIC_KERNELS, max_requests=REQUESTS, max_context=WIDTH)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize(("count", "is_scattered"), [(1, False), (3, True), (5, True)])
@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 1, "norm_before_residual": True}])
def test_padded_levels_equal_eager_ones(num_slots, count, is_scattered, changes):
    rng = np.random.default_rng(3)
    eager, captured, static = make_pair(count, num_slots=num_slots, **changes)
    requests = scattered_requests(rng, count, is_scattered, LENGTH)
    for drafter in (eager, captured):
        drafter.ingest(make_inputs(requests, [(0, r.context - 1) for r in requests]))
    captured.pool[count * LENGTH :] = float("nan")  # what padding leaves behind must not be read
    for r in requests:
        r.done = r.context - 1
    for _ in range(4):
        inputs = make_inputs(requests, [(r.done, r.context) for r in requests], float(rng.choice([0.0, 0.7])))
        static_inputs = padded(inputs, ROWS, REQUESTS, WIDTH, static.padding_slots)
        expected, got = eager.propose(inputs), static.propose(static_inputs)
        check(got, expected)
        for level in range(eager.caps.num_blocks - 1):
            frontier = even_frontier(rng, REQUESTS, got, LEAVES, LEAVES if level else None)
            expected = eager.expand(inputs, expected, first_requests(frontier, count))
            got = static.expand(static_inputs, got, frontier)
            check(got, expected)
        for r in requests:
            r.done = r.context
            r.context += int(rng.integers(1, 5))


def check(got, expected):
    cut = type(got)(
        token_ids=got.token_ids[: len(expected.token_ids)], logprobs=got.logprobs[: len(expected.logprobs)], widths=None,
        hidden=got.hidden[: len(expected.hidden)],
    )  # fmt: skip
    assert_same_proposal(cut, expected)


def test_all_levels_can_be_captured():
    rng = np.random.default_rng(4)
    _, _, static = make_pair(2, num_slots=2)
    requests = scattered_requests(rng, 2, True, LENGTH)
    inputs = padded(make_inputs(requests, [(0, r.context) for r in requests]), ROWS, 2, WIDTH, static.padding_slots)

    def run():
        proposal = static.propose(inputs)
        for level in range(static.caps.num_blocks - 1):
            leaves = torch.arange(2 * LEAVES)
            frontier = even_frontier(rng, 2, proposal, LEAVES, LEAVES if level else None)
            frontier.slot, frontier.token_ids = leaves % 2, leaves
            proposal = static.expand(inputs, proposal, frontier)

    backend = StrictGraphs()
    backend.capture(run)
    assert backend.num_captured == 1
