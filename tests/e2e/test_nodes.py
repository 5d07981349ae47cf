"""A service over several computers: no shared folder, Redis by password and TLS, versions and traces in an object store."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import httpx
import pytest
import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from paceline import __version__
from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bench.chaos.load import Load, wait_for
from paceline.config import EngineConfig, PolicyConfig, ServiceConfig, TraceConfig, TrainerResources, to_dict
from paceline.infra.controller.actor import NAMESPACE, get_controller
from paceline.infra.service.front import PROXY_CALLBACK, PROXY_VARIABLE
from paceline.infra.service.stores import StorePaths
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.machine import free_port
from paceline.serving.loading.target import read_target
from tests.helpers.nodes import Front, Nodes
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

moto = pytest.importorskip("moto.server")
pytest.importorskip("s3fs")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]
NUM_TOKENS = 48
ROOT = Path(__file__).parents[2]
SERVING: dict[str, Any] = {"num_cpus": 1, "labels": {"paceline/role": "serve"}}
AWS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass(kw_only=True)
class Site:
    """The cluster, what its nodes share, and the service on it."""

    nodes: Nodes
    redis: Front
    s3: Front
    config: ServiceConfig
    url: str
    traffic: list[Answer]
    """Every answer so far."""

    def deploy(self, **changes: Any) -> None:
        """What `serve deploy` does with a file."""
        values = {k: v for k, v in to_dict(self.config).items() if v is not None}
        application = {"name": "nodes", "route_prefix": "/", "import_path": "paceline.infra.app:build", "args": values}
        schema = ServeDeploySchema.model_validate({"applications": [{**application, **changes}]})
        _get_global_client().deploy_apps(schema, _blocking=False)

    def post(self, command: str, **values: str) -> None:
        HTTP.post(f"{self.url}/paceline/{command}", json=values, timeout=60).raise_for_status()

    def load(self) -> Load:
        return Load(self.url, ask_one, width=4)

    def check(self, answers: Sequence[Any]) -> None:
        """There are answers, each the target's own to its end, and every round of each is counted once."""
        assert answers
        for answer in answers:
            answer.check_complete()
        self.traffic += answers
        num_rounds = sum(a.stats[-1]["num_rounds"] for a in self.traffic)
        wait_for(lambda: fresh_state(self.url)["feedback"]["delivered"] >= num_rounds, "the feedback")
        assert fresh_state(self.url)["feedback"]["delivered"] == num_rounds


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    assert not ray.is_initialized()
    folder = tmp_path_factory.mktemp("nodes")
    cert, key = make_certificate(folder)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in {
            **AWS,
            PROXY_VARIABLE: PROXY_CALLBACK,
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        }.items():
            patch.setenv(name, value)
        store = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
        store.start()
        stack.callback(store.stop)
        s3 = stack.enter_context(Front(store.get_host_and_port()[1]))
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3.port}")
        fsspec.filesystem("s3").mkdir("paceline")
        server = stack.enter_context(EmbeddedRedis(folder / "redis"))
        redis = stack.enter_context(Front(server.port, (cert, key)))
        credentials = server.url.removeprefix("redis://").split("@")[0]
        config = tiny_config(
            folder, "nodes", data_dir="~/paceline", store_url="s3://paceline/test",
            redis_url=f"rediss://{credentials}@127.0.0.1:{redis.port}/0?ssl_ca_certs={cert}",
            engine=EngineConfig(max_running=8, max_waiting=16, kv_bytes=8 * 2**20, num_threads=1),
            policy=PolicyConfig(epoch_s=2.0, min_rows=64, holdback_percent=0, job_time_limit_s=10.0),
            trace=TraceConfig(flush_interval_s=0.5, shard_rows=128),
            trainer_resources=TrainerResources(num_cpus=0, resources={"train_slot": 1}),
        )  # fmt: skip
        nodes = Nodes(folder / "homes", num_cpus=0)
        stack.callback(nodes.cluster.shutdown)
        for name in ("w1", "w2"):
            nodes.add(name, **SERVING)
        nodes.add("tr", num_cpus=0, resources={"train_slot": 1}, labels={"paceline/role": "train"})
        patch.chdir(folder)  # workers look for modules in the driver's folder first
        ray.init(address=nodes.address, namespace=NAMESPACE, log_to_driver=False)
        stack.callback(ray.shutdown)
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        made = Site(nodes=nodes, redis=redis, s3=s3, config=config, url=f"http://127.0.0.1:{port}", traffic=[])
        made.deploy()

        def is_running() -> bool:
            app = serve.status().applications.get("nodes")
            return app is not None and app.status == "RUNNING"

        wait_for(is_running, "the service", RESTART_S)
        fresh_state(made.url)
        yield made


async def ask_one(client: httpx.AsyncClient, i: int) -> Answer:
    return await ask(client, i % NUM_PROMPTS, stream=i % 2 == 0, num_tokens=NUM_TOKENS, bucket="load")


