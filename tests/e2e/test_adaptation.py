"""The loop closes on the real stack: traffic shifts, a delta is trained on captured rows, gated, swapped in, and drafts better."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bench.chaos.load import wait_for
from paceline.bench.common.workloads import load_prompts
from paceline.config import (
    EngineConfig,
    PolicyConfig,
    RolloutConfig,
    ServiceConfig,
    TraceConfig,
    TrainerResources,
    TreeConfig,
)
from paceline.infra.app import Service
from paceline.infra.service.stores import StorePaths
from tests.helpers.service_load import HTTP, outer_listeners, running

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(560)]
TOKEN = {"authorization": "Bearer t"}
BUCKET = "math"
"""A bucket that the bundled drafter was not trained on."""
PATIENCE_S = 400.0
NUM_COMPARED = 16


class Traffic(threading.Thread):
    """Requests of the bucket, one after the other, until it is stopped; notes every answer that is not whole."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._client = httpx.Client(base_url=url, timeout=120, headers=TOKEN)
        self._prompts = itertools.cycle(load_prompts(BUCKET, None, 240))
        self.is_over = False
        self.num_answers = 0
        self.failures: list[str] = []

    def run(self) -> None:
        while not self.is_over:
            try:
                self.ask(temperature=0.8 if self.num_answers % 3 else 0.0)
            except (httpx.HTTPError, AssertionError) as e:
                self.failures.append(repr(e))

    def ask(self, *, temperature: float, group: str | None = None, prompt: str | None = None) -> dict[str, Any]:
        body = {"prompt": prompt or next(self._prompts).text, "max_tokens": 96, "temperature": temperature, "seed": 1}
        headers = {"x-paceline-bucket": BUCKET} | ({"x-paceline-group": group} if group else {})
        response = self._client.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        answer = response.json()
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")
        self.num_answers += 1
        return answer["paceline"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    config = ServiceConfig(
        model_name="adaptation",
        device="cpu",
        data_dir=str(tmp_path_factory.mktemp("adaptation") / "data"),
        host="0.0.0.0",
        api_token="t",
        port=0,
        # a fixed budget: acceptance length then tells of the drafter, not of whether speculation pays here
        engine=EngineConfig(num_threads=1, tree=TreeConfig(max_draft_tokens=8, policy="fixed"), max_class_deltas=4),
        trainer_resources=TrainerResources(niceness=0),  # other tests keep the cores busy
        trace=TraceConfig(shard_rows=256, flush_interval_s=1.0),
        rollout=RolloutConfig(min_requests=4, max_requests=20, max_s=60.0, quiet_s=1.0),
        policy=PolicyConfig(policy="always", epoch_s=3.0, min_rows=800, holdback_percent=10),
    )
    with running(config) as service:
        yield service


def test_host_opens_the_http_port_and_no_other(service: Service) -> None:
    assert {(ip, port) for ip, port, _ in outer_listeners()[1]} == {("0.0.0.0", service.config.port)}


def test_none_of_rays_processes_that_serve_nobody_here_is_started(service: Service) -> None:
    commands = [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)]
    assert any("raylet" in c for c in commands)
    assert not [c for c in commands if "log_monitor.py" in c or "autoscaler" in c or "dashboard.py" in c]


def test_a_shift_is_learned_gated_and_swapped_in(service: Service) -> None:
    url = service.url

    def state() -> dict[str, Any]:
        return HTTP.get(f"{url}/paceline/state", headers=TOKEN, timeout=30).json()

    def adapted() -> str | None:
        now = state()
        return now["replica"]["class_versions"].get(BUCKET) if now.get("has_controller") else None

    first = wait_for(lambda: (s := state()).get("has_controller") and s["gen"] > 0 and s, "the controller")["version"]
    traffic = Traffic(url)
    traffic.start()
    try:
        version = wait_for(adapted, "an accepted drafter for the class in the replica", PATIENCE_S, every_s=0.5)
    finally:
        traffic.is_over = True
        traffic.join(120)
    assert traffic.failures == [] and not traffic.is_alive()
    assert state()["replica"]["version"] == first, "the other classes keep theirs"
    trained = [d for d in state()["decisions"] if d["action"] == "train" and d["version"] == version]
    assert [d["outcome"] for d in trained] == ["accepted"] and trained[0]["bucket"] == BUCKET

    registry = DrafterRegistry(StorePaths.of(service.config).registry)
    manifest = registry.get_manifest(version)
    assert manifest.parent == first and manifest.bucket == BUCKET and manifest.num_train_rows > 0
    assert (manifest.arm, manifest.delta_of) == ("lora", first) and registry.get_manifest(first).parent is None
    assert state()["replica"]["slots"]["first+0"] == version, "it drafts beside the first drafter"

    entries = wait_for(
        lambda: (e := state()["ledger_entries"]) and {"training", "shadow", "staging"} <= {x["kind"] for x in e} and e,
        "the job's costs in the ledger",
    )
    assert all(e["seconds"] > 0 for e in entries if e["kind"] in ("training", "shadow", "staging"))

    def length(group: str) -> float:
        with ThreadPoolExecutor(NUM_COMPARED) as pool:
            answers = list(pool.map(lambda p: traffic.ask(temperature=0, group=group, prompt=p.text), prompts))
        served = {a["drafter_version"] for a in answers}
        assert served == {first} if group == "static" else first not in served  # a later job may have made another one
        return sum(a["num_rounds"] * a["acceptance_length"] for a in answers) / sum(a["num_rounds"] for a in answers)

    prompts = load_prompts(BUCKET, None, NUM_COMPARED, seed=1)
    assert length("adaptive") > length("static")
