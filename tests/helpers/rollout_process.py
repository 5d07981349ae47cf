"""Controllers with canaries in processes of their own, forked from one that has imported everything: so kills are cheap.

python rollout_process.py URL MODEL DIR canary|guard: each line on stdin starts a controller and is answered with its process id.
"""

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from paceline.config import PolicyConfig, RolloutConfig  # noqa: E402
from paceline.contracts import TrainJob  # noqa: E402
from paceline.infra.controller.host import ControllerHost  # noqa: E402
from paceline.infra.controller.jobs import WorkerLease  # noqa: E402
from paceline.infra.controller.store import HostConfig  # noqa: E402
from tests.helpers.scripted import (  # noqa: E402
    MemoryRegistry,
    MemoryStore,
    ProcessHandle,
    ProcessLauncher,
    ScriptedController,
    Shard,
    decision,
)


class AlwaysTraining(ScriptedController):
    """Orders a job whenever none is in flight, no canary is on trial and nothing is frozen."""

    pause_s = 0.0
    """From an order, or the start, to the next one."""
    ordered_s: float | None = None

    def tick(self, now, context):
        if self.ordered_s is None:
            self.ordered_s = now
        if not context.job_running and not context.frozen and not self.queue and now - self.ordered_s >= self.pause_s:
            self.ordered_s = now
            self.queue.append(decision(self.s.next_id, "train", arm="full"))
        return super().tick(now, context)


class Unhurried(AlwaysTraining):
    """Lets a guard come to its end before it orders the next version of the class, which would end it."""

    pause_s = 3.0


class GrowingStore(MemoryStore):
    """There is always a newer shard, so that no two orders are the same job."""

    def list_shards(self, bucket=None):
        return [Shard(f"s{time.time():.3f}")]


class AnyVersion(MemoryRegistry):
    """Knows every version that a job of this test can make."""

    def get_manifest(self, version, *, target_version=None):
        self.known.add(version)
        return super().get_manifest(version, target_version=target_version)


@dataclass
class VersionLauncher(ProcessLauncher):
    """Each job makes a version of its own, named after it."""

    def launch(self, job: TrainJob, lease: WorkerLease) -> ProcessHandle:
        self.version = f"v-{job.job_id[:10]}"
        return super().launch(job, lease)


def serve(url: str, model: str, folder: Path, trial: str) -> None:
    is_guarded = trial == "guard"
    rollout = RolloutConfig(
        guard=is_guarded, canary_percent=40, quiet_s=0.05, freeze_s=1.0, max_requests=200, max_s=20.0
    )
    host = ControllerHost(
        HostConfig(
            redis_url=url, model=model, data_dir=folder / "data", lease_ttl_s=2.0, context_every_s=0.05, target_version="t",
            start_s=10.0, rollout=rollout, policy=PolicyConfig(holdback_percent=40),
        ),
        store=GrowingStore(), registry=AnyVersion(), launcher=VersionLauncher(url, str(folder / "journal"), seconds=0.1),
        make_controller=Unhurried if is_guarded else AlwaysTraining,
    )  # fmt: skip
    host.start()
    threading.Event().wait()


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries killed children
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)
            serve(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
        print(pid, flush=True)


if __name__ == "__main__":
    main()
