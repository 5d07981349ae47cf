"""A service over several computers that share no folder: two replicas, a trainer and a head on raylets with a home each.

They share an S3 server and a Redis behind TLS, each by a port that can be cut for the processes of one of them.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import httpx
import psutil
import pytest
import ray
from moto.server import ThreadedMotoServer
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from paceline import __version__
from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bench.chaos.load import Load, wait_for
from paceline.config import EngineConfig, PolicyConfig, ServiceConfig, TraceConfig, TrainerResources, to_dict
from paceline.infra.controller.actor import NAMESPACE, ROLE_LABEL, TRAIN_ROLE, get_controller
from paceline.infra.service.front import PROXY_CALLBACK, PROXY_VARIABLE
from paceline.infra.service.stores import StorePaths
from paceline.infra.state.redis_clients import Keys, patient_client
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.machine import free_port
from paceline.serving.loading.target import read_target
from tests.helpers.cut_ports import CutPort
from tests.helpers.hosts import ledger
from tests.helpers.nodes import Nodes
from tests.helpers.service_load import (
    HTTP,
    NUM_PROMPTS,
    RESTART_S,
    Answer,
    ask,
    fresh_state,
    make_certificate,
    put_drafter,
    replicas_of,
    tiny_config,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]
NAME, NUM_TOKENS, WIDTH = "nodes", 48, 4
ROOT = Path(__file__).parents[2]
SERVING: dict[str, Any] = {"num_cpus": 1, "labels": {ROLE_LABEL: "serve"}}
TRAINING: dict[str, Any] = {"num_cpus": 0, "resources": {"train_slot": 1}, "labels": {ROLE_LABEL: TRAIN_ROLE}}
ENGINE, CONTROLLER, TRAINER = "ray::ServeReplica:nodes:engine", "ray::ControllerActor", "ray::train_task"
IDLE = "ray::IDLE"
AWS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
BUCKET = "paceline"


@dataclass(kw_only=True)
class Site:
    """The cluster, and the service on it."""

    nodes: Nodes
    shared: tuple[CutPort, CutPort]
    """Redis' and the object store's."""
    config: ServiceConfig
    url: str

    @property
    def paths(self) -> StorePaths:
        return StorePaths.of(self.config)

    def deploy(self, **changes: Any) -> None:
        """What `serve deploy` does with a file."""
        values = {k: v for k, v in to_dict(self.config).items() if v is not None}
        application = {"name": NAME, "route_prefix": "/", "import_path": "paceline.infra.app:build", "args": values}
        schema = ServeDeploySchema.model_validate({"applications": [{**application, **changes}]})
        _get_global_client().deploy_apps(schema, _blocking=False)

    def post(self, command: str, **values: str) -> httpx.Response:
        return HTTP.post(f"{self.url}/paceline/{command}", json=values, timeout=60)

    def pin(self, seed: int) -> str:
        """Version of a drafter that was put into the store and is pinned."""
        target, registry = read_target(self.config.model), DrafterRegistry(self.paths.registry)
        version = put_drafter(registry, target, Path(self.config.model).parent / f"d{seed}", seed)
        self.post("pin", version=version).raise_for_status()
        return version

    def publish(self, seed: int) -> str:
        """As `pin`, and both replicas serve it."""
        version = self.pin(seed)
        self.wait_version(version)
        return version

    def versions(self) -> set[str]:
        """Those that the replicas serve."""
        return {r["version"] for r in replicas_of(self.url).values()}

    def wait_version(self, version: str) -> None:
        wait_for(lambda: self.versions() == {version}, "it on both nodes")

    def serving_nodes(self) -> tuple[str, str]:
        """Both, that without the controller first."""
        (home,) = self.nodes.where(CONTROLLER)
        return ("w2", "w1") if home != "w2" else ("w1", "w2")

    def load(self) -> Load:
        return Load(self.url, ask_one, width=WIDTH, pause_s=0.8)

    def num_folded(self) -> int:
        return int(fresh_state(self.url)["feedback"]["delivered"])

    def outcomes(self) -> list[str]:
        """How the training jobs ended that have."""
        return [d["outcome"] for d in fresh_state(self.url)["decisions"] if d["action"] == "train" and d["outcome"]]

    def check_books(self, answers: Sequence[Any], num_before: int, before: set[str]) -> None:
        """Every answer is the target's own to its end, its rounds are counted once, and no entry of the ledger is lost."""
        assert answers
        for answer in answers:
            answer.check_complete()
        num_rounds = sum(a.stats[-1]["num_rounds"] for a in answers)
        wait_for(lambda: self.num_folded() - num_before >= num_rounds, "the feedback of all answers")
        assert self.num_folded() - num_before == num_rounds
        assert before <= self.entries()

    def entries(self) -> set[str]:
        """Ids of the ledger's entries; asserts that there are as many as were booked."""
        with patient_client(str(self.config.redis_url)) as client:
            return set(ledger(client, Keys(NAME)))


