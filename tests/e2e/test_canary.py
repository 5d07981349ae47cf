"""A poisoned drafter that the gate let through meets real traffic: two replicas, the bundled model, a canary of a tenth."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bench.chaos.drafters import nudged, shuffled
from paceline.bench.chaos.load import wait_for
from paceline.bench.common.lossless import LosslessChecker
from paceline.bench.common.workloads import bundled_prompts
from paceline.config import EngineConfig, PolicyConfig, RolloutConfig, ServiceConfig, TraceConfig, TreeConfig
from paceline.contracts import is_canary
from paceline.infra.app import Service, run_service, stop_service
from paceline.paths import resolve_drafter, resolve_model, service_home
from paceline.serving.loading.families import read_drafter_files
from tests.helpers.service_load import HTTP, fresh_state

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]
PERCENT, NUM_TOKENS, WIDTH, MOST = 10, 24, 4, 200


@dataclass(kw_only=True)
class Place:
    service: Service
    first: str
    poisoned: str
    retrained: str

    def state(self) -> dict[str, Any]:
        return fresh_state(self.service.url)

    def order(self, command: str, **values: str) -> None:
        HTTP.post(f"{self.service.url}/paceline/{command}", json=values, timeout=60).raise_for_status()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("canary")
    folder = resolve_drafter("bundled")
    assert folder is not None
    config = ServiceConfig(
        model_name="canary",
        device="cpu",
        data_dir=str(root / "data"),
        port=0,
        num_replicas=2,
        # a fixed budget: the tree policy can neither protect the canary nor turn speculation off for the first drafter
        engine=EngineConfig(
            max_running=4,
            kv_bytes=16 * 2**20,
            num_threads=1,
            tree=TreeConfig(max_draft_tokens=8, policy="fixed"),
        ),
        policy=PolicyConfig(policy="never", holdback_percent=0),
        rollout=RolloutConfig(canary_percent=PERCENT, freeze_s=3600.0),
        trace=TraceConfig(share=0.0),
    )
    service = run_service(config)
    try:
        registry = DrafterRegistry(service_home(root / "data", "canary") / "registry")
        settings, state = read_drafter_files(folder)
        (first,) = registry.list()

        def put(weights: dict[str, torch.Tensor]) -> str:
            return registry.put(
                weights, drafter_type="specblock", config=settings, target_version=first.target_version,
                parent=first.version, arm="full", bucket="tools",
            ).version  # fmt: skip

        place = Place(
            service=service, first=first.version, poisoned=put(shuffled(state, 1)), retrained=put(nudged(state, 0))
        )  # fmt: skip
        place.state()  # the controller comes up after the replicas
        yield place
    finally:
        stop_service(service)


class Client:
    """Sends greedy requests, WIDTH at a time, and keeps every answer."""

    def __init__(self, url: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(resolve_model("bundled"))
        self._prompts = [tokenizer.encode(p.text) for p in bundled_prompts("tools")[:40]]
        self._url, self._lock, self.num_sent = url, threading.Lock(), 0
        self.answers: list[tuple[list[int], list[int]]] = []
        self.versions: dict[str, str] = {}

    def send(self) -> None:
        with self._lock:
            k, self.num_sent = self.num_sent, self.num_sent + 1
        prompt = self._prompts[k % len(self._prompts)]
        body = {
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = {"x-paceline-bucket": "tools"}  # no group: what a client chooses proves nothing
        response = HTTP.post(f"{self._url}/v1/completions", json=body, headers=headers, timeout=120)
        response.raise_for_status()
        answer = response.json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == NUM_TOKENS
        with self._lock:
            self.answers.append((prompt, choice["token_ids"]))
            self.versions[answer["id"].removeprefix("cmpl-")] = answer["paceline"]["drafter_version"]

    def send_many(self, number: int) -> None:
        with ThreadPoolExecutor(WIDTH) as pool:
            for done in [pool.submit(self.send) for _ in range(number)]:
                done.result()


def wait_canary(place: Place, version: str) -> None:
    def is_served() -> bool:
        replicas = place.state()["replicas"]
        return len(replicas) == 2 and all(r["canary_version"] == version for r in replicas)

    wait_for(is_served, f"canary {version} on both replicas")


def test_a_poisoned_drafter_goes_within_200_requests_and_no_output_changes(place: Place) -> None:
    client = Client(place.service.url)
    client.send_many(12)
    assert set(client.versions.values()) == {place.first}
    place.order("canary", version=place.poisoned)
    wait_canary(place, place.poisoned)
    begun = client.num_sent
    while place.state()["rollout"]["status"] == "canary":
        assert client.num_sent - begun < MOST, place.state()["rollout"]
        client.send_many(8)
    sent = client.num_sent - begun
    state = place.state()
    last = state["rollout"]["last"]
    assert (last["version"], last["outcome"]) == (place.poisoned, "rolled_back"), last
    assert sent <= MOST
    assert state["version"] == place.first and state["lifecycle"][place.poisoned]["state"] == "rolled_back"
    assert state["rollout"]["frozen_until"]["tools"] > time.time() + 3000
    own = {i: v for i, v in client.versions.items() if v == place.poisoned}
    assert own and all(is_canary(i, place.poisoned, PERCENT) for i in own)
    print(f"rolled back after {sent} requests, {len(own)} of them on the canary: {last['reason']}")

    def is_gone() -> bool:
        replicas = place.state()["replicas"]
        return len(replicas) == 2 and all(r["canary_version"] == "" and r["gen"] == state["gen"] for r in replicas)

    wait_for(is_gone, "the end of the canary on both replicas")
    before = len(client.versions)
    client.send_many(12)
    assert set(list(client.versions.values())[before:]) == {place.first}
    report = LosslessChecker(resolve_model("bundled")).check(client.answers)
    assert report.checked == NUM_TOKENS * len(client.answers) and report.mismatches == 0


def test_an_operator_may_end_a_canary_by_promoting_it(place: Place) -> None:
    place.order("canary", version=place.retrained)
    wait_canary(place, place.retrained)
    client = Client(place.service.url)
    client.send_many(20)
    served = {i: is_canary(i, place.retrained, PERCENT) for i in client.versions}
    assert {i for i, v in client.versions.items() if v == place.retrained} == {i for i, own in served.items() if own}
    place.order("pin", version=place.retrained)

    def is_live() -> bool:
        state = place.state()
        return all(
            (r["version"], r["canary_version"], r["gen"]) == (place.retrained, "", state["gen"])
            for r in state["replicas"]
        )

    wait_for(is_live, "the canary live on both replicas")
    assert place.state()["lifecycle"][place.first]["state"] == "retired"
    before = len(client.versions)
    client.send_many(6)
    assert set(list(client.versions.values())[before:]) == {place.retrained}
