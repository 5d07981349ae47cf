"""Raw sockets of the fuzzer: HTTP that no library sends: slow, split, oversized, ambiguous, and cut off.

A smuggled request is one that stands where a body should be: it names SMUGGLED_PATH, and a server that answers it has
lost track of where messages end.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

SMUGGLED_PATH = "/smuggled-by-fuzz"
QUIET_S = 1.0
"""Silence after which what the server has sent is taken for all."""
PATIENCE_S = 30.0
"""Longest time that a server may wait for the rest of a head: three times what ours does, which may be busy."""
_BODY = b'{"prompt": "a", "max_tokens": 1}'
_SMUGGLED = f"GET {SMUGGLED_PATH} HTTP/1.1\r\nHost: a\r\n\r\n".encode()


@dataclass(frozen=True, slots=True)
class RawRequest:
    """Pieces of bytes and the pauses before them (s)."""

    name: str
    pieces: tuple[tuple[float, bytes], ...]
    resets: bool = False
    """The client drops the connection at once."""
    ends: bool = False
    """The client says that it will send no more."""


@dataclass(frozen=True, slots=True)
class RawOutcome:
    """What came back."""

    name: str
    statuses: tuple[int, ...]
    has_smuggled: bool
    is_hung: bool
    """The server neither answered a whole request nor closed."""
    sent: bytes = b""
    """Its beginning."""


def _head(
    *lines: bytes, path: bytes = b"/v1/completions", method: bytes = b"POST", version: bytes = b"HTTP/1.1"
) -> bytes:
    return b"\r\n".join((b"%s %s %s" % (method, path, version), b"Host: 127.0.0.1", *lines, b"", b""))


_JSON = b"Content-Type: application/json"


def _sized(size: bytes, *lines: bytes) -> bytes:
    return _head(_JSON, b"Content-Length: " + size, *lines)


def _chunked(*lines: bytes) -> bytes:
    return _head(_JSON, b"Transfer-Encoding: chunked", *lines)


def _whole(rng: random.Random) -> bytes:
    return _sized(b"%d" % len(_BODY)) + _BODY


def _once(make: Callable[[random.Random], bytes], **how: bool) -> Callable[[random.Random, str], RawRequest]:
    return lambda rng, name: RawRequest(name, ((0.0, make(rng)),), **how)


def _split(rng: random.Random, name: str) -> RawRequest:
    raw = _whole(rng)
    cuts = sorted(rng.randrange(len(raw)) for _ in range(rng.randrange(1, 12)))
    parts = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    return RawRequest(name, tuple((0.002, p) for p in parts if p))


def _slow(rng: random.Random, name: str) -> RawRequest:
    raw = _whole(rng)
    at = rng.randrange(1, len(raw))
    return RawRequest(name, ((0.0, raw[:at]), (0.3, raw[at:])))


def _bytes(rng: random.Random) -> bytes:
    return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 400)))


def _flipped(rng: random.Random) -> bytes:
    raw = bytearray(_whole(rng))
    for _ in range(rng.randrange(1, 6)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw)


KINDS: dict[str, Callable[[random.Random, str], RawRequest]] = {
    "whole": _once(_whole),
    "split": _split,
    "slow": _slow,
    "byte flips": _once(_flipped, ends=True),
    "random bytes": _once(_bytes, ends=True),
    "hang up in the head": _once(lambda r: _whole(r)[: r.randrange(60)], resets=True),
    "hang up in the body": _once(lambda r: _whole(r)[:-5], resets=True),
    "half closed": _once(lambda r: _whole(r)[:-5], ends=True),
    "length and chunks": _once(lambda r: _sized(b"%d" % (5 + len(_SMUGGLED)), b"Transfer-Encoding: chunked") + b"0\r\n\r\n" + _SMUGGLED),
    "two lengths": _once(lambda r: _sized(b"%d" % (len(_BODY) + len(_SMUGGLED)), b"Content-Length: %d" % len(_BODY)) + _BODY + _SMUGGLED),
    "length within": _once(lambda r: _sized(b"%d" % (len(_BODY) + len(_SMUGGLED))) + _BODY + _SMUGGLED),
    "odd length": _once(lambda r: _sized(r.choice((b"-1", b"+5", b"0x20", b"1e3", b"5, 5", b"", b"9" * 40, b"\xb2"))) + _BODY + _SMUGGLED, ends=True),
    "odd coding": _once(lambda r: _head(_JSON, b"Transfer-Encoding: " + r.choice((b"chunked, identity", b"xchunked", b"\x0bchunked", b"identity", b"gzip", b"chunked;a=b"))) + b"0\r\n\r\n" + _SMUGGLED, ends=True),
    "two codings": _once(lambda r: _chunked(b"Transfer-Encoding: identity") + b"0\r\n\r\n" + _SMUGGLED, ends=True),
    "folded header": _once(lambda r: _sized(b"%d" % len(_BODY), b"X-A: b", b" Transfer-Encoding: chunked") + _BODY),
    "space before colon": _once(lambda r: _sized(b"%d" % (len(_BODY) + len(_SMUGGLED)), b"Transfer-Encoding : chunked") + _BODY + _SMUGGLED),
    "lines without return": _once(lambda r: _whole(r).replace(b"\r\n", b"\n"), ends=True),
    "nul in a header": _once(lambda r: _sized(b"%d" % len(_BODY), b"X-A: a\x00b") + _BODY),
    "chunk sizes": _once(lambda r: _chunked() + r.choice((b"FFFFFFFFFFFFFFFFF", b"-1", b"zz", b"0x5", b"1 ;" + b"x" * 70_000)) + b"\r\n" + _BODY + b"\r\n0\r\n\r\n", ends=True),
    "chunks": _once(lambda r: _chunked() + b"".join(b"1\r\n%c\r\n" % c for c in _BODY) + b"0\r\n\r\n"),
    "huge header": _once(lambda r: _sized(b"%d" % len(_BODY), b"X-A: " + b"a" * 200_000) + _BODY),
    "many headers": _once(lambda r: _sized(b"%d" % len(_BODY), *(b"X-%d: a" % i for i in range(3000))) + _BODY),
    "huge target": _once(lambda r: _head(method=b"GET", path=b"/" + b"a" * 100_000)),
    "whole address": _once(lambda r: _head(method=b"GET", path=b"http://evil.example/v1/models")),
    "odd target": _once(lambda r: _head(method=b"GET", path=r.choice((b"*", b"//", b"/%", b"/%zz", b"/\xff", b"/..%2f..%2f", b"/a b")))),
    "odd version": _once(lambda r: _head(method=b"GET", path=b"/healthz", version=r.choice((b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"HTTX/1.1", b""))), ends=True),
    "odd method": _once(lambda r: _head(method=r.choice((b"FOO", b"get", b"G\x00T", b"CONNECT", b"PRI")))),
    "upgrade": _once(lambda r: _head(b"Connection: Upgrade", b"Upgrade: " + r.choice((b"websocket", b"h2c")), b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", method=b"GET", path=b"/v1/models")),
    "http2": _once(lambda r: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)),
    "tls": _once(lambda r: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(r.randrange(256) for _ in range(200)), ends=True),
    "expects": _once(lambda r: _sized(b"%d" % len(_BODY), b"Expect: 100-continue") + _BODY),
    "two at once": _once(lambda r: _whole(r) + _whole(r)),
    "8-bit id": _once(lambda r: _sized(b"%d" % len(_BODY), b"x-request-id: " + r.choice((b"\xff", b"\xe4\xf6", b"\x80" * 30))) + _BODY),
    "no host": _once(lambda r: b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"),
}  # fmt: skip
"""Name -> how such a request is drawn."""
_ANSWERED = frozenset({"whole", "split", "slow", "chunks", "expects", "two at once"})
"""Kinds that are whole requests: no answer at all is a hang."""


async def ask_raw(url: str, rng: random.Random, timeout_s: float) -> RawOutcome:
    """Send a request of a random kind to the server of `url` and read what it answers within timeout_s."""
    name = rng.choice(list(KINDS))
    request = KINDS[name](rng, name)
    try:
        reader, writer = await asyncio.wait_for(_connect(url), timeout_s)
    except (OSError, TimeoutError):
        return RawOutcome(name, (), False, True)
    received = b""
    try:
        with contextlib.suppress(ConnectionError):
            for pause_s, piece in request.pieces:
                if pause_s:
                    await asyncio.sleep(pause_s)
                writer.write(piece)
                await asyncio.wait_for(writer.drain(), timeout_s)
            if request.resets:
                return RawOutcome(name, (), False, False)
            if request.ends and writer.can_write_eof():
                with contextlib.suppress(OSError):  # the server was faster
                    writer.write_eof()
            received = await _read(reader, timeout_s, needs_answer=name in _ANSWERED)
    except TimeoutError:
        return RawOutcome(name, (), False, True, request.pieces[0][1][:500])
    finally:
        writer.transport.abort()
    statuses = tuple(int(s) for s in re.findall(rb"(?:^|\r\n\r\n|\}|\n)HTTP/1\.[01] (\d{3})", received))
    has_smuggled = 404 in statuses[1:]  # there is no such path, and the request before it was for another one
    is_hung = name in _ANSWERED and not statuses and b"HTTP/1." not in received
    return RawOutcome(name, statuses, has_smuggled, is_hung, request.pieces[0][1][:500])


UNFINISHED: dict[str, bytes] = {
    "nothing": b"",
    "half a line": b"GET /hea",
    "half a header": _whole(random.Random(0))[:40],
    "half of a second head": _head(method=b"GET", path=b"/healthz") + b"GET /hea",
}
"""Name -> what is sent on a connection that then stays as it is."""


async def ends_unfinished(url: str, name: str) -> float | None:
    """Send what UNFINISHED has by that name; seconds until the server closes, None: it does not within PATIENCE_S."""
    began = time.monotonic()
    writer = None
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await _connect(url)
            with contextlib.suppress(ConnectionError):
                writer.write(UNFINISHED[name])
                while await reader.read(65_536):
                    pass
    except (OSError, TimeoutError):
        return None
    finally:
        if writer is not None:
            writer.transport.abort()
    return round(time.monotonic() - began, 1)


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    place = urlsplit(url)
    context: ssl.SSLContext | None = None
    if place.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # what is tested is the server's patience
    port = place.port or (443 if place.scheme == "https" else 80)
    return await asyncio.open_connection(place.hostname, port, ssl=context)


async def _read(reader: asyncio.StreamReader, timeout_s: float, *, needs_answer: bool) -> bytes:
    """What comes until the server closes, or is quiet after an answer, or (where none is due) quiet at all."""
    received = b""
    end = time.monotonic() + timeout_s
    while (left := end - time.monotonic()) > 0:
        patience = left if needs_answer and not received else min(left, QUIET_S if not received else 0.15)
        try:
            part = await asyncio.wait_for(reader.read(65_536), patience)
        except TimeoutError:
            break
        if not part:
            break
        received += part
    return received
