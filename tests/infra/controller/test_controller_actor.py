"""Claims of infra/controller/actor.py: one actor, replaced when the configuration changes, jobs as Ray tasks."""

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest
import ray
from ray.exceptions import RayError

from paceline.config import PolicyConfig
from paceline.contracts import TrainJob, encode
from paceline.infra.app import lean_nodes
from paceline.infra.controller.actor import (
    ControllerSpec,
    RayLauncher,
    actor_name,
    ensure_controller,
    get_controller,
    stop_controller,
)
from paceline.infra.controller.jobs import WorkerLease
from paceline.infra.controller.snapshot import Snapshot
from paceline.infra.controller.store import HostConfig
from paceline.infra.replica.feedback import make_batch
from paceline.infra.state.desired import ensure_first_version
from tests.helpers.scripted import ARM, row

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster():
    owns = not ray.is_initialized()
    if owns:
        with lean_nodes():
            ray.init(
                address="local",
                num_cpus=4,
                include_dashboard=False,
                object_store_memory=100 * 2**20,
                log_to_driver=False,
                namespace="paceline",
            )
    yield
    if owns:
        ray.shutdown()


@pytest.fixture
def spec(cluster, shared_redis, keys, tmp_path):
    made = ControllerSpec(
        host=HostConfig(
            redis_url=shared_redis.url, model=keys.model, data_dir=tmp_path, target_version="t",
            policy=PolicyConfig(policy="never"),
        ),
        trace_root=str(tmp_path / "traces"), registry_root=str(tmp_path / "registry"), learner_root=str(tmp_path / "learners"),
        target=str(tmp_path / "no-target"),
    )  # fmt: skip
    yield made
    stop_controller(keys.model)


def snapshot(model: str) -> Snapshot:
    try:
        return ray.get(get_controller(model).snapshot.remote(), timeout=10)
    except (RayError, ValueError):
        return Snapshot()


def test_one_controller_is_kept_and_takes_commands_until_it_is_stopped(spec, client, keys, wait_until):
    ensure_first_version(client, keys, "v1", 10, time.time())
    now = replace(spec, deployed_at=5.0)
    kept = ensure_controller(now)
    for same in (
        now,
        replace(now, deployed_at=9.0),
        replace(now, deployed_at=4.0, host=replace(now.host, target_version="u")),  # of an older deployment
        replace(now, host=replace(now.host, target_version="u")),  # of this one, on a node with other files
    ):
        assert ensure_controller(same)._actor_id == kept._actor_id
    wait_until(lambda: snapshot(keys.model).epoch == 1, timeout_s=90.0)
    with pytest.raises(Exception, match=r"not in the registry|12 hexadecimal"):
        ray.get(kept.command.remote("pin", "nope"), timeout=20)
    ray.get(kept.command.remote("set_policy", "payoff"), timeout=20)
    assert snapshot(keys.model).policy == "payoff"
    stop_controller(keys.model)
    with pytest.raises(ValueError, match=actor_name(keys.model)):
        get_controller(keys.model)


def test_redeployment_with_another_configuration_replaces_the_controller(spec, client, keys, wait_until):
    ensure_first_version(client, keys, "v1", 10, time.time())
    old = ensure_controller(spec)
    batch = make_batch([row(1)], replica_id="a", boot_epoch=1, seq=1, target_version="t", num_dropped=0)
    client.xadd(keys.feedback, {"v": encode(batch)})
    wait_until(lambda: snapshot(keys.model).feedback.delivered == 1, timeout_s=90.0)
    other_policy = replace(spec.host, policy=PolicyConfig(policy="always", holdback_percent=40))
    for deployed_at, host, num_replicas in (
        (1.0, other_policy, 1),
        (2.0, replace(other_policy, target_version="u"), 3),
    ):
        changed = replace(spec, deployed_at=deployed_at, host=host)
        epoch = snapshot(keys.model).epoch
        with ThreadPoolExecutor(num_replicas) as pool:  # replicas that replace the controller together end with one
            new, *others = pool.map(ensure_controller, [changed] * num_replicas)
        assert new._actor_id != old._actor_id and {h._actor_id for h in others} <= {new._actor_id}
        wait_until(lambda epoch=epoch: (snapshot(keys.model).epoch or 0) > epoch, timeout_s=90.0)
        view = snapshot(keys.model)
        assert (view.policy, view.holdback_percent, view.target_version) == ("always", 40, host.target_version)
        assert view.feedback.delivered == 1, "the state of the one before it was restored"
        with pytest.raises(RayError):
            ray.get(old.pid.remote(), timeout=20)
        old = new
    assert ray.get(get_controller(spec.host.model).pid.remote(), timeout=20) == ray.get(old.pid.remote(), timeout=20)


def is_training() -> bool:
    """Whether a process of this one's Ray runs a training job."""
    names = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            names += process.cmdline()[:1]
    return "ray::train_task" in names


def test_job_that_fails_or_is_killed_ends_as_failed(spec, keys, wait_until):
    job = TrainJob(
        job_id="j1", bucket="math", arm=ARM, base_version="v1", first_version="v1", shard_ids=["gone"], rehearsal_shard_ids=[],
        seed=0, time_limit_s=30.0,
    )  # fmt: skip
    lease = WorkerLease(spec.host.redis_url, keys.model, "j1", "t", ttl_s=5.0, limit_s=30.0)
    handle = RayLauncher(spec).launch(job, lease)
    wait_until(lambda: not handle.is_alive(), timeout_s=120.0)
    result = handle.result()
    assert result is not None and result.status == "failed"
    never = "0" * 12
    manifest = Path(spec.registry_root) / "manifests" / f"{never}.json"
    manifest.parent.mkdir(parents=True)
    os.mkfifo(manifest)  # the job reads until it is killed
    second = RayLauncher(spec).launch(msgspec.structs.replace(job, base_version=never), lease)
    wait_until(is_training, timeout_s=60.0)
    second.kill()
    wait_until(lambda: not second.is_alive(), timeout_s=60.0)
    cancelled = second.result()
    assert cancelled is not None and cancelled.status == "failed"
    assert "training process ended" in cancelled.reason, cancelled.reason
