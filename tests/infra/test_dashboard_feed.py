"""Claims of infra/dashboard_feed.py on its threads: slow pages starve nobody, and a feed that is closed lets go."""

from __future__ import annotations

import asyncio
import threading

import httpx

from paceline.infra.dashboard_access import Access
from paceline.infra.dashboard_feed import DashboardFeed, events
from paceline.infra.dashboard_routes import dashboard_router
from paceline.serving.api import build_api
from paceline.serving.api_generation import ApiParts
from tests.serving.api_server import TOKENIZER, ScriptedEngine


def slow_feed(gate: threading.Event, is_reading: threading.Event) -> DashboardFeed:
    """A feed whose controller answers when the gate opens."""

    def read() -> dict:
        is_reading.set()
        gate.wait(60)
        return {}

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
            assert [event async for event in events(feed, {}, 0.0)] == []
            return [page.status_code for page in await asyncio.gather(*pages)] + [late.status_code]

    found = asyncio.run(main())
    assert found.count(200) <= 2 and found[-1] == 503 and set(found) <= {200, 503}
    assert feed.num_pages == 0
