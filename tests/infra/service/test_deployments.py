"""What a redeployment, a deletion and the kinds of nodes do to engines and controller, on a cluster of three raylets."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray._private.state import actors
from ray.cluster_utils import Cluster

from paceline.bench.chaos.load import wait_for
from paceline.config import PolicyConfig
from paceline.errors import PacelineError
from paceline.infra.app import lean_nodes
from paceline.infra.controller.actor import (
    APPLICATION_CHECK_S,
    HEAD_ROLE,
    NAMESPACE,
    ROLE_LABEL,
    TRAIN_ROLE,
    ControllerSpec,
    actor_name,
    code_digest,
    ensure_controller,
    get_controller,
    stop_controller,
)
from paceline.infra.controller.store import HostConfig
from paceline.infra.service.claim import own_application
from paceline.infra.service.deployment import DeploymentLimits, bind_engine
from paceline.infra.service.ingress import INGRESS_PLACE
from paceline.infra.service.parts import ControllerSupervisor

pytestmark = [pytest.mark.ray, pytest.mark.slow]


class Tiny:
    """Stands for an engine: takes two CPUs and says which deployment it is of."""

    def __init__(self, factory: str, config: dict[str, Any]) -> None:
        self.number = config["number"]

    def __call__(self) -> int:
        return self.number

    def name(self) -> str:
        return own_application()


class Earlier:
    """The controller actor of a release that did not say which it is."""

    async def gives_way_to(self, spec: Any) -> bool:
        return False

    async def stop(self) -> None:
        return None

    async def pid(self) -> int:
        return 0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without CPUs, a node that serves and has two slots' worth of CPUs, a node that trains."""
    assert not ray.is_initialized()
    made = Cluster()
    try:
        with lean_nodes():
            made.add_node(num_cpus=0, include_dashboard=False, labels={ROLE_LABEL: HEAD_ROLE})
            made.add_node(num_cpus=4, labels={ROLE_LABEL: "serve"}, object_store_memory=100 * 2**20)
            made.add_node(num_cpus=0, resources={"train_slot": 1}, labels={ROLE_LABEL: TRAIN_ROLE}, object_store_memory=100 * 2**20)  # fmt: skip
        ray.init(address=made.address, namespace=NAMESPACE, log_to_driver=False)
        serve.start(proxy_location="Disabled")
        yield made
    finally:
        serve.shutdown()
        ray.shutdown()
        made.shutdown()


def spec_of(redis_url: str, model: str, folder: Path) -> ControllerSpec:
    return ControllerSpec(
        host=HostConfig(
            redis_url=redis_url, model=model, data_dir=folder, target_version="t", policy=PolicyConfig(policy="never")
        ),
        trace_root=str(folder / "traces"), registry_root=str(folder / "registry"), learner_root=str(folder / "learners"), target=str(folder / "none"),
    )  # fmt: skip


@pytest.fixture
def spec(cluster, shared_redis, keys, tmp_path) -> Iterator[ControllerSpec]:
    yield spec_of(shared_redis.url, keys.model, tmp_path)
    stop_controller(keys.model)


@pytest.fixture(scope="module", autouse=True)
def deleted_early(cluster, shared_redis, tmp_path_factory) -> Iterator[str]:
    """Model of a controller whose application is deleted before the tests: what follows takes it half a minute."""
    model = uuid.uuid4().hex[:8]
    spec = spec_of(shared_redis.url, model, tmp_path_factory.mktemp("deleted"))
    assert deploy(3, "mine").name.remote().result(timeout_s=60) == "mine"
    handle = ensure_controller(replace(spec, application="mine"))
    ray.get(handle.pid.remote(), timeout=60)
    wait_for(lambda: ray.get(get_controller(model).snapshot.remote(), timeout=60).epoch == 1, "the controller's start")
    serve.delete("mine")
    get_controller(model)  # it is there as long as the application is
    yield model
    stop_controller(model)


