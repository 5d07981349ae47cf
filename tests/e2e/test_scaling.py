"""Services of several replicas and of several models: they grow and shrink, come and go, and no request notices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bench.chaos.load import Load, wait_for
from paceline.config import AutoscalingConfig, EngineConfig
from paceline.errors import ConfigError
from paceline.infra.app import Service, lean_nodes, run_service, stop_service
from paceline.infra.controller.actor import get_controller
from paceline.infra.service.claim import check_claim
from paceline.infra.service.deployment import replica_values
from paceline.infra.service.front import PROXY_CALLBACK, PROXY_VARIABLE
from paceline.infra.service.parts import replica_parts
from paceline.infra.service.stores import StorePaths
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.serving.loading.target import read_target
from tests.helpers.service_load import (
    HTTP,
    NUM_PROMPTS,
    RESTART_S,
    Answer,
    ask,
    fresh_state,
    make_certificate,
    put_drafter,
    replica_of,
    running,
    tiny_config,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]
CLASSES = ("code", "chat")
NUM_TOKENS = 96


def check_whole(answers: Sequence[Any]) -> None:
    """There are answers, and each has all its tokens by one version; that they are the right ones is test_service.py's."""
    assert answers
    for a in answers:
        assert a.looks_complete and len(a.token_ids) == a.num_wanted, (a.status, a.error, len(a.token_ids))
        assert a.num_late == 0 and len({s["drafter_version"] for s in a.stats}) == 1


def replica_states(app: str) -> dict[str, int]:
    """State -> number of engine replicas, by Serve."""
    found = serve.status().applications[app].deployments["engine"].replica_states
    return {str(getattr(state, "value", state)): number for state, number in found.items()}


def test_replicas_come_with_requests_and_drain_without_a_failed_one(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path, "paceline", num_replicas=1,
        engine=EngineConfig(max_running=2, max_waiting=16, kv_bytes=8 * 2**20, num_threads=1),
        autoscaling=AutoscalingConfig(max_replicas=2, look_back_period_s=1.0, upscale_delay_s=0.0, downscale_delay_s=0.5),
    )  # fmt: skip
    target, registry = read_target(config.model), DrafterRegistry(StorePaths.of(config).registry)
    code, chat, later = (put_drafter(registry, target, tmp_path / f"d{seed}", seed) for seed in (7, 8, 9))
    with running(config) as service:
        url = service.url

        def post(command: str, **values: str) -> None:
            HTTP.post(f"{url}/paceline/{command}", json=values, timeout=60).raise_for_status()

        def reports() -> list[dict[str, Any]]:
            return fresh_state(url)["replicas"]

        def both() -> list[dict[str, Any]] | None:
            return found if len(found := reports()) == 2 else None

        async def ask_one(client: httpx.AsyncClient, i: int) -> Answer:
            return await ask(client, i % NUM_PROMPTS, stream=i % 3 > 0, num_tokens=NUM_TOKENS, bucket=CLASSES[i % 2])

        fresh_state(url)  # the controller is there
        for bucket, version in zip(CLASSES, (code, chat), strict=True):
            post("assign", bucket=bucket, version=version)
        wanted = {"code": code, "chat": chat}
        wait_for(lambda: [r["class_versions"] for r in reports()] == [wanted], "the versions of both classes")
        assert replica_states("paceline") == {"RUNNING": 1}
        first = replica_of(url)["replica_id"]

        with Load(url, ask_one, width=6) as busy:  # two run, and the others wait
            found: dict[str, Any] = {}

            def is_second() -> bool:
                found.update(replica_of(url))
                return found.get("replica_id", first) != first

            wait_for(is_second, "a second replica", RESTART_S, every_s=0.02)
            assert [r["class_versions"] for r in wait_for(both, "reports of both replicas")] == [wanted, wanted]
        with Load(url, ask_one, width=1, pause_s=0.2) as quiet:
            wait_for(lambda: "STOPPING" in replica_states("paceline"), "a replica that drains", RESTART_S, every_s=0.2)
            post("pin", version=later)
            wait_for(lambda: replica_states("paceline") == {"RUNNING": 1}, "its end", RESTART_S)

            def is_published() -> bool:
                state = fresh_state(url)
                return [(r["version"], r["gen"]) for r in state["replicas"]] == [(later, state["gen"])]

            wait_for(is_published, "the version that was published meanwhile")

        answers: list[Answer] = [*busy.answers, *quiet.answers]  # type: ignore[list-item]
        check_whole(answers)
        assert {a.version for a in answers if a in busy.answers} == {code, chat}, (
            "every replica, from its first request"
        )

        def delivered() -> int:
            return int(fresh_state(url)["feedback"]["delivered"])

        num_rounds = sum(a.stats[-1]["num_rounds"] for a in answers)
        wait_for(lambda: delivered() >= num_rounds, "the last feedback of the replica that is gone")
        assert delivered() == num_rounds
        scrape = HTTP.get(f"{url}/metrics").text
        assert scrape.count("\npaceline_rounds_total{") == 1, "a replica that is gone is in no scrape"


