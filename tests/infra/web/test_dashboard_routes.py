"""Claims of infra/web/dashboard_routes.py, access.py, feed.py and commands.py, over ASGI.

Behind the routes is a real controller host with a real Redis; see dashboard_host.py.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from paceline.config import VARIABLES, ServiceConfig, with_environment
from paceline.errors import ConfigError, RequestError
from paceline.infra.controller.session import restore_controller
from paceline.infra.controller.snapshot import TrafficBin, state_json
from paceline.infra.state.redis_clients import Keys
from paceline.infra.web.access import Access
from paceline.infra.web.commands import FIELDS, parse_command
from paceline.infra.web.dashboard_routes import FOLDER, dashboard_router, plotly_facts, plotly_file
from paceline.infra.web.export import TABLES, as_csv, as_json
from paceline.infra.web.feed import MAX_PAGES, DashboardFeed, events, parse_have, update
from paceline.serving.api.app import build_api
from paceline.serving.api.generation import ApiParts
from paceline.serving.wire.credentials import Tokens
from tests.helpers.api_server import TOKENIZER, ScriptedEngine
from tests.helpers.dashboard_host import FIRST, HOSTILE, Scene, make_scene

ADMIN = {"authorization": "Bearer adm"}
DATA = (
    "/api/session",
    "/api/state",
    "/api/history",
    "/api/events",
    "/api/decisions/1",
    "/api/export/dashboard.json",
    "/api/export/ledger.csv",
)

OPERATING = ("/paceline/state", "/paceline/swap", "/metrics")


@pytest.fixture(scope="module")
def scene(shared_redis) -> Iterator[Scene]:
    made = make_scene(shared_redis.url, Keys(uuid.uuid4().hex[:8]))
    made.run(100, ["code", "math", HOSTILE])
    yield made
    for _, feed in _apps.values():
        feed.close()
    _apps.clear()
    made.client.close()


SHORT = {"fresh_s": -1.0, "lifetime_s": 0.0}
"""Every document is fresh; a transport that collects needs streams that end."""


@pytest.fixture
def feeds() -> Iterator[Callable[..., DashboardFeed]]:
    """Makes feeds and closes them."""
    made: list[DashboardFeed] = []

    def make(*readers: Any, **limits: float) -> DashboardFeed:
        made.append(DashboardFeed(*readers, **{**SHORT, **limits}))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for feed in made:
        feed.close()


_apps: dict[tuple[int, Access, int], tuple[FastAPI, DashboardFeed]] = {}


def app(scene: Scene, access: Access, max_pages: int = MAX_PAGES) -> FastAPI:
    """One application for each set of rules: building one costs more than asking it."""
    if (found := _apps.get((id(scene), access, max_pages))) is not None:
        return found[0]
    feed = DashboardFeed(scene.state, scene.traffic, **SHORT, max_pages=max_pages)
    parts = ApiParts(
        client=ScriptedEngine(), tokenizer=TOKENIZER, open_routers=(dashboard_router(scene, access, feed),),
        state=lambda: state_json(scene.state()), check_state=access.check_read, check_metrics=access.check_metrics,
    )  # fmt: skip
    return _apps.setdefault((id(scene), access, max_pages), (build_api(parts), feed))[0]


def call(scene: Scene, method: str, path: str, access: Access | None = None, *, peer: str = "127.0.0.1", base: str = "http://127.0.0.1:8000", max_pages: int = MAX_PAGES, **kwargs) -> httpx.Response:  # fmt: skip
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(
            app=app(scene, access or Access(tokens=Tokens(admin_token="adm")), max_pages), client=(peer, 5000)
        )
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            return await client.request(method, path if path.startswith(OPERATING) else f"/dashboard{path}", **kwargs)

    return asyncio.run(main())


# ---- who may ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", [*DATA, *OPERATING])
def test_without_tokens_a_loopback_service_shows_itself_to_this_computer_only(scene: Scene, path: str) -> None:
    free = Access()
    assert call(scene, "GET", path, free).status_code == 200
    assert call(scene, "GET", path, free, base="http://localhost:8000").status_code == 200
    assert call(scene, "GET", path, free, peer="10.0.0.7").status_code == 403
    assert call(scene, "GET", path, free, base="http://rebound.example:8000").status_code == 403
    for name in ("x-forwarded-for", "forwarded", "via", "x-real-ip", "x-forwarded-host"):
        assert call(scene, "GET", path, free, headers={name: "10.0.0.7"}).status_code == 403
    assert call(scene, "GET", path, Access(host="0.0.0.0")).status_code == 403


@pytest.mark.parametrize("path", [*DATA, *OPERATING])
def test_elsewhere_a_token_opens_the_data_and_a_wrong_one_does_not(scene: Scene, path: str) -> None:
    for access in (
        Access(tokens=Tokens(api_token="api", admin_token="adm"), host="0.0.0.0"),
        Access(tokens=Tokens(api_token="api", admin_token="adm")),
    ):
        assert call(scene, "GET", path, access).status_code == 401
        assert call(scene, "GET", path, access, headers={"authorization": "Bearer wrong"}).status_code == 401
        assert call(scene, "GET", path, access, headers={"authorization": "Basic adm"}).status_code == 401
        assert call(scene, "GET", path, access, headers={"cookie": "authorization=adm"}).status_code == 401
        assert call(scene, "GET", f"{path}?token=adm", access).status_code == 401
        for token in ("api", "adm"):
            assert call(scene, "GET", path, access, headers={"authorization": f"bearer {token}"}).status_code == 200


def test_metrics_open_to_anybody_when_the_configuration_says_so_and_nothing_else_does(scene: Scene) -> None:
    config = ServiceConfig(host="0.0.0.0", api_token="api", metrics_public=True)
    open_metrics = Access.of(config, Tokens.of(config))
    assert call(scene, "GET", "/metrics", open_metrics, peer="10.0.0.7").status_code == 200
    assert call(scene, "GET", "/paceline/state", open_metrics, peer="10.0.0.7").status_code == 401
    assert call(scene, "GET", "/api/state", open_metrics, peer="10.0.0.7").status_code == 401
    assert not Access.of(ServiceConfig(), Tokens()).is_metrics_public


def test_every_data_route_is_in_the_list_of_these_tests(scene: Scene, feeds: Callable[..., DashboardFeed]) -> None:
    router = dashboard_router(scene, Access(), feeds(scene.state, scene.traffic))
    known = {re.sub(r"\{.*?\}", "", r.path) for r in router.routes if "/api/" in r.path}  # type: ignore[attr-defined]
    known.discard("/dashboard/api/commands/")
    tested = {re.sub(r"(decisions/|export/).*", r"\1", f"/dashboard{p}") for p in DATA}
    assert known == tested


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_commands_need_the_admin_token_and_json_and_nothing_changes_without(scene: Scene, name: str) -> None:
    before = scene.host.session.state.commit
    path = f"/api/commands/{name}"
    access = Access(tokens=Tokens(api_token="api", admin_token="adm"))
    assert call(scene, "POST", path, Access(), json={}).status_code == 403, "no admin token: controls are off"
    assert call(scene, "POST", path, access, json={}).status_code == 401
    assert call(scene, "POST", path, access, json={}, headers={"authorization": "Bearer api"}).status_code == 401
    assert call(scene, "GET", path, access, headers=ADMIN).status_code == 405
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        sent = call(scene, "POST", path, access, content=b"{}", headers={**ADMIN, "content-type": kind})
        assert sent.status_code == 415, "a form of a foreign page must not get through"
    assert call(scene, "POST", "/api/commands/flush", access, json={}, headers=ADMIN).status_code == 404
    assert call(scene, "POST", path, access, json={"x": 1}, headers=ADMIN).status_code == 400
    big = call(
        scene, "POST", path, access, content=b" " * 70_000, headers={**ADMIN, "content-type": "application/json"}
    )
    assert big.status_code == 413
    assert scene.host.session.state.commit == before


@pytest.mark.parametrize("token", ["", " a", "ü"])
def test_tokens_that_a_header_cannot_carry_are_refused(token: str) -> None:
    for name in ("api_token", "admin_token"):
        with pytest.raises(ConfigError, match=name):
            ServiceConfig(**{name: token})


def test_tokens_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, variable in VARIABLES.items():
        monkeypatch.setenv(variable, f"{'http://' if name == 'otlp_traces_endpoint' else ''}{name}-of-env")
    config = with_environment(ServiceConfig())
    assert (config.api_token, config.admin_token) == ("api_token-of-env", "admin_token-of-env")
    assert (config.token_file, config.otlp_traces_endpoint) == (
        "token_file-of-env", "http://otlp_traces_endpoint-of-env",
    )  # fmt: skip
    given = with_environment(ServiceConfig(admin_token="given", redis_url="redis://given"))
    assert (given.admin_token, given.redis_url) == ("given", "redis://given")
    access = Access.of(given, Tokens.of(ServiceConfig(admin_token="given")))
    assert access.has_admin and "given" not in repr(access) + repr(ServiceConfig(admin_token="given"))


# ---- what commands do ------------------------------------------------------------------------------------------------
def order(scene: Scene, name: str, **body) -> httpx.Response:
    return call(scene, "POST", f"/api/commands/{name}", json=body, headers=ADMIN)


def notes(scene: Scene) -> list[str]:
    return [n.text for n in scene.state().notes]


def test_pause_policy_and_bank_are_carried_out_and_noted(scene: Scene) -> None:
    assert order(scene, "pause").json()["is_paused"] is True
    assert order(scene, "resume").json()["is_paused"] is False
    assert order(scene, "policy", policy="never").json()["policy"] == "never"
    assert order(scene, "policy", policy="greedy").status_code == 400
    assert order(scene, "bank", bank_s=55.5).status_code == 200
    assert order(scene, "bank", bank_s=-1).status_code == 400
    assert order(scene, "bank", bank_s=True).status_code == 400
    assert scene.host.session.controller.bank().start_s == 55.5
    assert notes(scene)[-4:] == ["decisions paused", "decisions resumed", "policy set to never", "starting balance of the bank set to 55.5 device-seconds"]  # fmt: skip
    restored = restore_controller(scene.host.config, scene.host.session.controller.state(), scene.clock)
    assert restored.bank().start_s == 55.5, "a restart keeps what the operator set"


def test_training_now_pinning_and_rolling_back(shared_redis) -> None:
    scene = make_scene(shared_redis.url, Keys(uuid.uuid4().hex[:8]), policy="never")  # nothing but orders trains
    scene.run(100, ["code", "math"])
    assert order(scene, "train", bucket="math", arm="nothing").status_code == 400
    assert order(scene, "train", bucket="nowhere", arm="head").status_code == 400
    assert order(scene, "train", arm="head").status_code == 400
    done = order(scene, "train", bucket="math")
    assert done.status_code == 200, done.text
    ordered = next(d for d in reversed(scene.state().decisions) if d.action == "train")
    assert (ordered.policy, ordered.arm, ordered.bucket) == ("operator", "head", "math")
    assert ordered.expected_cost_s > 0 and "Ordered by the operator" in ordered.reason
    assert order(scene, "train", bucket="math", arm="head").status_code == 400, "one job at a time"
    scene.run(30, ["math", "code"])
    assert scene.launcher.jobs[-1].arm.name == "head" and scene.launcher.jobs[-1].bucket == "math"
    version = scene.launcher.registry.manifests[-1].version
    assert order(scene, "pin", version="no-such").status_code == 400
    assert order(scene, "pin", version=version).json()["version"] == version
    head = json.loads(call(scene, "GET", "/api/state").content)["parts"]["head"]
    assert head["pinned"] == version
    assert order(scene, "assign", bucket="math", version="no-such").status_code == 400
    assert order(scene, "assign", bucket="no class", version=version).status_code == 400
    assert order(scene, "unassign", bucket="math").status_code == 400
    assert order(scene, "assign", bucket="math", version=version).status_code == 200
    parts = json.loads(call(scene, "GET", "/api/state").content)["parts"]
    assert "for math" in next(v["roles"] for v in parts["versions"] if v["version"] == version)
    assert next(b["version"] for b in parts["buckets"] if b["bucket"] == "math") == version
    assert f"math by {version[:12]}" in parts["answers"][2]["text"]
    assert order(scene, "unassign", bucket="math").status_code == 200
    assert order(scene, "rollback").json()["version"] == FIRST
    assert order(scene, "unpin").status_code == 200
    assert json.loads(call(scene, "GET", "/api/state").content)["parts"]["head"]["pinned"] is None
    scene.client.close()


@pytest.mark.parametrize(
    ("name", "raw", "want"),
    [
        ("resume", b"", ("pause", (False,))),
        ("rollback", b"{}", ("rollback", ())),
        ("pin", b'{"version": "a"}', ("pin", ("a",))),
        ("bank", b'{"bank_s": 3}', ("set_bank", (3.0,))),
        ("train", b'{"arm": "head", "bucket": "b"}', ("train", ("b", "head"))),
        ("assign", b'{"version": "v", "bucket": "b"}', ("assign", ("b", "v"))),
        ("unassign", b'{"bucket": "~class-1"}', ("unassign", ("~class-1",))),
        ("canary", b'{"version": "v"}', ("canary", ("v",))),
        ("canary", b'{"bucket": "b", "version": "v"}', ("canary", ("v", "b"))),
    ],
)
def test_command_bodies_become_arguments(name: str, raw: bytes, want: tuple) -> None:
    assert parse_command(name, raw) == want


@pytest.mark.parametrize(("name", "raw"), [("pin", b"{}"), ("pin", b'{"version": 3}'), ("assign", b'{"version": "v"}'), ("canary", b'{"version": "v", "bucket": 3}'), ("pin", b"["), ("pin", b"[]"), ("bank", b'{"bank_s": NaN}'), ("bank", b'{"bank_s": "3"}'), pytest.param("bank", b'{"bank_s": 1%s}' % (b"0" * 400), id="no-float"), pytest.param("pin", b"[" * 60_000, id="deep"), ("flush", b"{}")])  # fmt: skip
def test_wrong_command_bodies_are_refused(name: str, raw: bytes) -> None:
    with pytest.raises(RequestError):
        parse_command(name, raw)


# ---- what is shown ---------------------------------------------------------------------------------------------------
def test_state_holds_every_part_and_the_traffic_of_the_past(scene: Scene) -> None:
    body = json.loads(call(scene, "GET", "/api/state").content)
    assert set(body["parts"]) == set(body["digests"])
    assert len(body["bins"]) >= 20
    bin_ = body["bins"][5]
    rows = next(r for r in scene.host.traffic() if r.ts == bin_["ts"])
    for bucket, groups in rows.buckets.items():
        for group, sums in groups.items():
            length, speed, tokens, rounds = bin_["buckets"][bucket][group]
            assert (tokens, rounds) == (sums.tokens, sums.rounds)
            assert length == pytest.approx(sums.acceptance_length, abs=1e-3)
            assert speed == pytest.approx(sums.tokens_per_s, abs=1e-3)
    arms = {r["arm"] for r in body["parts"]["posterior"]}
    assert arms <= {"calibration", "head", "full"} and arms
    assert all(r["low"] < r["mean"] < r["high"] for r in body["parts"]["posterior"])


def test_names_from_clients_stay_data_and_the_page_is_static(scene: Scene) -> None:
    body = call(scene, "GET", "/api/state")
    assert body.headers["content-type"] == "application/json" and body.headers["x-content-type-options"] == "nosniff"
    assert HOSTILE in {b["bucket"] for b in body.json()["parts"]["buckets"]}
    page = call(scene, "GET", "").text
    assert page == (FOLDER / "index.html").read_text(encoding="utf-8"), (
        "nothing is ever put into the page on the server"
    )
    rows = list(csv.DictReader(io.StringIO(call(scene, "GET", "/api/export/traffic.csv").content.decode(), newline="")))
    assert HOSTILE in {r["bucket"] for r in rows}


def test_stream_sends_what_changed_and_then_only_that(scene: Scene, feeds: Callable[..., DashboardFeed]) -> None:
    feed = feeds(scene.state, scene.traffic)

    async def first(have: dict[str, str], since: float) -> dict:
        stream = events(feed, have, since)
        event = (await anext(stream)).decode()
        await stream.aclose()
        assert event.startswith("event: update\ndata: ") and event.endswith("\n\n") and "\n" not in event[20:-2]
        return json.loads(event[20:])

    whole = asyncio.run(first({}, 0.0))
    again = asyncio.run(first(whole["digests"], whole["bins"][-1]["ts"]))
    assert again["parts"] == {}, "nothing changed"
    assert 0 < len(again["bins"]) <= 5 < len(whole["bins"])
    assert feed.num_pages == 0
    order(scene, "pause")
    feed._read_at = float("-inf")
    changed = asyncio.run(first(whole["digests"], 0.0))["parts"]
    order(scene, "resume")
    assert {"head", "answers", "decisions"} <= set(changed) and "posterior" not in changed


def test_one_document_serves_all_pages_of_a_second(scene: Scene, feeds: Callable[..., DashboardFeed]) -> None:
    calls = []
    feed = feeds(lambda: calls.append(1) or scene.state(), scene.traffic, fresh_s=600.0)  # type: ignore[func-returns-value]
    assert len({id(feed.document()) for _ in range(5)}) == 1
    assert len(calls) == 1


def test_past_stays_visible_while_the_controller_is_away(scene: Scene, feeds: Callable[..., DashboardFeed]) -> None:
    feed = feeds(scene.state, scene.traffic)
    seen = json.loads(update(feed.document(), {}, 0.0))
    scene.is_away, feed._read_at = True, float("-inf")
    try:
        away = json.loads(update(feed.document(), {}, 0.0))
    finally:
        scene.is_away = False
    assert away["parts"]["head"]["has_controller"] is False
    assert away["parts"]["decisions"] == seen["parts"]["decisions"]
    assert away["bins"] == seen["bins"]


def test_more_pages_than_a_replica_carries_are_refused(scene: Scene) -> None:
    refused = call(scene, "GET", "/api/events", max_pages=0)
    assert refused.status_code == 503 and refused.headers["retry-after"] == "10"


def test_what_a_page_claims_to_have_cannot_break_the_stream() -> None:
    assert parse_have("head:1a,ledger:2b,rubbish,:,x:") == {"head": "1a", "ledger": "2b", "": "", "x": ""}
    assert parse_have("a" * 10_000) == {}


def test_exports_agree_with_the_controller(scene: Scene) -> None:
    state = scene.state()
    for name, rows in (
        ("decisions", state.decisions),
        ("ledger", state.ledger_entries),
        ("versions", state.versions),
    ):
        answer = call(scene, "GET", f"/api/export/{name}.csv")
        assert "attachment" in answer.headers["content-disposition"]
        assert len(list(csv.DictReader(io.StringIO(answer.content.decode(), newline="")))) == len(rows)
    whole = call(scene, "GET", "/api/export/dashboard.json").json()
    assert whole["ledger"]["totals"]["net_s"] == pytest.approx(state.ledger.net_s)
    assert call(scene, "GET", "/api/export/secrets.csv").status_code == 404


def test_saved_traffic_is_all_that_the_page_can_show_and_a_table_without_a_row_has_its_columns(
    scene: Scene, feeds: Callable[..., DashboardFeed]
) -> None:
    live = scene.traffic(0.0)
    assert live
    old = TrafficBin(ts=live[0].ts - 7200.0, seconds=60.0, buckets=live[0].buckets)
    feed = feeds(scene.state, lambda since: [old, *(scene.traffic(since) or [])])
    columns, rows = TABLES["traffic"]
    found = list(csv.DictReader(io.StringIO(as_csv(rows(feed.whole()), columns).decode(), newline="")))
    assert {float(r["seconds"]) for r in found} == {5.0, 60.0} and float(found[0]["ts"]) == old.ts
    assert json.loads(as_json(feed.whole()))["traffic"] == json.loads(feed.history())
    away = feeds(scene.state, lambda since: None)
    assert away.whole().bins == []
    for name, (columns, _) in TABLES.items():
        assert as_csv([], columns).decode().strip().split(",") == columns, name


def test_decision_page_and_its_data(scene: Scene) -> None:
    wanted = scene.state().decisions[0].decision_id
    assert "<title>Decision" in call(scene, "GET", f"/decisions/{wanted}").text
    assert call(scene, "GET", f"/api/decisions/{wanted}").json()["decision_id"] == wanted
    assert call(scene, "GET", "/api/decisions/987654").status_code == 404
    for path, param in (("/api/decisions/abc", "decision_id"), ("/api/events?since=abc", "since")):
        wrong = call(scene, "GET", path)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, param)


def test_static_files_come_with_the_strict_policy_and_can_be_cached(scene: Scene) -> None:
    closed = Access(tokens=Tokens(api_token="api"), host="0.0.0.0")
    for name in [p.name for p in FOLDER.iterdir() if p.suffix in (".js", ".css")] + ["plotly.min.js"]:
        answer = call(scene, "GET", f"/static/{name}", closed)
        assert answer.status_code == 200, name
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self';" in policy and "unsafe" not in policy and "default-src 'none'" in policy
        again = call(scene, "GET", f"/static/{name}", closed, headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304
    assert call(scene, "GET", "/static/..%2Fmetrics.py", closed).status_code == 404
    assert call(scene, "GET", "/static/nothing.js", closed).status_code == 404


def test_plotly_is_the_installed_wheels_and_travels_compressed(scene: Scene) -> None:
    answer = call(scene, "GET", "/static/plotly.min.js", headers={"accept-encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.content == plotly_file().read_bytes()
    assert plotly_facts()["style_ids"], "maps of this plotly put styles inline under an id; see plot.js"
