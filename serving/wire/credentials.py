"""Credentials: the bearer tokens that a service takes, whose they are, and their file, which may change while it runs.

A token is looked up by its SHA-256 and the digests are compared in constant time, so that no answer's time tells how
much of a guess was right. Tokens travel in the Authorization header only, never in a cookie or an address, so that a
foreign page cannot send them. Without tokens, requests of a foreign web page are told by what browsers add to them.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request

from paceline.config import ClientLimits, ServiceConfig, TokenEntry, TokenFile, load_token_file
from paceline.errors import ConfigError
from paceline.names import OWN_PREFIX

log = logging.getLogger(__name__)

API_ROLE, CLIENT_ROLE, ADMIN_ROLE = "api", "client", "admin"
RELOAD_S = 2.0
"""Period of looking at the token file: how long a new token waits and a withdrawn one still opens."""
SETTLE_S = 0.1
"""Time that a changed file must stay as it is before it is taken: an editor that empties a file and then writes it
would otherwise shut everybody out until the next look."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Who sends a token."""

    role: str
    """api (the service's own token: one trusted application, which names tenants itself) | client | admin."""
    name: str
    """For the audit log; no secret."""
    tenant: str | None = None
    """Of a client; None: the holder may name any."""


@dataclass(frozen=True, slots=True)
class _Known:
    digest: bytes
    holder: Holder


class Tokens:
    """The tokens of one service; one table that is replaced as a whole. Thread-safe."""

    def __init__(
        self, *, api_token: str | None = None, admin_token: str | None = None, file: str | Path | None = None,
        reload_s: float = RELOAD_S,
    ) -> None:  # fmt: skip
        """file: see TokenFile; it is read here and, after `start`, again whenever it changes.

        Raises: ConfigError when the file cannot be used.
        """
        own: list[_Known] = []
        for token, role in ((api_token, API_ROLE), (admin_token, ADMIN_ROLE)):
            if token is not None:
                own.append(_Known(_digest(token), Holder(role=role, name=f"{role}_token")))
        self._own, self._reload_s = own, reload_s
        self._path = None if file is None else Path(file).expanduser()
        self._seen: tuple[int, ...] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.limits: Mapping[str, ClientLimits] = {}
        """Tenant -> its limits, as the file says."""
        self._known: Mapping[bytes, _Known] = {}
        self.num_reloads = 0
        """Times that a changed file was taken."""
        if self._path is None:
            self._install(TokenFile())
        else:
            self._seen = _mark(self._path)
            self._install(load_token_file(self._path))

    @classmethod
    def of(cls, config: ServiceConfig) -> Tokens:
        """The tokens of a service. Raises: ConfigError when its file cannot be used."""
        return cls(api_token=config.api_token, admin_token=config.admin_token, file=config.token_file)

    # ---- who is it ----------------------------------------------------------------------------------------------
    def holder(self, request: Request) -> Holder | None:
        """Who sends the request's token; None without a valid one."""
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest = hashlib.sha256(sent.strip().encode("latin-1")).digest()
        known = self._known.get(digest)
        return known.holder if known is not None and hmac.compare_digest(known.digest, digest) else None

    def has(self, *roles: str) -> bool:
        """Whether there is a token of one of these roles."""
        return any(known.holder.role in roles for known in self._known.values())

    @property
    def guards_api(self) -> bool:
        """Whether requests for text need a token. A file guards it whatever stands in it: an empty one shuts everybody out."""
        return self._path is not None or self.has(API_ROLE)

    # ---- the file -----------------------------------------------------------------------------------------------
    def start(self) -> Tokens:
        """Read the file again whenever it changes, in a thread: a folder that hangs must hold up no request."""
        if self._path is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="token-file", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """Stop looking at the file."""
        self._stop.set()

    def reload(self) -> bool:
        """Take the file if it has changed, is settled and whole; else the tokens stay as they are and the log says why."""
        assert self._path is not None, "there is a file"
        try:
            seen = _mark(self._path)
            if seen == self._seen or self._stop.wait(SETTLE_S) or _mark(self._path) != seen:
                return False
            self._seen = seen
            self._install(load_token_file(self._path))
        except (ConfigError, OSError) as e:
            log.error("token file is not used, the tokens before it stay: %s", e)
            self._seen = self._seen if isinstance(e, ConfigError) else None
            return False
        self.num_reloads += 1
        log.info("token file read again tokens=%d", len(self._known) - len(self._own))
        return True

    def _run(self) -> None:
        is_told = False
        while not self._stop.wait(self._reload_s):
            try:
                self.reload()
                is_told = False
            except Exception:  # the thread must not end: a token could then never be withdrawn again
                if not is_told:
                    log.exception("reading the token file failed")
                is_told = True

    def _install(self, file: TokenFile) -> None:
        known = {k.digest: k for k in (*_entries(file.tokens), *self._own)}  # the service's own win
        self._known, self.limits = known, dict(file.tenants)


def _entries(tokens: Iterable[TokenEntry]) -> Iterable[_Known]:
    for entry in tokens:
        digest = entry.digest
        short = digest.hex()[:12]
        tenant = None
        if entry.role == CLIENT_ROLE:
            tenant = entry.tenant or f"{OWN_PREFIX}{entry.name or short}"
        yield _Known(digest, Holder(role=entry.role, name=entry.name or f"token {short}", tenant=tenant))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _mark(path: Path) -> tuple[int, ...]:
    """What tells one state of a file from another; links are followed, as mounted secrets are exchanged that way."""
    found = os.stat(path) if path.exists() else None
    return () if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)


# ---- without tokens -------------------------------------------------------------------------------------------------
def is_loopback(name: str) -> bool:
    """Whether a host name or address means this computer and cannot be pointed elsewhere."""
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def host_name(request: Request) -> str:
    """The Host header without its port, lower case."""
    host = request.headers.get("host", "").strip().lower()
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def is_foreign_page(request: Request) -> bool:
    """Whether a browser says that another site's page sends the request, as it does with every POST."""
    if request.headers.get("sec-fetch-site", "none").lower() not in ("none", "same-origin"):
        return True
    origin = request.headers.get("origin")
    return origin is not None and origin.partition("://")[2].lower() != request.headers.get("host", "").strip().lower()
