"""Operator client: what the command line asks and orders of a running service: its versions and its policy."""

from __future__ import annotations

import ssl
import time
from dataclasses import field
from typing import Annotated as A
from typing import TypeVar

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from paceline.errors import PacelineError
from paceline.infra.controller.snapshot import CommandResult, VersionList
from paceline.names import TOKEN_RULE, is_token
from paceline.records import Setting, record, require

T = TypeVar("T")
NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
"""What OpenSSL 1.1 to 3.5 say of a first record that is none of TLS."""


class _Fault(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Fault


@record()
class ServiceAddress:
    """Where a service is and who asks."""

    url: A[str, Setting("Address of the running service.", env="PACELINE_URL")] = "http://127.0.0.1:8000"
    token: A[
        str | None,
        Setting(
            "Bearer token of the service; to change something the admin token, where the service has one.",
            env=("PACELINE_ADMIN_TOKEN", "PACELINE_API_TOKEN"),
        ),
    ] = None  # fmt: skip

    def __post_init__(self) -> None:
        rule = "url must begin with http:// or https://"
        require(self.url.lower().startswith(("http://", "https://")), rule, self.url)
        require(not self.token or is_token(self.token), f"token {TOKEN_RULE}", "something else")


@record()
class ListOptions:
    """The table says which version is live and which one came first."""

    service: ServiceAddress = field(default_factory=ServiceAddress)
    json: A[bool, Setting("Print JSON.")] = False


@record()
class VersionOptions:
    """`paceline versions list` has the names."""

    version: A[str, Setting("Name of the version.", is_argument=True)]
    service: ServiceAddress = field(default_factory=ServiceAddress)


@record()
class CanaryOptions:
    """`paceline versions list` has the names."""

    version: A[str, Setting("Name of the version.", is_argument=True)]
    bucket: A[
        str | None, Setting("Try it on this class alone; promoted it serves the class. Default: on what the live one serves.")
    ] = None  # fmt: skip
    service: ServiceAddress = field(default_factory=ServiceAddress)


@record()
class AssignOptions:
    """`paceline versions list` has the versions, the dashboard the classes."""

    bucket: A[str, Setting("Class: a bucket, or the service's own name for requests without one.", is_argument=True)]
    version: A[str, Setting("Name of the version.", is_argument=True)]
    service: ServiceAddress = field(default_factory=ServiceAddress)


@record()
class UnassignOptions:
    """`paceline versions list` says which classes have versions of their own."""

    bucket: A[str, Setting("Class.", is_argument=True)]
    service: ServiceAddress = field(default_factory=ServiceAddress)


@record()
class TrainOptions:
    """The dashboard has the classes and how many rows each has to learn from."""

    bucket: A[str, Setting("Class.", is_argument=True)]
    arm: A[
        str | None,
        Setting(
            "What of the drafter may change: a name of the dashboard's list; default: head, or lora where classes learn deltas."
        ),
    ] = None
    service: ServiceAddress = field(default_factory=ServiceAddress)


@record()
class PolicyOptions:
    """docs/policies.md has the names."""

    policy: A[str, Setting("Name of the policy.", is_argument=True)]
    service: ServiceAddress = field(default_factory=ServiceAddress)


@record()
class BankOptions:
    """A starting balance; docs/policies.md says what the policy does with it."""

    bank_s: A[float, Setting("Starting balance, device-seconds.", is_argument=True)]
    service: ServiceAddress = field(default_factory=ServiceAddress)


def _call(method: str, service: ServiceAddress, path: str, kind: type[T], body: dict | None = None) -> T:
    url, token = service.url, service.token
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        response = httpx.request(method, url.rstrip("/") + path, json=body, headers=headers, timeout=30.0)
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        raise PacelineError(_no_answer(url, e)) from e
    except OSError as e:  # of the file that signs certificates
        raise PacelineError(f"SSL_CERT_FILE must name a file of certificates (PEM) that can be read: {e}") from e
    try:
        if response.status_code == 200:
            return msgspec.json.decode(response.content, type=kind)
    except msgspec.MsgspecError:
        pass  # a page of somebody else's
    raise PacelineError(f"{url}{path} answered {response.status_code}: {_reason(response)}")


def _no_answer(url: str, error: Exception) -> str:
    """Why a call had no answer, and what to do about it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"the certificate at {url} is not trusted ({cause.verify_message}); set SSL_CERT_FILE to its file, or its signer's"
    if cause is not None and cause.reason in NOT_TLS:
        return f"no TLS is spoken at {url} ({cause.reason}); without it the address begins with http://"
    if cause is not None:
        return f"{url} and this computer do not agree on TLS ({cause.reason or cause})"
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        return (
            f"{url} broke off without an answer ({error or type(error).__name__}): the service may be ending, another protocol "
            "may be spoken there, and a service with tls_cert has an address with https://"
        )
    return f"no service answers at {url} ({type(error).__name__}); start one with `paceline serve`"


def _reason(response: httpx.Response) -> str:
    """What a service says of a refusal, or the beginning of what somebody else sent."""
    try:
        return msgspec.json.decode(response.content, type=_Refusal).error.message
    except msgspec.MsgspecError:
        return response.text[:300]


def print_versions(service: ServiceAddress, console: Console, *, as_json: bool) -> None:
    """Print the registry's versions and which one serves."""
    found = _call("GET", service, "/paceline/versions", VersionList)
    if as_json:
        console.print_json(msgspec.json.encode(found).decode())
        return
    pinned = " (pinned)" if found.pinned == found.version else ""
    table = Table(title=f"generation {found.gen}, live {found.version}{pinned}, first {found.first_version}")
    for name in ("version", "parent", "arm", "bucket", "train rows", "created (UTC)", "serves"):
        table.add_column(name, no_wrap=name in ("version", "parent"), overflow="fold")
    for v in found.versions:
        serves = [
            (f"live{pinned}", found.version),
            ("first", found.first_version),
            *sorted(found.class_versions.items()),
        ]
        table.add_row(
            v.version, v.parent or "-", v.arm, v.bucket or "-", str(v.num_train_rows),
            time.strftime("%Y-%m-%d %H:%M", time.gmtime(v.created)),
            ", ".join(role for role, version in serves if version == v.version),
        )  # fmt: skip
    console.print(table)


def order(service: ServiceAddress, action: str, console: Console, **fields: str | float | None) -> None:
    """Carry out a command with its fields, those that are given; prints the generation and what decides from now on."""
    body = {name: value for name, value in fields.items() if value is not None}
    answer = _call("POST", service, f"/paceline/{action}", CommandResult, body)
    policy = f"{answer.policy} (paused)" if answer.is_paused else answer.policy
    console.print(f"{action}: generation {answer.gen}, live {answer.version}, policy {policy}")
