"""The head of a cluster is lost, GCS, Serve's controller and a proxy with it, and comes back: the replicas serve on meanwhile.

GCS keeps its state in a Redis, as in infra/kubernetes/; every node with a replica has a proxy, all on one port.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bench.chaos.load import Load, wait_for
from paceline.config import EngineConfig, PolicyConfig, to_dict
from paceline.infra.controller.actor import NAMESPACE, ROLE_LABEL
from paceline.infra.service.front import PROXY_CALLBACK, PROXY_VARIABLE
from paceline.infra.service.stores import StorePaths
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.machine import free_port
from paceline.serving.loading.target import read_target
from tests.helpers.nodes import Nodes
from tests.helpers.service_load import (
    HTTP,
    NUM_PROMPTS,
    RESTART_S,
    ask,
    put_drafter,
    replicas_of,
    tiny_config,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]
NAME, WIDTH = "heads", 4
ENGINE, CONTROLLER = f"ray::ServeReplica:{NAME}:engine", "ray::ControllerActor"


async def ask_one(client: Any, i: int) -> Any:
    return await ask(client, i % NUM_PROMPTS, stream=i % 2 == 0, num_tokens=32, bucket="load")


def pin(url: str, version: str) -> int:
    response = HTTP.post(f"{url}/paceline/pin", json={"version": version}, timeout=60)
    assert response.is_success or response.status_code == 503, response.text
    return response.status_code


def test_replicas_serve_on_without_a_head_and_the_next_one_looks_after_them_again(tmp_path: Path) -> None:
    assert not ray.is_initialized()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(PROXY_VARIABLE, PROXY_CALLBACK)
        patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
        own = stack.enter_context(EmbeddedRedis(tmp_path / "redis"))
        gcs = stack.enter_context(EmbeddedRedis(tmp_path / "gcs"))
        config = tiny_config(
            tmp_path, NAME, data_dir=str(tmp_path / "data"), redis_url=own.url,
            engine=EngineConfig(max_running=8, max_waiting=16, kv_bytes=8 * 2**20, num_threads=1),
            policy=PolicyConfig(policy="never", holdback_percent=0),
        )  # fmt: skip
        nodes = Nodes(tmp_path / "homes", gcs, num_cpus=0)
        stack.callback(nodes.cluster.shutdown)
        for name in ("w1", "w2"):
            nodes.add(name, num_cpus=1, labels={ROLE_LABEL: "serve"})
        patch.chdir(tmp_path)
        ray.init(address=nodes.address, namespace=NAMESPACE, log_to_driver=False)
        stack.callback(ray.shutdown)
        serve.start(proxy_location="EveryNode", http_options={"host": "127.0.0.1", "port": port})
        values = {k: v for k, v in to_dict(config).items() if v is not None}
        application = {"name": NAME, "route_prefix": "/", "import_path": "paceline.infra.app:build", "args": values}
        _get_global_client().deploy_apps(
            ServeDeploySchema.model_validate({"applications": [application]}), _blocking=False
        )
        wait_for(
            lambda: _get_global_client().get_serve_status(NAME).app_status.status == "RUNNING", "the service", RESTART_S
        )
        replicas_of(url)
        ray.shutdown()  # a driver ends with the raylet that it is at
        with Load(url, ask_one, width=WIDTH, pause_s=0.3) as load:
            wait_for(lambda: len(load.answers) > 2 * WIDTH, "answers")
        # A replica that writes to the head's proxy when that ends stands still until GCS is back: no client may be there.
        proxies = [p for p in nodes.processes("head") if "ray::ProxyActor" in " ".join(p.cmdline())]
        nodes.kill("head")
        assert proxies and not psutil.wait_procs(proxies, timeout=60)[1]
        with Load(url, ask_one, width=WIDTH, pause_s=0.3) as without:
            wait_for(lambda: len(without.answers) > 6 * WIDTH, "answers without a head")
            assert nodes.where(ENGINE) == ["w1", "w2"]
            nodes.add("head", num_cpus=0)
            replicas_of(url)
        for answer in (*load.answers, *without.answers):
            answer.check_complete()
        version = put_drafter(
            DrafterRegistry(StorePaths.of(config).registry), read_target(config.model), tmp_path / "d", 7
        )
        # the controller was at the head: commands get 503 until a replica has started it elsewhere
        wait_for(lambda: pin(url, version) != 503, "a controller", RESTART_S)
        wait_for(lambda: {r["version"] for r in replicas_of(url).values()} == {version}, "it on both nodes")
        before = set(replicas_of(url))
        lost = next(p for p in nodes.processes("w1") if " ".join(p.cmdline()).startswith(ENGINE))
        lost.kill()
        wait_for(lambda: len(before & set(replicas_of(url))) == 1, "a replica in its place", RESTART_S)
        with Load(url, ask_one, width=WIDTH, pause_s=0.1) as later:
            wait_for(lambda: len(later.answers) > 6 * WIDTH, "answers of both")
        for answer in later.answers:
            answer.check_complete()
        assert len(nodes.where(ENGINE)) == 2 and len(nodes.where(CONTROLLER)) == 1