def deploy(number: int, name: str = "tiny"):
    limits = DeploymentLimits(num_replicas=2, num_cpus=2.0, graceful_shutdown_timeout_s=5.0)
    return serve.run(bind_engine(Tiny, "none", {"number": number}, limits), name=name, route_prefix=None)


def test_a_redeployment_with_all_slots_taken_ends(cluster):
    assert deploy(1).remote().result(timeout_s=60) == 1
    with ThreadPoolExecutor(1) as pool:
        handle = pool.submit(deploy, 2).result(timeout=120)
    assert {handle.remote().result(timeout_s=60) for _ in range(20)} == {2}
    ingress = ray.remote(**INGRESS_PLACE)(Earlier).remote()
    assert ray.get(ingress.pid.remote(), timeout=60) == 0
    assert role_of(ingress) == "serve", "where engines hold all CPUs"
    serve.delete("tiny")


def role_of(handle: Any) -> str | None:
    """Role of the node that an actor is on."""
    labels = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
    assert TRAIN_ROLE in {found.get(ROLE_LABEL) for found in labels.values()}
    return labels[actors(handle._actor_id.hex())["Address"]["NodeID"]].get(ROLE_LABEL)


def test_the_controller_is_on_no_node_that_trains(spec, cluster):
    for i in range(4):
        one = replace(spec, host=replace(spec.host, model=f"{spec.host.model}-{i}"))
        handle = ensure_controller(one)
        ray.get(handle.pid.remote(), timeout=60)
        assert role_of(handle) != TRAIN_ROLE
        stop_controller(one.host.model)


def test_a_later_deployment_of_another_release_replaces_the_controller(spec):
    assert len(code_digest()) == 16
    first = replace(spec, release="a", deployed_at=5.0)
    kept = ensure_controller(first)
    for same in (
        first,
        replace(first, release="b"),  # a node of one deployment that has other code
        replace(first, release="b", deployed_at=4.0),  # a replica of an older one that drains
        replace(first, deployed_at=9.0),
    ):
        assert ensure_controller(same)._actor_id == kept._actor_id
    new = ensure_controller(replace(first, release="b", deployed_at=9.0))
    assert new._actor_id != kept._actor_id
    assert ray.get(new.release.remote(), timeout=60) == "b"
    back = ensure_controller(replace(first, release="a", deployed_at=10.0))  # and back to the old one
    assert ray.get(back.release.remote(), timeout=60) == "a"


def test_a_supervisor_removes_its_own_controller_alone(spec, tmp_path):
    mine = ControllerSupervisor(replace(spec, deployed_at=1.0))
    other = replace(spec, registry_root=str(tmp_path / "elsewhere"), deployed_at=2.0)
    mine.start()
    wait_for(lambda: names_a_controller(spec.host.model), "a controller")
    kept = ensure_controller(other)
    mine.remove()
    assert get_controller(spec.host.model)._actor_id == kept._actor_id, "another one's, deployed later"
    theirs = ControllerSupervisor(other)
    theirs.start()
    theirs.remove()
    assert not names_a_controller(spec.host.model)
    with pytest.raises(PacelineError, match="not wanted"):
        ensure_controller(spec, lambda: False)


def names_a_controller(model: str) -> bool:
    try:
        get_controller(model)
    except ValueError:
        return False
    return True


def test_a_controller_that_does_not_know_releases_is_replaced(spec, keys):
    options = {"name": actor_name(keys.model), "namespace": NAMESPACE, "lifetime": "detached"}
    old = ray.remote(num_cpus=0)(Earlier).options(**options).remote()
    assert ray.get(old.pid.remote(), timeout=60) == 0
    new = ensure_controller(replace(spec, release="b", deployed_at=1.0))
    assert new._actor_id != old._actor_id
    assert ray.get(new.release.remote(), timeout=60) == "b"


def test_the_controller_ends_with_its_application_and_no_sooner(deleted_early):
    wait_for(lambda: not names_a_controller(deleted_early), "the controller's end", timeout_s=6 * APPLICATION_CHECK_S)
