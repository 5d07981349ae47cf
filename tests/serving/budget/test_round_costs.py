"""What padding costs a round is known beforehand, told apart from what rows cost, and part of what drafting costs."""

from __future__ import annotations

import pytest

from paceline.config import TreeConfig
from paceline.serving.budget.controller import BudgetController
from paceline.serving.budget.cost_model import CostModel
from paceline.serving.budget.round_costs import RoundCosts
from paceline.serving.budget.stats import RoundObservation

KEY = ("v", "b", True)
PAIR_S, UNEVEN_S = 2e-7, 1e-4


def seconds(rows):
    return 5e-3 + 5e-5 * rows


def observe(costs, nodes, *, longest=200, context_rows=400, padding_s=0.0):
    verify_s = seconds(len(nodes) + sum(nodes)) + padding_s
    costs.observe(
        RoundObservation(
            keys=[KEY] * len(nodes), is_drafted=[n > 0 for n in nodes], num_nodes=nodes,
            num_accepted_tokens=[0] * len(nodes), context_rows=context_rows, longest_context=longest,
            draft_s=2e-3 if any(nodes) else 0.0, verify_s=verify_s, round_s=verify_s + 2.1e-3,
        )
    )  # fmt: skip


def padded_costs():
    costs = RoundCosts(CostModel(seconds))
    costs.pair_s, costs.uneven_s = PAIR_S, UNEVEN_S
    return costs


def test_padding_follows_the_widest_request_and_the_longest_context():
    costs = padded_costs()
    for _ in range(200):
        observe(costs, [3, 3, 3, 3])
    padding = costs.padding(400, 4)
    assert padding is not None
    # 4 requests of 100 rows on average, the longest of 200: 4 * 9 - 18 padded rows of 200 + 9 keys
    assert padding.seconds(4, 9, 18) == pytest.approx((UNEVEN_S + 18 * 209 * PAIR_S) * costs.speed, rel=0.01)
    assert padding.seconds(4, 5, 20) == 0.0
    apart = (UNEVEN_S + 2 * 16_384 * PAIR_S) * costs.speed  # requests that differ so much are split
    assert padding.seconds(64, 60, 100) == pytest.approx(apart)


def test_nothing_is_padded_for_one_request_or_where_padding_costs_nothing():
    assert padded_costs().padding(100, 1) is None
    assert RoundCosts(CostModel(seconds)).padding(400, 4) is None


def test_rows_are_not_blamed_for_what_padding_takes():
    costs = padded_costs()
    for _ in range(400):
        extra = costs.padding(400, 4).seconds(4, 13, 22)
        observe(costs, [12, 2, 2, 2], padding_s=extra)
    assert costs.verify.seconds(22, 400, 4) == pytest.approx(seconds(22), rel=0.03)
    assert costs.speed == pytest.approx(1.0, rel=0.05)


def test_whether_to_draft_counts_the_padding_that_drafted_rounds_had():
    even, uneven = padded_costs(), padded_costs()
    for _ in range(200):
        observe(even, [4, 4, 4, 4])
        observe(uneven, [13, 1, 1, 1], padding_s=uneven.padding(400, 4).seconds(4, 14, 20))
    more = uneven.round_s(20, 4, 400, 4) - even.round_s(20, 4, 400, 4)
    assert more == pytest.approx(UNEVEN_S + 36 * 214 * PAIR_S, rel=0.15)
    assert uneven.round_s(4, 0, 400, 4) == pytest.approx(even.round_s(4, 0, 400, 4), rel=0.02)


def test_a_backlog_may_take_as_long_as_a_forward_of_a_chunk_or_the_rounds_of_a_probe():
    ctrl = BudgetController(TreeConfig(policy="adaptive"), CostModel(seconds))
    assert ctrl.catch_up_rows(256, 400, 4) == 256, "nothing was timed"
    ctrl.costs.ingest_row_s = 1e-4
    assert ctrl.catch_up_rows(4096, 400, 4) == pytest.approx(ctrl.costs.verify.seconds(4096) / 1e-4, abs=1)
    assert ctrl.catch_up_rows(8, 400, 4) == pytest.approx(16 * ctrl.costs.round_s(4, 0, 400, 4) / 1e-4, abs=1)


def test_a_forward_that_takes_a_prompt_along_teaches_nothing_wrong_of_tree_rows():
    """Few rows wait for the weights: by number, 5 of 255 would have taken a fiftieth of the time that they take."""
    costs = RoundCosts(CostModel(seconds))
    for speed in (1.0, 2.0):  # a slow-down is seen in such rounds, too
        for is_drafted in ([True] * 4, [False] * 4):
            for _ in range(400):
                nodes = [4 * d for d in is_drafted]
                num_rows = 4 + sum(nodes)
                verify_s = costs.alone_s(speed * seconds(num_rows + 250), num_rows, 250, 400, 4)
                costs.observe(
                    RoundObservation(
                        keys=[KEY] * 4, is_drafted=is_drafted, num_nodes=nodes, num_accepted_tokens=[0] * 4,
                        context_rows=400, draft_s=2e-3 * any(is_drafted), verify_s=verify_s, round_s=verify_s + 2.1e-3,
                    )
                )  # fmt: skip
            assert costs.speed == pytest.approx(speed, rel=0.03)
