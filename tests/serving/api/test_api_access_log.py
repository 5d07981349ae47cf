"""One line a request on `paceline.access`: who asked, what it cost, how it ended; never what was said."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.infra.state.log import configure_logging
from paceline.serving.api.app import build_api
from paceline.serving.api.generation import ApiParts
from paceline.serving.engine.engine import Engine
from tests.helpers.api_server import TOKENIZER, ScriptedEngine, serve_app, serve_engine, wait_until
from tests.helpers.fakes import tiny_target

SECRET = "correct horse battery staple"


class Lines(logging.Handler):
    """Keeps the fields of every record."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.fields.append({**record.fields, "message": record.getMessage()})  # type: ignore[attr-defined]

    def of(self, request_id: str) -> dict[str, Any]:
        """The one line of a request; the server writes it after the client has its answer."""
        wait_until(lambda: any(f.get("request_id") == request_id for f in self.fields))
        (line,) = [f for f in self.fields if f.get("request_id") == request_id]
        return line


@pytest.fixture
def lines() -> Iterator[Lines]:
    log, handler = logging.getLogger("paceline.access"), Lines()
    level = log.level
    log.addHandler(handler)
    log.setLevel("INFO")
    yield handler
    log.removeHandler(handler)
    log.setLevel(level)


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[str, Engine]]:
    with serve_engine(tiny_target(vocab=300, layers=2), has_access_log=True) as served:
        yield served


def post(base: str, name: str, headers: dict[str, str] | None = None, route: str = "completions", **fields: Any):
    body = {"prompt": SECRET, "max_tokens": 8, "ignore_eos": True, **fields}
    return httpx.post(f"{base}/v1/{route}", json=body, headers={"x-request-id": name, **(headers or {})})


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_one_line(real: tuple, lines: Lines, stream: bool) -> None:
    name = f"one-{stream}"
    post(real[0], name, {"x-paceline-bucket": "math", "x-paceline-tenant": "acme"}, stream=stream, priority=3)
    line = lines.of(name)
    assert 0 < line.pop("ttft_ms") <= line.pop("duration_ms") < 60_000
    assert line.pop("acceptance_length") >= 1.0 and len(line.pop("answer_id")) == 32
    assert line == {
        "request_id": name, "method": "POST", "route": "/v1/completions", "status": 200, "bucket": "math",
        "group": "adaptive", "tenant": "acme", "n": 1, "stream": stream, "priority": 3,
        "prompt_tokens": len(TOKENIZER.encode(SECRET)), "completion_tokens": 8, "cached_tokens": line["cached_tokens"],
        "finish_reason": "length", "drafter_version": "repeat-1", "message": "request",
    }  # fmt: skip


def test_several_choices_are_one_line(real: tuple, lines: Lines) -> None:
    post(real[0], "several", n=3)
    line = lines.of("several")
    assert (line["n"], line["completion_tokens"], line["finish_reason"]) == (3, 24, "length")


@pytest.mark.parametrize(
    ("fields", "status", "error"),
    [
        ({"temperature": -1}, 400, "invalid_request_error"),
        ({"model": "gpt"}, 404, "model_not_found"),
        ({"prompt": [], "model": None}, 400, "invalid_request_error"),
    ],
)
def test_refused_requests_have_a_line_too(real: tuple, lines: Lines, fields: dict, status: int, error: str) -> None:
    name = f"bad-{status}-{len(fields)}"
    post(real[0], name, **fields)
    line = lines.of(name)
    assert (line["status"], line["error"]) == (status, error)
    assert "completion_tokens" not in line


def test_token_routes_have_a_line(real: tuple, lines: Lines) -> None:
    httpx.post(f"{real[0]}/v1/tokenize", json={"prompt": SECRET})
    wait_until(lambda: lines.fields)
    assert (lines.fields[0]["route"], lines.fields[0]["status"]) == ("/v1/tokenize", 200)


def test_operating_routes_have_none(real: tuple, lines: Lines) -> None:
    for path in ("/healthz", "/readyz", "/metrics", "/v1/models"):
        assert httpx.get(f"{real[0]}{path}").status_code == 200
    post(real[0], "last")
    lines.of("last")
    assert len(lines.fields) == 1


