"""A service grows with its requests and shrinks again: no request notices, and every replica serves the classes' versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bench.chaos.load import Load, wait_for
from paceline.config import AutoscalingConfig, EngineConfig
from paceline.infra.service.stores import StorePaths
from paceline.serving.loading.target import read_target
from tests.helpers.service_load import (
    HTTP,
    NUM_PROMPTS,
    RESTART_S,
    Answer,
    ask,
    fresh_state,
    put_drafter,
    replica_of,
    running,
    tiny_config,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]
CLASSES = ("code", "chat")
NUM_TOKENS = 96


def replica_states(app: str) -> dict[str, int]:
    """State -> number of engine replicas, by Serve."""
    found = serve.status().applications[app].deployments["engine"].replica_states
    return {str(getattr(state, "value", state)): number for state, number in found.items()}


def test_replicas_come_with_requests_and_drain_without_a_failed_one(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path, "paceline", num_replicas=1,
        engine=EngineConfig(max_running=2, max_waiting=16, kv_bytes=8 * 2**20, num_threads=1),
        autoscaling=AutoscalingConfig(max_replicas=2, look_back_period_s=2.0, upscale_delay_s=0.5, downscale_delay_s=1.0),
    )  # fmt: skip
    target, registry = read_target(config.model), DrafterRegistry(StorePaths.of(config).registry)
    code, chat, later = (put_drafter(registry, target, tmp_path / f"d{seed}", seed) for seed in (7, 8, 9))
    with running(config) as service:
        url = service.url

        def post(command: str, **values: str) -> None:
            HTTP.post(f"{url}/paceline/{command}", json=values, timeout=60).raise_for_status()

        def reports() -> list[dict[str, Any]]:
            return fresh_state(url)["replicas"]

        async def ask_one(client: httpx.AsyncClient, i: int) -> Answer:
            return await ask(client, i % NUM_PROMPTS, stream=i % 3 > 0, num_tokens=NUM_TOKENS, bucket=CLASSES[i % 2])

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
        with Load(url, ask_one, width=1) as quiet:
            wait_for(lambda: len(reports()) == 2, "reports of both replicas")
            assert all(r["class_versions"] == wanted for r in reports())
            wait_for(lambda: "STOPPING" in replica_states("paceline"), "a replica that drains", RESTART_S, every_s=0.02)
            post("pin", version=later)
            wait_for(lambda: replica_states("paceline") == {"RUNNING": 1}, "its end", RESTART_S)

            def is_published() -> bool:
                state = fresh_state(url)
                return [(r["version"], r["gen"]) for r in state["replicas"]] == [(later, state["gen"])]

            wait_for(is_published, "the version that was published meanwhile")

        answers: list[Answer] = [*busy.answers, *quiet.answers]  # type: ignore[list-item]
        for answer in answers:
            answer.check_complete()
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
