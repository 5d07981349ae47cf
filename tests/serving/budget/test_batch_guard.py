"""Drafting in batches may cost a bounded time against plain decoding, whatever the forecasts say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import TreeConfig
from paceline.serving.budget.batch_guard import CREDIT, LEAST_PLAIN, LIMIT, PLAIN_EVERY, RESUME, SHARE, BatchGuard
from paceline.serving.budget.controller import BudgetController
from paceline.serving.budget.cost_model import CostModel
from paceline.serving.budget.stats import RoundObservation


def play(guard, num_rounds, drafted_s, plain_s=lambda i: 1.0, tokens=2.0):
    """Draft whenever allowed, else decode plainly; returns drafted rounds and their loss in seconds.

    drafted_s: of a drafted round, over that of a plain one, which yields a token where a drafted one yields `tokens`.
    """
    num_drafted, lost_s = 0, 0.0
    for i in range(num_rounds):
        is_drafted, now_s = not guard.forbids(), plain_s(i)
        guard.note(
            tokens if is_drafted else 1.0, (drafted_s if is_drafted else 1.0) * now_s, 0.5, is_drafted=is_drafted
        )
        num_drafted += is_drafted
        lost_s += is_drafted * (drafted_s - tokens) * now_s
    return num_drafted, lost_s


@given(drafted_s=st.floats(2.0, 4.0), num_rounds=st.integers(1, 5000))
@settings(max_examples=50, deadline=None)
def test_losing_drafts_cost_the_limit_once_and_then_their_share(drafted_s, num_rounds):
    _, lost_s = play(BatchGuard(), num_rounds, drafted_s)
    assert lost_s <= LIMIT + SHARE * num_rounds + (drafted_s - 2.0)  # the round that passes the limit counts whole


def test_a_guard_that_stopped_drafting_lets_it_begin_again_at_half_the_debt():
    guard = BatchGuard()
    play(guard, LEAST_PLAIN, 1.0)
    while not guard.is_locked:
        guard.note(1.0, 2.0, 0.5, is_drafted=True)  # a plain round's time lost
    at_lock, num_plain = guard.debt, 0
    assert LIMIT < at_lock <= LIMIT + 1
    while guard.is_locked:
        assert guard.forbids()
        before, num_plain = guard.debt, num_plain + 1
        guard.note(1.0, 1.0, 0.5, is_drafted=False)
    assert guard.debt <= RESUME == LIMIT / 2 < before
    assert num_plain == pytest.approx((at_lock - RESUME) / SHARE, abs=1)


def test_gains_are_used_up_only_to_a_bound():
    guard = BatchGuard()
    play(guard, 2000, 1.5)
    assert guard.debt == -CREDIT
    _, lost_s = play(guard, 2000, 2.6)
    assert lost_s <= CREDIT + LIMIT + SHARE * 2000 + 0.6


def test_winning_drafts_are_never_taken_away():
    num_drafted, _ = play(BatchGuard(), 3000, 1.7)
    assert num_drafted > 3000 * (1 - 1 / PLAIN_EVERY)


def test_a_machine_that_slows_down_is_no_reason_to_stop():
    guard = BatchGuard()
    num_drafted, _ = play(guard, 3000, 1.6, plain_s=lambda i: 1.0 + i / 1000)
    assert num_drafted > 2700 and not guard.is_locked


def test_a_class_that_looks_good_and_is_not_loses_little_in_a_batch():
    """Costs that the controller cannot foresee: every drafted round takes twice as long as it was told."""
    ctrl = BudgetController(TreeConfig(), CostModel(lambda rows: 5e-3 + 1e-4 * rows))
    keys, seconds, tokens = [("v", "b", True)] * 8, 0.0, 0
    for _ in range(4000):
        drafted = ctrl.wants_draft(keys, 800)
        accepted, nodes = [2 * d for d in drafted], [4 * d for d in drafted]
        verify_s, draft_s = 5e-3 + 1e-4 * (8 + sum(nodes)), 2e-3 * any(drafted)
        catch_up_s = (verify_s + draft_s) * (sum(drafted) > 4)
        ctrl.observe(
            RoundObservation(
                keys=keys, is_drafted=drafted, num_nodes=nodes, num_accepted_tokens=accepted, context_rows=800,
                draft_s=draft_s, verify_s=verify_s, round_s=verify_s + draft_s, catch_up_s=catch_up_s,
            )
        )  # fmt: skip
        seconds += verify_s + draft_s + catch_up_s
        tokens += 8 + sum(accepted)
    assert (tokens / seconds) / (8 / (5e-3 + 8e-4)) > 0.97
