"""What clients see of a running two-replica service, also when its parts are killed, poisoned or swapped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray._private import ray_constants
from typer.testing import CliRunner

from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bench.chaos.drafters import Publisher
from paceline.bench.chaos.load import leave_streams, long_body, new_client, wait_for
from paceline.cli.main import app
from paceline.config import TraceConfig
from paceline.errors import PacelineError
from paceline.infra.app import Service
from paceline.infra.controller.actor import get_controller
from paceline.infra.service.stores import StorePaths
from paceline.serving.loading.target import read_target
from paceline.serving.target_model.model import TargetModel
from tests.helpers.fakes import greedy_continuation
from tests.helpers.service_load import (
    HTTP,
    NUM_PROMPTS,
    NUM_REPLICAS,
    RESTART_S,
    Answer,
    ask,
    fresh_state,
    outer_listeners,
    put_delta,
    put_drafter,
    replica_of,
    replicas_of,
    running,
    tiny_config,
    under_load,
    wait_busy,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]
LOAD_AFTER_KILL_S = 5.0
PAUSE_S = 0.3
"""Of a client before its next request: what is done meanwhile has a core for itself most of the time."""


@dataclass(kw_only=True)
class Place:
    """The running service, its registry and two random drafters next to the first one."""

    service: Service
    registry: DrafterRegistry
    target: TargetModel
    first: str
    others: list[str]

    @property
    def url(self) -> str:
        return self.service.url

    def get(self, route: str) -> dict[str, Any]:
        response = HTTP.get(f"{self.url}{route}", timeout=30)
        return response.json() if response.status_code == 200 else {}

    def post(self, command: str, **values: str) -> httpx.Response:
        return HTTP.post(f"{self.url}/paceline/{command}", json=values, timeout=60)

    def state(self) -> dict[str, Any]:
        return fresh_state(self.url)

    def replicas(self) -> dict[str, dict[str, Any]]:
        return replicas_of(self.url)

    def are_idle(self) -> bool:
        engines = [r["engine"] for r in self.replicas().values()]
        return all(e["num_running"] == e["num_waiting"] == 0 and e["num_free_pages"] == e["num_pages"] for e in engines)

    def wait_version(self, version: str) -> None:
        """Every replica runs the version in the desired generation."""

        def runs() -> bool:
            gen = self.state()["gen"]
            return all((r["version"], r["gen"]) == (version, gen) for r in self.replicas().values())

        wait_for(runs, f"version {version} on all replicas")

    def make_live(self, version: str) -> None:
        if self.state()["version"] != version:
            self.post("pin", version=version).raise_for_status()
        self.wait_version(version)

    def feedback(self) -> tuple[int, int, int, int]:
        """(produced, delivered, dropped) rows of the live replicas and rows folded by the controller, when all is quiet."""

        def read() -> tuple[int, int, int, int] | None:
            parts = [r["feedback"] for r in self.replicas().values()]
            folded = self.state()["feedback"]
            if any(p["pending"] for p in parts) or folded["lag"] != 0:
                return None
            sums = tuple(sum(p[k] for p in parts) for k in ("produced", "delivered", "dropped"))
            return (*sums, folded["delivered"])  # type: ignore[return-value]

        last: list[Any] = [None]

        def settled() -> bool:
            before, last[0] = last[0], read()
            return last[0] is not None and before == last[0]

        wait_for(settled, "quiet feedback", every_s=0.5)
        return last[0]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("faults")
    config = tiny_config(
        root, "faults", trace=TraceConfig(share=0.1, flush_interval_s=0.5),
        otlp_traces_endpoint="http://127.0.0.1:1",  # a collector that is never there, whatever else fails
    )  # fmt: skip
    target = read_target(config.model)
    registry = DrafterRegistry(StorePaths.of(config).registry)
    others = [put_drafter(registry, target, root / f"d{seed}", seed) for seed in (7, 8)]
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        variables.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
        with running(config) as service:
            place = Place(service=service, registry=registry, target=target, first="", others=others)
            place.first = place.state()["first_version"]
            place.wait_version(place.first)
            yield place


def home(place: Place) -> Path:
    """Folder of the service's files."""
    return StorePaths.of(place.service.config).home


