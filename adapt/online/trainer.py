"""Online trainer: one burst of a class's learner, from stored text and state to a version in the registry, or a reason why not.

Faults that are expected in service (missing shards, a foreign base, poisoned features, a learner that diverged, a full
disk) end in a TrainResult with status 'failed' and one sentence; serving never depends on this code.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import msgspec
import numpy as np
import torch

from paceline.adapt.data.learning_text import Features, LearningText, ShardReader, load_learning_text
from paceline.adapt.families.target_handle import TargetTables, load_target_handle
from paceline.adapt.gate.gate import Finding, score_version
from paceline.adapt.gate.shadow import ShadowStoppedError, shadow_scores
from paceline.adapt.online.burst import Burst
from paceline.adapt.online.learner import LORA, Learner
from paceline.adapt.online.learner_store import LearnerKey, LearnerStore
from paceline.adapt.versions.registry import DrafterRegistry, check_finite
from paceline.bootstrap import SCORED_TOGETHER
from paceline.contracts import DrafterManifest, ShadowScore, TrainJob, TrainResult
from paceline.errors import DrafterMismatchError, ManifestError, PacelineError
from paceline.paths import resolve_model
from paceline.serving.drafters.deltas import merge, rank_of
from paceline.serving.drafters.family import TrainedDrafter
from paceline.serving.drafters.network import TargetHandles
from paceline.serving.loading.families import build_drafter, build_model
from paceline.serving.target_model.int8 import is_int8_version

log = logging.getLogger(__name__)
Progress = Callable[[int, int, dict], None]


class WalkTree(TypedDict):
    """Shape of the trees that a replay walk builds, under the names that `shadow_scores` has for it."""

    num_nodes: int
    max_frontier: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShadowConfig:
    """The tree of the replay walk, equal for all versions."""

    num_nodes: int = 8
    """Draft nodes per request and round."""
    max_frontier: int = 4
    """Leaves of a block that the next one continues from."""
    chain: int | None = None
    """Draft tokens of an engine that verifies one chain a round, as vLLM does: the walk then takes the best token of each
    slot, so many of them, instead of a tree. None: the tree above, as this engine has it."""

    @property
    def tree(self) -> WalkTree:
        """The walk's tree, as `shadow_scores` takes it; a chain is one where every slot has one candidate."""
        if self.chain is not None:
            return {"num_nodes": self.chain, "max_frontier": 1}
        return {"num_nodes": self.num_nodes, "max_frontier": self.max_frontier}


class _JobFailedError(PacelineError):
    """The order cannot be carried out; the message becomes the result's reason."""


class _Watch:
    """Deadline and stop request of one burst; `should_stop` is polled at every step."""

    def __init__(
        self, limit_s: float, should_stop: Callable[[], bool], clock: Callable[[], float], began: float
    ) -> None:
        self._clock, self._began = clock, began
        self._limit_s, self._asked = limit_s, should_stop
        self.reason = ""

    def now(self) -> float:
        return self._clock()

    def elapsed(self) -> float:
        return self._clock() - self._began

    def should_stop(self) -> bool:
        if self.elapsed() > self._limit_s:
            self.reason = f"its {self._limit_s:g} s are used up"
        elif self._asked():
            self.reason = "stopped on request"
        return bool(self.reason)


