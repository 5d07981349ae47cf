"""What did a finished job cost, teach, and change?"""

from __future__ import annotations

import msgspec

from paceline.bandit.controller_state import ControllerState, JobOutcome, JobRecord
from paceline.bandit.epoch import bucket_beliefs
from paceline.bandit.job_learning import learn, measured_gain
from paceline.bandit.ledger import entry_id
from paceline.bandit.observation import JobCosts
from paceline.bandit.policies import SELF_FUNDED
from paceline.bandit.pricing import price_recalls
from paceline.config import PolicyConfig
from paceline.contracts import LedgerEntry, TrainResult

MAX_OUTCOMES = 50


def finish_job(
    state: ControllerState, config: PolicyConfig, result: TrainResult, decision_id: int, now: float, costs: JobCosts
) -> JobOutcome:
    """Book, learn, decide on publishing. Raises ValueError when decision_id is not the job in flight."""
    job = state.job
    if job is None or job.decision_id != decision_id:
        raise ValueError(f"decision_id must be that of the job in flight, got {decision_id}")
    state.job, state.last_job_ended = None, now
    for kind, seconds in (("training", result.train_s), ("shadow", result.shadow_s), ("staging", costs.staging_s)):
        if seconds > 0:
            entry = LedgerEntry(
                entry_id=entry_id(decision_id, kind, result.job_id),
                ts=now,
                kind=kind,
                bucket=job.bucket,
                version=result.version,
                seconds=seconds,
                arm=job.arm.name,
            )
            state.book(entry, decision_id)
    learn(state, job, result, costs)
    publish, reason = _publish(state, config, job, result)
    if publish is not None:
        state.owner[publish] = decision_id
        state.last_swap = now
    decision = msgspec.structs.replace(
        state.actions[decision_id],
        version=result.version,
        realised_gain=_realised_gain(state, config, job, result) if publish is not None else 0.0,
        realised_cost_s=state.actions[decision_id].realised_cost_s or 0.0,
        outcome=result.status if publish is not None or result.status != "accepted" else "kept",
    )
    state.remember(decision)
    outcome = JobOutcome(decision=decision, publish=publish, reason=reason)
    state.outcomes[decision_id] = outcome
    for key in sorted(state.outcomes)[:-MAX_OUTCOMES]:
        del state.outcomes[key]
    return outcome


def _realised_gain(state: ControllerState, config: PolicyConfig, job: JobRecord, result: TrainResult) -> float:
    gain, _ = measured_gain(job, result)
    after = job.length_before + gain
    belief = bucket_beliefs(state, config, state.context).get(job.bucket) if state.context is not None else None
    if belief is not None:
        return belief.relative_gain(job.length_before, after)
    return 1.0 - job.length_before / after if after > 0 else 0.0


def _publish(
    state: ControllerState, config: PolicyConfig, job: JobRecord, result: TrainResult
) -> tuple[str | None, str]:
    """Version to make live: accepted by the gate and, for policies that mind what they lose elsewhere, better on the mix
    that is served now; for every policy when the gate compared it with a version that is no longer live."""
    if result.status != "accepted" or result.version is None:
        return None, f"The job on {job.bucket} was {result.status}: {result.reason}"
    if state.pinned is not None:
        return None, f"Version {result.version} was accepted, but {state.pinned} is pinned."
    context = state.context
    if context is not None and (state.policy in SELF_FUNDED or job.base_version != context.live_version):
        beliefs = bucket_beliefs(state, config, context)
        priced = price_recalls(
            beliefs,
            [result.version],
            context.live_version,
            table=state.table,
            horizon_s=config.horizon_s,
            staging_s=0.0,
        )
        if priced and priced[0].gain < 0:  # 0: decoding stays plain under both, until the better one is tried
            reason = (
                f"Version {result.version} was accepted on {job.bucket}, but serves the present mix "
                f"{-100 * priced[0].gain:.1f}% dearer; it waits for a recall."
            )
            return None, reason
    return result.version, f"Version {result.version} was accepted on {job.bucket}: {result.reason}"
