"""The dashboard's page in a real browser, over a controller with a rich and partly hostile past; see dashboard_host.py."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from paceline.infra.controller.snapshot import ReplicaState, Snapshot, SpeculationState
from paceline.infra.replica.feedback import make_batch
from paceline.infra.state.redis_clients import Keys
from paceline.infra.web import sections as web_sections
from paceline.infra.web.access import Access
from paceline.infra.web.dashboard_routes import dashboard_router
from paceline.infra.web.feed import DashboardFeed
from paceline.serving.api.app import build_api
from paceline.serving.api.generation import ApiParts
from paceline.serving.wire.credentials import Tokens
from tests.helpers.api_server import TOKENIZER, ScriptedEngine, below, serve_app
from tests.helpers.browser_page import Watch, open_browser, watched_page
from tests.helpers.dashboard_host import FIRST, HOSTILE, Scene, make_scene
from tests.helpers.scripted import row

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(900)]
CHARTS = ("timeline", "expected", "ledger", "ledger-by", "lineage", "posterior", "swaps")


PREFIX = "/below/it"
"""Route prefix of the service; without one the dashboard runs in tests/e2e/test_dashboard_browser.py."""


@dataclass
class Place:
    scene: Scene
    url: str
    browser: Any


@contextlib.contextmanager
def serve(scene: Scene, access: Access) -> Iterator[str]:
    feed = DashboardFeed(scene.state, scene.traffic)
    router = dashboard_router(scene, access, feed)
    try:
        app = build_api(ApiParts(client=ScriptedEngine(), tokenizer=TOKENIZER, open_routers=(router,)))
        with serve_app(below(PREFIX, app)) as url:
            yield f"{url}{PREFIX}"
    finally:
        feed.close()


@pytest.fixture(scope="module")
def place(shared_redis) -> Iterator[Place]:
    scene = make_scene(shared_redis.url, Keys(uuid.uuid4().hex[:8]))
    scene.run(100, ["code", HOSTILE])
    scene.run(300, ["code", HOSTILE, "math"])
    with open_browser() as browser, serve(scene, Access(tokens=Tokens(admin_token="adm"))) as url:
        yield Place(scene, url, browser)


def load(watch: Watch, url: str) -> None:
    watch.page.goto(f"{url}/dashboard")
    for name in CHARTS:
        watch.wait("(id) => !!document.getElementById(id).data", name)
    watch.wait("document.querySelectorAll('#buckets .chart .main-svg').length > 0")


@pytest.fixture(scope="module")
def open_page(place: Place) -> Iterator[Watch]:
    """The dashboard, loaded once for the tests that leave it as it was."""
    with watched_page(place.browser) as watch:
        load(watch, place.url)
        yield watch


def test_the_page_is_reached_with_a_slash_at_its_end_too(place: Place) -> None:
    with watched_page(place.browser) as watch:
        watch.page.goto(f"{place.url}/dashboard/")
        watch.wait("(url) => location.href === url", f"{place.url}/dashboard")


def test_hostile_names_are_shown_as_text_and_nothing_of_them_runs(place: Place) -> None:
    with watched_page(place.browser) as watch:
        watch.page.on("dialog", lambda d: watch.errors.append(f"dialog {d.message}"))
        load(watch, place.url)
        watch.page.locator("#show-holds").check()
        watch.page.locator("details summary").first.click()
        watch.wait("(name) => document.querySelector('#bucket-table').textContent.includes(name)", HOSTILE)
        watch.page.locator("#split").select_option("bucket")
        watch.page.locator("#bucket").select_option(HOSTILE)
        watch.wait("(name) => document.querySelector('#buckets h3').textContent === name", HOSTILE)
        watch.page.locator("#posterior-bucket").select_option(HOSTILE)
        watch.wait("document.getElementById('ledger-by').data[0].y.some((y) => y.includes('&lt;img'))")
        assert (
            watch.page.evaluate("document.querySelectorAll('img, svg a, a[href^=\"javascript\"], [onerror]').length")
            == 0
        )
        trained = next(d for d in place.scene.state().decisions if d.action == "train")
        assert trained.bucket == HOSTILE, "the scene must have a decision on the hostile bucket"
        watch.page.goto(f"{place.url}/dashboard/decisions/{trained.decision_id}")
        watch.wait("document.getElementById('found')?.hidden === false")
        assert HOSTILE in watch.page.locator("#words").text_content()
        assert watch.page.evaluate("document.querySelectorAll('img, a[href^=\"javascript\"], [onerror]').length") == 0
        watch.check_clean(place.url)


def test_charts_show_the_controllers_numbers(place: Place, open_page: Watch) -> None:
    state = place.scene.state()
    lines = {t["name"]: t for t in open_page.traces("#ledger")}
    assert lines["net"]["y"][-1] == pytest.approx(state.ledger.net_s, abs=1e-3)
    assert lines["saved"]["y"][-1] == pytest.approx(state.ledger.saved_s, abs=1e-3)
    kinds = {t["name"]: dict(zip(t["y"], t["x"], strict=True)) for t in open_page.traces("#ledger-by")}
    for kind, seconds in state.ledger.by_kind.items():
        assert abs(kinds["saved" if kind == "saving" else "spent"][kind]) == pytest.approx(abs(seconds), abs=1e-3)
    (points,) = open_page.traces("#timeline")
    assert points["meta"]["ids"] == [d.decision_id for d in state.decisions]
    assert points["y"] == [d.action for d in state.decisions]
    assert points["x"] == pytest.approx([d.ts for d in state.decisions], abs=2e-3)
    nodes = open_page.traces("#lineage")[1]
    assert set(nodes["meta"]["versions"]) == {v.version for v in state.versions}
    now = {r.arm: r for r in state.bandit.posterior if r.bucket is None}
    shown = open_page.traces("#posterior")[1]
    assert dict(zip(shown["y"], shown["x"], strict=True)) == pytest.approx({a: 100 * r.mean for a, r in now.items()})
    assert "Yes: net" in open_page.page.locator("#answer-paying").text_content()
    assert state.version[:12] in open_page.page.locator("#answer-serves").text_content()
    open_page.check_clean(place.url)


def test_how_long_clients_waited_stands_beside_the_speed(place: Place, open_page: Watch) -> None:
    scene = place.scene
    text = open_page.page.locator("#latency").text_content()
    for words in (
        "first token 12 ms (p99 250 ms)",
        "between tokens 4.50 ms (p99 30 ms)",
        "whole answer 1.50 s (p99 -)",
    ):
        assert words in text
    assert "100 answers, none failed" in text and open_page.page.locator("#latency .bad").count() == 0
    scene.num_failed = 3
    open_page.wait("document.querySelector('#latency .bad')?.textContent === '3 failed'")
    scene.num_failed = 0
    open_page.check_clean(place.url)


def test_a_longer_past_is_shown_when_it_is_asked_for(place: Place, open_page: Watch) -> None:
    stats, now = place.scene.host.session.state.traffic, place.scene.clock.now()
    old = now - 7200.0
    stats.observe(
        make_batch(
            [row(i, ts=old) for i in range(4)], replica_id="old", boot_epoch=1, seq=1, target_version="t", num_dropped=0
        )
    )
    open_page.page.select_option("#bucket", "math")
    oldest = "Math.min(...document.querySelector('#buckets .chart').data.flatMap((t) => t.x.map(Number))) / 1000"
    open_page.wait(f"{oldest} > {now - 1300.0}")
    open_page.page.select_option("#range", "10800")
    open_page.wait(f"Math.abs({oldest} - {old}) <= 60")
    open_page.page.select_option("#range", "1200")
    open_page.wait(f"{oldest} > {now - 1300.0}")
    open_page.page.select_option("#bucket", "")
    open_page.check_clean(place.url)


def test_a_pause_of_traffic_is_a_gap_and_no_part_of_what_comes_behind_it(place: Place, shared_redis) -> None:
    scene = make_scene(shared_redis.url, Keys(uuid.uuid4().hex[:8]), policy="never")
    scene.run(60, ["math"])
    paused = scene.clock.now()
    scene.run(300, [])
    scene.run(20, ["math"])
    with serve(scene, Access()) as url, watched_page(place.browser) as watch:
        watch.page.goto(f"{url}/dashboard")
        watch.wait("document.querySelector('#buckets .chart:nth-child(2)')?.data?.length > 0")
        line = next(t for t in watch.traces("#buckets .chart:nth-child(2)") if t["meta"]["group"] == "adaptive")
        first = next(i for i, x in enumerate(line["x"]) if x > paused + 60.0 and line["y"][i] is not None)
        assert line["y"][first - 1] is None, "no line through the pause"
        (own,) = (b.buckets["math"]["adaptive"] for b in scene.traffic(0.0) if b.ts + b.seconds == line["x"][first])
        assert line["y"][first] == pytest.approx(own.tokens_per_s, rel=1e-3)
        watch.check_clean(url)


def test_the_choice_of_a_version_says_what_it_does_now(place: Place, shared_redis) -> None:
    scene = make_scene(shared_redis.url, Keys(uuid.uuid4().hex[:8]), policy="never")
    other = "c0a1b2c3d4e5"
    scene.launcher.registry.add(other, parent=FIRST, arm="head", bucket="math", created=scene.clock.now())
    scene.run(20, ["math"])
    live = "[...document.getElementById('pin-version').options].filter((o) => o.text.includes('live')).map((o) => o.value).join()"
    with serve(scene, Access()) as url, watched_page(place.browser) as watch:
        watch.page.goto(f"{url}/dashboard")
        watch.wait(f"{live} === '{FIRST}'")
        scene.command("pin", other)
        scene.run(20, ["math"])
        watch.wait(f"{live} === '{other}'")
        watch.check_clean(url)


def test_times_of_other_days_have_their_day(place: Place, open_page: Watch) -> None:
    clock = "async (s) => (await import(`${location.pathname}/static/dom.js`)).clock(Date.now() / 1000 - s)"
    assert re.fullmatch(r"\d\d:\d\d:\d\d", open_page.page.evaluate(clock, 0))
    assert re.fullmatch(r"[A-Z][a-z]{2} \d+, \d\d:\d\d:\d\d", open_page.page.evaluate(clock, 86_400))


@pytest.mark.parametrize("span_s", [20, 90, 1200, 10_800, 86_400, 5 * 86_400])
def test_no_two_labels_of_a_time_axis_are_alike(open_page: Watch, span_s: int) -> None:
    labels = open_page.page.evaluate(
        """async (span_s) => {
            const { TIME, date, draw } = await import(document.querySelector("script[type=module]").src.replace("app.js", "plot.js"));
            const node = document.body.appendChild(document.createElement("div"));
            node.style.width = "500px";
            await draw(node, [{ type: "scatter", x: [date(1.7e9), date(1.7e9 + span_s)], y: [1, 2] }], { xaxis: TIME });
            const found = [...node.querySelectorAll(".xtick text")].map((t) => t.textContent);
            node.remove();
            return found;
        }""",
        span_s,
    )
    assert 2 <= len(labels) == len(set(labels)), labels


def test_names_that_begin_alike_have_bars_of_their_own(place: Place) -> None:
    names = [f"customers-of-the-english-shop-{i}" for i in (1, 2)]
    with watched_page(place.browser) as watch:
        document = watch.page.request.get(f"{place.url}/dashboard/api/state").json()
        document["parts"]["ledger"]["by"]["kind"] = [{"name": n, "spent_s": 1.0, "saved_s": 2.0} for n in names]
        body = f"event: update\ndata: {json.dumps(document)}\n\n"
        watch.page.route(
            "**/dashboard/api/events*",
            lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
        )
        watch.page.goto(f"{place.url}/dashboard")
        watch.wait("document.querySelectorAll('#ledger-by .ytick').length === 2")


def test_why_the_stream_is_refused_is_said(place: Place) -> None:
    reason = "24 pages watch this replica already; close one"
    with watched_page(place.browser) as watch:
        watch.page.route(
            "**/dashboard/api/events*", lambda route: route.fulfill(status=503, json={"error": {"message": reason}})
        )
        watch.page.goto(f"{place.url}/dashboard")
        watch.wait(f"document.getElementById('status').textContent.startsWith('{reason}, trying again')")


def test_a_service_that_comes_back_with_operators_has_their_controls(place: Place) -> None:
    said = "document.getElementById('controls-text').textContent"
    with watched_page(place.browser) as watch:
        watch.page.route("**/api/events*", lambda route: route.fulfill(status=503, body="{}"))
        watch.page.route(
            "**/api/session", lambda route: route.fulfill(json={"is_admin": False, "has_admin_token": False})
        )
        watch.page.goto(f"{place.url}/dashboard")
        watch.wait(f"{said}.includes('start the service with --admin-token')")
        watch.page.unroute_all()
        watch.wait(f"{said}.includes('Enter the admin token')")


def test_where_drafting_is_off_is_said_beside_the_speed(
    place: Place, open_page: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_page.page.locator("#drafting").text_content() == "", "nothing is known"
    told = [
        ("code", "adaptive", True),
        ("code", "static", False),
        ("math", "adaptive", False),
        (HOSTILE, "adaptive", True),
    ]
    place.scene.speculation = [SpeculationState(bucket=b, role=r, mode="greedy", is_on=on) for b, r, on in told]
    said = "document.querySelector('#drafting').textContent"
    open_page.wait(f"{said} === 'Drafting is off for 1 of 3 buckets: it loses there (math).'")
    place.scene.speculation = [msgspec.structs.replace(s, is_on=True) for s in place.scene.speculation]
    open_page.wait(f"{said} === 'Drafting is on for all 3 buckets with traffic.'")
    with monkeypatch.context() as limited:
        limited.setattr(web_sections, "NUM_BUCKETS", 2)
        open_page.wait(f"{said} === 'Drafting is on for the 2 busiest of 3 buckets.'")
    place.scene.speculation = []
    open_page.check_clean(place.url)


def test_a_version_on_trial_has_a_line_of_its_own_as_long_as_it_is_on_trial(place: Place, shared_redis) -> None:
    scene = make_scene(shared_redis.url, Keys(uuid.uuid4().hex[:8]), policy="never")
    scene.run(60, ["math"])
    tried = "c0a1b2c3d4e5"
    scene.launcher.registry.add(tried, parent=FIRST, arm="head", bucket="math", created=scene.clock.now())
    groups = (
        "() => [...document.querySelectorAll('#buckets .chart')].map((c) => (c.data ?? []).map((t) => t.meta.group))"
    )
    legend = "document.getElementById('legend').textContent.includes('version on trial')"
    with serve(scene, Access()) as url, watched_page(place.browser) as watch:
        scene.command("canary", tried)
        since = scene.clock.now()
        scene.run(60, ["math"])
        assert scene.state().canary is not None, "the trial must go on while it is looked at"
        watch.page.goto(f"{url}/dashboard")
        for chart in ("1", "2"):
            watch.wait(
                "(s) => document.querySelector(s)?.data?.some((t) => t.meta.group === 'canary')", f"#buckets .chart:nth-child({chart})"
            )  # fmt: skip
        assert watch.page.evaluate(legend)
        lines = {t["meta"]["group"]: t for t in watch.traces("#buckets .chart:nth-child(2)")}
        assert set(lines) == {"adaptive", "static", "plain", "canary"}
        drawn = [(x, y) for x, y in zip(lines["canary"]["x"], lines["canary"]["y"], strict=True) if y is not None]
        assert drawn and drawn[0][0] > since
        ts, speed = drawn[-1]
        bins = [b.buckets["math"].get("canary") for b in scene.traffic(0.0) if ts - 30.0 < b.ts + 5.0 <= ts]
        known = [c for c in bins if c]
        want = sum(c.tokens for c in known) / sum(c.tokens / c.tokens_per_s for c in known)
        assert speed == pytest.approx(want, rel=1e-3)
        watch.page.locator("details summary").first.click()
        watch.wait("document.querySelector('#bucket-table').textContent.includes('canary tok/s')")
        watch.check_contrast()
        scene.command("pin", FIRST)
        watch.wait(f"!({legend})")
        watch.wait(f"({groups})().every((g) => g.length > 0 && !g.includes('canary'))")
        assert "canary" in scene.state().buckets["math"].groups(), "its past stays in the numbers"
        watch.check_clean(url)


def test_every_text_has_enough_contrast_in_both_schemes(place: Place) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    with watched_page(place.browser, scheme="light") as watch:
        load(watch, place.url)

        def check(shown: str, change: Callable[[], Any]) -> str:
            """The background after a change of the colours of the page and its charts."""
            change()
            watch.wait(f"(old) => {background} !== old", shown)
            watch.wait(
                "document.getElementById('ledger').layout.font.color === getComputedStyle(document.documentElement).getPropertyValue('--text').trim()"
            )
            assert watch.check_contrast() > 100
            return watch.page.evaluate(background)

        light = watch.page.evaluate(background)
        assert watch.check_contrast() > 100
        dark = check(light, lambda: watch.page.emulate_media(color_scheme="dark"))
        assert check(dark, lambda: watch.page.locator("#theme").select_option("light")) == light
        watch.page.emulate_media(color_scheme="light")
        assert check(light, lambda: watch.page.locator("#theme").select_option("dark")) == dark
        for theme in ("dark", "light"):
            watch.page.locator("#theme").select_option(theme)
            watch.page.goto(f"{place.url}/dashboard/decisions/1")
            watch.wait("document.getElementById('found')?.hidden === false")
            assert watch.page.evaluate(background) == {"light": light, "dark": dark}[theme]
            assert watch.check_contrast() > 10
            watch.page.goto(f"{place.url}/dashboard")
        watch.check_clean(place.url)


def test_narrow_screens_have_no_horizontal_scroll(place: Place) -> None:
    widest = "Math.max(document.documentElement.scrollWidth, ...[...document.querySelectorAll('.chart')].map((c) => c.getBoundingClientRect().right - 1))"
    with watched_page(place.browser, width=320, height=800) as watch:
        load(watch, place.url)
        for width in (320, 820, 390):
            watch.page.set_viewport_size({"width": width, "height": 800})
            watch.wait(f"{widest} <= innerWidth && innerWidth === {width}")  # charts follow a moment later
        watch.page.goto(f"{place.url}/dashboard/decisions/1")
        watch.wait("document.getElementById('found')?.hidden === false")
        for width in (820, 390, 320):
            watch.page.set_viewport_size({"width": width, "height": 800})
            watch.wait(f"document.documentElement.scrollWidth <= {width} && innerWidth === {width}")


def test_everything_can_be_reached_and_used_with_the_keyboard(place: Place) -> None:
    with watched_page(place.browser) as watch:
        load(watch, place.url)
        watch.page.evaluate("document.body.focus()")
        reached: list[str] = []
        for _ in range(120):
            watch.page.keyboard.press("Tab")
            found = watch.page.evaluate(
                "(() => { const a = document.activeElement; const s = getComputedStyle(a); return a === document.body ? null : [a.id || a.textContent.trim().slice(0, 30), s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0]; })()"
            )
            if found is None:
                break
            assert found[1], f"{found[0]} shows no focus"
            reached.append(found[0])
        assert {"theme", "export", "bucket", "split", "show-holds", "posterior-bucket", "admin-token"} <= set(reached)
        assert reached[0] == "Skip to the answers"
        labels = watch.page.evaluate(
            "[...document.querySelectorAll('input, select')].filter((n) => !n.labels?.length && !n.ariaLabel).map((n) => n.id)"
        )
        assert labels == [], "every field has a label"
        watch.page.locator("#admin-token").focus()
        watch.page.keyboard.type("adm")
        watch.page.keyboard.press("Enter")
        watch.wait("!document.getElementById('commands').hidden")
        watch.page.locator("#pause").focus()
        watch.page.keyboard.press("Enter")
        watch.wait("document.getElementById('pause').dataset.command === 'resume'")
        assert place.scene.state().is_paused is True
        watch.page.keyboard.press("Enter")
        watch.wait("document.getElementById('pause').dataset.command === 'pause'")
        assert place.scene.state().is_paused is False
        watch.check_clean(place.url)


def test_closed_dashboard_asks_for_a_token_and_forgets_it_with_the_tab(place: Place) -> None:
    access = Access(tokens=Tokens(api_token="api", admin_token="adm"), host="0.0.0.0")
    with serve(place.scene, access) as url, watched_page(place.browser) as watch:
        watch.page.goto(f"{url}/dashboard")
        watch.page.locator("#login").wait_for()
        assert FIRST not in watch.page.content()
        for field in ("login", "admin"):
            watch.page.locator(f"#{field}-token").fill("令牌")
            watch.page.keyboard.press("Enter")
            assert not watch.page.evaluate("sessionStorage.length"), (
                "no header can carry it, so no request would be sent"
            )
        watch.page.locator("#login-token").fill("api")
        watch.page.keyboard.press("Enter")
        watch.page.locator("#answer-serves").wait_for()
        assert watch.page.locator("#commands").is_hidden()
        assert watch.page.context.cookies() == []
        assert watch.page.evaluate("JSON.stringify(localStorage).includes('api')") is False
        watch.errors[:] = [
            e for e in watch.errors if "401" not in e
        ]  # the browser logs every one itself, as often as it asks
        watch.check_clean(url)
        said = "document.getElementById('command-result').textContent"
        watch.page.locator("#admin-token").fill("mistyped")
        watch.page.keyboard.press("Enter")
        watch.wait(f"{said} === 'That is not the admin token.'")
        watch.wait("JSON.stringify(sessionStorage).includes(':\"api\"')")
        assert watch.page.locator("#login").is_hidden() and watch.page.locator("#answer-serves").is_visible()
        watch.page.route("**/api/session", lambda route: route.abort())
        watch.page.locator("#admin-token").fill("adm")
        watch.page.keyboard.press("Enter")
        watch.wait(f"{said}.includes('fetch')")
        watch.page.unroute("**/api/session")
        watch.page.locator("#admin-token").fill("adm")
        watch.page.keyboard.press("Enter")
        watch.wait(f"{said} === 'Unlocked.'")
        assert watch.page.locator("#commands").is_visible()


def test_a_service_that_does_not_adapt_is_told_from_one_whose_controller_is_away(place: Place) -> None:
    for is_adaptive in (True, False):
        shown = Snapshot(version="lookup", first_version="lookup", replica=ReplicaState(), is_adaptive=is_adaptive)
        view: Any = SimpleNamespace(state=lambda shown=shown: shown, traffic=lambda since: None)
        with serve(view, Access()) as url, watched_page(place.browser) as watch:
            watch.page.goto(f"{url}/dashboard")
            watch.wait("document.getElementById('health').textContent.includes('controller')")
            texts = [watch.page.locator(f"#{name}").text_content() or "" for name in ("status", "health", "buckets")]
            assert all(("away" in text) is is_adaptive for text in texts[:2]), texts
            assert texts[2].startswith("No traffic has been measured yet" if is_adaptive else "Where nothing adapts")
            assert watch.page.locator("#controls").is_visible() is is_adaptive
            watch.check_clean(url)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"redis_up": True}, "live"),
        ({}, "Redis away: nothing is decided"),
        ({"redis_up": True, "read_only": "damaged"}, "stored state refused: nothing is decided"),
    ],
)
def test_what_keeps_the_controller_from_deciding_stands_at_the_top(place: Place, found: dict, said: str) -> None:
    shown = Snapshot(ts=1.0, version="v1", first_version="v1", replica=ReplicaState(), has_controller=True, **found)
    view: Any = SimpleNamespace(state=lambda: shown, traffic=lambda since: None)
    with serve(view, Access()) as url, watched_page(place.browser) as watch:
        watch.page.goto(f"{url}/dashboard")
        watch.wait("document.getElementById('health').textContent.includes('controller')")
        assert watch.page.locator("#status").text_content() == said


def test_exports_are_saved_by_the_page(open_page: Watch) -> None:
    with open_page.page.expect_download() as waiting:
        open_page.page.locator("#export").select_option("decisions.csv")
    path = waiting.value.path()
    assert waiting.value.suggested_filename == "paceline-decisions.csv"
    assert len(path.read_text(encoding="utf-8").splitlines()) > 2


@pytest.mark.parametrize("is_renewed", [True, False])
def test_a_stream_that_ends_without_renew_is_followed_by_a_wait(place: Place, is_renewed: bool) -> None:
    body = "event: renew\ndata: {}\n\n" if is_renewed else ""
    asked: list[float] = []

    def answer(route: Any) -> None:
        asked.append(time.monotonic())
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    with watched_page(place.browser) as watch:
        watch.page.route("**/dashboard/api/events*", answer)
        watch.page.goto(f"{place.url}/dashboard")
        deadline = time.monotonic() + 60.0
        while len(asked) < 3 and time.monotonic() < deadline:
            watch.page.wait_for_timeout(50)
        assert len(asked) >= 3
        gaps = [b - a for a, b in itertools.pairwise(asked)]
        assert is_renewed or min(gaps) > 0.9, "it waits one second, then longer"
        assert not is_renewed or min(gaps) < 0.9, "the next stream is opened at once"
