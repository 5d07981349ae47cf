"""Policy update: what the policies' memories take in at the end of an epoch."""

from __future__ import annotations

from paceline.bandit.beliefs.observation import speculative
from paceline.bandit.beliefs.ratio import RatioSums
from paceline.bandit.controller.state import ControllerState
from paceline.bandit.policies.pricing import staleness_rates, version_losses
from paceline.bandit.policies.view import View
from paceline.config import PolicyConfig
from paceline.contracts import ArmSpec, Group


def remember_epoch(
    state: ControllerState,
    config: PolicyConfig,
    arms: tuple[ArmSpec, ...],
    view: View,
    seconds: float,
    *,
    is_training: bool,
) -> None:
    """Fold the epoch that just closed, `seconds` long, into state.memory; `is_training`: a job was in flight in it.

    The memory of every policy is kept, whichever decides. Staleness does not accrue while a job is dealing with it.
    """
    memory = state.memory
    memory.ema.update(
        adapted_length(state),
        state.rows_written,
        fast=config.ema_fast,
        slow=config.ema_slow,
        margin=config.ema_margin,
    )
    rates = staleness_rates(
        view.beliefs,
        arms,
        gains=state.gains,
        best_length=state.table.best_length(),
        min_rows=config.min_rows,
    )
    own = state.job.bucket if state.job is not None else None
    memory.add_staleness({b: r for b, r in rates.items() if not (is_training and b == own)}, seconds)
    versions = sorted({view.live_version, *(r.version for r in view.recalls)} - {""})
    memory.hedge.keep(versions)
    losses = version_losses(view.beliefs, versions, table=state.table)
    memory.hedge.update(losses, rate=config.hedge_rate, share=config.hedge_share)


def adapted_length(state: ControllerState) -> float | None:
    """Acceptance length of all adapted traffic of the closed epoch, None without any."""
    pool = RatioSums()
    for seen in state.latest.values():
        for stats in seen.stats:
            if stats.group == Group.ADAPTIVE and speculative(stats) and stats.drafted_rounds:
                pool.merge(stats.acceptance_length)
    return pool.ratio()
