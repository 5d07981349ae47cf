"""Who may read and change a service by /paceline/...: operators, the API's clients, or this computer, and no foreign web page."""

import asyncio
import contextlib
import io
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import Request
from rich.console import Console
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from paceline.config import ServiceConfig
from paceline.errors import PacelineError, RequestError
from paceline.infra.app import curl_words, dashboard_words
from paceline.infra.controller.snapshot import Snapshot, VersionInfo
from paceline.infra.service.versions import ServiceAddress, print_versions
from paceline.infra.state import log as log_module
from paceline.infra.state.log import configure_logging
from paceline.infra.web.access import MAX_REFUSALS, Access, RefusalLog
from paceline.infra.web.state_routes import audited, run_command, service_router
from paceline.serving.api.app import build_api
from paceline.serving.api.generation import ApiParts
from paceline.serving.wire.credentials import Tokens
from tests.helpers.api_server import TOKENIZER, ScriptedEngine, serve_app
from tests.helpers.service_load import make_certificate


def request(*, host: str = "127.0.0.1:8000", peer: str = "127.0.0.1", token: str = "", kind: str = "application/json") -> Request:  # fmt: skip
    headers = {"host": host, "content-type": kind} | ({"authorization": f"Bearer {token}"} if token else {})
    raw = [(k.encode(), v.encode()) for k, v in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/paceline/pin", "headers": raw, "client": (peer, 4711)})


def refusal(access: Access, made: Request) -> int | None:
    try:
        access.check_command(made)
    except HTTPException as e:
        return e.status_code
    return None


def test_without_tokens_only_this_computer_may_command():
    open_here = Access()
    assert refusal(open_here, request()) is None
    assert refusal(open_here, request(host="[::1]:8000", peer="::1")) is None
    assert refusal(open_here, request(host="rebound.example:8000")) == 403  # a name that was pointed at 127.0.0.1
    assert (
        refusal(open_here, request(peer="10.0.0.7")) == 403
    )  # the proxy listens elsewhere than the configuration says
    assert refusal(Access(host="0.0.0.0"), request()) == 403


def test_the_api_token_commands_from_anywhere_unless_there_are_operators():
    clients = Access(tokens=Tokens(api_token="api"))
    assert refusal(clients, request()) == 401
    assert refusal(clients, request(token="api", host="paceline.example", peer="10.0.0.7")) is None
    operators = Access(tokens=Tokens(api_token="api", admin_token="adm"))
    assert refusal(operators, request(token="api")) == 401
    assert refusal(operators, request(token="adm", host="paceline.example", peer="10.0.0.7")) is None


@pytest.mark.parametrize(
    "access", [Access(), Access(tokens=Tokens(api_token="t")), Access(tokens=Tokens(admin_token="t"))]
)
def test_what_a_foreign_page_can_send_unasked_is_refused(access):
    assert refusal(access, request(token="t", kind="text/plain")) == 415


ONE = VersionInfo(
    version="a0c1d2e3f4b5", sha256="", num_bytes=1, drafter_type="specblock", shapes_hash="", target_version="t", parent=None,
    arm="initial", bucket=None, num_train_rows=0, metrics={}, created=1.0,
)  # fmt: skip


class OneVersion:
    """A service whose registry holds one version."""

    def state(self) -> Snapshot:
        return Snapshot(gen=1, version=ONE.version, first_version=ONE.version, versions=[ONE])

    def command(self, name: str, *args: Any) -> Snapshot:
        raise AssertionError("nothing is changed here")


def app(access: Access):
    router = service_router(OneVersion(), access, asyncio.to_thread)
    return build_api(ApiParts(client=ScriptedEngine(), tokenizer=TOKENIZER, open_routers=(router,)))


def read_versions(access: Access, *, peer: str = "127.0.0.1", base: str = "http://127.0.0.1:8000", token: str = "") -> httpx.Response:  # fmt: skip
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app=app(access), client=(peer, 5000))
        headers = {"authorization": f"Bearer {token}"} if token else {}
        async with httpx.AsyncClient(transport=transport, base_url=base, headers=headers) as client:
            return await client.get("/paceline/versions")

    return asyncio.run(main())