@contextmanager
def held_threads(threads: int) -> Iterator[None]:
    """Torch's threads for this process until the end of the block."""
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
    target: str | Path | TargetHandles,
    *,
    threads: int = 1,
    device: str = "cpu",
    should_stop: Callable[[], bool] = lambda: False,
    progress: Progress = lambda done, total, info: None,
    shadow: ShadowConfig | None = None,
    clock: Callable[[], float] = time.perf_counter,
    began: float | None = None,
    learners: LearnerStore | None = None,
) -> TrainResult:
    """Carry out one order; an accepted version is in the registry when this returns, and the learner's state is stored.

    Args:
        target: as `resolve_model` takes it, or its handle.
        threads: torch threads while the job runs.
        device: cpu or cuda; a handle brings its own.
        should_stop: polled at every optimizer step and replay round.
        progress: (requests of the class learned, those there are, {"nll"}) after every one.
        clock: seconds that the time limit and the result count in. began: its reading at the job's start; None: now.
        learners: where states lie between bursts; None: every burst begins at the base.
    Returns: a TrainResult; seconds are those of `clock`.
    Raises: nothing that service brings about; programming errors only.
    """
    watch = _Watch(job.time_limit_s, should_stop, clock, clock() if began is None else began)
    try:
        with held_threads(threads):
            if isinstance(target, str | Path):
                taps, dtype = None, "auto"
                with contextlib.suppress(ManifestError):  # said where the job begins; a wrong folder comes first
                    base = registry.get_manifest(job.base_version)
                    taps, dtype = (
                        base.config.get("tap_layers"),
                        "int8" if is_int8_version(base.target_version) else dtype,
                    )
                target = load_target_handle(resolve_model(str(target)), device=device, tap_layers=taps, dtype=dtype)
            return _run(job, store, registry, target, watch, progress, shadow or ShadowConfig(), learners)
    except ShadowStoppedError:
        log.info("training stopped job=%s reason=%s", job.job_id, watch.reason)
        return _result(job, "stopped", watch.reason, watch)
    except (PacelineError, OSError, RuntimeError, ValueError, MemoryError) as e:
        log.warning("training failed job=%s reason=%s", job.job_id, e, exc_info=not isinstance(e, PacelineError))
        return _result(job, "failed", f"{type(e).__name__}: {e}", watch)


def _result(job: TrainJob, status: str, reason: str, watch: _Watch) -> TrainResult:
    """The end of a burst that scored nothing; all of its time is booked."""
    return TrainResult(
        job_id=job.job_id, status=status, version=None, reason=reason, train_s=watch.elapsed(), shadow_s=0.0
    )


def _run(
    job: TrainJob,
    store: ShardReader,
    registry: DrafterRegistry,
    target: TargetHandles,
    watch: _Watch,
    progress: Progress,
    shadow: ShadowConfig,
    learners: LearnerStore | None,
) -> TrainResult:
    base = registry.get_manifest(job.base_version)
    name = f"{job.bucket} {job.text_began:.3f}" if job.text_began else job.bucket
    key = LearnerKey(name, base.drafter_type, job.base_version, target.version, job.arm.parameters)
    whole, factors, arm = job.base_version, None, job.arm
    if arm.parameters == LORA and base.delta_of is not None:  # the same delta learns on
        whole, factors = base.delta_of, registry.load_own(job.base_version, target_version=target.version)
        arm = msgspec.structs.replace(arm, rank=max(arm.rank, rank_of(factors)))
    whole_state = registry.load_state(whole, target_version=target.version)
    base_state = whole_state if factors is None else merge(whole_state, factors)

    def new_learner() -> Learner:
        model = build_model({**base.config, "drafter_type": base.drafter_type}, whole_state)
        model.to(target.device)
        tables = TargetTables.of(target, torch.device(target.device))
        made = Learner(model, tables, arm, seed=job.seed, factors=factors)
        if learners is not None:
            made.seen = dict.fromkeys(learners.learned_by(job.base_version))
        return made

    learner = new_learner()
    if learners is not None and (found := learners.load(key)) is not None:
        try:
            learner.restore(*found)
        except DrafterMismatchError as e:
            log.warning("the learner of bucket %s begins anew: %s", job.bucket, e)
            learner = new_learner()
    text = _read(job, store, target, learner)
    drafter, incumbent = (_drafter(base, base_state, target, chain=shadow.chain) for _ in range(2))
    burst = Burst(
        learner,
        drafter,
        incumbent,
        **shadow.tree,
        min_gain=job.min_gain,
        plan=job.plan,
        device=target.device,
        clock=watch.now,
        should_stop=watch.should_stop,
        save=lambda: learners.save(key, *learner.state()) if learners is not None else None,
    )
    start_s = watch.elapsed()
    try:
        for done in burst.run(text.fresh, text.rehearsal):
            progress(done, len(text.fresh), {"nll": learner.nll})
    except DrafterMismatchError:
        if learners is not None:  # what it has read, it is not given again
            _begin_again(learners, key, learner, new_learner)
        raise
    if not burst.num_learned or (learners is None and not burst.scored and watch.reason):
        raise ShadowStoppedError
    finding = learner.evidence.finding(job.min_gain)
    own = learner.factors()
    state = {name: t.detach().cpu().clone() for name, t in (learner.snapshot() if own is None else own).items()}
    check_finite(state)
    fields: dict = {"drafter_type": base.drafter_type, "config": base.config, "target_version": target.version}
    if own is not None:
        fields["delta_of"] = whole
    version = registry.version_of(state, **fields)
    rng = np.random.default_rng(job.seed)
    scores = learner.evidence.scores(version, job.base_version, rng) if learner.evidence.test.num_requests else None
    elsewhere = learner.evidence.scores_elsewhere(version, job.base_version, rng)
    reason = _words(finding, burst, learner, scores, watch)
    is_accepted = scores is not None and finding is Finding.BETTER and version != job.base_version
    num_rows_before, first, log_evidence = learner.num_rows - burst.num_rows, None, learner.evidence.test.log_evidence
    if is_accepted:
        assert scores is not None, "what surely gains was scored"
        first = _first_score(job, registry, target, burst, shadow, rng, watch)
        if learners is not None:  # before it could become a base: none is scored on text that it has learned
            learners.note_learned(version, torch.tensor(list(learner.seen), dtype=torch.int64))
        registry.put(
            state,
            **fields,
            parent=job.base_version,
            arm=job.arm.name,
            bucket=job.bucket,
            num_train_rows=learner.num_rows + learner.num_rehearsed_rows,
            metrics=_metrics(scores, learner, watch),
        )
    if learners is not None and is_accepted:
        _hand_on(learners, key, version, learner)
    elif learners is not None and finding is Finding.SHORT:
        _begin_again(learners, key, learner, new_learner)
    status = "accepted" if is_accepted else "learning" if finding is Finding.OPEN else "rejected"
    log.info("training %s job=%s version=%s %s", status, job.job_id, version, reason)
    return TrainResult(
        job_id=job.job_id,
        status=status,
        version=version if is_accepted else None,
        reason=reason,
        train_s=watch.elapsed() - burst.shadow_s,
        shadow_s=burst.shadow_s,
        candidate=None if scores is None else scores[0],
        incumbent=None if scores is None else scores[1],
        first=first,
        elsewhere=elsewhere,
        num_rows=burst.num_rows,
        num_requests=burst.num_learned,
        log_evidence=log_evidence,
        num_rows_before=num_rows_before,
        start_s=start_s,
    )


