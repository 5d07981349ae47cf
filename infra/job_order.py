"""Which traces does a training job learn from: the newest of its bucket, rehearsed with the newest of the others."""

from __future__ import annotations

import hashlib
from typing import Any

from paceline.config import PolicyConfig
from paceline.contracts import ArmSpec, Decision, DesiredState, TrainJob


def order_job(
    decision: Decision, arm: ArmSpec, shards: list[Any], *, desired: DesiredState, policy: PolicyConfig
) -> TrainJob | None:
    """Turn a train decision into a job; None when the bucket has no shards.

    Args:
        arm: sized arm; twice its rows are handed over, since part of them is held out for shadow scoring.
        shards: ShardInfo of the target, oldest first.
    """
    own = newest([s for s in shards if s.bucket == decision.bucket], 2 * arm.num_rows)
    if not own:
        return None
    others = sorted({s.bucket for s in shards} - {decision.bucket})
    share = 2 * int(arm.num_rows * arm.rehearsal_share / max(1, len(others))) + 1
    rehearsal = [s for b in others for s in newest([x for x in shards if x.bucket == b], share)]
    text = "\n".join((desired.version, decision.bucket, arm.name, str(arm.num_rows), own[-1].shard_id))
    limit_s = float(decision.context.get("time_limit_s") or policy.job_time_limit_s)
    return TrainJob(
        job_id=hashlib.sha256(text.encode()).hexdigest()[:16],
        bucket=decision.bucket,
        arm=arm,
        base_version=desired.version,
        first_version=desired.first_version,
        shard_ids=[s.shard_id for s in own],
        rehearsal_shard_ids=[s.shard_id for s in rehearsal],
        seed=policy.seed + decision.decision_id,
        time_limit_s=min(limit_s, policy.job_time_limit_s),
    )


def newest(shards: list[Any], num_rows: int) -> list[Any]:
    """The newest shards that hold num_rows together, oldest first."""
    out: list[Any] = []
    total = 0
    for s in reversed(shards):
        if total >= num_rows:
            break
        out.append(s)
        total += s.num_rows
    return out[::-1]
