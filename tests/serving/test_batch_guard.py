"""Drafting that yields less than plain decoding is taken away, for longer each time."""

from paceline.config import TreeConfig
from paceline.serving.batch_guard import FIRST_LOCK, WINDOW, BatchGuard
from paceline.serving.budget import BudgetController
from paceline.serving.budget_stats import RoundObservation
from paceline.serving.cost_model import CostModel


def play(guard, num_rounds, drafted_s, plain_s=1.0):
    """Draft whenever allowed, else decode plainly; returns the drafted rounds."""
    num_drafted = 0
    for i in range(num_rounds):
        is_drafted = not guard.is_locked() and i >= 8
        guard.note(8, drafted_s if is_drafted else plain_s, is_drafted=is_drafted)
        num_drafted += is_drafted
    return num_drafted


def test_losing_drafts_cost_few_rounds_and_fewer_later():
    guard = BatchGuard()
    first, later = play(guard, 2000, 1.3), play(guard, 20_000, 1.3)
    assert first <= 4 * WINDOW and later <= 8 * WINDOW
    lost = 0.3 * (first + later) / 22_000
    assert lost < 0.005


def test_winning_drafts_are_never_taken_away():
    guard = BatchGuard()
    assert play(guard, 3000, 0.8) > 2970 and guard.next_lock == FIRST_LOCK


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
