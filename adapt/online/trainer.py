"""Online trainer: one order from data over update, shadow scores and gate to the registry, or a reason why not.

Faults that are expected in service (missing shards, a foreign base, poisoned features, a diverged update, a full
disk) end in a TrainResult with status 'failed' and one sentence; serving never depends on this code.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from paceline.adapt.data.split import MIN_HELD_OUT, ShardReader, TrainData, count_rows, load_train_data
from paceline.adapt.families.target_handle import TargetTables, load_target_handle
from paceline.adapt.gate.gate import GateResult, gate, score_version
from paceline.adapt.gate.shadow import ShadowStoppedError, shadow_scores
from paceline.adapt.online.update import UpdateStoppedError, update_drafter
from paceline.adapt.versions.registry import DrafterRegistry, check_finite
from paceline.contracts import DrafterManifest, TrainJob, TrainResult
from paceline.errors import ManifestError, PacelineError
from paceline.serving.drafters.family import TrainedDrafter
from paceline.serving.drafters.interface import Drafter
from paceline.serving.drafters.network import TargetHandles
from paceline.serving.loading.families import build_drafter, build_model
from paceline.serving.target_model.int8 import is_int8_version

log = logging.getLogger(__name__)
TRAIN_SHARE = 0.7
"""Part of the time limit that the update may use; the rest is for scoring."""
Progress = Callable[[int, int, dict], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShadowConfig:
    """The tree of the replay walk, equal for all versions, and the bar of the gate."""

    num_nodes: int = 8
    """Draft nodes per request and round."""
    max_frontier: int = 4
    """Leaves of a block that the next one continues from."""
    min_gain: float = 0.0
    """Tokens per round that the lower bound of the gain must exceed (what the swap costs)."""


class _JobFailedError(PacelineError):
    """The order cannot be carried out; the message becomes the result's reason."""


