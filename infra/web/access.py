"""Access: who may look at a service and who may change it, by bearer tokens, and nobody else's web page.

Tokens travel in the Authorization header only, never in a cookie or an address, so that a foreign page cannot send them;
commands must be JSON, which a foreign page cannot send unasked either. Without tokens a service on a loopback address
shows itself to this computer: the peer and the Host header must be loopback too (a name that an attacker points at
127.0.0.1 is refused).
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from fastapi import Request
from starlette.exceptions import HTTPException

from paceline.config import VARIABLES, ServiceConfig

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SET_TOKEN = "set api_token (--api-token) or admin_token (--admin-token)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """The rules of one service."""

    api_token: str | None = field(default=None, repr=False)
    admin_token: str | None = field(default=None, repr=False)
    host: str = LOOPBACK[0]
    """Address that the service was told to listen on."""
    is_metrics_public: bool = False
    """Anybody may scrape /metrics."""

    @classmethod
    def of(cls, config: ServiceConfig) -> Access:
        return cls(
            api_token=config.api_token,
            admin_token=config.admin_token,
            host=config.host,
            is_metrics_public=config.metrics_public,
        )

    @property
    def is_loopback(self) -> bool:
        """Only programs on this computer reach the service."""
        return self.host in LOOPBACK

    def closed(self) -> str | None:
        """Why nobody at all may look, and what to do about it; None where somebody may."""
        if self.is_loopback or self.api_token is not None or self.admin_token is not None:
            return None
        return f"closed: the service listens on {self.host} without a token; {_SET_TOKEN}, or bind it to 127.0.0.1"

    def is_admin(self, request: Request) -> bool:
        """Whether the request carries the admin token."""
        return _is_token(request, self.admin_token)

    def check_read(self, request: Request) -> None:
        """Raise 401 or 403 unless the request may see the dashboard's data or /paceline/state, /swap and /versions."""
        if self.is_admin(request) or _is_token(request, self.api_token):
            return
        if self.api_token is None and self.is_loopback and _is_from_here(request):
            return
        if self.api_token is None and self.admin_token is None:
            here = f"closed: without a token only this computer may look, by a loopback name and no proxy; {_SET_TOKEN}"
            raise HTTPException(403, self.closed() or here)
        raise _unauthorized("the admin token" if self.api_token is None else "the API token or the admin token")

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
        if self.admin_token is None:
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
        if self.admin_token is not None:
            self.check_change(request)
            return
        if self.api_token is not None and not _is_token(request, self.api_token):
            raise _unauthorized("the API token")
        if self.api_token is None and not (self.is_loopback and _is_from_here(request)):
            raise HTTPException(403, "changes are off: set admin_token or api_token, or bind the service to 127.0.0.1")
        check_json(request)


def check_json(request: Request) -> None:
    """Raise 415 unless the body is declared as JSON; a foreign web page cannot declare that unasked."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "commands must be sent as application/json")


def _unauthorized(what: str) -> HTTPException:
    message = f"{what} must be sent as 'Authorization: Bearer TOKEN'"
    return HTTPException(401, message, headers={"WWW-Authenticate": "Bearer"})


def _is_token(request: Request, wanted: str | None) -> bool:
    scheme, _, sent = request.headers.get("authorization", "").partition(" ")
    if wanted is None or scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(sent.strip().encode("latin-1"), wanted.encode())


def _is_from_here(request: Request) -> bool:
    host = request.headers.get("host", "")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    peer = request.client.host if request.client is not None else "127.0.0.1"
    is_forwarded = "x-forwarded-for" in request.headers or "forwarded" in request.headers
    return name.lower() in LOOPBACK and (peer in LOOPBACK or peer.startswith("127.")) and not is_forwarded
