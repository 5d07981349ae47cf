"""What does a finished job teach about gains, costs and versions, also when its result is delayed or cut short?"""

from __future__ import annotations

from paceline.bandit.arms import sized
from paceline.bandit.controller_state import ControllerState, JobRecord
from paceline.bandit.epoch import learned_rows
from paceline.bandit.gain_model import POWER
from paceline.bandit.observation import JobCosts
from paceline.contracts import TrainResult

CUT_SHARE = 0.97
"""A job that used this share of its time limit was cut short by it: it learned from fewer rows, at a lower cost."""


def learn(state: ControllerState, job: JobRecord, result: TrainResult, costs: JobCosts) -> None:
    """Fold one result.

    accepted, rejected: gain and cost were measured, the gain by paired replay whatever the gate said of it. stopped: the
    cost is a lower bound, the gain unknown. failed: nothing but that it failed. When the bucket's text changed while the
    job ran, its scores describe a text that is gone: only its cost teaches.
    """
    regime = state.buckets.get(job.bucket)
    is_text_gone = regime is not None and regime.start > job.started
    is_measured = result.status in ("accepted", "rejected")
    fraction = _done_fraction(state, job, result)
    if result.status == "stopped" or (is_measured and fraction < 1.0):
        state.costs.update_cut_short(job.arm, result.train_s)
    elif is_measured:
        num_replicas = state.context.num_replicas if state.context is not None else 1
        state.costs.update(job.arm, result.train_s, result.shadow_s, costs.staging_s, num_replicas)
    if is_measured and not is_text_gone:
        gain, error = measured_gain(job, result)
        state.gains.update(job.bucket, job.arm, job.headroom, job.share * fraction**POWER, gain, error, job.new)
        done = sized(job.arm, max(int(fraction * job.arm.num_rows), 1))
        state.table.add_job(job.bucket, result, job.base_version, state.forgotten.loss(done))
        if result.status == "accepted" and result.version is not None:
            state.forgotten.expect(job.bucket, result.version, job.base_version, done, state.table)
    state.memory.ema.job_ended(result.status, state.rows_written)
    if result.status == "accepted" and result.version is not None:
        _note_version(state, job, result.version, is_text_gone=is_text_gone)
    elif result.status != "stopped" and not is_text_gone:
        state.required_rows[job.bucket] = 2 * max(job.arm.num_rows, state.required_rows.get(job.bucket, 0))


def _done_fraction(state: ControllerState, job: JobRecord, result: TrainResult) -> float:
    """Share of the ordered training that the time limit let through, 1 when it did not bind."""
    decision = state.actions.get(job.decision_id)
    limit = float(decision.context.get("time_limit_s", float("inf"))) if decision is not None else float("inf")
    if result.train_s < CUT_SHARE * limit or job.expected_cost.training_s <= 0:
        return 1.0
    return min(max(result.train_s / job.expected_cost.training_s, 0.05), 1.0)


def _note_version(state: ControllerState, job: JobRecord, version: str, *, is_text_gone: bool) -> None:
    learned = learned_rows(state, state.context, job.base_version)
    own = {} if is_text_gone else {job.bucket: job.learned_after}
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
    error = max(candidate.gain_mean - candidate.gain_lower, 0.0) / 1.645
    return candidate.gain_mean * scale, error * scale