async def ask_two(client: httpx.AsyncClient, i: int) -> Answer:
    return await ask(client, i % NUM_PROMPTS, stream=i % 2 > 0)


def check_own(service: Service, answers: Sequence[Any]) -> None:
    """Every answer is whole, and routes, controller, log and figures of a service tell of them and of nothing else."""
    name, url = service.config.model_name, service.url
    check_whole(answers)
    num_rounds = sum(a.stats[-1]["num_rounds"] for a in answers)
    wait_for(lambda: fresh_state(url)["feedback"]["delivered"] >= num_rounds, f"the feedback of {name}")
    assert fresh_state(url)["feedback"]["delivered"] == num_rounds
    assert [m["id"] for m in HTTP.get(f"{url}/v1/models").json()["data"]] == [name]
    samples = [line for line in HTTP.get(f"{url}/metrics").text.splitlines() if line.startswith("paceline_")]
    assert samples and all(f'model="{name}"' in line for line in samples)
    page = HTTP.get(f"{url}/dashboard")
    assert page.status_code == 200 and HTTP.get(f"{url}/dashboard/static/app.js").status_code == 200
    logs = StorePaths.of(service.config).home.glob("access-*.log")
    assert sum(len(log.read_text().splitlines()) for log in logs) >= len(answers)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a Ray cluster that is no service's own."""
    assert not ray.is_initialized()
    monkeypatch.setenv(PROXY_VARIABLE, PROXY_CALLBACK)
    monkeypatch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    with lean_nodes():
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        yield made.address
    finally:
        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
        made.shutdown()


def test_two_services_of_one_cluster_know_nothing_of_each_other(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedRedis(tmp_path / "shared") as redis:
        changes: dict[str, Any] = {"num_replicas": 1, "ray_address": cluster, "redis_url": redis.url}
        config = tiny_config(tmp_path, "a", **changes, route_prefix="/a")
        target = read_target(config.model)
        with running(config) as a:
            other = replace(config, model_name="b", route_prefix="/b")
            cert, key = map(str, make_certificate(tmp_path))
            for refused, rule in (
                (replace(other, model_name="a"), r"--model-name\) must be another one than 'a'"),
                (replace(other, route_prefix="/a"), r"--route-prefix\) must be another one than '/a'.* '/b', for instance"),
                (replace(other, port=a.config.port + 1), f"must be left out or be {a.config.port}"),
                (replace(other, tls_cert=cert, tls_key=key), "tls_cert must be left out: Serve's proxies .* run without TLS"),
            ):  # fmt: skip
                with pytest.raises(ConfigError, match=rule):
                    run_service(refused)
            # by `serve deploy` an application may have any name, and its service the name of another one
            monkeypatch.setattr("paceline.infra.service.parts.own_application", lambda: "c")
            with pytest.raises(ConfigError, match="'a', which application 'a' of this Ray cluster has"):
                replica_parts(replica_values(config, 0.0), "c-replica")
            b = run_service(other)
            assert (b.url, a.url) == (a.url.replace("/a", "/b"), f"http://127.0.0.1:{a.config.port}/a")

            only_a = put_drafter(DrafterRegistry(StorePaths.of(a.config).registry), target, tmp_path / "d7", 7)
            assert fresh_state(a.url)["gen"] == fresh_state(b.url)["gen"] == 1
            loads = [Load(s.url, ask_two, width=2) for s in (a, b)]
            with loads[0], loads[1]:
                HTTP.post(f"{a.url}/paceline/pin", json={"version": only_a}, timeout=60).raise_for_status()
                wait_for(lambda: [r["version"] for r in fresh_state(a.url)["replicas"]] == [only_a], "a's own version")
            states = {s.config.model_name: fresh_state(s.url) for s in (a, b)}
            assert [(name, s["model"], s["has_controller"]) for name, s in states.items()] == [
                ("a", "a", True),
                ("b", "b", True),
            ]
            assert states["b"]["version"] == states["b"]["first_version"] != only_a
            assert (states["a"]["gen"], states["b"]["gen"]) == (2, 1)
            for service, running_load in zip((a, b), loads, strict=True):
                check_own(service, running_load.answers)

            with Load(b.url, ask_two, width=2) as going_on:
                stop_service(a)
                assert set(serve.status().applications) == {"b"}
                with pytest.raises(ValueError, match="paceline-controller-a"):
                    get_controller("a")
                assert HTTP.get(f"{a.url}/v1/models").status_code == 404
                num_before = len(going_on.answers)
                wait_for(lambda: len(going_on.answers) > num_before + 4, "answers of the one that goes on")
            check_whole(going_on.answers)
            assert fresh_state(b.url)["has_controller"]
            check_claim(config, "c")  # the name is free again
            stop_service(b)
            assert not serve.status().applications