@pytest.fixture(scope="module")
def client(place: Place) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{place.url}/v1", api_key="unused", max_retries=0)


def run_as_client(address: str, **environment: str) -> subprocess.Popen[str]:
    """A driver in a process of its own that tries to run code in the Ray at `address`."""
    code = (
        "import sys, ray\n"
        "ray.init(address=sys.argv[1], log_to_driver=False)\n"
        "print('ran', ray.get(ray.remote(lambda: 6 * 7).options(num_cpus=0).remote()))\n"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    # without this variable a client looks for a Ray on 127.0.0.1 at the computer's outer address
    environment = {**kept, ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", code, address], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def ask_all(url: str, num_requests: int, **options: Any) -> list[Answer]:
    """Send them all at once, streaming and not in turn."""

    async def main() -> list[Answer]:
        async with new_client(url) as client:
            return await asyncio.gather(
                *(ask(client, i % NUM_PROMPTS, stream=i % 2 == 0, **options) for i in range(num_requests))
            )

    return asyncio.run(main())


def ask_in_turn(url: str, num_requests: int, **options: Any) -> list[Answer]:
    async def main() -> list[Answer]:
        async with new_client(url) as client:
            return [await ask(client, i % NUM_PROMPTS, stream=False, **options) for i in range(num_requests)]

    return asyncio.run(main())


def test_greedy_answers_over_http_are_the_targets_own(place: Place, client: openai.OpenAI) -> None:
    for group in ("adaptive", "static", "plain"):
        answer = client.completions.create(
            model="faults", prompt=[5, 9, 33], max_tokens=24, temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
            extra_headers={"x-paceline-group": group, "x-paceline-bucket": "b"},
        )  # fmt: skip
        choice = answer.choices[0].model_dump()
        assert choice["token_ids"] == greedy_continuation(place.target, [5, 9, 33], 24)
        assert answer.usage is not None and answer.usage.completion_tokens == 24
        has_drafter = answer.paceline["drafter_version"] != ""  # type: ignore[attr-defined]
        assert has_drafter == (group != "plain")


def test_streams_and_errors_pass_through_serve(place: Place, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    options: Any = {"max_tokens": 12, "seed": 1, "extra_body": {"ignore_eos": True}}
    ask = {"model": "faults", "messages": messages, **options}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
    assert "," not in (whole._request_id or ",")
    with pytest.raises(openai.BadRequestError, match="suffix is not supported") as refused:
        client.completions.create(model="faults", prompt="a", suffix="b")
    assert "," not in (refused.value.request_id or ",")
    assert len(client.completions.create(model="faults", prompt="a", n=3).choices) == 3
    raw = HTTP.post(f"{place.url}/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 3})
    assert raw.text.endswith("data: [DONE]\n\n")


def test_requests_are_in_the_access_log_under_the_id_that_the_client_saw(place: Place, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="faults", prompt="a secret", max_tokens=5, extra_body={"ignore_eos": True})

    def log() -> str:
        return "".join(p.read_text() for p in home(place).glob("access-*.log"))

    text = wait_for(lambda: answer._request_id in (text := log()) and text, "a line of the access log")  # type: ignore[operator]
    (line,) = [e for e in map(json.loads, text.splitlines()) if e.get("request_id") == answer._request_id]
    assert (line["status"], line["route"], line["completion_tokens"]) == (200, "/v1/completions", 5)
    assert "secret" not in text


@pytest.mark.parametrize("path", ["/paceline/state", "/paceline/swap", "/metrics"])
def test_without_tokens_what_the_service_tells_about_itself_stays_on_this_computer(place: Place, path: str) -> None:
    assert HTTP.get(f"{place.url}{path}").status_code == 200
    assert HTTP.get(f"{place.url}{path}", headers={"host": "rebound.example"}).status_code == 403
    assert HTTP.get(f"{place.url}{path}", headers={"x-forwarded-for": "10.0.0.7"}).status_code == 403


def test_nothing_of_the_service_listens_beyond_loopback(place: Place, client: openai.OpenAI) -> None:
    client.completions.create(model="faults", prompt="abc", max_tokens=2)
    names, outer = outer_listeners()
    parts = ("gcs_server", "raylet", "Agent", "Proxy", "Replica", "ServeController", "redis")
    assert [p for p in parts if not any(p in name for name in names)] == [], names
    assert outer == []


def test_ray_runs_nothing_for_a_client_without_its_token(place: Place, tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    assert address.startswith("127.0.0.1:")
    clients = [
        run_as_client(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=os.environ["RAY_AUTH_TOKEN"]),
        run_as_client(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="guess"),
        run_as_client(address, RAY_AUTH_MODE="disabled"),
        run_as_client(address, HOME=str(tmp_path)),
    ]
    invited, *others = [c.communicate(timeout=120)[0] for c in clients]
    assert "ran 42" in invited, invited[-2000:]
    for process, output in zip(clients[1:], others, strict=True):
        assert process.returncode != 0 and "ran" not in output.split()
        assert "Unauthenticated" in output or "AuthenticationError" in output, output[-2000:]


def test_replicas_run_at_the_priority_of_whoever_started_the_service(place: Place) -> None:
    nices = {psutil.Process(r["pid"]).nice() for r in place.replicas().values()}
    assert nices == {psutil.Process().nice()}


def test_metrics_and_health(place: Place) -> None:
    text = HTTP.get(f"{place.url}/metrics").text
    assert re.search(r"\npaceline_emitted_tokens_total\{", text) and re.search(
        r"\npaceline_redis_up\{[^}]*\} 1.0", text
    )
    assert HTTP.get(f"{place.url}/healthz").json()["status"] == "ok"


def test_spans_that_no_collector_takes_are_counted(place: Place) -> None:
    body = {"prompt": "to be traced", "max_tokens": 4, "ignore_eos": True}
    assert HTTP.post(f"{place.url}/v1/completions", json=body).status_code == 200

    def dropped() -> bool:
        text = HTTP.get(f"{place.url}/metrics").text
        counts = re.findall(r"\npaceline_spans_(exported|dropped)_total\{[^}]*\} (\S+)", text)
        return {what for what, n in counts if float(n) > 0} == {"dropped"}

    assert wait_for(dropped, "dropped spans")


def test_any_scrape_counts_the_requests_of_all_replicas_and_counts_never_fall(place: Place) -> None:
    def scrape() -> dict[tuple[str, str], float]:
        found = {}
        for family in text_string_to_metric_families(HTTP.get(f"{place.url}/metrics").text):
            for s in family.samples:
                if s.name in (
                    "paceline_responses_total",
                    "paceline_request_seconds_count",
                    "paceline_emitted_tokens_total",
                ):
                    at = (s.name, s.labels["replica"])
                    found[at] = found.get(at, 0.0) + s.value
        return found

    def total(values: dict[tuple[str, str], float], name: str) -> float:
        return sum(v for (n, _), v in values.items() if n == name)

    wait_for(lambda: len({replica for _, replica in scrape()}) == NUM_REPLICAS, "every replica in one scrape")
    wait_for(place.are_idle, "empty engines")
    before, num, tokens = scrape(), 12, 5
    shown = before
    for i in range(num):
        body = {"prompt": f"number {i}", "max_tokens": tokens, "ignore_eos": True, "stream": i % 2 == 0}
        assert HTTP.post(f"{place.url}/v1/completions", json=body).status_code == 200
        now = scrape()
        assert all(now.get(at, 0.0) >= value for at, value in shown.items()), "whoever answers, no count falls"
        shown = now

    def is_counted() -> bool:
        now = scrape()
        grown = {n: total(now, n) - total(before, n) for n, _ in before}
        return grown == {
            "paceline_responses_total": num, "paceline_request_seconds_count": num,
            "paceline_emitted_tokens_total": num * tokens,
        }  # fmt: skip

    wait_for(is_counted, "one scrape that has counted all of it")


def test_200_requests_at_once_are_answered_or_told_when_to_come_back(place: Place) -> None:
    answers = ask_all(place.url, 200)
    assert len(answers) == 200
    for answer in answers:
        answer.check_complete()
    assert sum(a.num_refusals for a in answers) > 0  # more than the queues of both replicas hold
    wait_for(place.are_idle, "empty engines")
    wait_for(lambda: list((home(place) / "traces").rglob("*.safetensors")), "a trace shard")


def test_policy_never_trains_and_swaps_nothing(place: Place) -> None:
    state = wait_for(lambda: (found := place.state())["decisions"] and found, "a decision")
    assert state["policy"] == "never" and {d["action"] for d in state["decisions"]} == {"hold"}
    assert state["version"] == place.first and state["ledger"]["spent_s"] == 0
    assert sum(r["num_swaps"] for r in place.replicas().values()) == 0


def test_the_policys_commands_are_carried_out_and_what_cannot_be_is_refused(place: Place) -> None:
    def run(*words: str) -> str:
        said = CliRunner().invoke(app, ["policy", *words, "--url", place.url], catch_exceptions=False)
        assert said.exit_code == 0, said.output
        return " ".join(said.output.split())

    before = place.state()
    live = f"generation {before['gen']}, live {before['version']}"
    assert run("pause") == f"pause: {live}, policy never (paused)" and place.state()["is_paused"]
    num_decisions = len(place.state()["decisions"])
    assert run("resume") == f"resume: {live}, policy never" and not place.state()["is_paused"]
    assert run("set", "payoff") == f"policy: {live}, policy payoff" and place.state()["policy"] == "payoff"
    balances = []
    for start_s in (40, 90):
        assert run("bank", str(start_s)) == f"bank: {live}, policy payoff"
        balances.append(place.state()["bandit"]["bank_s"])
    assert balances[1] - balances[0] == pytest.approx(50.0, abs=1.0)  # an epoch between the two books savings
    for words, reason in (
        (("set", "magic"), "policy must be one of never, always, interval, payoff"),
        (("bank", "1e30"), r"bank_s must be in \[0"),
        (("train", "load", "--arm", "magic"), "arm must be one of lora"),
        (("train", "nobody"), "bucket must be one with measured traffic"),
    ):
        with pytest.raises(PacelineError, match=reason):
            run(*words)
    assert run("set", "never") == f"policy: {live}, policy never"
    assert len(place.state()["decisions"]) >= num_decisions and place.state()["gen"] == before["gen"]


def test_swaps_under_live_streams_drop_nothing_and_mix_no_versions(place: Place) -> None:
    def make_live(version: str, command: str = "pin") -> None:
        values = {"version": version} if command == "pin" else {}
        place.post(command, **values).raise_for_status()
        place.wait_version(version)
        answers.extend(ask_in_turn(place.url, 1))  # also when it is live for a moment only
        assert answers[-1].version == version

    def swap() -> None:
        for version in place.others:
            make_live(version)
        make_live(place.others[0], "rollback")
        make_live(place.first)

    answers: list[Answer] = []
    place.make_live(place.first)
    swaps = {i: r["num_swaps"] for i, r in place.replicas().items()}
    answers += (streams := under_load(place.url, swap, width=8, num_tokens=48, only_streams=True))
    for answer in answers:
        answer.check_complete()
    for answer in streams:
        assert len(answer.stats) == 2  # the last chunk and the usage chunk name the same version
    assert len({a.version for a in streams}) > 1
    assert any(a.stats[-1]["num_draft_tokens"] > 0 for a in answers)
    pauses_ms: list[float] = []
    for replica_id, replica in place.replicas().items():
        assert replica["num_swaps"] == swaps[replica_id] + 4
        assert replica["engine"]["num_drafter_failures"] == replica["engine"]["num_callback_errors"] == 0
        pauses_ms += replica["pause_ms"][-4:]
    rounds_ms = [s["round_ms"] / s["num_rounds"] for a in streams for s in a.stats if s["num_rounds"]]
    # one of the eight may be the operating system's: two engines and their clients share two cores with other tests
    assert sorted(pauses_ms)[-2] < statistics.median(rounds_ms), (pauses_ms, statistics.median(rounds_ms))
    wait_for(lambda: not any(sum(r["pins"].values()) for r in place.replicas().values()), "released pins")


def test_clients_that_hang_up_free_the_engine(place: Place) -> None:
    def num_aborted() -> int:
        return sum(r["engine"]["num_aborted"] for r in place.replicas().values())

    def is_running() -> bool:
        return replica_of(place.url)["engine"]["num_running"] > 0

    async def leave_whole_answers() -> None:
        async with new_client(place.url) as client:
            whole = [asyncio.ensure_future(client.post("/v1/completions", json=long_body())) for _ in range(8)]
            while not await asyncio.to_thread(is_running) and not all(w.done() for w in whole):
                pass
            for w in whole:
                w.cancel()
            await asyncio.gather(*whole, return_exceptions=True)

    before = num_aborted()
    leave_streams(place.url, 6)
    wait_for(place.are_idle, "empty engines")
    streams = num_aborted() - before
    assert 0 < streams <= 6  # a busy machine may finish one before it notices that its client is gone

    def some_were_aborted() -> bool:  # how many reach their engine before the client leaves is a matter of timing
        asyncio.run(leave_whole_answers())
        wait_for(place.are_idle, "empty engines")
        return num_aborted() > before + streams

    wait_for(some_were_aborted, "a whole answer aborted because its client left")
    ask_in_turn(place.url, 1)[0].check_complete()


def publisher(place: Place) -> Publisher:
    """Publishes versions made of the first one, by the front door and behind the registry's back."""
    return Publisher(home(place) / "registry", place.first)


def poisoned(place: Place, tmp_path: Path) -> str:
    """Weights with one NaN under a manifest that fits them."""
    return publisher(place).poisoned(9)


def of_another_shape(place: Place, tmp_path: Path) -> str:
    return put_drafter(place.registry, place.target, tmp_path, 9, hidden_size=24)


def with_damaged_weights(place: Place, tmp_path: Path) -> str:
    return publisher(place).damaged(11)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (poisoned, "must be finite"),
        (of_another_shape, "must be ("),
        (with_damaged_weights, "differ from their manifest"),
    ],
)
def test_a_drafter_that_replicas_refuse_never_serves(place: Place, tmp_path: Path, make: Any, reason: str) -> None:
    place.make_live(place.first)
    gen = place.state()["gen"]
    version = make(place, tmp_path)
    assert place.post("pin", version=version).status_code == 200

    def is_back() -> bool:
        state = place.state()
        return state["gen"] == gen + 2 and state["version"] == place.first

    answers = under_load(place.url, lambda: wait_for(is_back, "the roll-back"), width=3, pause_s=0.3)
    for answer in answers:
        answer.check_complete()
        assert answer.version == place.first
    # the roll-back follows a replica's report of this generation, and carries its reason
    last = [d for d in place.state()["decisions"] if d["action"] != "hold"][-1]
    assert (last["action"], last["version"]) == ("rollback", place.first)
    assert f"refused {version}" in last["reason"] and reason in last["reason"]
    place.wait_version(place.first)
    assert all(r["failed_gen"] is None and not r["failures"] for r in place.replicas().values())
    assert place.state()["bandit"]["pinned"] is None  # the operator's pin ended with the version
    assert version not in place.state()["history"]


def test_classes_have_versions_of_their_own_while_orders_change_and_the_controller_dies(place: Place, tmp_path: Path) -> None:  # fmt: skip
    place.make_live(place.first)
    one, other = place.others[0], put_delta(place.registry, place.first, seed=3)
    bad = poisoned(place, tmp_path)

    def serve(**versions: str) -> None:
        def is_so() -> bool:
            return all(r["class_versions"] == versions for r in place.replicas().values())

        wait_for(is_so, f"replicas that serve {versions}")
        for bucket in ("b0", "b1"):
            for answer in ask_in_turn(place.url, 2, bucket=bucket):
                answer.check_complete()
                assert answer.version == versions.get(bucket, place.first)

    def change() -> None:
        place.post("assign", bucket="b0", version=one).raise_for_status()
        said = CliRunner().invoke(app, ["versions", "assign", "b1", other, "--url", place.url])
        assert said.exit_code == 0 and "assign: generation" in said.output, said.output
        listed = CliRunner().invoke(app, ["versions", "list", "--json", "--url", place.url])
        assert json.loads(listed.output)["class_versions"] == {"b0": one, "b1": other}
        serve(b0=one, b1=other)
        slots = [r["slots"] for r in place.replicas().values()]
        assert all(other in (s.get("first+0"), s.get("first+1")) and one not in s["first"] for s in slots), slots
        os.kill(ray.get(get_controller(place.service.config.model_name).pid.remote()), signal.SIGKILL)
        wait_for(lambda: place.state()["class_versions"] == {"b0": one, "b1": other}, "the controller's return")
        place.post("assign", bucket="b0", version=bad).raise_for_status()
        serve(b1=other)
        wait_for(lambda: all(bad in r["refused"] for r in place.state()["replicas"]), "reports of the refusal")
        assert place.post("assign", bucket="b0", version="00000000aaaa").status_code == 400
        place.post("unassign", bucket="b1").raise_for_status()
        place.post("assign", bucket="b0", version=other).raise_for_status()
        serve(b0=other)
        place.post("unassign", bucket="b0").raise_for_status()
        serve()

    answers = under_load(place.url, change, width=4, pause_s=PAUSE_S)
    for answer in answers:
        answer.check_complete()
        assert answer.version in (place.first, one, other)
    assert {place.first, one, other} <= {a.version for a in answers}
    assert place.state()["version"] == place.first and place.state()["class_versions"] == {}
    assert place.are_idle()


def test_a_damaged_or_unknown_manifest_is_refused_at_once(place: Place) -> None:
    gen = place.state()["gen"]
    root = home(place) / "registry" / "manifests"
    (root / "0123456789ab.json").write_text('{"version": "0123')
    good = json.loads((root / f"{place.first}.json").read_text())
    (root / "ba9876543210.json").write_text(json.dumps(good))
    try:
        for version, reason in (
            ("0123456789ab", "is damaged"), ("ba9876543210", "belongs to another version"),
            ("00000000aaaa", "not in the registry"), ("../../etc", "12 hexadecimal digits"),
        ):  # fmt: skip
            refused = place.post("pin", version=version)
            assert refused.status_code == 400 and reason in refused.json()["error"]["message"], refused.text
    finally:
        (root / "0123456789ab.json").unlink()
        (root / "ba9876543210.json").unlink()
    assert place.state()["gen"] == gen
    ask_in_turn(place.url, 1)[0].check_complete()


def test_a_drafter_that_accepts_nothing_changes_no_text_and_stops_drafting(place: Place) -> None:
    place.make_live(place.first)
    place.make_live(place.others[0])
    answers = ask_in_turn(place.url, 40, bucket="nothing", num_tokens=32)
    for answer in answers:
        answer.check_complete()
        assert answer.version == place.others[0]
    drafted = [a.stats[-1]["num_draft_tokens"] for a in answers]
    assert sum(drafted) > 0  # it was tried
    assert (
        sum(drafted[24:]) < 16 * 5.0
    )  # and switched off, but for rare probes; always on, each would have about 30 rounds' trees
    place.post("rollback").raise_for_status()
    place.wait_version(place.first)
    assert ask_in_turn(place.url, 1)[0].version == place.first


def test_ten_seconds_without_redis_lose_no_request_and_no_count(place: Place) -> None:
    before = place.feedback()
    redis = place.service.redis
    assert redis is not None
    kills = 0

    def kill() -> None:
        nonlocal kills
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if (pid := redis.pid) is not None:  # as often as the supervisor brings it back
                with contextlib.suppress(ProcessLookupError):  # it is dead, and the supervisor has yet to see it
                    os.kill(pid, signal.SIGKILL)
                    kills += 1
            if kills % 8 == 0:
                assert HTTP.get(f"{place.url}/healthz", timeout=30).status_code == 200
            time.sleep(0.05)
        is_up = lambda: all(r["feedback"]["redis_up"] for r in place.replicas().values())  # noqa: E731
        wait_for(is_up, "Redis back in every replica")

    answers = under_load(place.url, kill, pause_s=PAUSE_S)
    for answer in answers:
        answer.check_complete()
    assert kills > 1
    produced, delivered, dropped, folded = (b - a for a, b in zip(before, place.feedback(), strict=True))
    assert produced == delivered + dropped
    assert folded == delivered  # every delivered row exactly once
    assert produced == sum(a.stats[-1]["num_rounds"] for a in answers)
    assert dropped == 0  # the rings hold more than ten seconds of this load
    assert place.state()["redis_up"] is True


def test_the_controller_comes_back_as_it_was(place: Place) -> None:
    place.make_live(place.others[1])
    before, rows = place.state(), place.feedback()
    old = ray.get(get_controller("faults").pid.remote(), timeout=30)

    def kill() -> None:
        os.kill(old, signal.SIGKILL)
        time.sleep(LOAD_AFTER_KILL_S)

    def is_new() -> bool:
        state = place.get("/paceline/state")
        return bool(state.get("has_controller")) and state["epoch"] > before["epoch"]

    answers = under_load(place.url, kill, pause_s=PAUSE_S)
    for answer in answers:
        answer.check_complete()
        assert answer.version == place.others[1]
    wait_for(is_new, "a new controller", RESTART_S)
    assert ray.get(get_controller("faults").pid.remote(), timeout=30) != old
    after = place.state()
    for key in ("gen", "version", "first_version", "history", "policy"):
        assert after[key] == before[key], key
    for key, name in (("decisions", "decision_id"), ("ledger_entries", "entry_id")):
        ids = [entry[name] for entry in after[key]]
        assert len(ids) == len(set(ids)) and {entry[name] for entry in before[key]} <= set(ids), key
    produced, delivered, dropped, folded = (b - a for a, b in zip(rows, place.feedback(), strict=True))
    assert produced == delivered == folded and dropped == 0
    assert produced == sum(a.stats[-1]["num_rounds"] for a in answers)
    assert place.post("rollback").status_code == 200  # and takes commands again


def test_requests_of_a_killed_replica_break_off_visibly_and_the_rest_succeed(place: Place) -> None:
    place.make_live(place.others[0])
    victim, replica = next(iter(place.replicas().items()))

    def kill() -> None:
        wait_busy(place.url, victim, 3)
        os.kill(replica["pid"], signal.SIGKILL)
        time.sleep(LOAD_AFTER_KILL_S)

    answers = under_load(place.url, kill, width=8, num_tokens=64)
    for answer in answers:
        answer.check_explicit()
    broken = [a for a in answers if not a.looks_complete]
    assert 0 < len(broken) <= 24  # at most what the replica held, not everything sent meanwhile
    assert {a.status for a in answers} <= {200, 503}
    assert victim not in place.replicas()
    place.wait_version(place.others[0])  # also the new one, which began with the first drafter
    later = ask_all(place.url, 16)
    for answer in later:
        answer.check_complete()
        assert answer.version == place.others[0]
    wait_for(place.are_idle, "empty engines")
    assert HTTP.get(f"{place.url}/healthz", timeout=30).json()["status"] == "ok"
