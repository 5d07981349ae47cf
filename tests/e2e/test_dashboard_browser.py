"""The dashboard of a running service, in a real browser: bundled model, Ray, Redis, controller, traffic.

PACELINE_SCREENSHOTS=docs/images writes the picture of docs/operate.md (and sends three minutes of traffic first).
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.adapt.versions.registry import DrafterRegistry
from paceline.config import EngineConfig, PolicyConfig, RolloutConfig, ServiceConfig, TraceConfig
from paceline.infra.app import Service, run_service, stop_service
from paceline.infra.demo.client import DemoClient
from paceline.infra.demo.pools import bucket_pools
from paceline.infra.demo.scenario import Phase, Traffic
from paceline.infra.service.stores import StorePaths
from paceline.paths import resolve_drafter, resolve_model
from paceline.serving.loading.families import read_drafter_files
from paceline.serving.loading.target import read_target
from tests.helpers import service_load
from tests.helpers.browser_page import Watch, open_browser, watched_page
from tests.helpers.service_load import HTTP

pytestmark = [pytest.mark.browser, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]
SCREENSHOTS = os.environ.get("PACELINE_SCREENSHOTS")
ADMIN = "operator"
PATIENCE_S = 240.0
SETTLED_S = 20.0
"""Age of a point of a chart behind which late rows change nothing."""
IS_SETTLED = """([s, age]) => {
    const points = document.querySelector(s).data.filter((d) => d.meta.group !== "canary").map((d) => d.x.map((x, i) => [x.getTime() / 1000, d.y[i]]));
    const newest = Math.max(...points.flat().map((p) => p[0]));
    return points.every((line) => line.some(([x, y]) => y !== null && x < newest - age));
}"""


wait_for = functools.partial(service_load.wait_for, timeout_s=PATIENCE_S, every_s=0.5)


@dataclass
class Place:
    service: Service
    browser: Any
    first: str
    other: str
    errors: list[BaseException] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.service.url

    def state(self) -> dict[str, Any]:
        """The service's state while its controller answers, {} otherwise."""
        found = HTTP.get(f"{self.url}/paceline/state", timeout=30).json()
        return found if found["has_controller"] else {}

    def traffic(self, stop: threading.Event) -> None:
        """One closed-loop client; known traffic for a while, then unseen."""
        began, traffic = time.monotonic(), Traffic(bucket_pools(("tools", "math"), None), 0)
        clients = {bucket: DemoClient(self.url, "paceline", began, bucket) for bucket in ("tools", "math")}
        try:
            while not stop.wait(0.0 if SCREENSHOTS else 0.1):
                bucket = "tools" if time.monotonic() - began < (40.0 if SCREENSHOTS else 3.0) else "math"
                clients[bucket].send(traffic.next(Phase(name="x", buckets=(bucket,), share=1.0)), "x")
        except BaseException as e:
            self.errors.append(e)
        finally:
            for client in clients.values():
                client.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with open_browser() as browser:
        config = ServiceConfig(
            device="cpu",
            data_dir=str(tmp_path_factory.mktemp("data")),
            port=0,
            admin_token=ADMIN,
            engine=EngineConfig(num_threads=1, max_running=8),
            trace=TraceConfig(shard_rows=256, flush_interval_s=1.0),
            policy=PolicyConfig(epoch_s=5.0, min_rows=800, holdback_percent=25, horizon_s=150.0, trusts_groups=True),
            rollout=RolloutConfig(canary_percent=20, max_requests=24, max_s=40.0),
        )
        service = run_service(config)
        stop = threading.Event()
        sender = threading.Thread(target=lambda: made.traffic(stop), daemon=True)
        try:
            first = wait_for(
                lambda: HTTP.get(f"{service.url}/paceline/state", timeout=30).json().get("version"), "a live version"
            )
            made = Place(service, browser, first, another_version(config, first))
            wait_for(made.state, "a controller")
            sender.start()
            yield made
        finally:
            stop.set()
            if sender.ident is not None:
                sender.join(130)
            stop_service(service)


def another_version(config: ServiceConfig, first: str) -> str:
    """The bundled drafter with one tensor changed a little, in the registry: something to pin."""
    folder = resolve_drafter("bundled")
    assert folder is not None
    settings, state = read_drafter_files(folder)
    name = sorted(state)[0]
    state[name] = state[name] * 1.001
    target = read_target(resolve_model(config.model))
    registry = DrafterRegistry(StorePaths.of(config).registry)
    return registry.put(
        state, drafter_type="specblock", config=settings, target_version=target.version, parent=first, arm="head"
    ).version


def load(watch: Watch, url: str) -> None:
    watch.page.goto(f"{url}/dashboard")
    watch.wait("document.querySelectorAll('#buckets .chart .main-svg').length > 0")
    watch.wait("!!document.getElementById('lineage').data")


def order(place: Place, command: str, **values: str) -> None:
    headers, path = {"authorization": f"Bearer {ADMIN}"}, f"/dashboard/api/commands/{command}"

    def taken() -> bool:
        response = HTTP.post(f"{place.url}{path}", json=values, headers=headers, timeout=60)
        if response.status_code != 503:  # a busy controller is to be asked again
            response.raise_for_status()
        return response.is_success

    wait_for(taken, f"{command} taken by the controller")