async def ask_one(client: httpx.AsyncClient, i: int) -> Answer:
    return await ask(client, i % NUM_PROMPTS, stream=i % 2 == 0, num_tokens=NUM_TOKENS, bucket="load")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    assert not ray.is_initialized()
    folder = tmp_path_factory.mktemp(NAME)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(PROXY_VARIABLE, PROXY_CALLBACK)
        patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
        logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for every request of the store
        store = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        store.start()
        stack.callback(store.stop)
        s3 = stack.enter_context(CutPort(store.get_host_and_port()[1]))
        for name, value in {**AWS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3.port}"}.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir(BUCKET)
        server, cert = stack.enter_context(EmbeddedRedis(folder / "redis")), make_certificate(folder)
        redis = stack.enter_context(CutPort(server.port, cert))
        password = server.url.removeprefix("redis://").rpartition("@")[0]
        assert password
        config = tiny_config(
            folder, NAME, data_dir="~/paceline", store_url=f"s3://{BUCKET}/test",
            redis_url=f"rediss://{password}@127.0.0.1:{redis.port}/0?ssl_ca_certs={cert[0]}",
            engine=EngineConfig(max_running=8, max_waiting=16, kv_bytes=8 * 2**20, num_threads=1),
            policy=PolicyConfig(policy="payoff", epoch_s=2.0, min_rows=64, holdback_percent=0, job_time_limit_s=60.0),
            trace=TraceConfig(flush_interval_s=0.5, shard_rows=128),
            trainer_resources=TrainerResources(
                num_cpus=0, resources={"train_slot": 1}, start_timeout_s=RESTART_S, niceness=0
            ),
        )  # fmt: skip
        nodes = Nodes(folder / "homes", num_cpus=0)
        stack.callback(nodes.cluster.shutdown)
        for name in ("w1", "w2"):
            nodes.add(name, **SERVING)
        nodes.add("tr", **TRAINING)
        patch.chdir(folder)  # workers look for modules in the driver's folder first
        ray.init(address=nodes.address, namespace=NAMESPACE, log_to_driver=False)
        stack.callback(ray.shutdown)
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        made = Site(nodes=nodes, shared=(redis, s3), config=config, url=f"http://127.0.0.1:{port}")
        made.deploy()

        def is_running() -> bool:
            return _get_global_client().get_serve_status(NAME).app_status.status == "RUNNING"

        wait_for(is_running, "the service", RESTART_S)
        fresh_state(made.url)
        yield made


def test_nodes_without_a_shared_folder_learn_from_each_others_traffic(site: Site) -> None:
    traces, num_before, before = TraceStore(site.paths.traces), site.num_folded(), site.entries()
    assert site.nodes.where(ENGINE) == ["w1", "w2"] and len(site.nodes.where(CONTROLLER)) == 1
    pid = ray.get(get_controller(NAME).pid.remote(), timeout=60)
    with site.load() as load:
        wait_for(lambda: sum(s.num_rows for s in traces.list_shards("load")) >= 64, "traces in the store")
        wait_for(lambda: site.post("train", bucket="load", arm="head").is_success, "an epoch with traffic of the class")
        assert wait_for(lambda: site.nodes.where(TRAINER), "a training process", RESTART_S) == ["tr"]
    # Without the load, which would leave the job little of two cores
    outcomes = wait_for(lambda: site.outcomes(), "the end of the job", RESTART_S)
    assert set(outcomes) <= {"accepted", "rejected", "learning"}, fresh_state(site.url)["decisions"]
    with site.load() as later:
        site.publish(7)
    site.check_books(load.answers + later.answers, num_before, before)
    assert site.entries() > before, "the job's costs"
    assert ray.get(get_controller(NAME).pid.remote(), timeout=60) == pid, "one controller, whose replicas agree on it"
    stored = fsspec.filesystem("s3", use_listings_cache=False).ls(f"{BUCKET}/test/services/{NAME}")
    assert {"traces", "registry", "learners"} <= {path.rpartition("/")[2] for path in stored}
    homes = [site.nodes.home(name) / "paceline" / "services" / NAME for name in ("head", "w1", "w2", "tr")]
    assert sum(home.is_dir() for home in homes) >= 2, "log files are each node's own"
    assert not [p for home in homes for name in ("traces", "registry", "learners") if (p := home / name).exists()]


