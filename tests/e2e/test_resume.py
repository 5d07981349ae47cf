"""Resume mode with real processes: a replica that is killed takes no answer with it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from paceline.config import EngineConfig, IngressConfig, PolicyConfig, ServiceConfig
from paceline.infra.app import Service, run_service, stop_service
from paceline.serving.target import TargetModel
from tests.e2e.service_load import (
    MAX_TOKENS,
    PROMPTS,
    fresh_state,
    new_client,
    under_load,
    wait_for,
    write_drafter,
    write_model,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]
NUM_REPLICAS = 2
NUM_LONG = 480
RESTART_S = 120.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("resume")
    write_model(root / "model")
    write_drafter(root / "drafter", TargetModel.load(root / "model"), seed=0)
    config = ServiceConfig(
        model=str(root / "model"),
        drafter=str(root / "drafter"),
        model_name="resume",
        device="cpu",
        data_dir=str(root / "data"),
        port=0,
        num_replicas=NUM_REPLICAS,
        resume=True,
        ingress=IngressConfig(max_wait_s=RESTART_S),
        engine=EngineConfig(max_running=8, max_waiting=16, kv_bytes=8 * 2**20, num_threads=1),
        policy=PolicyConfig(policy="never", holdback_percent=0),
    )
    service = run_service(config)
    yield service
    stop_service(service)


def replicas(url: str) -> dict[str, dict[str, Any]]:
    """Replica id -> its part of the state, of every engine."""
    seen: dict[str, dict[str, Any]] = {}

    def look() -> bool:
        response = httpx.get(f"{url}/paceline/state", timeout=30)
        if response.status_code == 200:
            replica = response.json()["replica"]
            seen[replica["replica_id"]] = replica
        return len(seen) == NUM_REPLICAS

    wait_for(look, "an answer of every replica", RESTART_S, every_s=0.01)
    return seen


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=30).text  # an error while a replica is being lost has no such line
    return next((float(s.split()[1]) for s in text.splitlines() if s.startswith(f"paceline_{name} ")), -1.0)


def test_the_ingress_passes_on_what_engines_answer(service: Service) -> None:
    url = service.url
    assert httpx.get(f"{url}/healthz").json()["status"] == "ok"
    card = httpx.get(f"{url}/v1/models").json()["data"][0]
    assert card["id"] == "resume" and card["max_model_len"] > 64
    assert metric(url, "emitted_tokens_total") >= 0
    assert httpx.get(f"{url}/paceline/swap").json()["slots"]
    page = httpx.get(f"{url}/dashboard", follow_redirects=True)
    assert page.status_code == 200 and "content-security-policy" in page.headers
    assert len(httpx.get(f"{url}/dashboard/static/plotly.min.js").content) > 10**6
    with httpx.stream("GET", f"{url}/dashboard/api/events", timeout=30) as events:
        assert next(events.iter_lines()) == "event: update"
    fresh_state(url)  # the controller is there
    refused = httpx.post(f"{url}/paceline/pin", json={"version": "00000000aaaa"}, timeout=30)
    assert refused.status_code == 400 and "not in the registry" in refused.text
    assert httpx.get(f"{url}/paceline/state", headers={"host": "evil.example"}).status_code == 403
    bad = httpx.post(f"{url}/v1/completions", json={"prompt": [5, 10**6], "stream": True})
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "prompt"


def test_clients_that_hang_up_free_the_engines(service: Service) -> None:
    body = {"prompt": PROMPTS[3], "max_tokens": NUM_LONG, "temperature": 0, "ignore_eos": True}

    def totals() -> tuple[int, int]:
        engines = [r["engine"] for r in replicas(service.url).values()]
        return sum(e["num_aborted"] for e in engines), sum(e["num_running"] + e["num_waiting"] for e in engines)

    async def leave() -> None:
        async with new_client(service.url) as client:
            for _ in range(4):  # left after their first event
                async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                    await anext(response.aiter_lines())

    before = totals()[0]
    asyncio.run(leave())
    wait_for(lambda: totals()[1] == 0, "empty engines")
    assert totals()[0] > before


def test_a_killed_replica_takes_no_answer_with_it(service: Service) -> None:
    url = service.url
    before = replicas(url)
    victim = next(iter(before))

    def kill() -> None:
        def is_busy() -> bool:
            response = httpx.get(f"{url}/paceline/state", timeout=30)
            replica = response.json()["replica"] if response.status_code == 200 else {"replica_id": ""}
            return replica["replica_id"] == victim and replica["engine"]["num_running"] > 1

        wait_for(is_busy, "a busy replica", every_s=0.001)
        os.kill(before[victim]["pid"], signal.SIGKILL)
        wait_for(lambda: metric(url, "ingress_resumed_total") >= 1, "an answer that goes on elsewhere", every_s=0.01)

    answers = under_load(url, kill, width=8, num_tokens=MAX_TOKENS)  # streams and whole answers
    assert {a.is_stream for a in answers} == {False, True}
    for answer in answers:
        answer.check_complete()
        stats = answer.stats[-1]
        assert stats["num_emitted_tokens"] == MAX_TOKENS
        assert 1 + stats["num_rounds"] + stats["num_accepted_tokens"] - stats["num_truncated_tokens"] == MAX_TOKENS
    assert wait_for(lambda: metric(url, "ingress_requests_total") > 0, "metrics")
    assert metric(url, "ingress_given_up_total") == 0