def test_operator_pins_and_rolls_back_through_the_page(place: Place) -> None:
    order(place, "pause")  # what the policy decides meanwhile would come between pin and roll-back
    live = wait_for(lambda: place.state().get("version"), "the live version")
    with watched_page(place.browser) as watch:
        load(watch, place.url)
        assert watch.page.locator("#commands").is_hidden(), "without the token the page only shows"
        watch.page.locator("#admin-token").fill("wrong")
        watch.page.locator("#admin-form button").first.click()
        watch.wait("document.getElementById('command-result').textContent.includes('not the admin token')")
        watch.page.locator("#admin-token").fill(ADMIN)
        watch.page.locator("#admin-form button").first.click()
        watch.page.locator("#pin-version").wait_for()
        watch.wait("(v) => [...document.getElementById('pin-version').options].some((o) => o.value === v)", place.other)
        watch.page.locator("#pin-version").select_option(place.other)
        watch.page.locator("#pin-form button").first.click()
        watch.wait("document.getElementById('command-result').textContent.startsWith('pin: done')")
        assert wait_for(lambda: place.state().get("version") == place.other, "the pinned version in the desired state")
        watch.wait("(v) => document.getElementById('answer-serves').textContent.includes(v.slice(0, 12))", place.other)
        watch.wait("document.getElementById('answer-serves').textContent.includes('pinned by an operator')")
        swapped = "(v) => document.getElementById('replica-table').textContent.includes(v.slice(0, 12))"
        watch.wait(swapped, place.other)
        watch.page.locator("#rollback").click()
        watch.wait("document.getElementById('command-result').textContent.startsWith('rollback: done')")
        assert wait_for(lambda: place.state().get("version") == live, "the version before live again")
        actions = [d["action"] for d in wait_for(place.state, "the state")["decisions"]]
        assert "pin" in actions and "rollback" in actions
        watch.wait("document.getElementById('decision-table').textContent.includes('Rollback')")
        watch.page.locator("#decision-table a").first.click()
        watch.wait("document.getElementById('found')?.hidden === false")
        assert "operator" in watch.page.locator("#words").text_content()
        watch.check_clean(place.url)
    order(place, "resume")
    assert not place.errors


def test_commands_without_the_token_are_refused_by_the_service(place: Place) -> None:
    for path in ("/dashboard/api/commands/pin", "/paceline/pin"):
        assert HTTP.post(f"{place.url}{path}", json={"version": place.other}, timeout=30).status_code == 401
    forwarded = HTTP.get(f"{place.url}/dashboard/api/state", headers={"host": "rebound.example"}, timeout=30)
    assert forwarded.status_code == 401, "another name in the Host header is not this computer: it needs the token"


def test_a_page_that_was_left_open_does_not_hold_up_the_service(place: Place) -> None:
    with httpx.stream("GET", f"{place.url}/dashboard/api/events", timeout=60) as stream:
        began = time.monotonic()
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-2] == "event: renew"
    assert time.monotonic() - began < 55.0


def pooled(bins: list[dict], bucket: str, group: str, end: float) -> float:
    """Tokens per device-second of the six bins that end at `end`, from the service's own numbers."""
    cells = [b["buckets"].get(bucket, {}).get(group) for b in bins if end - 30.0 < b["ts"] + 5.0 <= end + 0.5]
    known = [c for c in cells if c and c[1]]
    return sum(c[2] for c in known) / sum(c[2] / c[1] for c in known)


def test_charts_show_the_traffic_of_the_running_service_as_it_goes_on(place: Place) -> None:
    def has_traffic() -> bool:
        recent = (place.state().get("buckets") or {}).get("math", {}).get("recent", {})
        return {"adaptive", "static", "plain"} <= set(recent)

    wait_for(has_traffic, "traffic of all three groups")
    assert not place.errors
    with watched_page(place.browser) as watch:
        load(watch, place.url)
        watch.page.locator("#bucket").select_option("math")
        watch.wait("document.querySelector('#buckets h3').textContent === 'math'")
        speed = "#buckets .chart:nth-child(2)"
        # a drafter that was trained meanwhile may be on trial: its line is young
        watch.wait(
            "(s) => document.querySelector(s).data?.filter((t) => t.meta.group !== 'canary').length === 3", speed
        )
        watch.wait(IS_SETTLED, [speed, SETTLED_S])
        shown = {t["meta"]["group"]: t for t in watch.traces(speed) if t["meta"]["group"] != "canary"}
        newest = max(x for t in shown.values() for x in t["x"])
        state = HTTP.get(f"{place.url}/dashboard/api/state", timeout=30).json()
        for group, line in shown.items():
            # late rows may still change the newest bins
            at = max(i for i, y in enumerate(line["y"]) if y is not None and line["x"][i] < newest - SETTLED_S)
            want = pooled(state["bins"], "math", group, line["x"][at])
            assert line["y"][at] == pytest.approx(want, rel=0.1), group
        before = max(x for t in shown.values() for x in t["x"])
        watch.wait(
            "([s, t]) => Math.max(...document.querySelector(s).data.flatMap((d) => d.x.map((x) => x.getTime() / 1000))) > t + 4",
            [speed, before],
        )
        watch.check_clean(place.url)


@pytest.mark.skipif(
    not SCREENSHOTS, reason="writes the picture of the documentation: set PACELINE_SCREENSHOTS=docs/images"
)
def test_picture_of_the_documentation(place: Place) -> None:
    out = Path(str(SCREENSHOTS))
    out.mkdir(parents=True, exist_ok=True)
    wait_for(lambda: any(d["action"] == "train" for d in place.state().get("decisions", [])), "a training decision")
    wait_for(lambda: (place.state().get("ledger") or {}).get("saved_s"), "a measured saving")
    with watched_page(place.browser, width=1280, height=1000, scheme="light") as watch:
        train = next(d for d in place.state()["decisions"] if d["action"] == "train")
        watch.page.goto(f"{place.url}/dashboard/decisions/{train['decision_id']}")
        watch.wait("document.getElementById('found')?.hidden === false")
        watch.page.screenshot(path=str(out / "dashboard_decision.png"))
