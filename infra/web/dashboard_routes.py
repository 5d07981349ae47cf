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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
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
from paceline.infra.web.feed import DashboardFeed, events, parse_have, update
from paceline.infra.web.state_routes import ServiceView, audited, run_command

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


def _json(body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    sent = {**HEADERS, "Cache-Control": "no-store", **(headers or {})}
    return Response(body, media_type="application/json", headers=sent)


async def _joined(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(rest):
        yield first
        async for event in rest:
            yield event


@dataclass(frozen=True, slots=True)
class DashboardRoutes:
    """The handlers below /dashboard; each checks tokens itself."""

    view: ServiceView
    access: Access
    feed: DashboardFeed
    files: Mapping[str, Path]
    """Name -> file of the page."""

    async def page(self, request: Request) -> Response:
        return await _send_file(self.files["index.html"], request)

    async def without_slash(self) -> Response:
        """The page's files are beside it: relative, since a service may be below a prefix."""
        return Response(status_code=307, headers={**HEADERS, "Location": "../dashboard"})

    async def decision_shell(self, decision_id: str, request: Request) -> Response:
        return await _send_file(self.files["decision.html"], request)

    async def static(self, name: str, request: Request) -> Response:
        if name == "plotly.min.js":
            return await _send_file(plotly_file(), request, _DAY)
        if name == "plotly.json":
            return _json(msgspec.json.encode(await asyncio.to_thread(plotly_facts)))
        if name not in self.files or name.endswith(".html"):
            raise HTTPException(404, f"the dashboard has no file {name!r}")
        return await _send_file(self.files[name], request)

    async def session(self, request: Request) -> Response:
        self.access.check_read(request)
        found = {"is_admin": self.access.is_admin(request), "has_admin_token": self.access.has_admin}
        return _json(msgspec.json.encode(found))

    async def state(self, request: Request) -> Response:
        self.access.check_read(request)
        return _json(update(await self.feed.run(self.feed.document), {}, 0.0))

    async def history(self, request: Request) -> Response:
        self.access.check_read(request)
        return _json(await self.feed.run(self.feed.history))

    async def stream(self, request: Request, have: str = "", since: float = 0.0) -> Response:
        self.access.check_read(request)
        if self.feed.num_pages >= self.feed.max_pages:
            reason = f"{self.feed.max_pages} pages watch this replica already; close one"
            raise HTTPException(503, reason, {"Retry-After": "10"})
        headers = {**HEADERS, "X-Accel-Buffering": "no", "Cache-Control": "no-store"}
        stream = events(self.feed, parse_have(have), since)
        first = await anext(stream)  # a feed that is closed is refused while there is a status to say it with
        return StreamingResponse(_joined(first, stream), media_type="text/event-stream", headers=headers)

    async def decision(self, decision_id: int, request: Request) -> Response:
        self.access.check_read(request)
        document = await self.feed.run(self.feed.document)
        found = decision_page(document.state, decision_id)
        if found is None:
            raise HTTPException(
                404, f"decision {decision_id} is not among the latest; decisions.jsonl in the data folder keeps all"
            )
        return _json(msgspec.json.encode(found))

    async def export(self, name: str, request: Request) -> Response:
        self.access.check_read(request)
        stem, _, kind = name.rpartition(".")
        saved_as = {"Content-Disposition": f'attachment; filename="paceline-{stem}.{kind}"'}
        if name == "dashboard.json":
            return _json(as_json(await self.feed.run(self.feed.whole)), saved_as)
        if kind != "csv" or stem not in TABLES:
            raise HTTPException(404, f"export must be dashboard.json or one of {', '.join(f'{t}.csv' for t in TABLES)}")
        document = await self.feed.run(self.feed.whole if stem == "traffic" else self.feed.document)
        columns, rows = TABLES[stem]
        body = await self.feed.run(lambda: as_csv(rows(document), columns))
        headers = {**HEADERS, "Cache-Control": "no-store", **saved_as}
        return Response(body, media_type="text/csv; charset=utf-8", headers=headers)

    async def command(self, name: str, request: Request) -> Response:
        with audited(name, request, self.access):
            self.access.check_change(request)
            return _json(msgspec.json.encode(await run_command(self.view, name, request)))


def dashboard_router(view: ServiceView, access: Access, feed: DashboardFeed) -> APIRouter:
    """Everything below /dashboard; `feed` is of the same view, and whoever made it closes it."""
    routes = DashboardRoutes(view, access, feed, {p.name: p for p in FOLDER.iterdir() if p.suffix in _TYPES})
    router = APIRouter(prefix="/dashboard")
    get: dict[str, Callable[..., Any]] = {
        "": routes.page,
        "/": routes.without_slash,
        "/decisions/{decision_id}": routes.decision_shell,
        "/static/{name}": routes.static,
        "/api/session": routes.session,
        "/api/state": routes.state,
        "/api/history": routes.history,
        "/api/events": routes.stream,
        "/api/decisions/{decision_id}": routes.decision,
        "/api/export/{name}": routes.export,
    }
    for path, handler in get.items():
        router.add_api_route(path, handler, methods=["GET"])
    router.add_api_route("/api/commands/{name}", routes.command, methods=["POST"])
    return router
