"""A whole service under Serve: what its proxy lets through, whom it waits for, and who gave which command."""

import contextlib
import io
import json
import os
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from paceline.bench.serve.fuzz import FuzzOptions, has_failed, run_fuzz
from paceline.bench.serve.server_metrics import MetricsPage, parse_page
from paceline.config import EngineConfig, PolicyConfig, ServiceConfig, TraceConfig
from paceline.infra.app import Service, run_service, stop_service
from paceline.paths import keep_private
from tests.helpers.service_load import make_certificate

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TOKENS = """
tokens:
  - {token: a, tenant: acme}
  - {token: b, tenant: bolt}
  - {token: ops, role: admin, name: alice}
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("attackers")
    (folder / "tokens.yaml").write_text(TOKENS)
    cert, key = make_certificate(folder)
    config = ServiceConfig(
        model_name="attackers", device="cpu", data_dir=str(folder / "data"), port=0, token_file=str(folder / "tokens.yaml"),
        tls_cert=str(cert), tls_key=str(key), engine=EngineConfig(num_threads=1, max_running=4, max_waiting=8),
        policy=PolicyConfig(policy="never"), trace=TraceConfig(share=0.0),
    )  # fmt: skip
    before = os.umask(0o022)
    keep_private()  # as `paceline serve` does
    try:
        service = run_service(config)
    finally:
        os.umask(before)
    try:
        yield service
    finally:
        stop_service(service)


@pytest.fixture(scope="module")
def trusted(service: Service) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=service.config.tls_cert)


@pytest.fixture(scope="module")
def http(service: Service, trusted: ssl.SSLContext) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, verify=trusted, timeout=60) as client:
        yield client


@pytest.fixture(scope="module", autouse=True)
def unfinished_heads(service: Service, trusted: ssl.SSLContext) -> Iterator[list[Future[float]]]:
    """Seconds until connections are closed that begin with the tests: it happens while others run."""
    with ExitStack() as stack:
        readers = stack.enter_context(ThreadPoolExecutor(3))
        ends = []
        for sent in (b"", b"GET /hea", b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\nGET /hea"):
            plain = stack.enter_context(socket.create_connection(("127.0.0.1", service.config.port), timeout=40))
            sock = stack.enter_context(trusted.wrap_socket(plain, server_hostname="localhost"))
            sock.sendall(sent)
            ends.append(readers.submit(seconds_to_end, sock))
        yield ends


def seconds_to_end(sock: ssl.SSLSocket) -> float:
    began = time.perf_counter()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while sock.recv(65_536):
            pass
    return time.perf_counter() - began


def ask(http: httpx.Client, token: str, **headers: str | bytes) -> httpx.Response:
    sent = {"authorization": f"Bearer {token}", **{k.replace("_", "-"): v for k, v in headers.items()}}
    return http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 4}, headers=sent)


def test_the_service_speaks_tls_and_nothing_else(service: Service, http: httpx.Client) -> None:
    assert service.url.startswith("https://") and http.get("/healthz").status_code == 200
    with pytest.raises(httpx.HTTPError):
        httpx.get(service.url.replace("https", "http") + "/healthz", timeout=10)


def test_tokens_of_tenants_open_the_api_and_only_that(http: httpx.Client) -> None:
    assert ask(http, "a").status_code == ask(http, "b", x_paceline_tenant="bolt").status_code == 200
    assert ask(http, "x").status_code == 401 and ask(http, "ops").status_code == 401
    assert ask(http, "a", x_paceline_tenant="bolt").status_code == 403
    for path in ("/paceline/state", "/metrics", "/dashboard/api/state"):
        assert http.get(path, headers={"authorization": "Bearer a"}).status_code == 403
        assert http.get(path, headers={"authorization": "Bearer ops"}).status_code == 200


@pytest.mark.parametrize("request_id", [b"\xff", b"\xe4\xf6", b"a b", b"x" * 129])
def test_an_id_that_serve_cannot_read_is_a_bad_request(http: httpx.Client, request_id: bytes) -> None:
    answer = ask(http, "a", x_request_id=request_id)
    assert answer.status_code == 400 and "x-request-id" in answer.json()["error"]["message"]
    assert ask(http, "a", x_request_id="mine").headers["x-request-id"] == "mine"


def test_headers_that_would_steer_serve_change_nothing(http: httpx.Client) -> None:
    assert ask(http, "a", x_request_timeout_seconds="0.000001").status_code == 200
    assert ask(http, "a", x_session_id=b"\xff", serve_multiplexed_model_id=b"\xff").status_code == 200


def test_connections_that_send_one_byte_take_no_place(
    service: Service, trusted: ssl.SSLContext, http: httpx.Client
) -> None:
    """More of them than the replica has places (4 + 8 + 48); they wait in the proxy until they are told why they go."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer a\r\nContent-Length: 1000\r\n\r\n{"
    ask(http, "b")
    began = time.perf_counter()
    assert ask(http, "b").status_code == 200
    alone_s = time.perf_counter() - began
    with ExitStack() as stack:
        slow = []
        for _ in range(120):
            plain = stack.enter_context(socket.create_connection(("127.0.0.1", service.config.port)))
            sock = stack.enter_context(trusted.wrap_socket(plain, server_hostname="localhost"))
            sock.sendall(head)
            slow.append(sock)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            assert ask(http, "b").status_code == 200
            times.append(time.perf_counter() - began)
        assert sorted(times)[2] < 2 * alone_s + 1.0
        for sock in slow:
            sock.settimeout(60)
            assert sock.recv(65_536).startswith(b"HTTP/1.1 408 ")