def test_replicas_and_trainer_are_each_on_a_node_of_their_own_and_share_no_folder(site: Site) -> None:
    paths = StorePaths.of(site.config)
    traces = TraceStore(paths.traces)
    assert site.nodes.where("ray::ServeReplica:nodes:engine") == {"w1", "w2"}
    assert site.nodes.where("ray::ControllerActor") <= {"head", "w1", "w2"}
    with site.load() as load:
        wait_for(lambda: sum(s.num_rows for s in traces.list_shards("load")) >= 64, "traces in the store")
        site.post("train", bucket="load", arm="head")
        wait_for(lambda: site.nodes.where("ray::train_task"), "a training process", RESTART_S)
        assert site.nodes.where("ray::train_task") == {"tr"}
        wait_for(lambda: fresh_state(site.url)["job"] is None, "the end of the job", RESTART_S)
        version = put_drafter(
            DrafterRegistry(paths.registry), read_target(site.config.model), Path(site.config.model), 7
        )
        site.post("pin", version=version)
        wait_for(
            lambda: {r["version"] for r in replicas_of(site.url).values()} == {version}, "the version on both nodes"
        )
    site.check(load.answers)
    outcomes = [d["outcome"] for d in fresh_state(site.url)["decisions"] if d["action"] == "train"]
    assert outcomes and "failed" not in str(outcomes), outcomes
    objects = fsspec.filesystem("s3", use_listings_cache=False).find("paceline/test/services/nodes")
    assert {name.split("/")[4] for name in objects} >= {"traces", "registry", "learners"}
    homes = [home / "paceline" / "services" / "nodes" for home in (site.nodes.folder.iterdir())]
    assert sum(home.is_dir() for home in homes) >= 2, "log files are each node's own"
    assert not [p for home in homes for name in ("traces", "registry", "learners") if (p := home / name).exists()]


def test_a_node_that_is_cut_off_from_redis_and_store_serves_on_and_catches_up(site: Site) -> None:
    paths = StorePaths.of(site.config)

    def cut() -> set[int]:
        return {p.pid for p in site.nodes.processes("w1")}

    with site.load() as load:
        with site.redis.cut_off(cut), site.s3.cut_off(cut):
            version = put_drafter(
                DrafterRegistry(paths.registry), read_target(site.config.model), Path(site.config.model), 8
            )
            num_before, until = len(load.answers), time.monotonic() + 4.0
            wait_for(lambda: time.monotonic() > until and len(load.answers) > num_before + 8, "answers meanwhile")
        site.post("pin", version=version)
        wait_for(
            lambda: {r["version"] for r in replicas_of(site.url).values()} == {version}, "the version on both nodes"
        )
    site.check(load.answers)


def release(folder: Path, version: str) -> Path:
    """A source tree of another version, in which `paceline` and its folders are found."""
    shutil.copytree(ROOT / "paceline", folder / "paceline", ignore=shutil.ignore_patterns("models", "__pycache__"))
    (folder / "pyproject.toml").touch()
    for name in ("adapt", "bandit", "bench", "infra", "kernels", "serving"):
        (folder / name).symlink_to(ROOT / name)
    package = folder / "paceline" / "__init__.py"
    package.write_text(package.read_text().replace(__version__, version))
    return folder


def test_a_release_rolls_out_and_back_under_load(site: Site, tmp_path: Path) -> None:
    def runs(version: str, before: str) -> bool:
        found = {HTTP.get(f"{site.url}/version").json()["version"] for _ in range(24)}
        return found == {version} and ray.get(get_controller("nodes").release.remote(), timeout=60) != before

    pinned = fresh_state(site.url)["version"]
    tree = release(tmp_path / "new", "9.9.9")
    with site.load() as load:
        for version, env in (("9.9.9", {"PYTHONPATH": str(tree)}), (__version__, {})):
            before = ray.get(get_controller("nodes").release.remote(), timeout=60)
            num_before = len(load.answers)
            site.deploy(runtime_env={"env_vars": env})
            wait_for(lambda: suppressed(runs, version, before), f"release {version}", RESTART_S)
            assert len(load.answers) > num_before
    site.check(load.answers)
    wait_for(lambda: {r["version"] for r in replicas_of(site.url).values()} == {pinned}, "the version from before")


def suppressed(look: Callable[..., bool], *args: Any) -> bool:
    """A look at a controller that may be on its way."""
    try:
        return look(*args)
    except (ValueError, ray.exceptions.RayError):
        return False


def test_the_service_outlives_a_node(site: Site) -> None:
    with site.load() as load:
        wait_for(lambda: len(load.answers) > 8, "answers")
        site.nodes.kill("w1")
        num_before = len(load.answers)
        wait_for(lambda: len(load.answers) > num_before + 8, "answers of the other node", RESTART_S)
        site.nodes.add("w1", **SERVING)
        wait_for(lambda: site.nodes.where("ray::ServeReplica:nodes:engine") == {"w1", "w2"}, "the replica", RESTART_S)
        wait_for(lambda: len(replicas_of(site.url)) == 2, "both replicas", RESTART_S)
    assert any(not a.looks_complete for a in load.answers) or load.answers
    for answer in load.answers:
        answer.check_explicit()  # type: ignore[attr-defined]
    assert fresh_state(site.url)["has_controller"]
