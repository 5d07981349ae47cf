"""Finished jobs: their costs are booked, gains and costs learned, and their version is published or kept."""

from __future__ import annotations

import math

import msgspec

from paceline.bandit.beliefs.arms import sized
from paceline.bandit.beliefs.evidence import Unsure
from paceline.bandit.beliefs.gain_model import POWER, learned_share
from paceline.bandit.controller.epoch import bucket_beliefs, class_began, learned_rows
from paceline.bandit.controller.state import ControllerState, JobOutcome, JobRecord
from paceline.bandit.policies.pricing import price_recalls
from paceline.bandit.policies.table import is_self_funded
from paceline.config import PolicyConfig
from paceline.contracts import TrainResult

CUT_SHARE = 0.97
"""A job that used this share of its time limit was cut short by it: it learned from fewer rows, at a lower cost."""
MEASURED = ("accepted", "rejected", "learning")
"""Ends of a job that measured gain and cost."""
MAX_OUTCOMES = 50
"""Outcomes kept, so that a result may be told twice."""


def learn(state: ControllerState, job: JobRecord, result: TrainResult) -> None:
    """Fold one result.

    accepted, rejected, learning: gain and cost were measured, the gain by paired replay whatever the gate said of it; it is
    that of all rows that the learner has read since its base, in this burst and before. stopped: the cost is a lower bound,
    the gain unknown. failed: that it failed, and the cost where it was dearer than expected. When the bucket's text changed
    while the job ran, its scores describe a text that is gone: only its cost teaches.
    """
    regime = state.buckets.get(job.bucket)
    is_text_gone = regime is not None and regime.start >= job.started  # an alarm's text began with the order's epoch
    is_measured = result.status in MEASURED
    fraction = _done_fraction(state, job, result)
    expected_s = job.expected_cost.training_s + job.expected_cost.shadow_s
    is_dear_failure = result.status == "failed" and result.train_s > expected_s
    is_cut_short = result.status == "stopped" or is_dear_failure or (is_measured and fraction < 1.0)
    done = sized(job.arm, max(int(fraction * job.arm.num_rows), 1))
    if is_measured and result.num_rows is not None:
        state.costs.update(done, result.train_s, result.shadow_s, result.start_s)
    elif is_cut_short:
        state.costs.update_cut_short(job.arm, result.train_s)
    elif is_measured:
        state.costs.update(job.arm, result.train_s, result.shadow_s, result.start_s)
    if is_measured and not is_text_gone and (result.candidate is not None or result.status != "learning"):
        gain, error = measured_gain(job, result)
        counted = result.num_rows is not None
        share = learned_share(result.num_rows_before + done.num_rows) if counted else job.share * fraction**POWER
        state.gains.update(job.bucket, job.arm, job.headroom, share, gain, error, job.new)
        for bucket in (job.bucket, *job.others):
            state.table.add_job(bucket, result)
    state.memory.ema.job_ended(result.status, state.rows_written)
    if is_measured:
        if not is_text_gone:
            state.evidence.update(job.bucket, result)
        _note_learner(state, job, result, is_text_gone=is_text_gone)
    if result.status == "accepted" and result.version is not None:
        total = None if result.num_rows is None else result.num_rows_before + result.num_rows
        _note_version(state, job, result.version, total, is_text_gone=is_text_gone)
    elif result.status == "learning":
        state.required_rows.pop(job.bucket, None)
    elif result.status != "stopped" and (is_measured or result.train_s > 0) and not is_text_gone:
        state.required_rows[job.bucket] = 2 * max(job.arm.num_rows, state.required_rows.get(job.bucket, 0))


def _done_fraction(state: ControllerState, job: JobRecord, result: TrainResult) -> float:
    """Share of the ordered rows that the job learned; without a count it is 1 where the time limit did not bind."""
    if result.num_rows is not None:
        return min(result.num_rows / max(job.arm.num_rows, 1), 1.0)
    decision = state.actions.get(job.decision_id)
    limit = float(decision.context.get("time_limit_s", float("inf"))) if decision is not None else float("inf")
    if result.train_s < CUT_SHARE * limit or job.expected_cost.training_s <= 0:
        return 1.0
    return min(max(result.train_s / job.expected_cost.training_s, 0.05), 1.0)


