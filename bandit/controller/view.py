"""What does the policy believe right now, as plain values for dashboards?"""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.bandit.beliefs.belief import BucketBelief
from paceline.bandit.beliefs.gain_model import arm_posteriors, regime_starts
from paceline.bandit.controller.epoch import bucket_beliefs
from paceline.bandit.controller.state import ControllerState
from paceline.config import PolicyConfig


def policy_view(state: ControllerState, config: PolicyConfig, now: float, *, balance_s: float) -> dict[str, Any]:
    """Beliefs and scores per bucket, regime, ledger totals, bank, pending job."""
    context = state.context
    beliefs: dict[str, BucketBelief] = {}
    if context is not None:
        beliefs = bucket_beliefs(state, config, context)
    scores: dict[str, dict[str, float]] = {}
    for bucket, versions in state.table.scores.items():
        known = {version: state.table.estimate(bucket, version) for version in versions}
        scores[bucket] = {version: found[0] for version, found in known.items() if found is not None}
    regime, totals = state.regime, state.ledger.totals
    return {
        "policy": state.policy,
        "epoch": state.epoch,
        "pinned": state.pinned,
        "barred": list(state.barred),
        "beliefs": {name: msgspec.to_builtins(b) for name, b in beliefs.items()},
        "scores": scores,
        "regime_age_s": now - regime.start if regime is not None else 0.0,
        "horizon_s": regime.horizon_s(now, config.horizon_s) if regime is not None else config.horizon_s,
        "regime_starts": regime_starts(regime.start, regime.lengths) if regime is not None else [],
        "posterior": arm_posteriors(state.gains),
        "drift_alarms": {name: bucket.num_alarms for name, bucket in state.buckets.items()},
        "ledger": {
            **totals.by_kind(),
            "spent_s": totals.spent_s(),
            "saved_s": totals.saved_s(),
            "saved_error_s": state.savings.standard_error_s(),
            "net_s": totals.saved_s() - totals.spent_s(),
            "saved_interval_s": list(totals.saved_interval_s()),
            "cells": totals.rows(),
        },
        "bank_s": balance_s,
        "job": msgspec.to_builtins(state.job) if state.job is not None else None,
        "slowdown": state.costs.slowdown,
        "num_jobs_learned": state.gains.num_jobs,
        "num_rows_dropped": state.num_rows_dropped,
    }
