"""Claims of infra/controller/actor.py: one actor, back after kill -9 with its state, jobs as Ray tasks."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import ray
from ray.exceptions import RayError

from paceline.config import PolicyConfig, to_dict
from paceline.contracts import TrainJob, encode
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
from paceline.infra.replica.feedback import make_batch
from paceline.infra.state.desired import ensure_first_version
from tests.helpers.scripted import ARM, row

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster():
    owns = not ray.is_initialized()
    if owns:
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
        redis_url=shared_redis.url, model=keys.model, data_dir=str(tmp_path), trace_root=str(tmp_path / "traces"),
        registry_root=str(tmp_path / "registry"), target_dir=str(tmp_path / "no-target"), target_version="t",
        policy=to_dict(PolicyConfig(policy="never")),
    )  # fmt: skip
    yield made
    stop_controller(keys.model)


def snapshot(model: str) -> Snapshot:
    try:
        return ray.get(get_controller(model).snapshot.remote(), timeout=10)
    except (RayError, ValueError):
        return Snapshot()


def test_actor_survives_kill_9_with_its_state(spec, client, keys, wait_until):
    ensure_first_version(client, keys, "v1", 10, time.time())
    handle = ensure_controller(spec)
    again = ensure_controller(spec)
    assert handle._actor_id == again._actor_id

    def send(seq: int) -> None:
        batch = make_batch([row(seq)], replica_id="a", boot_epoch=1, seq=seq, target_version="t", num_dropped=0)
        client.xadd(keys.feedback, {"v": encode(batch)})

    send(1)
    wait_until(lambda: snapshot(keys.model).feedback.delivered == 1, timeout_s=90.0)
    pid = ray.get(handle.pid.remote())
    os.kill(pid, signal.SIGKILL)
    send(1)
    send(2)
    wait_until(lambda: snapshot(keys.model).feedback.delivered == 2, timeout_s=120.0)
    view = snapshot(keys.model)
    assert (view.epoch, view.feedback.duplicates) == (2, 1)
    assert ray.get(get_controller(keys.model).pid.remote()) != pid
    with pytest.raises(Exception, match=r"not in the registry|12 hexadecimal"):
        ray.get(get_controller(keys.model).command.remote("pin", "nope"), timeout=20)
    ray.get(get_controller(keys.model).command.remote("set_policy", "payoff"), timeout=20)
    assert snapshot(keys.model).policy == "payoff"
    stop_controller(keys.model)
    with pytest.raises(ValueError, match=actor_name(keys.model)):
        get_controller(keys.model)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"policy": to_dict(PolicyConfig(policy="always", holdback_percent=40))}, ("policy", "always")),
        ({"target_version": "u"}, ("target_version", "u")),
    ],
)
def test_redeployment_with_another_configuration_replaces_the_controller(spec, client, keys, wait_until, change, shown):
    ensure_first_version(client, keys, "v1", 10, time.time())
    old = ensure_controller(spec)
    batch = make_batch([row(1)], replica_id="a", boot_epoch=1, seq=1, target_version="t", num_dropped=0)
    client.xadd(keys.feedback, {"v": encode(batch)})
    wait_until(lambda: snapshot(keys.model).feedback.delivered == 1, timeout_s=90.0)
    new = ensure_controller(replace(spec, deployed_at=1.0, **change))
    assert new._actor_id != old._actor_id
    wait_until(lambda: snapshot(keys.model).epoch == 2, timeout_s=90.0)
    view = snapshot(keys.model)
    assert getattr(view, shown[0]) == shown[1]
    assert view.feedback.delivered == 1, "the state of the one before it was restored"
    assert view.holdback_percent == change.get("policy", {}).get("holdback_percent", 10)
    with pytest.raises(RayError):
        ray.get(old.pid.remote(), timeout=20)


def test_controller_is_kept_when_nothing_changed_or_an_older_deployment_asks(spec):
    now = replace(spec, deployed_at=5.0)
    kept = ensure_controller(now)
    assert ensure_controller(replace(now, deployed_at=9.0))._actor_id == kept._actor_id
    draining = replace(now, deployed_at=4.0, target_version="u")
    assert ensure_controller(draining)._actor_id == kept._actor_id


def test_replicas_that_replace_the_controller_together_end_with_one(spec):
    ensure_controller(spec)
    new = replace(spec, deployed_at=1.0, target_version="u")
    with ThreadPoolExecutor(3) as pool:
        handles = list(pool.map(ensure_controller, [new] * 3))
    assert len({h._actor_id for h in handles}) == 1
    assert ray.get(get_controller(spec.model).pid.remote(), timeout=20) == ray.get(handles[0].pid.remote(), timeout=20)


def test_job_that_fails_or_is_killed_ends_as_failed(spec, keys, wait_until):
    job = TrainJob(
        job_id="j1", bucket="math", arm=ARM, base_version="v1", first_version="v1", shard_ids=["gone"], rehearsal_shard_ids=[],
        seed=0, time_limit_s=30.0,
    )  # fmt: skip
    lease = WorkerLease(spec.redis_url, keys.model, "j1", "t", ttl_s=5.0, limit_s=30.0)
    handle = RayLauncher(spec).launch(job, lease)
    wait_until(lambda: not handle.is_alive(), timeout_s=120.0)
    result = handle.result()
    assert result is not None and result.status == "failed"
    for _ in range(8):  # a warm worker may end the broken job by itself before the kill arrives
        second = RayLauncher(spec).launch(job, lease)
        second.kill()
        wait_until(lambda handle=second: not handle.is_alive(), timeout_s=60.0)
        cancelled = second.result()
        assert cancelled is not None and cancelled.status == "failed"
        if "training process ended" in cancelled.reason:
            return
    pytest.fail(f"no kill in 8 arrived in time: {cancelled.reason}")
