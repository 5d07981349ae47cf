"""Access: who may look at a service and who may change it, by bearer tokens, and nobody else's web page.

Commands must be JSON, which a foreign page cannot send unasked. Without tokens a service on a loopback address shows
itself to this computer: the peer and the Host header must be loopback too (a name that an attacker points at 127.0.0.1
is refused). Tokens of tenants open the API only: what a service shows is of all tenants.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import Request
from starlette.exceptions import HTTPException

from paceline.config import VARIABLES, ServiceConfig
from paceline.serving.wire.credentials import ADMIN_ROLE, API_ROLE, CLIENT_ROLE, Tokens, host_name, is_loopback

_SET_TOKEN = "set api_token (--api-token) or admin_token (--admin-token)"


MAX_REFUSALS = 10
"""Lines a minute about commands that were refused to anybody but operators: 5 MB a day at most, so that 40 MB of log last
eight days of attack."""


class RefusalLog:
    """Says which refused commands get a line. Of one event loop."""

    def __init__(self, timer: Callable[[], float] = time.monotonic) -> None:
        """timer: seconds."""
        self._timer, self._minute, self._num_written, self._num_left_out = timer, float("-inf"), 0, 0

    def take(self) -> int | None:
        """How many got no line since the last one that did; None: this one gets none either."""
        minute = self._timer() // 60
        if minute != self._minute:
            self._minute, self._num_written = minute, 0
        if self._num_written >= MAX_REFUSALS:
            self._num_left_out += 1
            return None
        self._num_written += 1
        found, self._num_left_out = self._num_left_out, 0
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """The rules of one service."""

    tokens: Tokens = field(default_factory=Tokens)
    host: str = "127.0.0.1"
    """Address that the service was told to listen on."""
    is_metrics_public: bool = False
    """Anybody may scrape /metrics."""
    refusals: RefusalLog = field(default_factory=RefusalLog)

    @classmethod
    def of(cls, config: ServiceConfig, tokens: Tokens) -> Access:
        return cls(tokens=tokens, host=config.host, is_metrics_public=config.metrics_public)

    @property
    def is_loopback(self) -> bool:
        """Only programs on this computer reach the service."""
        return is_loopback(self.host)

    @property
    def has_admin(self) -> bool:
        """There is a token of operators."""
        return self.tokens.has(ADMIN_ROLE)

    @property
    def _is_open_here(self) -> bool:
        """Programs on this computer may look without a token."""
        return self.is_loopback and not self.tokens.guards_api

    def closed(self) -> str | None:
        """Why nobody at all may look, and what to do about it; None where somebody may."""
        if self._is_open_here or self.tokens.has(API_ROLE, ADMIN_ROLE):
            return None
        if self.tokens.guards_api:
            return f"closed: the token file has no token of role {ADMIN_ROLE}; add one, or {_SET_TOKEN}"
        return f"closed: the service listens on {self.host} without a token; {_SET_TOKEN}, or bind it to 127.0.0.1"

    def is_admin(self, request: Request) -> bool:
        """Whether the request carries a token of operators."""
        return self._role(request) == ADMIN_ROLE

    def operator(self, request: Request) -> str:
        """Who gives a command, for the audit log."""
        holder = self.tokens.holder(request)
        return "no token" if holder is None else holder.name

    def check_read(self, request: Request) -> None:
        """Raise 401 or 403 unless the request may see the dashboard's data or /paceline/state, /swap and /versions."""
        role = self._role(request)
        if role in (ADMIN_ROLE, API_ROLE):
            return
        if self._is_open_here and _is_from_here(request):
            return
        if role == CLIENT_ROLE:
            raise HTTPException(403, "a tenant's token opens the API only; looking at the service takes an operator's")
        if not self.tokens.has(API_ROLE, ADMIN_ROLE):
            here = f"closed: without a token only this computer may look, by a loopback name and no proxy; {_SET_TOKEN}"
            raise HTTPException(403, self.closed() or here)
        raise _unauthorized("the API token or the admin token" if self.tokens.has(API_ROLE) else "the admin token")

    def check_metrics(self, request: Request) -> None:
        """Raise 401 or 403 unless the request may scrape /metrics: as for check_read, or anybody with metrics_public."""
        if self.is_metrics_public:
            return
        try:
            self.check_read(request)
        except HTTPException as e:
            raise HTTPException(e.status_code, f"{e.detail}; --metrics-public opens /metrics", e.headers) from e

    def check_change(self, request: Request) -> None:
        """Raise 401, 403 or 415 unless the request is an operator's."""
        if not self.has_admin:
            raise HTTPException(
                403, f"controls are off: start the service with --admin-token or {VARIABLES['admin_token']}"
            )
        if not self.is_admin(request):
            raise _unauthorized("the admin token")
        check_json(request)

    def check_command(self, request: Request) -> None:
        """Raise 401, 403 or 415 unless the request may change versions and policy by /paceline/<command>.

        The admin token's once there is one; else the API token's; without both only from this computer.
        """
        if self.has_admin:
            self.check_change(request)
            return
        if self.tokens.has(API_ROLE):
            if self._role(request) != API_ROLE:
                raise _unauthorized("the API token")
        elif not (self._is_open_here and _is_from_here(request)):
            why = (
                self.closed()
                or "off: without a token only this computer may change, by a loopback name and no proxy; " + _SET_TOKEN
            )
            raise HTTPException(403, f"changes are {why}")
        check_json(request)

    def _role(self, request: Request) -> str | None:
        holder = self.tokens.holder(request)
        return None if holder is None else holder.role


_OF_PROXIES = {"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"}
"""Headers by which a proxy says that the request is another's. One that adds none, as nginx by default, cannot be told."""


def check_json(request: Request) -> None:
    """Raise 415 unless the body is declared as JSON; a foreign web page cannot declare that unasked."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "commands must be sent as application/json")


def _unauthorized(what: str) -> HTTPException:
    message = f"{what} must be sent as 'Authorization: Bearer TOKEN'"
    return HTTPException(401, message, headers={"WWW-Authenticate": "Bearer"})


def _is_from_here(request: Request) -> bool:
    peer = request.client.host if request.client is not None else "127.0.0.1"
    return is_loopback(host_name(request)) and is_loopback(peer) and not _OF_PROXIES.intersection(request.headers)