def _read(job: TrainJob, store: ShardReader, target: TargetHandles, learner: Learner) -> LearningText:
    taps = getattr(target, "tap_layers", None)  # not every holder of a target's tensors ran it
    text = load_learning_text(
        store,
        job.shard_ids,
        job.rehearsal_shard_ids,
        target.version,
        num_rows=job.arm.num_rows,
        rehearsal_share=job.arm.rehearsal_share,
        rng=np.random.default_rng(job.seed),
        seen=learner.seen,
        features=Features(learner.model.config.feature_size, None if taps is None else tuple(taps)),
    )
    if not text.fresh:
        raise _JobFailedError(
            f"no text that the learner has not read: {len(learner.seen)} requests read, {text.num_unreadable} shards or "
            "traces unusable; wait for more traffic"
        )
    return text


def _hand_on(learners: LearnerStore, key: LearnerKey, version: str, learner: Learner) -> None:
    """Let the learner go on from its snapshot, the next base; where that is taken back, another one begins at the old base:
    what made this one sure is used up."""
    learner.rebase()
    try:
        learners.save(key._replace(base_version=version), *learner.state())
    except OSError as e:  # the version is there
        log.warning("the learner of bucket %s begins anew at version %s: %s", key.bucket, version, e)
    try:
        learners.drop(key)
    except OSError as e:
        log.warning("the learner of bucket %s before version %s cannot be deleted: %s", key.bucket, version, e)


def _begin_again(learners: LearnerStore, key: LearnerKey, learner: Learner, new_learner: Callable[[], Learner]) -> None:
    """Let the next burst begin at the base, with text that this learner has not read."""
    fresh = new_learner()
    fresh.seen = learner.seen
    learners.save(key, *fresh.state())


