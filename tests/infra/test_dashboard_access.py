"""Who may change a service by /paceline/<command>: operators, the API's clients, or this computer, and no foreign web page."""

import pytest
from fastapi import Request
from starlette.exceptions import HTTPException

from paceline.infra.dashboard_access import Access


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
    assert refusal(Access(is_loopback=False), request()) == 403


def test_the_api_token_commands_from_anywhere_unless_there_are_operators():
    clients = Access(api_token="api")
    assert refusal(clients, request()) == 401
    assert refusal(clients, request(token="api", host="paceline.example", peer="10.0.0.7")) is None
    operators = Access(api_token="api", admin_token="adm")
    assert refusal(operators, request(token="api")) == 401
    assert refusal(operators, request(token="adm", host="paceline.example", peer="10.0.0.7")) is None


@pytest.mark.parametrize("access", [Access(), Access(api_token="t"), Access(admin_token="t")])
def test_what_a_foreign_page_can_send_unasked_is_refused(access):
    assert refusal(access, request(token="t", kind="text/plain")) == 415
