"""Lines of server-sent events end at line feeds alone, wherever the bytes are cut."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from paceline.bench.common.event_lines import event_lines

TEXT = 'data: {"text": "a\u2028b\x85c\u2029d"}\r\n\ndata: [DONE]\n\nüber'
LINES = ['data: {"text": "a\u2028b\x85c\u2029d"}', "", "data: [DONE]", "", "über"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_end_at_line_feeds_alone(size: int) -> None:
    data = TEXT.encode()

    async def parts() -> AsyncIterator[bytes]:
        for i in range(0, len(data), size):
            yield data[i : i + size]

    async def read() -> list[str]:
        return [line async for line in event_lines(httpx.Response(200, content=parts()))]

    assert asyncio.run(read()) == LINES
