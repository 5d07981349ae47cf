"""Event lines: lines of a stream of server-sent events, which end at line feeds alone.

httpx also ends them at the other characters that Unicode counts as line ends (U+0085, U+2028, U+2029). JSON holds those as they
are, and a server may send them within an event.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx


async def event_lines(response: httpx.Response) -> AsyncIterator[str]:
    """The lines of an answer as they arrive, without their ends. Raises: httpx.TransportError."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode("utf-8", errors="replace")
    if rest:
        yield rest.decode("utf-8", errors="replace")
