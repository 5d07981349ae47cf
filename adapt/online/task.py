"""Training task (RAY LEAF): a training order in a process of its own, beside serving.

On a CPU Ray may give the next order to the same process, which has imported everything by then: that takes as long as a short
burst. On a GPU the process ends with the task, so that its memory goes back. A task is never retried by Ray, since whoever
ordered it holds a lease on it; a lost worker is a failed job. Infrastructure hands in that lease as a picklable object that
connects inside the task.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import ray

from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.online.learner_store import LearnerStore
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.config import TrainerResources
from paceline.contracts import TrainJob, TrainResult
from paceline.paths import keep_private

log = logging.getLogger(__name__)

MAX_CALLS = 32
"""Orders that a process carries out on a CPU: what memory allocators do not give back goes with it."""
_taken: dict[str, int] = {}
"""Of this process: "nice", what its nice value was raised by; "orders", those that it has carried out."""


class JobLease(Protocol):
    """The worker's right to run; picklable. Entering it begins to renew it in the background, with what `clock` says."""

    clock: Callable[[], float] | None
    """Device-seconds that the worker has taken; set before it is entered."""

    def __enter__(self) -> object: ...

    def __exit__(self, *exc: object) -> object: ...

    def should_stop(self) -> bool: ...

    def finish(self, result: TrainResult) -> object: ...


def run_leased_job(
    job: TrainJob,
    *,
    trace_root: str,
    registry_root: str,
    learner_root: str,
    target: str,
    threads: int = 1,
    device: str = "cpu",
    lease: JobLease | None = None,
    chain: int | None = None,
    niceness: int = 0,
) -> TrainResult:
    """Carry out one order in this process and hand the result to the lease.

    Args:
        trace_root: location of the trace store, reachable from this node.
        registry_root: location of the drafter registry, reachable from this node.
        learner_root: location of the learners' states, reachable from this node.
        target: as `model` of the service's configuration; it must be on this node.
        device: where the drafter is trained and scored, cpu or cuda.
        chain: as ShadowConfig has it.
        niceness: that of this process, over the one that it began with; 0 leaves it (a process cannot take it back).
    """
    if niceness > _taken.get("nice", 0):
        os.nice(niceness - _taken.get("nice", 0))
        _taken["nice"] = niceness
    clock = device_clock(device, threads)
    run = partial(
        _run_job, job, trace_root, registry_root, target, threads=threads, device=device, chain=chain,
        learners=LearnerStore(learner_root), clock=clock,
    )  # fmt: skip
    try:
        if lease is None:
            return run()
        lease.clock = clock
        with lease:  # before the imports: they are seconds, and on a busy core minutes
            result = run(should_stop=lease.should_stop)
        lease.finish(result)
        return result
    finally:
        gc.collect()  # the model and what it learned hold one another
        _taken["orders"] = _taken.get("orders", 0) + 1


def _run_job(
    job: TrainJob, trace_root: str, registry_root: str, target: str, *, chain: int | None, **options: Any
) -> TrainResult:
    from paceline.adapt.online.trainer import ShadowConfig, run_training_job  # whoever orders a job needs no torch

    log.info("training started job=%s bucket=%s arm=%s", job.job_id, job.bucket, job.arm.name)
    store, registry = TraceStore(trace_root), DrafterRegistry(registry_root)
    # what imports took of a CPU is paid for, too, by the first order of a process
    return run_training_job(job, store, registry, target, shadow=ShadowConfig(chain=chain), began=0.0, **options)


def _has_cuda() -> bool:
    """Whether this process has opened a GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def device_clock(
    device: str,
    threads: int,
    *,
    spent: Callable[[], float] = time.process_time,
    is_open: Callable[[], bool] = _has_cuda,
) -> Callable[[], float]:
    """Seconds that this process takes of its device, by its threads' time: a polite process is not charged for its waiting.

    A CPU is taken by so many threads, for its first order from the process's beginning. A GPU is driven by one, which spins
    while it waits for the GPU (CUDA's cudaDeviceScheduleAuto), from the first look behind the GPU's opening: not by imports,
    nor by waiting for stores.
    """
    if device == "cpu":
        before = spent() if _taken.get("orders") else 0.0
        return lambda: (spent() - before) / threads
    began: float | None = None

    def taken_s() -> float:
        nonlocal began
        if began is None:
            if not is_open():
                return 0.0
            began = spent()
        return spent() - began

    return taken_s


def train_task(job: TrainJob, **options: object) -> TrainResult:
    """run_leased_job in a Ray worker."""
    keep_private()
    return run_leased_job(job, **options)  # type: ignore[arg-type]


_TASKS: dict[str, Any] = {
    "cpu": ray.remote(max_calls=MAX_CALLS, max_retries=0)(train_task),
    "cuda": ray.remote(max_calls=1, max_retries=0)(train_task),
}


def task_options(resources: TrainerResources, threads: int = 1) -> dict[str, Any]:
    """What a training task asks of Ray.

    The scheduling strategy is explicit: a caller inside a placement group would otherwise capture its child task.
    """
    env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    return {
        "num_cpus": resources.num_cpus,
        "num_gpus": resources.num_gpus,
        "resources": dict(resources.resources),
        "scheduling_strategy": "DEFAULT",
        "runtime_env": {"env_vars": env},
    }


def launch_training(
    job: TrainJob, *, threads: int = 1, resources: TrainerResources | None = None, **options: object
) -> ray.ObjectRef:
    """Start a job and return the reference of its TrainResult; options are those of run_leased_job.

    It waits until a node has the resources free, and trains on the GPU when it asks for one.
    """
    wanted = resources or TrainerResources()
    device = "cuda" if wanted.num_gpus > 0 else "cpu"
    task = _TASKS[device].options(**task_options(wanted, threads))
    return task.remote(job, threads=threads, niceness=wanted.niceness, device=device, **options)
