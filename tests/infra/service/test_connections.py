"""Connections over plain sockets: whoever sends no head in time or takes no answer is let go, others stay."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import uvicorn

from paceline.infra.service import connections, front
from paceline.infra.service.connections import Connection
from paceline.machine import free_port
from tests.helpers.api_server import wait_until

HEAD_S, SLACK_S = 0.5, 10.0
GET = b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n"


gone = threading.Event()


async def answers(scope, receive, send):
    if scope["path"] == "/wait":
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()
        return
    size = int(scope["path"][1:])
    headers = [(b"content-length", b"%d" % size)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"x" * size})


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of a server as Serve's proxy starts it: it names no protocol."""
    monkeypatch.setattr(Connection, "head_s", HEAD_S)
    monkeypatch.setattr(Connection, "write_s", HEAD_S)
    monkeypatch.setattr(front.Presence, "start", lambda self: self)
    monkeypatch.setattr(uvicorn.config, "HTTP_PROTOCOLS", dict(uvicorn.config.HTTP_PROTOCOLS))
    front.middlewares()
    config = uvicorn.Config(
        answers, port=(port := free_port()), log_level="critical", lifespan="off", timeout_keep_alive=60
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(10)


def connect(port: int, sent: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=SLACK_S)
    sock.sendall(sent)
    return sock


def is_closed(sock: socket.socket) -> bool:
    """Whether the server hangs up within SLACK_S."""
    try:
        return sock.recv(1 << 16) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET /hea", b"GET /1 HTTP/1.1\r\nHost: a\r\nX-Half: "])
def test_a_connection_without_a_whole_head_is_closed(port: int, sent: bytes) -> None:
    with connect(port, sent) as sock:
        assert is_closed(sock)
    wait_until(lambda: not Connection.num_open)


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /1 HTTP/1.1\r\nHost: a\r\nX-Long: ",
        b"GET /",
        b"POST /1 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX-Trailer: ",
    ],
)
def test_a_head_or_a_trailer_without_end_is_refused_before_it_fills_the_memory(
    port: int, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "head_s", 60.0)  # its time is not what ends it
    sent, portion = 0, b"a" * 2**14
    with connect(port, begun) as sock:
        try:
            while sent < 64 * 2**20:
                sock.sendall(portion)
                sent += len(portion)
        except ConnectionError:
            pass
    assert sent < 16 * 2**20, "what the kernel holds, and no more"
    wait_until(lambda: not Connection.num_open)


def test_a_long_head_is_taken_and_a_longer_one_is_told_why(port: int) -> None:
    for size, status in ((50_000, b"200"), (70_000, b"431")):
        with connect(port, b"GET /1 HTTP/1.1\r\nHost: a\r\nX-Long: ") as sock:
            for _ in range(size // 10_000):
                sock.sendall(b"a" * 10_000)
            if status == b"200":
                sock.sendall(b"\r\n\r\n")
            head, _, body = sock.recv(1 << 16).partition(b"\r\n\r\n")
            assert head.split()[1] == status
            assert status == b"200" or "at most 65536 bytes" in json.loads(body)["error"]["message"]


def test_a_large_body_is_no_head(port: int) -> None:
    with connect(port, b"POST /1 HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n") as sock:
        sock.sendall(b"x" * 1_000_000)
        assert sock.recv(1 << 16).split()[1] == b"200"


def test_a_head_that_trickles_is_closed_too(port: int) -> None:
    with connect(port) as sock, pytest.raises(ConnectionError):
        began = time.monotonic()
        for byte in GET % 1:
            sock.sendall(bytes([byte]))
            time.sleep(0.1)
            assert time.monotonic() - began < SLACK_S


def test_the_second_head_has_the_same_time_and_a_quiet_connection_stays(port: int) -> None:
    with connect(port) as sock:
        for _ in range(2):
            sock.sendall(GET % 1)
            assert sock.recv(1 << 16).endswith(b"x")
            time.sleep(2 * HEAD_S)
        sock.sendall((GET % 1)[:9])
        assert is_closed(sock)


def test_half_a_head_behind_a_request_is_closed_after_its_answer(port: int) -> None:
    with connect(port, GET % 1 + b"GET /hea") as sock:
        assert sock.recv(1 << 16).endswith(b"x") and is_closed(sock)


@pytest.mark.parametrize("num_behind", [0, 1, 3])
def test_a_client_that_leaves_is_seen_whatever_it_has_sent_behind_its_request(port: int, num_behind: int) -> None:
    gone.clear()
    with connect(port, b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n" + num_behind * (GET % 5)):
        assert not gone.wait(0.3)
    assert gone.wait(SLACK_S)


def test_requests_behind_one_another_are_answered_in_order_and_a_crowd_of_them_is_not(port: int) -> None:
    with connect(port, b"".join(GET % n for n in range(1, 8))) as sock:
        got = b""
        while not got.endswith(b"x" * 7):
            got += sock.recv(1 << 16)
        bodies = [part.partition(b"HTTP/1.1")[0] for part in got.split(b"\r\n\r\n")[1:]]
        assert bodies == [b"x" * n for n in range(1, 8)]
    with connect(port, b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n" + 100 * (GET % 5)) as sock:
        assert is_closed(sock)


def test_an_answer_whose_end_nobody_reads_is_dropped(port: int) -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", port))
        sock.sendall(GET % 30_000_000)
        wait_until(lambda: Connection.num_open)
        wait_until(lambda: not Connection.num_open, SLACK_S)


def test_a_reader_that_takes_its_time_gets_all(port: int) -> None:
    size, num_bytes = 20_000_000, 0
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        sock.settimeout(SLACK_S)
        sock.connect(("127.0.0.1", port))
        sock.sendall(GET % size)
        began = time.monotonic()
        while num_bytes < size:
            part = sock.recv(1 << 18)
            assert part
            num_bytes += len(part)
            if time.monotonic() - began < 3 * HEAD_S:
                time.sleep(HEAD_S / 20)
        assert time.monotonic() - began > 2 * HEAD_S


def test_one_address_has_a_bounded_number(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert connections.max_per_address() >= 100
    monkeypatch.setattr(Connection, "head_s", 60.0)
    monkeypatch.setattr(connections, "max_per_address", lambda: 5)
    with ExitStack() as stack:
        kept = [stack.enter_context(connect(port)) for _ in range(5)]
        wait_until(lambda: Connection.num_open["127.0.0.1"] == 5)
        assert is_closed(stack.enter_context(connect(port)))
        kept[0].sendall(GET % 1)
        assert kept[0].recv(1 << 16).endswith(b"x")
        kept[1].close()
        wait_until(lambda: Connection.num_open["127.0.0.1"] == 4)
        assert stack.enter_context(connect(port, GET % 1)).recv(1 << 16).endswith(b"x")
