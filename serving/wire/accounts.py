"""Accounts: what a tenant may ask of a replica, what it has asked for, and who is turned away.

A rate is a bucket that fills by the minute and holds a minute's worth. Prompts are paid for when they come and answers
when they end, so that nobody is turned away for an answer that stays short; a tenant in debt waits until it is paid.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from fastapi import Request
from starlette.exceptions import HTTPException

from paceline.config import ClientLimits, ServiceConfig
from paceline.errors import CapacityError
from paceline.names import is_label
from paceline.serving.wire.credentials import ADMIN_ROLE, Holder, Tokens, host_name, is_foreign_page, is_loopback

TENANT_HEADER = "x-paceline-tenant"
MAX_ACCOUNTS = 4096
"""Accounts remembered, the least recently used go first: without tokens every address is one."""


class LimitExceeded(CapacityError):
    """A tenant asks for more than its limits allow; `retry_after_s`: when it may try again."""

    code = "limit_exceeded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = max(1, math.ceil(retry_after_s))


class Allowance:
    """So much a minute, and at most a minute's worth at once. One event loop only."""

    def __init__(self, per_minute: float, timer: Callable[[], float]) -> None:
        """timer: seconds."""
        self._rate, self._timer = per_minute / 60.0, timer
        self._capacity = max(per_minute, 1.0)
        self._level, self._at = self._capacity, timer()

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` may be spent (what is beyond a minute's worth, when that is there); 0 = now."""
        now = self._timer()
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now
        return max(0.0, (min(amount, self._capacity) - self._level) / self._rate)

    def spend(self, amount: float) -> None:
        """Take `amount`, on credit if need be."""
        self._level -= amount

    def change(self, per_minute: float) -> None:
        """Fill at another rate from now on; what is there stays, as far as there is room for it."""
        self.wait_s(0.0)
        self._rate, self._capacity = per_minute / 60.0, max(per_minute, 1.0)
        self._level = min(self._level, self._capacity)


class Account:
    """One tenant at one replica. One event loop only."""

    def __init__(self, limits: ClientLimits, share: float, timer: Callable[[], float]) -> None:
        """share: this replica's part of the rates, in (0, 1]."""
        self._share, self._timer = share, timer
        self.num_unfinished = 0
        self.install(limits)

    def install(self, limits: ClientLimits) -> None:
        """Go by these limits from now on, with a full minute's worth."""
        self.limits = limits
        each = limits.requests_per_minute, limits.tokens_per_minute
        self._requests, self._tokens = (None if n is None else Allowance(n * self._share, self._timer) for n in each)

    def take_part(self, share: float) -> None:
        """Go by another part of the rates from now on."""
        if share == self._share:
            return
        self._share = share
        limits = self.limits
        for n, allowance in (
            (limits.requests_per_minute, self._requests),
            (limits.tokens_per_minute, self._tokens),
        ):
            if n is not None and allowance is not None:
                allowance.change(n * share)

    def begin(self, *, is_counted: bool) -> None:
        """A request comes; is_counted: against the rate. Raises: LimitExceeded."""
        most = self.limits.max_unfinished
        if most is not None and self.num_unfinished >= most:
            raise LimitExceeded(f"unfinished requests must be at most {most} at once; wait for some to end", 1.0)
        if is_counted and self._requests is not None:
            self._check(self._requests, 1, f"requests must be at most {self.limits.requests_per_minute:g} a minute")
            self._requests.spend(1)
        self.num_unfinished += 1

    def end(self) -> None:
        """A request that has begun is over."""
        self.num_unfinished -= 1

    def charge_prompt(self, num_tokens: int) -> None:
        """A prompt is to be computed. Raises: LimitExceeded."""
        if self._tokens is not None:
            self._check(self._tokens, num_tokens, f"tokens must be at most {self.limits.tokens_per_minute:g} a minute")
            self._tokens.spend(num_tokens)

    def charge_answer(self, num_tokens: int) -> None:
        """An answer has ended."""
        if self._tokens is not None:
            self._tokens.spend(num_tokens)

    def _check(self, allowance: Allowance, amount: float, rule: str) -> None:
        wait_s = allowance.wait_s(amount)
        if wait_s > 0:
            raise LimitExceeded(f"{rule}; try again in {max(1, math.ceil(wait_s))} s", wait_s)


class Visit:
    """One HTTP request of a known client, until its answer has ended."""

    def __init__(self, account: Account, holder: Holder | None) -> None:
        """holder: None where no token is asked for."""
        self.account, self.holder = account, holder
        self._is_over = False

    def tenant(self, named: str | None) -> str:
        """The tenant of a request that names one, or none: '' where nobody says. Raises: HTTPException 403."""
        own = None if self.holder is None else self.holder.tenant
        if own is None:
            return named or ""
        if named is not None and named != own:
            raise HTTPException(403, f"{TENANT_HEADER} must be absent or the tenant of the token, got {named!r}")
        return own

    def keeps_to_itself(self, tenant: str) -> bool:
        """Whether a tenant's buckets are its own: a token vouches for it, and its limits do not share what its text trains."""
        return bool(tenant) and self.holder is not None and not self.account.limits.shares_training

    def close(self) -> None:
        """The answer has ended, however; idempotent."""
        if not self._is_over:
            self._is_over = True
            self.account.end()


class Clients:
    """Who may ask for text, and how much. One event loop only."""

    def __init__(
        self, tokens: Tokens | None = None, *, host: str | None = None, limits: ClientLimits | None = None,
        share: Callable[[], float] = lambda: 1.0, timer: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Args:
        host: address that the service listens on; a loopback one is kept from names that others point at it.
        limits: of tenants for which the tokens' file has none.
        share: this replica's part of the rates, now.
        """
        self.tokens = tokens if tokens is not None else Tokens()
        self._is_loopback = host is not None and is_loopback(host)
        self._limits, self._share, self._timer = limits or ClientLimits(), share, timer
        self._accounts: OrderedDict[str, Account] = OrderedDict()

    @classmethod
    def of(cls, config: ServiceConfig, tokens: Tokens, *, num_sharing: Callable[[], int]) -> Clients:
        """The clients of one of `num_sharing` processes that answer requests."""
        return cls(tokens, host=config.host, limits=config.limits, share=lambda: 1.0 / num_sharing())

    def enter(self, request: Request) -> Visit:
        """Begin a request; `Visit.close` must follow. Raises: HTTPException 401 or 403, LimitExceeded."""
        holder = self.tokens.holder(request)
        if not self.tokens.guards_api:
            self._check_here(request)
            holder = None
        elif holder is None or holder.role == ADMIN_ROLE:
            message = "a valid token must be sent as 'Authorization: Bearer TOKEN'"
            raise HTTPException(401, message, headers={"WWW-Authenticate": "Bearer"})
        account = self._account(request, holder)
        account.begin(is_counted=request.method == "POST")
        return Visit(account, holder)

    def _check_here(self, request: Request) -> None:
        """Without tokens, a web page must not use the model of the computer that it is looked at on."""
        if self._is_loopback and not is_loopback(host_name(request)):
            raise HTTPException(
                403,
                "without an API token the Host header must name this computer (127.0.0.1, localhost); set api_token",
            )
        if is_foreign_page(request):
            raise HTTPException(403, "without an API token requests of other sites' pages are refused; set api_token")

    def _account(self, request: Request, holder: Holder | None) -> Account:
        if holder is None:
            key, tenant = f"address {'' if request.client is None else request.client.host}", None
        elif holder.tenant is not None:
            key = tenant = holder.tenant
        else:  # one trusted application; it names tenants by a header, or by a field that is not read yet
            named = request.headers.get(TENANT_HEADER, "")
            key = tenant = named if is_label(named) else ""
        limits = self.tokens.limits.get(tenant or "", self._limits)
        found = self._accounts.get(key)
        if found is None:
            found = self._accounts[key] = Account(limits, self._share(), self._timer)
        elif found.limits != limits:
            found.install(limits)
        found.take_part(self._share())
        self._accounts.move_to_end(key)
        if len(self._accounts) > MAX_ACCOUNTS:
            self._forget()
        return found

    def _forget(self) -> None:
        """Drop the account that was used least recently of those that have nothing under way; the newest one stays."""
        newest = next(reversed(self._accounts))
        idle = (key for key, account in self._accounts.items() if account.num_unfinished == 0 and key != newest)
        if (key := next(idle, None)) is not None:
            del self._accounts[key]
