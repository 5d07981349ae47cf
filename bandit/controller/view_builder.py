"""View builder: what a policy gets to see: beliefs, prices of every job and recall, forecasts, memory."""

from __future__ import annotations

from paceline.bandit.beliefs.observation import HostContext
from paceline.bandit.beliefs.regime import MixRegime
from paceline.bandit.controller.epoch import bucket_beliefs
from paceline.bandit.controller.state import ControllerState
from paceline.bandit.policies.pricing import price_jobs, price_recalls, recall_rate
from paceline.bandit.policies.table import View
from paceline.config import PolicyConfig
from paceline.contracts import ArmSpec


def build_view(
    state: ControllerState,
    config: PolicyConfig,
    arms: tuple[ArmSpec, ...],
    context: HostContext,
    now: float,
    *,
    balance_s: float,
) -> View:
    """The view at `now`; `balance_s` is what the bank holds."""
    beliefs = bucket_beliefs(state, config, context)
    regime = state.regime if state.regime is not None else MixRegime(now)
    horizon = regime.horizon_s(now, config.horizon_s)
    lag = config.epoch_s + config.min_dwell_s  # until a return is noticed and its version is back
    known = context.versions or state.lived
    versions = [v for v in {*known, context.first_version} if v not in state.barred]
    recalls = price_recalls(
        beliefs,
        versions,
        context.live_version,
        table=state.table,
        horizon_s=horizon,
        staging_s=state.costs.staging_s(context.num_replicas),
        first_version=context.first_version,
    )
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
                best_length=state.table.best_length(),
                horizon_s=horizon,
                min_rows=config.min_rows,
                num_replicas=context.num_replicas,
                left_s=lambda wait: regime.horizon_s(now, config.horizon_s, wait),
                returning_s=lambda bucket: regime.returning_s(bucket, now, config.horizon_s, lag),
                forgotten=state.forgotten,
                recall_rate=recall_rate(beliefs, recalls),
                known_length=lambda bucket: state.table.best_of(bucket, versions),
            )
            if job.bucket not in context.frozen
        ),
        recalls=tuple(recalls),
        balance_s=balance_s,
        horizon_s=horizon,
        since_swap_s=now - state.last_swap,
        since_job_s=now - state.last_job_started,
        is_job_running=context.job_running or state.job is not None,
        live_version=context.live_version,
        memory=state.memory,
        gains=state.gains,
        cost_margin=state.costs.margin(),
    )
