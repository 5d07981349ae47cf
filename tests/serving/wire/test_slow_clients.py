"""Over a real socket: clients that do not send, or do not read, hold up nobody and are let go."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import pytest

from paceline.config import ClientLimits
from paceline.serving.api.app import build_api
from paceline.serving.api.generation import ApiParts
from paceline.serving.wire.accounts import Clients
from paceline.serving.wire.credentials import Tokens
from tests.helpers.api_server import TOKENIZER, ScriptedEngine, serve_app, wait_until

GRACE_S, WRITE_S = 2.0, 1.0
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
)


@pytest.fixture
def served() -> Iterator[SimpleNamespace]:
    engine, clients = ScriptedEngine(), Clients()
    engine.context_tokens = 4096
    parts = ApiParts(client=engine, tokenizer=TOKENIZER, clients=clients, body_grace_s=GRACE_S, write_s=WRITE_S)
    with serve_app(build_api(parts)) as url:
        yield SimpleNamespace(url=url, engine=engine, clients=clients)


def connect(url: str, stack: ExitStack, buffer: int | None = None) -> socket.socket:
    """buffer: bytes that the client's kernel takes; with small segments the server's takes few, too."""
    place = urlsplit(url)
    sock = stack.enter_context(socket.socket())
    if buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    sock.connect((place.hostname, place.port))
    return sock


def first_token_s(url: str) -> float:
    """Median over a few requests."""
    found = []
    for _ in range(7):
        began = time.perf_counter()
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 6}
        ) as answer:
            assert answer.status_code == 200
            next(answer.iter_raw())
            found.append(time.perf_counter() - began)
    return sorted(found)[3]


def num_unfinished(served: SimpleNamespace) -> int:
    return sum(account.num_unfinished for account in served.clients._accounts.values())


def test_connections_that_send_one_byte_hold_up_nobody_and_are_told_why_they_are_closed(
    served: SimpleNamespace,
) -> None:
    before = first_token_s(served.url)
    with ExitStack() as stack:
        slow = [connect(served.url, stack) for _ in range(120)]
        for sock in slow:
            sock.sendall(HEAD.format(1000).encode() + b"{")
        wait_until(lambda: num_unfinished(served) == 120)
        assert first_token_s(served.url) < 2 * before + 0.05
        for sock in slow:
            sock.settimeout(GRACE_S + 10)
            answer = b""
            while part := sock.recv(65_536):
                answer += part
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head.lower()
            error = json.loads(body)["error"]
            assert error["code"] == "slow_body" and "got 1 bytes" in error["message"]
    wait_until(lambda: num_unfinished(served) == 0)
    assert served.engine.requests and first_token_s(served.url) < 2 * before + 0.05


def test_a_body_that_drips_is_cut_and_one_that_comes_steadily_is_not(served: SimpleNamespace) -> None:
    with ExitStack() as stack:
        dripping, steady = connect(served.url, stack), connect(served.url, stack)
        body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "u" * 40_000}).encode()
        for sock in (dripping, steady):
            sock.sendall(HEAD.format(len(body)).encode())
        end = time.monotonic() + GRACE_S + 1.5
        steps = 10
        for i in range(steps):
            time.sleep(max(0.0, (end - time.monotonic()) / (steps - i)))
            steady.sendall(body[i * len(body) // steps : (i + 1) * len(body) // steps])
            with suppress(ConnectionError):  # it was told by now
                dripping.sendall(b" ")
        dripping.settimeout(10)
        steady.settimeout(10)
        assert dripping.recv(65_536).startswith(b"HTTP/1.1 408 ")
        assert steady.recv(65_536).startswith(b"HTTP/1.1 200 "), "beyond the grace what has come counts"


@pytest.mark.slow
def test_clients_that_never_read_hold_up_nobody_and_their_answers_end(served: SimpleNamespace) -> None:
    before = first_token_s(served.url)
    short = served.engine.text
    served.engine.text = "abcdefghij" * 60
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 600, "logprobs": 5, "n": 2}).encode()
    num_before = len(served.engine.requests)
    with ExitStack() as stack:
        for _ in range(200):
            connect(served.url, stack, buffer=2048).sendall(HEAD.format(len(body)).encode() + body)
        wait_until(lambda: len(served.engine.requests) == num_before + 400, 60)
        served.engine.text = short
        wait_until(lambda: num_unfinished(served) == 0, 60)
        cut = [
            r for r in served.engine.requests[num_before : num_before + 400] if r.request_id in served.engine.aborted
        ]
        assert first_token_s(served.url) < 2 * before + 0.05
    assert len(cut) >= 200, "they were aborted, not finished"


def test_a_reader_that_pauses_for_less_than_the_deadline_gets_all_of_it(served: SimpleNamespace) -> None:
    served.engine.text = "abcdefghij" * 60
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 600, "logprobs": 5}).encode()
    with ExitStack() as stack:
        sock = connect(served.url, stack, buffer=2048)
        sock.sendall(HEAD.format(len(body)).encode() + body)
        time.sleep(WRITE_S / 2)
        sock.settimeout(20)
        received = b""
        while b"data: [DONE]" not in received:
            part = sock.recv(65_536)
            assert part, "cut"
            received += part


def test_slow_connections_of_one_tenant_leave_the_places_of_others() -> None:
    engine = ScriptedEngine()
    tokens = Tokens(api_token="front")
    parts = ApiParts(
        client=engine, tokenizer=TOKENIZER, body_grace_s=30.0,
        clients=Clients(tokens, limits=ClientLimits(max_unfinished=10)),
    )  # fmt: skip
    with serve_app(build_api(parts)) as url, ExitStack() as stack:
        head = HEAD.format(1000).replace("Host:", "Authorization: Bearer front\r\nx-paceline-tenant: greedy\r\nHost:")
        for _ in range(20):
            connect(url, stack).sendall(head.encode() + b"{")
        own = {"authorization": "Bearer front", "x-paceline-tenant": "greedy"}
        wait_until(lambda: httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=own).status_code == 429)
        other = {**own, "x-paceline-tenant": "other"}
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=other).status_code == 200