class _Watch:
    """Deadline, stop request and heartbeat of one job; `should_stop` is polled at every step."""

    def __init__(
        self, limit_s: float, should_stop: Callable[[], bool], heartbeat: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._clock, self._began = clock, clock()
        self._limit_s, self._asked, self._heartbeat = limit_s, should_stop, heartbeat
        self._next_beat = 0.0
        self.reason, self.train_s, self.shadow_s = "", 0.0, 0.0

    def elapsed(self) -> float:
        return self._clock() - self._began

    def should_stop(self) -> bool:
        now = self.elapsed()
        if now >= self._next_beat:
            self._heartbeat()
            self._next_beat = now + 0.5
        if self._asked():
            self.reason = "stopped on request"
        elif now > self._limit_s:
            self.reason = f"time limit of {self._limit_s:g} s reached"
        return bool(self.reason)


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_training_job(
    job: TrainJob,
    store: ShardReader,
    registry: DrafterRegistry,
    target_dir: str | Path | TargetHandles,
    *,
    threads: int = 1,
    device: str = "cpu",
    should_stop: Callable[[], bool] = lambda: False,
    heartbeat: Callable[[], None] = lambda: None,
    progress: Progress = lambda done, total, info: None,
    shadow: ShadowConfig | None = None,
    clock: Callable[[], float] = time.perf_counter,
    update: Callable[..., tuple[int, float]] = update_drafter,
) -> TrainResult:
    """Carry out one order; an accepted version is in the registry when this returns.

    Args:
        target_dir: checkpoint folder of the target, or its handle.
        threads: torch threads while the job runs.
        device: cpu or cuda; a handle brings its own.
        should_stop: polled at every optimizer step and replay round.
        heartbeat: called about twice a second while the job runs.
        progress: (steps done, steps in all, {"loss", "nll", "learning_rate"}) after every optimizer step.
        clock: seconds that the time limit and the result count in.
        update: trains the model in place like `update_drafter`, whose arguments it gets: (steps, last NLL).
    Returns: a TrainResult with status accepted | rejected | failed | stopped; seconds are wall-clock.
    Raises: nothing that service brings about; programming errors only.
    """
    watch = _Watch(job.time_limit_s, should_stop, heartbeat, clock)
    try:
        with _torch_threads(threads):
            if isinstance(target_dir, str | Path):
                taps, dtype = None, "auto"
                with contextlib.suppress(ManifestError):  # said where the job begins; a wrong folder comes first
                    base = registry.get_manifest(job.base_version)
                    taps, dtype = (
                        base.config.get("tap_layers"),
                        "int8" if is_int8_version(base.target_version) else dtype,
                    )
                target_dir = load_target_handle(target_dir, device=device, tap_layers=taps, dtype=dtype)
            return _run(job, store, registry, target_dir, watch, progress, shadow or ShadowConfig(), update)
    except (UpdateStoppedError, ShadowStoppedError):
        log.info("training stopped job=%s reason=%s", job.job_id, watch.reason)
        return _result(job, "stopped", watch.reason, watch)
    except (PacelineError, OSError, RuntimeError, ValueError, MemoryError) as e:
        log.warning("training failed job=%s reason=%s", job.job_id, e, exc_info=not isinstance(e, PacelineError))
        return _result(job, "failed", f"{type(e).__name__}: {e}", watch)


def _result(job: TrainJob, status: str, reason: str, watch: _Watch) -> TrainResult:
    """The end of a job that reached no verdict; all of its time is booked, as scoring from where the update ended."""
    train_s = watch.train_s or watch.elapsed()
    shadow_s = watch.elapsed() - train_s if watch.train_s else 0.0
    return TrainResult(
        job_id=job.job_id, status=status, version=None, reason=reason, train_s=train_s, shadow_s=shadow_s
    )


def _run(
    job: TrainJob,
    store: ShardReader,
    registry: DrafterRegistry,
    target: TargetHandles,
    watch: _Watch,
    progress: Progress,
    shadow: ShadowConfig,
    update: Callable[..., tuple[int, float]],
) -> TrainResult:
    base = registry.get_manifest(job.base_version)
    base_state = registry.load_state(job.base_version, target_version=target.version)
    data = _read(job, store, target.version)
    model = build_model({**base.config, "drafter_type": base.drafter_type}, base_state)
    model.to(target.device)
    steps, nll = update(
        model,
        TargetTables.of(target, torch.device(target.device)),
        data.fresh,
        data.rehearsal,
        job.arm,
        seed=job.seed,
        time_share=lambda: watch.elapsed() / (TRAIN_SHARE * job.time_limit_s),
        should_stop=watch.should_stop,
        progress=progress,
    )
    state = {name: t.detach().cpu() for name, t in model.state_dict().items()}
    check_finite(state)
    fields: dict = {"drafter_type": base.drafter_type, "config": base.config, "target_version": target.version}
    version = registry.version_of(state, **fields)
    watch.train_s = watch.elapsed()
    drafters: dict[str, Drafter] = {job.base_version: _drafter(base, base_state, target)}
    drafters[version] = _drafter(base, state, target, version)
    if job.first_version not in drafters:
        try:
            drafters[job.first_version] = load_version(registry, job.first_version, target)
        except ManifestError as e:
            log.warning("first drafter is not scored: %s", e)
    scores = shadow_scores(
        drafters, data.held_out, num_nodes=shadow.num_nodes, max_frontier=shadow.max_frontier, device=target.device,
        should_stop=watch.should_stop,
    )  # fmt: skip
    rng = np.random.default_rng(job.seed)
    verdict = gate(
        version, scores[version], job.base_version, scores[job.base_version], rng,
        min_requests=MIN_HELD_OUT, min_gain=shadow.min_gain,
    )  # fmt: skip
    first = None
    if job.first_version in scores:
        first = score_version(job.first_version, scores[job.first_version], scores[job.base_version], rng)
    watch.shadow_s = watch.elapsed() - watch.train_s
    is_accepted = verdict.is_accepted and version != job.base_version
    if is_accepted:
        registry.put(
            state,
            **fields,
            parent=job.base_version,
            arm=job.arm.name,
            bucket=job.bucket,
            num_train_rows=data.num_rows,
            metrics=_metrics(verdict, steps, nll, data, watch),
        )
    status = "accepted" if is_accepted else "rejected"
    log.info("training %s job=%s version=%s %s", status, job.job_id, version, verdict.reason)
    return TrainResult(
        job_id=job.job_id,
        status=status,
        version=version if is_accepted else None,
        reason=verdict.reason,
        train_s=watch.train_s,
        shadow_s=watch.shadow_s,
        candidate=verdict.candidate,
        incumbent=verdict.incumbent,
        first=first,
    )


def _read(job: TrainJob, store: ShardReader, target_version: str) -> TrainData:
    data = load_train_data(
        store,
        job.shard_ids,
        job.rehearsal_shard_ids,
        target_version,
        num_rows=job.arm.num_rows,
        rehearsal_share=job.arm.rehearsal_share,
        rng=np.random.default_rng(job.seed),
    )
    if count_rows(data.fresh) == 0 or len(data.held_out) < MIN_HELD_OUT:
        raise _JobFailedError(
            f"too little data: {count_rows(data.fresh)} fresh rows, {len(data.held_out)} held-out requests "
            f"(at least {MIN_HELD_OUT}), {data.num_unreadable} shards or traces unusable; wait for more traffic"
        )
    return data


def _drafter(
    manifest: DrafterManifest, weights: dict[str, torch.Tensor], target: TargetHandles, version: str = ""
) -> TrainedDrafter:
    """A drafter of these weights, which are the manifest's own or, under another name, those of another version."""
    config = {**manifest.config, "drafter_type": manifest.drafter_type}
    name = version or manifest.version
    return build_drafter(config, weights, target, version=name, target_version=manifest.target_version)


def load_version(registry: DrafterRegistry, version: str, target: TargetHandles) -> TrainedDrafter:
    """A new drafter with the weights of a version, in the number types that the service uses; raises as load_state."""
    return _drafter(registry.get_manifest(version), registry.load_state(version, target_version=target.version), target)


def _metrics(verdict: GateResult, steps: int, nll: float, data: TrainData, watch: _Watch) -> dict:
    return {
        "acceptance_length": verdict.candidate.acceptance_length,
        "incumbent_acceptance_length": verdict.incumbent.acceptance_length,
        "gain_mean": verdict.candidate.gain_mean,
        "gain_lower": verdict.candidate.gain_lower,
        "num_held_out_requests": verdict.candidate.num_requests,
        "num_fresh_rows": count_rows(data.fresh),
        "num_rehearsal_rows": count_rows(data.rehearsal),
        "num_steps": steps,
        "train_nll": nll,
        "train_s": watch.train_s,
        "shadow_s": watch.shadow_s,
    }