def test_versions_are_read_by_the_dashboards_rule():
    free, elsewhere = Access(), Access(host="0.0.0.0")
    found = read_versions(free)
    assert found.status_code == 200 and set(found.json()) == {
        "gen",
        "version",
        "first_version",
        "pinned",
        "class_versions",
        "versions",
    }
    assert read_versions(free, base="http://rebound.example:8000").status_code == 403, "a name pointed at 127.0.0.1"
    assert read_versions(free, peer="10.0.0.7").status_code == 403
    assert read_versions(elsewhere, peer="10.0.0.7", base="http://paceline.example").status_code == 403
    assert read_versions(elsewhere).status_code == 403
    tokens = Access(tokens=Tokens(api_token="api", admin_token="adm"), host="0.0.0.0")
    assert read_versions(tokens).status_code == read_versions(tokens, token="x").status_code == 401
    assert read_versions(tokens, token="api").status_code == read_versions(tokens, token="adm").status_code == 200


def test_the_command_line_lists_versions_of_a_service_on_loopback_and_is_told_what_a_closed_one_wants():
    with serve_app(app(Access())) as url:
        for address in (url, url.replace("127.0.0.1", "localhost")):
            shown = io.StringIO()
            print_versions(ServiceAddress(url=address), Console(file=shown), as_json=True)
            assert json.loads(shown.getvalue())["version"] == "a0c1d2e3f4b5"
    with (
        serve_app(app(Access(host="0.0.0.0"))) as url,
        pytest.raises(PacelineError, match=r"403: closed: .*--api-token"),
    ):
        print_versions(ServiceAddress(url=url), Console(file=io.StringIO()), as_json=True)


@pytest.mark.parametrize(
    ("answer", "as_json"),
    [(Response("<html>"), True), (Response("{}"), False), (RedirectResponse("https://elsewhere.example/"), False)],
)
def test_the_command_line_says_so_where_the_address_is_somebody_elses(answer: Response, as_json: bool):
    with (
        serve_app(Starlette(routes=[Route("/paceline/versions", lambda _: answer)])) as url,
        pytest.raises(PacelineError, match=f"/paceline/versions answered {answer.status_code}"),
    ):
        print_versions(ServiceAddress(url=url), Console(file=io.StringIO()), as_json=as_json)


def test_the_table_says_what_is_pinned():
    versions = [msgspec.to_builtins(v) for v in OneVersion().state().versions]
    found = {"gen": 2, "version": "a0c1d2e3f4b5", "first_version": "v0", "pinned": "a0c1d2e3f4b5", "versions": versions}
    shown = io.StringIO()
    with serve_app(Starlette(routes=[Route("/paceline/versions", lambda _: JSONResponse(found))])) as url:
        print_versions(ServiceAddress(url=url), Console(file=shown, width=200), as_json=False)
    assert "live a0c1d2e3f4b5 (pinned), first v0" in shown.getvalue() and "live (pinned)" in shown.getvalue()


def test_the_command_line_tells_an_untrusted_certificate_and_a_wrong_scheme_from_a_service_that_is_not_there(
    tmp_path, monkeypatch
):
    cert, key = make_certificate(tmp_path)
    ask = lambda url: print_versions(ServiceAddress(url=url), Console(file=io.StringIO()), as_json=True)  # noqa: E731
    with serve_app(app(Access()), ssl_certfile=cert, ssl_keyfile=key) as url:
        with pytest.raises(
            PacelineError, match=r"certificate at https://.* is not trusted \(self-signed .*SSL_CERT_FILE"
        ):
            ask(url)
        with pytest.raises(PacelineError, match=r"http://.* broke off without an answer.*https://"):
            ask(url.replace("https", "http"))
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        ask(url)
    with serve_app(app(Access())) as url, pytest.raises(PacelineError, match=r"no TLS is spoken at https://.*http://"):
        ask(url.replace("http", "https"))
    with pytest.raises(PacelineError, match=r"url must begin with http:// or https://, got '127\.0\.0\.1:8000'"):
        ask("127.0.0.1:8000")


def test_the_first_request_that_is_shown_has_what_the_service_asks_for():
    url, config = "http://127.0.0.1:8000", ServiceConfig()
    plain = curl_words(url, config, Access())
    assert plain.startswith(
        f'curl {url}/v1/completions -H \'content-type: application/json\' -d \'{{"model": "paceline"'
    )
    closed = curl_words(url, replace(config, tls_cert="c", tls_key="k"), Access(tokens=Tokens(api_token="api")))
    assert " --cacert CERT -H 'Authorization: Bearer TOKEN' -H 'content" in closed
    assert "Bearer" not in curl_words(url, config, Access(tokens=Tokens(admin_token="adm"))), "operators' alone"


def test_the_command_line_refuses_an_address_and_a_token_that_are_none():
    with pytest.raises(PacelineError, match="no service answers at http://"):
        print_versions(ServiceAddress(url="http://[::1"), Console(file=io.StringIO()), as_json=True)
    with pytest.raises(PacelineError, match="token must be ASCII"):
        ServiceAddress(token="schlüssel")


