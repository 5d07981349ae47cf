"""Claims of infra/web/feed.py on its threads: slow pages starve nobody, and a feed that is closed lets go."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from paceline.infra.controller.snapshot import Snapshot, state_json
from paceline.infra.web.access import Access
from paceline.infra.web.dashboard_routes import dashboard_router
from paceline.infra.web.feed import DashboardFeed, events
from paceline.infra.web.state_routes import service_router
from paceline.serving.api.app import build_api
from paceline.serving.api.generation import ApiParts
from paceline.serving.wire.accounts import Clients
from paceline.serving.wire.credentials import Tokens
from tests.helpers.api_server import TOKENIZER, ScriptedEngine


def slow_feed(gate: threading.Event, is_reading: threading.Event) -> DashboardFeed:
    """A feed whose controller answers when the gate opens."""

    def read() -> Snapshot:
        is_reading.set()
        gate.wait(60)
        return Snapshot()

    return DashboardFeed(read, lambda since: None)


def test_a_slow_controller_holds_up_pages_but_not_the_api() -> None:
    gate = threading.Event()
    feed = slow_feed(gate, threading.Event())
    router = dashboard_router(None, Access(), feed)  # type: ignore[arg-type]
    parts = ApiParts(client=ScriptedEngine(), tokenizer=TOKENIZER, open_routers=(router,), swap=lambda: {"slots": {}})

    async def main() -> None:
        transport = httpx.ASGITransport(app=build_api(parts), client=("127.0.0.1", 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=None) as client:
            pages = [asyncio.create_task(client.get("/dashboard/api/state")) for _ in range(80)]
            try:
                await asyncio.wait(pages, timeout=1.0)
                assert (await asyncio.wait_for(client.get("/paceline/swap"), 20.0)).status_code == 200
                assert not any(page.done() for page in pages)
            finally:
                gate.set()
            assert {page.status_code for page in await asyncio.gather(*pages)} == {200}

    asyncio.run(main())
    feed.close()


def test_a_page_goes_by_the_clock_of_the_times_that_it_shows_also_while_the_controller_is_away() -> None:
    states = iter([Snapshot(ts=1000.0, age_s=0.5, has_controller=True), Snapshot()])
    now = 700.0  # of a computer whose clock is five minutes slow
    feed = DashboardFeed(lambda: next(states), lambda since: None, clock=lambda: now, fresh_s=-1.0)
    assert feed.document().ts == 1000.5
    now = 702.0
    assert feed.document().ts == 1002.5
    feed.close()


def test_a_closed_feed_refuses_pages_and_lets_what_waits_go() -> None:
    gate, is_reading = threading.Event(), threading.Event()
    feed = slow_feed(gate, is_reading)
    router = dashboard_router(None, Access(), feed)  # type: ignore[arg-type]
    parts = ApiParts(client=ScriptedEngine(), tokenizer=TOKENIZER, open_routers=(router,))

    async def main() -> list[int]:
        transport = httpx.ASGITransport(app=build_api(parts), client=("127.0.0.1", 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=None) as client:
            pages = [asyncio.create_task(client.get("/dashboard/api/state")) for _ in range(6)]
            await asyncio.to_thread(is_reading.wait, 30)
            feed.close()
            gate.set()
            late = await client.get("/dashboard/api/state")
            stream = await client.get("/dashboard/api/events")
            assert stream.status_code == 503 and stream.headers["retry-after"] == "2"
            return [page.status_code for page in await asyncio.gather(*pages)] + [late.status_code]

    found = asyncio.run(main())
    assert found.count(200) <= 2 and found[-1] == 503 and set(found) <= {200, 503}
    assert feed.num_pages == 0


def test_a_stream_in_progress_ends_without_renew_when_its_feed_closes() -> None:
    feed = DashboardFeed(Snapshot, lambda since: None, period_s=0.0)

    async def main() -> list[bytes]:
        stream = events(feed, {}, 0.0)
        seen = [await anext(stream)]
        feed.close()
        return seen + [event async for event in stream]

    (only,) = asyncio.run(main())
    assert only.startswith(b"event: update\n")
    assert feed.num_pages == 0


class Blocked:
    """A service whose controller answers when the gate opens; notes the threads that ask."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.threads: set[str] = set()

    def state(self) -> Snapshot:
        self.threads.add(threading.current_thread().name)
        self.gate.wait(60)
        return Snapshot(gen=1)

    def command(self, name: str, *args: Any) -> Snapshot:
        raise AssertionError("nothing is changed here")


@pytest.mark.parametrize("path", ["/paceline/versions", "/paceline/state"])
def test_readers_of_versions_and_state_wait_in_the_dashboards_threads(path: str) -> None:
    view = Blocked()
    feed = DashboardFeed(view.state, lambda since: None)
    router = service_router(view, Access(), feed.run)
    parts = ApiParts(
        client=ScriptedEngine(), tokenizer=TOKENIZER, open_routers=(router,), state=lambda: state_json(view.state()), run_state=feed.run,
        swap=lambda: {"slots": {}},
    )  # fmt: skip

    async def main() -> None:
        transport = httpx.ASGITransport(app=build_api(parts), client=("127.0.0.1", 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=None) as client:
            waiting = [asyncio.create_task(client.get(path)) for _ in range(80)]
            try:
                await asyncio.wait(waiting, timeout=1.0)
                assert (await asyncio.wait_for(client.get("/paceline/swap"), 20.0)).status_code == 200
                assert not any(one.done() for one in waiting)
            finally:
                view.gate.set()
            assert {one.status_code for one in await asyncio.gather(*waiting)} == {200}

    asyncio.run(main())
    feed.close()
    assert view.threads and all(name.startswith("dashboard") for name in view.threads)


@pytest.mark.parametrize("path", ["/v1/models", "/paceline/state", "/paceline/swap", "/metrics"])
def test_no_token_is_checked_in_a_thread(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads run out while something blocks; what needs no I/O must not wait for one."""

    async def no_threads(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("FastAPI sent a check through its thread pool")

    monkeypatch.setattr("fastapi.dependencies.utils.run_in_threadpool", no_threads)
    tokens = Tokens(api_token="api")
    parts = ApiParts(
        client=ScriptedEngine(),
        tokenizer=TOKENIZER,
        clients=Clients(tokens),
        check_state=Access(tokens=tokens).check_read,
    )

    async def main() -> list[int]:
        transport = httpx.ASGITransport(app=build_api(parts), client=("127.0.0.1", 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            sent = {"authorization": "Bearer api"}
            return [(await client.get(path, headers=h)).status_code for h in ({}, sent)]

    assert asyncio.run(main()) == [401, 200]