def reset(sock: ssl.SSLSocket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_clients_that_reset_their_connections_are_no_failures_of_the_service(
    service: Service, trusted: ssl.SSLContext, http: httpx.Client
) -> None:
    ops = {"authorization": "Bearer ops"}
    before = parse_page(http.get("/metrics", headers=ops).text)
    whole = json.dumps({"prompt": "Hello", "max_tokens": 64, "ignore_eos": True}).encode()
    large = b'{"prompt": "' + b"a" * 200_000 + b'"}'  # more than the proxy keeps: the replica has a part
    for body, num_sent in ((whole, len(whole)), (whole, 20), (large, 150_000)):
        for wait_s in (0.001, 0.003, 0.01, 0.03, 0.1):
            sock = trusted.wrap_socket(
                socket.create_connection(("127.0.0.1", service.config.port)), server_hostname="localhost"
            )
            head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer a\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:num_sent])
            time.sleep(wait_s)
            reset(sock)
    assert ask(http, "b").status_code == 200
    time.sleep(1.0)  # the last ones end
    after = parse_page(http.get("/metrics", headers=ops).text)

    def num(page: MetricsPage, code: str) -> float:
        return sum(v for labels, v in page.samples["paceline_responses_total"] if labels["code"] == code)

    assert num(after, "500") == num(before, "500")
    assert num(after, "499") > num(before, "499")


def test_connections_without_a_whole_head_are_closed(unfinished_heads: list[Future[float]]) -> None:
    assert all(end.result(timeout=60) < 40.0 for end in unfinished_heads)


def test_five_hundred_requests_of_the_fuzzer_go_through_the_proxy(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", service.config.tls_cert or "")
    document = run_fuzz(
        FuzzOptions(url=service.url, num_requests=500, seed=6, api_token="b"), Console(file=io.StringIO())
    )
    assert not has_failed(document), (document["faults"], document["examples"])
    assert document["statuses"]["200"] > 0 and document["statuses"]["400"] > 0 and document["raw"]


def test_every_command_is_in_the_log_with_who_gave_it(service: Service, http: httpx.Client) -> None:
    for token, status in (("a", 401), ("ops", 200)):
        sent = http.post("/dashboard/api/commands/pause", json={}, headers={"authorization": f"Bearer {token}"})
        assert sent.status_code == status, sent.text
    http.post("/dashboard/api/commands/resume", json={}, headers={"authorization": "Bearer ops"})
    lines = []
    for path in Path(service.config.data_dir).rglob("replica-*.log"):
        lines += [json.loads(line) for line in path.read_text().splitlines()]
    found = [(x["who"], x["command"], x["outcome"][:11]) for x in lines if x["logger"] == "paceline.audit"]
    assert [(who, name) for who, name, _ in found if name == "pause"][-1] == ("alice", "pause")
    assert [outcome for _, _, outcome in found][-3:] == ["refused 401", "done", "done"]


def test_nobody_else_may_read_what_the_service_writes(service: Service, http: httpx.Client) -> None:
    root = Path(service.config.data_dir)
    assert root.stat().st_mode & 0o077 == 0
    files = [p for p in root.rglob("*") if p.name.endswith((".log", ".msgpack", ".jsonl", ".safetensors", ".json"))]
    assert files and [p for p in files if p.stat().st_mode & 0o077] == []


def test_a_token_that_is_taken_out_of_the_file_opens_nothing_within_seconds(
    service: Service, http: httpx.Client
) -> None:
    path = Path(service.config.token_file or "")
    path.write_text(TOKENS.replace("token: a,", "token: rotated,"))
    deadline = time.monotonic() + 20
    while ask(http, "a").status_code != 401:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert ask(http, "rotated").status_code == 200 and ask(http, "b").status_code == 200