def test_no_line_holds_text(real: tuple, lines: Lines) -> None:
    for i, fields in enumerate(({}, {"stream": True}, {"temperature": SECRET}, {"echo": True}, {"stop": SECRET})):
        post(real[0], f"quiet-{i}", **fields)
        lines.of(f"quiet-{i}")
    httpx.post(f"{real[0]}/tokenize", json={"prompt": SECRET})
    wait_until(lambda: len(lines.fields) == 6)
    assert not any(word in json.dumps(lines.fields) for word in SECRET.split())


def test_a_client_that_hangs_up_is_noted(real: tuple, lines: Lines) -> None:
    base, engine = real
    body = {"prompt": [5], "stream": True, "max_tokens": 400, "ignore_eos": True}
    headers = {"x-request-id": "gone"}
    with httpx.Client() as c, c.stream("POST", f"{base}/v1/completions", json=body, headers=headers) as answer:
        next(answer.iter_lines())
    line = lines.of("gone")
    assert line["disconnected"] is True
    assert "finish_reason" not in line
    wait_until(lambda: engine.is_idle)


def test_a_client_that_hangs_up_without_a_stream_is_499(lines: Lines) -> None:
    engine = ScriptedEngine()
    engine.go.clear()
    with serve_app(build_api(ApiParts(client=engine, tokenizer=TOKENIZER, has_access_log=True))) as base:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{base}/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "late"}, timeout=0.3)
        line = lines.of("late")
        engine.go.set()
    assert (line["status"], line["error"], line["disconnected"]) == (499, "client_closed", True)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_client_that_hangs_up_during_its_upload_is_499(
    real: tuple, lines: Lines, caplog: pytest.LogCaptureFixture, route: str
) -> None:
    host, port = real[0].removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"POST {route} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 1000\r\n\r\n{{".encode())
    wait_until(lambda: lines.fields)
    (line,) = lines.fields
    assert (line["status"], line["error"], line["disconnected"]) == (499, "client_closed", True)
    assert not [r for r in caplog.records if r.levelname == "ERROR"], "nothing failed here"


@pytest.mark.parametrize(("end", "code", "status"), [(None, "incomplete", 503), ("deadline", "deadline_exceeded", 504)])
@pytest.mark.parametrize("stream", [False, True])
def test_broken_answers_name_their_end(lines: Lines, end: str | None, code: str, status: int, stream: bool) -> None:
    engine = ScriptedEngine()
    engine.fail_after, engine.end = 1, end
    with serve_app(build_api(ApiParts(client=engine, tokenizer=TOKENIZER, has_access_log=True))) as base:
        post(base, "broken", max_tokens=9, stream=stream)
        line = lines.of("broken")
    assert (line["status"], line["error"]) == (200 if stream else status, code)
    assert (line["finish_reason"], line["completion_tokens"]) == (end or "error", 3)
    assert "disconnected" not in line


def test_an_internal_error_is_logged_with_the_request_id(lines: Lines, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ScriptedEngine):
        def submit_all(self, requests: Any, on_event: Any) -> None:
            raise ZeroDivisionError(SECRET)

    with serve_app(build_api(ApiParts(client=Broken(), tokenizer=TOKENIZER, has_access_log=True))) as base:
        answer = post(base, "crash")
        line = lines.of("crash")
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "crash")
    assert SECRET not in answer.text
    assert (line["status"], any("request crash to" in r.getMessage() for r in caplog.records)) == (500, True)


def test_the_log_is_off_unless_asked_for(lines: Lines) -> None:
    with serve_app(build_api(ApiParts(client=ScriptedEngine(), tokenizer=TOKENIZER))) as base:
        assert post(base, "silent").status_code == 200
    assert lines.fields == []


def test_replicas_write_the_lines_to_a_file_of_their_own(real: tuple, tmp_path: Path) -> None:
    try:
        configure_logging(file=tmp_path / "all.log", access_file=tmp_path / "access.log", to_stderr=False)
        post(real[0], "filed")
        wait_until(lambda: (tmp_path / "access.log").is_file() and (tmp_path / "access.log").read_text())
        (line,) = [json.loads(text) for text in (tmp_path / "access.log").read_text().splitlines()]
        assert (line["request_id"], line["status"], line["logger"]) == ("filed", 200, "paceline.access")
        assert not (tmp_path / "all.log").exists() or "filed" not in (tmp_path / "all.log").read_text()
        configure_logging(file=tmp_path / "all.log", to_stderr=False)
        post(real[0], "shared")
        wait_until(lambda: (tmp_path / "all.log").is_file() and "shared" in (tmp_path / "all.log").read_text())
    finally:
        configure_logging(to_stderr=False)