@pytest.mark.parametrize("is_silent", [False, True], ids=["refused", "silent"])
def test_a_node_that_is_cut_off_from_redis_and_store_serves_on_and_catches_up(site: Site, is_silent: bool) -> None:
    old, num_before, before = site.publish(6), site.num_folded(), site.entries()
    lost, _ = site.serving_nodes()
    redis, s3 = site.shared

    def pids() -> list[int]:
        return [p.pid for p in site.nodes.processes(lost)]

    with site.load() as load:
        with redis.cut_off(pids, is_silent=is_silent), s3.cut_off(pids, is_silent=is_silent):
            version = site.pin(4 + is_silent)
            wait_for(lambda: site.versions() == {old, version}, "the version on the node that is not cut off")
            num_answers, until = len(load.answers), time.monotonic() + (8.0 if is_silent else 4.0)
            wait_for(
                lambda: time.monotonic() > until and len(load.answers) > num_answers + 4 * WIDTH, "answers meanwhile"
            )
            assert site.versions() == {old, version}
        site.wait_version(version)
    assert not sum(a.num_refusals for a in load.answers)
    site.check_books(load.answers, num_before, before)


def release(folder: Path, version: str) -> Path:
    """A source tree of another version, in which `paceline` and its folders are found."""
    shutil.copytree(ROOT / "paceline", folder / "paceline", ignore=shutil.ignore_patterns("models", "__pycache__"))
    (folder / "pyproject.toml").touch()
    for name in ("adapt", "bandit", "bench", "infra", "kernels", "serving"):
        (folder / name).symlink_to(ROOT / name)
    package = folder / "paceline" / "__init__.py"
    package.write_text(package.read_text().replace(__version__, version))
    return folder


def test_a_release_rolls_out_and_back_without_a_failed_request(site: Site, tmp_path: Path) -> None:
    def controller() -> tuple[str, int]:
        """Digest of its code, and its process."""
        handle = get_controller(NAME)
        return ray.get(handle.release.remote(), timeout=60), ray.get(handle.pid.remote(), timeout=60)

    def runs(version: str, before: str) -> bool:
        if controller()[0] == before:
            return False
        return {HTTP.get(f"{site.url}/version").json()["version"] for _ in range(12)} == {version}

    pinned = site.publish(8)
    num_before, before = site.num_folded(), site.entries()
    tree = release(tmp_path / "new", "9.9.9")
    digests = [controller()[0]]
    with site.load() as load:
        for version, env in (("9.9.9", {"PYTHONPATH": str(tree)}), (__version__, {})):
            digest, pid = controller()
            num_answers = len(load.answers)
            site.deploy(runtime_env={"env_vars": env})
            wait_for(away_is_false(lambda: runs(version, digest)), f"release {version}", RESTART_S, every_s=0.5)  # noqa: B023
            wait_for(lambda: not psutil.pid_exists(pid), "the end of the older controller")  # noqa: B023
            assert len(load.answers) > num_answers
            digests.append(controller()[0])
    assert digests[0] == digests[2] != digests[1]
    assert not sum(a.num_refusals for a in load.answers)
    site.check_books(load.answers, num_before, before)
    site.wait_version(pinned)


def away_is_false(look: Callable[[], bool]) -> Callable[[], bool]:
    """A look at a controller that may be on its way."""

    def found() -> bool:
        try:
            return look()
        except (ValueError, ray.exceptions.RayError):
            return False

    return found


def test_a_service_outlives_a_node_and_is_whole_when_the_node_is_back(site: Site) -> None:
    def lasting() -> dict[str, dict[str, int]]:
        """Node -> what runs on it whatever happens; the controller may be on another one afterwards."""
        return {
            name: {c: n for c, n in counts.items() if c.startswith("ray::") and c not in (CONTROLLER, TRAINER, IDLE)}
            for name, counts in site.nodes.commands().items()
        }

    pinned, before, whole = site.publish(9), site.entries(), lasting()
    other, lost = site.serving_nodes()
    with site.load() as load:
        wait_for(lambda: len(load.answers) > 2 * WIDTH, "answers")
        site.nodes.kill(lost)
        num_before = len(load.answers)
        wait_for(lambda: len(load.answers) > num_before + 4 * WIDTH, "answers of the other node", RESTART_S)
        assert site.nodes.where(ENGINE) == [other]
        site.nodes.add(lost, **SERVING)
        wait_for(lambda: lasting() == whole, "all processes", RESTART_S)
        site.wait_version(pinned)
    for answer in load.answers:
        answer.check_explicit()  # type: ignore[attr-defined]
    assert sum(not a.looks_complete for a in load.answers) <= 2 * WIDTH, "what ran there, and what was on its way"
    with site.load() as later:
        wait_for(lambda: len(later.answers) > 4 * WIDTH, "answers of both nodes")
    for answer in later.answers:
        answer.check_complete()  # type: ignore[attr-defined]
    state = fresh_state(site.url)
    assert len(state["replicas"]) == 2 and before <= site.entries()
    assert len(site.nodes.where(CONTROLLER)) == 1
