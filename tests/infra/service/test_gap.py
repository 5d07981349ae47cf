"""The gap of a redeployment with one replica and no room for a second: clients are told at once, nobody waits or gets a 500."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import ray
from ray import serve

from paceline.errors import ConfigError
from paceline.infra.app import build, lean_nodes
from paceline.infra.service.deployment import DeploymentLimits, bind_engine
from paceline.infra.service.front import GAP_RETRY_S, PROXY_CALLBACK, PROXY_VARIABLE
from paceline.infra.service.presence import EVERY_S, LEAST_S, details, routes
from paceline.machine import free_port

START_S = 4.0


class Foreign:
    """An application that is not ours."""

    async def __call__(self, request: Any) -> str:
        return "foreign"


class Starting:
    """Stands for an engine that takes its time to start."""

    def __init__(self, factory: str, config: dict[str, Any]) -> None:
        time.sleep(config["start_s"])
        self.number = config["number"]

    async def __call__(self, request: Any) -> int:
        return self.number


@pytest.fixture
def url() -> Iterator[str]:
    assert not ray.is_initialized()
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PROXY_VARIABLE, PROXY_CALLBACK)
        with lean_nodes():
            ray.init(
                address="local",
                num_cpus=1,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=80 * 2**20,
            )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


def deploy(number: int, name: str = "gap", route: str = "/gap", *, num_cpus: float = 1.0, start_s: float = 0.0) -> None:
    limits = DeploymentLimits(num_cpus=num_cpus, graceful_shutdown_timeout_s=5.0)
    values = {"number": number, "start_s": start_s}
    serve.run(bind_engine(Starting, "none", values, limits), name=name, route_prefix=route)


@pytest.mark.ray
@pytest.mark.slow
def test_clients_are_told_to_come_back_while_the_only_replica_is_replaced(url):
    deploy(1)
    deploy(7, "other", "/", num_cpus=0.0)
    foreign = serve.deployment(Foreign, ray_actor_options={"num_cpus": 0})
    serve.run(foreign.bind(), name="foreign", route_prefix="/foreign")
    found: list[tuple[float, int, float, str]] = []  # sent at, status, seconds, body
    looks: list[tuple[float, float, bool]] = []  # began at, ended at, whether Serve's controller has no replica

    def look(second: Future[None]) -> None:
        while not second.done():
            began, is_gone = time.monotonic(), bool(routes(details())["/gap"])
            looks.append((began, time.monotonic(), is_gone))
            time.sleep(0.1)

    def ask() -> None:
        began = time.monotonic()
        answer = httpx.get(f"{url}/gap", timeout=60.0)
        found.append((began, answer.status_code, time.monotonic() - began, answer.text))
        if answer.status_code == 503:
            assert answer.headers["retry-after"] == str(GAP_RETRY_S)
            assert answer.json()["error"]["code"] == "no_replica"

    with ThreadPoolExecutor(30) as pool:
        second = pool.submit(deploy, 2, start_s=START_S)
        asked = [pool.submit(look, second)]
        while not second.done():
            asked.append(pool.submit(ask))
            assert [httpx.get(f"{url}{path}").text for path in ("/", "/gaps", "/foreign")] == ["7", "7", "foreign"]
            time.sleep(0.2)
        second.result()
        for future in asked:
            future.result()
    # Serve calls a deployment ready before its proxy has heard of the new replica: a client that comes back as told finds it.
    until = time.monotonic() + 30.0
    while (answer := httpx.get(f"{url}/gap")).status_code == 503 and time.monotonic() < until:
        time.sleep(float(answer.headers["retry-after"]))
    assert answer.text == "2" and httpx.get(f"{url}/-/routes").status_code == 200
    assert {code for _, code, _, _ in found} == {200, 503}, "neither a 500 nor a 429"
    refused = [(at, seconds) for at, code, seconds, _ in found if code == 503]
    assert len(refused) >= 8 and max(seconds for _, seconds in refused) < 2.0
    first = min(at for at, _ in refused)
    for at in sorted(at for at, code, seconds, _ in found if code == 200 and seconds > 2.0 and at > first + 0.5):
        # Serve's controller may be late itself, or have the new replica before the proxy knows of it.
        near = [(ended - began, is_gone) for began, ended, is_gone in looks if at <= began < at + EVERY_S]
        assert not near or not all(took < LEAST_S and is_gone for took, is_gone in near), (
            f"a request {at - first:.1f} s behind the first refusal waited, and the gap was known: {near}"
        )


def test_a_deployment_of_one_replica_is_told_of_the_gap_before_it_comes(tmp_path, caplog):
    args = {"data_dir": str(tmp_path), "drafter": "lookup"}
    with caplog.at_level(logging.WARNING, logger="paceline"):
        build({**args, "num_replicas": 2})
        assert "503" not in caplog.text
        build(args)
    assert "num_replicas is 1: a redeployment stops the replica before the new one starts" in caplog.text


def test_a_deployment_where_ray_has_gpus_must_say_what_its_replicas_take(tmp_path, monkeypatch):
    """Ray hides no GPU from a replica that asked for none, so that several would load onto the same one."""
    args = {"data_dir": str(tmp_path), "drafter": "lookup", "num_replicas": 2}
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0})
    with pytest.raises(ConfigError, match="must be cuda or cpu in a Ray cluster with GPUs"):
        build(args)
    build({**args, "device": "cpu"})
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 8.0})
    build(args)