def _words(
    finding: Finding,
    burst: Burst,
    learner: Learner,
    scores: list[ShadowScore] | None,
    watch: _Watch,
) -> str:
    end = watch.reason or ("the rest would not pay" if burst.is_given_up else "no unread text is left")
    meaning = {
        Finding.OPEN: f"not sure yet, the learner keeps its state ({end})",
        Finding.BETTER: "surely better",
        Finding.SHORT: "surely gains less than a swap costs",
    }[finding]
    read = f"{burst.num_learned} requests, {burst.num_rows} rows in this burst, {learner.num_rows} rows in all"
    if scores is None:
        return f"{meaning}; {read}, and none was scored yet"
    new, old = scores
    return (
        f"{meaning}: acceptance_length {old.acceptance_length:.3f} -> {new.acceptance_length:.3f}, paired gain "
        f"{new.gain_mean:+.3f}, lower bound {new.gain_lower:+.3f} on the newest {new.num_requests} requests before they "
        f"were learned; {read}"
    )


def _first_score(
    job: TrainJob,
    registry: DrafterRegistry,
    target: TargetHandles,
    burst: Burst,
    shadow: ShadowConfig,
    rng: np.random.Generator,
    watch: _Watch,
) -> ShadowScore | None:
    """Score of the first drafter on the newest requests of this burst; None when it is gone, fails, or the time is up.

    Where it is not the base it takes a replay of its own, of one look's requests: the hold-back measures it while it serves.
    """
    recent = burst.scored[-SCORED_TOGETHER:]
    base_scores = [score for _, score in recent]
    if job.first_version == job.base_version:
        return score_version(job.first_version, base_scores, base_scores, rng)
    if watch.should_stop():
        return None
    began = watch.now()
    try:
        drafter = load_version(registry, job.first_version, target, chain=shadow.chain)
        found = shadow_scores(
            {job.first_version: drafter}, [trace for trace, _ in recent], **shadow.tree, device=target.device,
            should_stop=watch.should_stop,
        )  # fmt: skip
    except ShadowStoppedError:
        return None
    # bookkeeping: the learner's gain is sure without it
    except (PacelineError, OSError, RuntimeError, MemoryError) as e:
        log.warning("first drafter is not scored: %s", e)
        return None
    finally:
        burst.shadow_s += watch.now() - began
    return score_version(job.first_version, found[job.first_version], base_scores, rng)


def _drafter(
    manifest: DrafterManifest,
    weights: dict[str, torch.Tensor],
    target: TargetHandles,
    version: str = "",
    *,
    chain: int | None = None,
) -> TrainedDrafter:
    """A drafter of these weights, which are the manifest's own or, under another name, those of another version.

    chain: draft tokens of a chain that it is to propose, the best token of each slot; None = candidates for trees.
    """
    config = {**manifest.config, "drafter_type": manifest.drafter_type}
    name = version or manifest.version
    make = build_drafter if chain is None else functools.partial(build_drafter, num_candidates=1)
    drafter = make(config, weights, target, version=name, target_version=manifest.target_version)
    if chain is not None and chain > drafter.caps.max_depth:
        raise DrafterMismatchError(
            f"chain must be at most {drafter.caps.max_depth}, the tokens that drafter {name} drafts ahead, got {chain}; ask "
            "for fewer"
        )
    return drafter


def load_version(
    registry: DrafterRegistry, version: str, target: TargetHandles, *, chain: int | None = None
) -> TrainedDrafter:
    """A new drafter with the weights of a version, in the number types that the service uses; raises as load_state.

    chain: as ShadowConfig has it; DrafterMismatchError where the drafter does not draft so far ahead.
    """
    state = registry.load_state(version, target_version=target.version)
    return _drafter(registry.get_manifest(version), state, target, chain=chain)


def _metrics(scores: list[ShadowScore], learner: Learner, watch: _Watch) -> dict:
    new, old = scores
    return {
        "acceptance_length": new.acceptance_length,
        "incumbent_acceptance_length": old.acceptance_length,
        "gain_mean": new.gain_mean,
        "gain_lower": new.gain_lower,
        "num_scored_requests": new.num_requests,
        "num_fresh_rows": learner.num_rows,
        "num_rehearsal_rows": learner.num_rehearsed_rows,
        "num_steps": learner.num_steps,
        "train_nll": learner.nll,
        "burst_s": watch.elapsed(),
    }
