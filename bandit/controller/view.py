"""Policy view: what the policy believes, has booked and is doing, as one typed record for dashboards."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from paceline.bandit.beliefs.belief import BucketBelief
from paceline.bandit.beliefs.gain_model import ArmPosterior, arm_posteriors, regime_starts
from paceline.bandit.beliefs.regime import MixRegime
from paceline.bandit.controller.epoch import bucket_beliefs
from paceline.bandit.controller.state import ControllerState, JobRecord
from paceline.bandit.ledger.totals import LedgerCell
from paceline.config import PolicyConfig
from paceline.contracts import ArmSpec


class PolicyLedger(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's own ledger, device-seconds; kinds without an entry are left out."""

    training: float | UnsetType = UNSET
    shadow: float | UnsetType = UNSET
    interference: float | UnsetType = UNSET
    staging: float | UnsetType = UNSET
    saving: float | UnsetType = UNSET
    spent_s: float
    saved_s: float
    saved_error_s: float
    """Standard error of the saving, of the policy's estimate."""
    net_s: float
    saved_interval_s: tuple[float, float]
    """95%."""
    cells: list[LedgerCell]


class PolicyView(msgspec.Struct, frozen=True, kw_only=True):
    """Beliefs and scores per bucket, regime, ledger, bank and the job in flight."""

    policy: str
    epoch: int
    pinned: str | None
    barred: list[str]
    beliefs: dict[str, BucketBelief]
    scores: dict[str, dict[str, float]]
    """Bucket -> version -> acceptance length."""
    regime_age_s: float
    horizon_s: float
    """Expected remaining life of the traffic mix."""
    regime_starts: list[float]
    arms: list[str]
    """Names of the ways to train."""
    posterior: list[ArmPosterior]
    drift_alarms: dict[str, int]
    """Bucket -> alarms that its text changed."""
    ledger: PolicyLedger
    bank_s: float
    job: JobRecord | None
    slowdown: float
    num_decisions: dict[str, int] = {}
    """Action -> decisions since the policy's state began."""
    num_jobs_learned: int
    num_rows_dropped: int


def policy_view(
    state: ControllerState, config: PolicyConfig, now: float, *, arms: Sequence[ArmSpec], balance_s: float
) -> PolicyView:
    """The view at `now`; `balance_s` is what the bank holds."""
    regime, totals = state.regime, state.ledger.totals
    return PolicyView(
        policy=state.policy,
        epoch=state.epoch,
        pinned=state.pinned,
        barred=list(state.barred),
        beliefs={} if state.context is None else bucket_beliefs(state, config, state.context),
        scores={bucket: _lengths(state, bucket) for bucket in state.table.scores},
        regime_age_s=now - regime.start if regime is not None else 0.0,
        horizon_s=(regime or MixRegime(now)).horizon_s(now, config.horizon_s, ends_at=config.end_s),
        regime_starts=regime_starts(regime.start, regime.lengths) if regime is not None else [],
        arms=[arm.name for arm in arms],
        posterior=arm_posteriors(state.gains),
        drift_alarms={name: bucket.num_alarms for name, bucket in state.buckets.items()},
        ledger=PolicyLedger(
            **totals.by_kind(),
            spent_s=totals.spent_s(),
            saved_s=totals.saved_s(),
            saved_error_s=totals.saved_error_s(),
            net_s=totals.saved_s() - totals.spent_s(),
            saved_interval_s=totals.saved_interval_s(),
            cells=totals.rows(),
        ),
        bank_s=balance_s,
        job=state.job,
        slowdown=state.costs.slowdown,
        num_decisions=state.num_decisions,
        num_jobs_learned=state.gains.num_jobs,
        num_rows_dropped=state.num_rows_dropped,
    )


def _lengths(state: ControllerState, bucket: str) -> dict[str, float]:
    known = {version: state.table.estimate(bucket, version) for version in state.table.scores[bucket]}
    return {version: found[0] for version, found in known.items() if found is not None}