def test_a_service_that_listens_elsewhere_without_a_token_says_that_it_is_closed_and_what_opens_it():
    want = (
        "closed: the service listens on 0.0.0.0 without a token; set api_token (--api-token) or admin_token "
        "(--admin-token), or bind it to 127.0.0.1"
    )
    access = Access(host="0.0.0.0")
    assert want in read_versions(access).text
    url = "http://127.0.0.1:8000"
    assert dashboard_words(url, access) == f"dashboard {want}", "no address that answers 403"
    rebound = read_versions(Access(), base="http://rebound.example:8000").text
    assert "only this computer" in rebound and "listens on" not in rebound
    assert dashboard_words(url, Access()).startswith(f"dashboard {url}/dashboard (read-only, this computer only")
    assert "with the API token" in dashboard_words(url, Access(tokens=Tokens(api_token="api"), host="0.0.0.0"))
    assert (
        dashboard_words(url, Access(tokens=Tokens(admin_token="adm"), host="0.0.0.0"))
        == f"dashboard {url}/dashboard (with controls)"
    )


def give(access: Access, made: Request, name: str = "pin") -> None:
    with contextlib.suppress(HTTPException), audited(name, made, access):
        access.check_command(made)


@contextlib.contextmanager
def logged(folder: Path) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Lines that the log and the audit log get in the block, there behind it."""
    lines, kept = list[dict[str, Any]](), list[dict[str, Any]]()
    try:
        configure_logging(file=folder / "all.log", audit_file=folder / "audit.log", to_stderr=False)
        yield lines, kept
        for name in ("paceline", "paceline.audit"):
            for handler in logging.getLogger(name).handlers:
                handler.flush()
        for found, name in ((lines, "all"), (kept, "audit")):
            found += [json.loads(x) for x in (folder / f"{name}.log").read_text().splitlines()]
    finally:
        configure_logging(to_stderr=False)


def test_refused_commands_push_no_carried_out_one_out_of_the_logs(tmp_path, monkeypatch):
    now_s = 0.0
    access = Access(tokens=Tokens(admin_token="adm"), refusals=RefusalLog(lambda: now_s))
    monkeypatch.setattr(log_module, "MAX_FILE_BYTES", 20_000)
    with logged(tmp_path) as (lines, kept):
        give(access, request(token="adm"))
        for minute in range(3):
            now_s = 60.0 * minute
            for _ in range(1000):
                give(access, request(), "nosuch")
        give(access, request(token="adm", kind="text/plain"))  # an operator's are never left out
    assert [x["outcome"] for x in kept] == ["done"]
    assert [x["outcome"][:11] for x in lines] == ["done", *["refused 401"] * 3 * MAX_REFUSALS, "refused 415"]
    assert [x["refused_without_a_line"] for x in lines if "refused_without_a_line" in x] == [1000 - MAX_REFUSALS] * 2


class Told(OneVersion):
    """A service that takes a command and then fails, or takes until `go`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.begun, self.go = error, threading.Event(), threading.Event()

    def command(self, name: str, *args: Any) -> Snapshot:
        self.begun.set()
        if self.error is not None:
            raise self.error
        self.go.wait(30)
        return self.state()


async def order(access: Access, service: Told, *, leaves: bool = False) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"version": "a0c1d2e3f4b5"}', "more_body": False}

    made = Request(request(token="adm").scope, receive)

    async def handle() -> None:
        with audited("pin", made, access):
            access.check_command(made)
            await run_command(service, "pin", made)  # type: ignore[arg-type]

    task = asyncio.ensure_future(handle())
    if leaves:
        await asyncio.to_thread(service.begun.wait, 30)
        task.cancel()
    await asyncio.wait([task])
    service.go.set()


def test_what_may_have_been_carried_out_is_in_the_audit_log_with_its_arguments(tmp_path):
    access = Access(tokens=Tokens(admin_token="adm"))
    with logged(tmp_path) as (lines, kept):
        asyncio.run(order(access, Told(), leaves=True))
        asyncio.run(order(access, Told(PacelineError("done, but not stored yet"))))
        asyncio.run(order(access, Told(RequestError("it is not in the registry"))))
    outcomes = ["the client left before its end", "refused 503: done, but not stored yet"]
    assert [x["outcome"] for x in kept] == outcomes
    assert [x["outcome"] for x in lines] == [*outcomes, "refused 400: it is not in the registry"]
    assert all((x["who"], x["args"]) == ("admin_token", ["a0c1d2e3f4b5"]) for x in lines)
