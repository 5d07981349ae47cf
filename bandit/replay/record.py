"""Recorder: the decision log of a simulated service."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from paceline.bandit.controller.decision_log import KIND
from paceline.bandit.replay.world import World
from paceline.contracts import TrainResult


def record(world: World) -> bytes:
    """Run a world to its end; the lines that a service would have appended to decisions.jsonl (docs/policies.md)."""
    lines: list[dict[str, Any]] = []
    jobs: dict[int, tuple[float, TrainResult]] = {}
    controller, finish = world.controller, world.controller.job_finished

    def job_finished(result: TrainResult, **known: Any) -> Any:
        jobs[known["decision_id"]] = (known["now"], result)
        return finish(result, **known)

    controller.job_finished = job_finished  # type: ignore[method-assign]
    for k in range(world.traffic.num_steps):
        world.step(k)
        lines += _drained(world, jobs)
        closed = controller.closed_epoch()
        if closed is not None:
            lines.append({"kind": KIND, **msgspec.to_builtins(closed)})
    world.stop_job()
    lines += _drained(world, jobs)
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _drained(world: World, jobs: dict[int, tuple[float, TrainResult]]) -> list[dict[str, Any]]:
    decisions, entries = world.controller.drain()
    lines = [{"kind": "decision", **msgspec.to_builtins(d)} for d in decisions]
    lines += [{"kind": "ledger", **msgspec.to_builtins(e)} for e in entries]
    for d in decisions:
        if d.decision_id in jobs:
            at, result = jobs.pop(d.decision_id)
            lines.append(
                {"log_id": f"{int(at * 1000)}-0", "kind": "job", **msgspec.to_builtins(result), "bucket": d.bucket, "arm": d.arm}
            )  # fmt: skip
    return lines
