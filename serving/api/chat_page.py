"""Chat page: one file with its script inside, which talks to this service alone and shows what speculation does.

The page holds no data and needs no token: it asks for one where the routes it calls do.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from pathlib import Path

from fastapi import Request, Response

_FILE = Path(__file__).with_name("chat.html")


@functools.cache
def _page() -> tuple[bytes, dict[str, str]]:
    """The file and its headers: its own script and style are allowed by their hashes, everything else is shut out."""
    body = _FILE.read_bytes()

    def source(tag: bytes) -> str:
        found = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in found)

    policy = (
        f"default-src 'none'; script-src {source(b'script')}; style-src {source(b'style')}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return body, {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.blake2b(body, digest_size=8).hexdigest()}"',
    }


async def chat_page(request: Request) -> Response:
    """GET /chat."""
    body, headers = _page()
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="text/html", headers=headers)
