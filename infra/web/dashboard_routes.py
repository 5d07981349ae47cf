"""Dashboard routes: the page's files, its data, its stream, exports and the operators' commands.

The page itself holds no data and needs no token: it asks for one where the data routes do. Nothing is loaded from anywhere
else; plotly's JavaScript is the file in the installed wheel.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import hashlib
import importlib.resources
import re
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import plotly
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from paceline.infra.web.access import Access
from paceline.infra.web.decision import decision_page
from paceline.infra.web.export import TABLES, as_csv, as_json
from paceline.infra.web.feed import MAX_PAGES, DashboardFeed, events, parse_have, update
from paceline.infra.web.state_routes import Commands, run_command

FOLDER = Path(__file__).resolve().parents[1] / "page"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Of every answer: scripts and styles only from files of this origin, none inline; no framing, no other origin."""
_DAY = "public, max-age=86400"


def plotly_file() -> Path:
    """plotly.min.js of the installed wheel."""
    return Path(str(importlib.resources.files("plotly") / "package_data" / "plotly.min.js"))


@functools.cache
def _file(path: Path, is_gzipped: bool) -> tuple[bytes, str]:
    """(body, entity tag) of a file that does not change while the process lives."""
    body = path.read_bytes()
    tag = hashlib.blake2b(body, digest_size=8).hexdigest()
    return (gzip.compress(body, 6), f'"{tag}-gz"') if is_gzipped else (body, f'"{tag}"')


@functools.cache
def plotly_facts() -> dict[str, Any]:
    """Version of plotly.js' wheel and the ids of the style elements that its maps would put inline.

    The page makes empty elements of these ids first, since the content security policy allows no inline style and the
    dashboard draws no maps; see plot.js.
    """
    text = plotly_file().read_text(encoding="utf-8")
    return {
        "version": plotly.__version__,
        "style_ids": sorted(set(re.findall(r'getElementById\("([0-9a-f]{64})"\)', text))),
    }


async def _send_file(path: Path, request: Request, cache: str = "no-cache") -> Response:
    is_gzipped = "gzip" in request.headers.get("accept-encoding", "")
    body, tag = await asyncio.to_thread(_file, path, is_gzipped)
    headers = {**HEADERS, "ETag": tag, "Cache-Control": cache, "Vary": "Accept-Encoding"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    if is_gzipped:
        headers["Content-Encoding"] = "gzip"
    return Response(body, media_type=_TYPES[path.suffix], headers=headers)


def _json(body: bytes, **headers: str) -> Response:
    return Response(body, media_type="application/json", headers={**HEADERS, "Cache-Control": "no-store", **headers})


async def _joined(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(rest):
        yield first
        async for event in rest:
            yield event


def dashboard_router(view: Commands, access: Access, feed: DashboardFeed) -> APIRouter:
    """Everything below /dashboard; checks tokens itself.

    Args:
        feed: of the same view; whoever made it closes it.
    """
    router = APIRouter(prefix="/dashboard")
    names = {p.name: p for p in sorted(FOLDER.iterdir()) if p.suffix in _TYPES}

    async def page(request: Request) -> Response:
        return await _send_file(names["index.html"], request)

    async def decision_shell(decision_id: str, request: Request) -> Response:
        return await _send_file(names["decision.html"], request)

    async def static(name: str, request: Request) -> Response:
        if name == "plotly.min.js":
            return await _send_file(plotly_file(), request, _DAY)
        if name == "plotly.json":
            return _json(msgspec.json.encode(await asyncio.to_thread(plotly_facts)))
        if name not in names or name.endswith(".html"):
            raise HTTPException(404, f"the dashboard has no file {name!r}")
        return await _send_file(names[name], request)

    async def session(request: Request) -> Response:
        access.check_read(request)
        found = {"is_admin": access.is_admin(request), "has_admin_token": access.admin_token is not None}
        return _json(msgspec.json.encode(found))

    async def state(request: Request) -> Response:
        access.check_read(request)
        return _json(update(await feed.run(feed.document), {}, 0.0))

    async def stream(request: Request, have: str = "", since: float = 0.0) -> Response:
        access.check_read(request)
        if feed.num_pages >= MAX_PAGES:
            raise HTTPException(503, f"{MAX_PAGES} pages watch this replica already; close one", {"Retry-After": "10"})
        headers = {**HEADERS, "X-Accel-Buffering": "no", "Cache-Control": "no-store"}
        stream = events(feed, parse_have(have), since)
        first = await anext(stream)  # a feed that is closed is refused while there is a status to say it with
        return StreamingResponse(_joined(first, stream), media_type="text/event-stream", headers=headers)

    async def decision(decision_id: int, request: Request) -> Response:
        access.check_read(request)
        document = await feed.run(feed.document)
        found = decision_page(document.state, decision_id)
        if found is None:
            raise HTTPException(
                404, f"decision {decision_id} is not among the latest; decisions.jsonl in the data folder keeps all"
            )
        return _json(msgspec.json.encode(found))

    async def export(name: str, request: Request) -> Response:
        access.check_read(request)
        document = await feed.run(feed.document)
        stem, _, kind = name.rpartition(".")
        headers = {
            **HEADERS,
            "Cache-Control": "no-store",
            "Content-Disposition": f'attachment; filename="paceline-{stem}.{kind}"',
        }
        if name == "dashboard.json":
            return Response(as_json(document), media_type="application/json", headers=headers)
        if kind != "csv" or stem not in TABLES:
            raise HTTPException(404, f"export must be dashboard.json or one of {', '.join(f'{t}.csv' for t in TABLES)}")
        body = await feed.run(lambda: as_csv(TABLES[stem](document)))
        return Response(body, media_type="text/csv; charset=utf-8", headers=headers)

    async def command(name: str, request: Request) -> Response:
        access.check_change(request)
        return _json(msgspec.json.encode(await run_command(view, name, request)))

    get: dict[str, Any] = {
        "": page, "/": page, "/decisions/{decision_id}": decision_shell, "/static/{name}": static, "/api/session": session,
        "/api/state": state, "/api/events": stream, "/api/decisions/{decision_id}": decision, "/api/export/{name}": export,
    }  # fmt: skip
    for path, handler in get.items():
        router.add_api_route(path, handler, methods=["GET"])
    router.add_api_route("/api/commands/{name}", command, methods=["POST"])
    return router
