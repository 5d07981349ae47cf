"""Policy inputs: what a policy gets to see, and what the memories of all policies take in at the end of an epoch."""

from __future__ import annotations

from paceline.bandit.beliefs.observation import HostContext, speculative
from paceline.bandit.beliefs.ratio import RatioSums
from paceline.bandit.beliefs.regime import MixRegime
from paceline.bandit.controller.epoch import bucket_beliefs, pooled_beliefs
from paceline.bandit.controller.state import ControllerState
from paceline.bandit.ledger.ledger import Bank
from paceline.bandit.policies.memory import HedgeWeights
from paceline.bandit.policies.pricing import price_jobs, price_recalls, recall_rates, staleness_rates, version_losses
from paceline.bandit.policies.view import View
from paceline.config import PolicyConfig
from paceline.contracts import ArmSpec, Group

HOPE_S = 3600.0
"""Seconds of serving whose income may be spent on hopes before it has come: where nothing is saved, a service's first hour costs
no more than its income."""


def build_view(
    state: ControllerState,
    config: PolicyConfig,
    arms: tuple[ArmSpec, ...],
    context: HostContext,
    now: float,
    *,
    bank: Bank,
) -> View:
    """The view at `now`."""
    each = bucket_beliefs(state, config, context)
    beliefs, pools = pooled_beliefs(state, context, each)
    regime = state.regime if state.regime is not None else MixRegime(now)
    horizon = regime.horizon_s(now, config.horizon_s, ends_at=config.end_s)
    known = context.versions or state.lived
    versions = [v for v in {*known, context.first_version} if v not in state.barred]
    recalls = price_recalls(
        each,
        versions,
        context.version_of,
        table=state.table,
        horizon_s=regime.horizon_s(now, config.horizon_s),  # a swap pays in seconds, and may be what stops a loss
        staging_s=state.costs.staging_s(context.num_replicas),
        first_version=context.first_version,
    )
    rates = recall_rates(each, recalls)
    return View(
        config=config,
        arms=arms,
        beliefs=beliefs,
        jobs=tuple(
            job
            for job in price_jobs(
                beliefs,
                arms,
                gains=state.gains,
                costs=state.costs,
                evidence=state.evidence,
                hysteresis=config.hysteresis,
                best_length=state.table.best_length(context.first_version),
                horizon_s=horizon,
                min_rows=config.min_rows,
                num_replicas=context.num_replicas,
                trainer_price=config.trainer_price,
                left_s=lambda wait: regime.horizon_s(now, config.horizon_s, wait, config.end_s),
                returning_s=lambda bucket, wait: regime.returning_s(bucket, now, config.horizon_s, wait, config.end_s),
                recall_rates=rates,
                pools=pools,
                known_length=lambda bucket: state.table.best_of(bucket, versions),
            )
            if job.bucket not in context.frozen
        ),
        recalls=tuple(recalls),
        balance_s=bank.balance_s,
        hope_s=bank.hope_s(config.bank_income * state.devices() * HOPE_S),
        horizon_s=horizon,
        since_job_s=now - state.last_job_started,
        is_job_running=context.job_running or state.job is not None,
        versions={bucket: context.version_of(bucket) for bucket in each},
        pools=pools,
        recall_rates=rates,
        memory=state.memory,
        gains=state.gains,
        cost_margin=state.costs.margin(),
    )


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
        best_length=state.table.best_length(state.context.first_version if state.context is not None else ""),
        min_rows=config.min_rows,
    )
    own = state.job.bucket if state.job is not None else None
    memory.add_staleness({b: r for b, r in rates.items() if not (is_training and b == own)}, seconds)
    each = bucket_beliefs(state, config, state.context) if view.pools and state.context is not None else view.beliefs
    for name, belief in each.items():
        if not belief.is_active:
            continue  # no round is lost on it, so its weights stay
        versions = sorted({view.versions[name], *(r.version for r in view.recalls if r.bucket == name)} - {""})
        hedge = memory.hedges.setdefault(name, HedgeWeights())
        hedge.keep(versions)
        losses = version_losses(belief, versions, table=state.table)
        hedge.update(losses, rate=config.hedge_rate, share=config.hedge_share)


def adapted_length(state: ControllerState) -> float | None:
    """Acceptance length of all adapted traffic of the closed epoch, None without any."""
    pool = RatioSums()
    for seen in state.latest.values():
        for stats in seen.stats:
            if stats.group == Group.ADAPTIVE and speculative(stats) and stats.drafted_rounds:
                pool.merge(stats.acceptance_length)
    return pool.ratio()