def _note_learner(state: ControllerState, job: JobRecord, result: TrainResult, *, is_text_gone: bool) -> None:
    """Where the bucket's next burst goes on: behind an accepted version anew, and with the rows that this one left unread."""
    state.learners.pop(job.bucket, None)
    state.unsure.pop(job.bucket, None)
    if result.num_rows is None:
        return
    left = max(job.arm.num_rows - result.num_rows, 0) if result.status != "rejected" else 0
    state.rows_at_job[job.bucket] = max(state.rows_at_job.get(job.bucket, 0) - left, 0)
    if result.status == "accepted" and result.version is not None:
        state.learners[job.bucket] = (result.version, 0, job.arm.parameters)  # it goes on from its own version
    elif result.status == "learning" and not is_text_gone:
        rows = result.num_rows_before + result.num_rows
        state.learners[job.bucket] = (job.base_version, rows, job.arm.parameters)
        gain, error = measured_gain(job, result)
        if result.candidate is not None and math.isfinite(error):  # one request has no error
            state.unsure[job.bucket] = Unsure(log_evidence=result.log_evidence, gain=gain, gain_se=error)


def _note_version(
    state: ControllerState, job: JobRecord, version: str, num_rows: int | None, *, is_text_gone: bool
) -> None:
    """num_rows: rows that its learner learned since the base; None: those ordered."""
    learned = learned_rows(state, state.context, job.base_version)
    counted = None if num_rows is None else learned.get(job.bucket, 0) + num_rows
    own = {} if is_text_gone else {job.bucket: job.learned_after if counted is None else counted}
    state.learned[version] = {**learned, **own}
    state.made_by[version] = job.arm.name
    if version not in state.lived:
        state.lived.append(version)
    state.required_rows.pop(job.bucket, None)


def measured_gain(job: JobRecord, result: TrainResult) -> tuple[float, float]:
    """Gain in acceptance length on the serving scale and its standard error, from the paired replay."""
    candidate, incumbent = result.candidate, result.incumbent
    if candidate is None:
        return 0.0, 0.1
    scale = job.length_before / incumbent.acceptance_length if incumbent and incumbent.acceptance_length > 0 else 1.0
    return candidate.gain_mean * scale, candidate.gain_error * scale


def finish_job(
    state: ControllerState, config: PolicyConfig, result: TrainResult, decision_id: int, now: float
) -> JobOutcome:
    """Book, learn, decide on publishing. Raises ValueError when decision_id is not the job in flight."""
    job = state.job
    if job is None or job.decision_id != decision_id:
        raise ValueError(f"decision_id must be that of the job in flight, got {decision_id}")
    state.job, state.last_job_ended = None, now
    state.interference.end()
    # a class that has ended since is another kind of text under its name now
    job = msgspec.structs.replace(job, others=[b for b in job.others if class_began(state, b) <= job.started])
    for kind, seconds in (("training", result.train_s), ("shadow", result.shadow_s)):
        if seconds > 0:
            state.book(
                kind,
                result.job_id,
                config.trainer_price * seconds,
                now,
                decision_id,
                job.bucket,
                result.version,
                job.arm.name,
            )
    if result.status in MEASURED:  # another's time is that of finding out
        state.costs.update_duration(now - job.started, result.train_s + result.shadow_s)
    learn(state, job, result)
    publish, reason = _publish(state, config, job, result)
    if publish is not None:
        for bucket in (job.bucket, *job.others):
            state.owners.setdefault(bucket, {})[publish] = decision_id
    decision = msgspec.structs.replace(
        state.actions[decision_id],
        version=result.version,
        realised_gain=_realised_gain(state, config, job, result) if publish is not None else 0.0,
        realised_cost_s=state.actions[decision_id].realised_cost_s or 0.0,
        outcome=result.status if publish is not None or result.status != "accepted" else "kept",
    )
    state.remember(decision)
    outcome = JobOutcome(decision=decision, publish=publish, reason=reason, others=job.others)
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
    """Version for the job's bucket: accepted by the gate and, for policies that mind what they spend, no worse at the prices
    of now; for every policy when the gate compared it with a version that the bucket no longer has."""
    if result.status != "accepted" or result.version is None:
        return None, f"The job on {job.bucket} was {result.status}: {result.reason}"
    if state.pinned is not None:
        return None, f"Version {result.version} was accepted, but {state.pinned} is pinned."
    if class_began(state, job.bucket) > job.started:
        return (
            None,
            f"Version {result.version} was accepted, but the class that it is for has ended: {job.bucket} is another one now.",
        )
    context = state.context
    if context is not None and (is_self_funded(state.policy) or job.base_version != context.version_of(job.bucket)):
        beliefs = bucket_beliefs(state, config, context)
        priced = price_recalls(
            {b: beliefs[b] for b in (job.bucket,) if b in beliefs},
            [result.version],
            context.version_of,
            table=state.table,
            horizon_s=config.horizon_s,
            staging_s=0.0,
        )
        if priced and priced[0].gain < 0:  # 0: decoding stays plain under both, until the better one is tried
            reason = (
                f"Version {result.version} was accepted, but would serve {job.bucket} {-100 * priced[0].gain:.1f}% dearer "
                "than the version that it has now."
            )
            return None, reason
    return result.version, f"Version {result.version} was accepted on {job.bucket}: {result.reason}"
