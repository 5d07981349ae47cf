"""Versions client: drafter versions of a running service, from the command line: list, pin, unpin, roll back."""

from __future__ import annotations

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from paceline.errors import PacelineError
from paceline.infra.controller.snapshot import CommandResult, VersionList


def _call(method: str, url: str, token: str | None, path: str, body: dict | None = None) -> bytes:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        response = httpx.request(method, url.rstrip("/") + path, json=body, headers=headers, timeout=30.0)
    except httpx.HTTPError as e:
        raise PacelineError(f"no service answers at {url} ({type(e).__name__}); start one with `paceline serve`") from e
    if response.status_code >= 400:
        raise PacelineError(f"{url}{path} answered {response.status_code}: {response.text[:300]}")
    return response.content


def print_versions(url: str, token: str | None, console: Console, *, as_json: bool) -> None:
    """Print the registry's versions and which one serves."""
    body = _call("GET", url, token, "/paceline/versions")
    if as_json:
        console.print_json(body.decode())
        return
    found = msgspec.json.decode(body, type=VersionList)
    table = Table(title=f"generation {found.gen}, live {found.version}, first {found.first_version}")
    for name in ("version", "parent", "arm", "bucket", "train rows", "created", "serves"):
        table.add_column(name)
    for v in found.versions:
        serves = {"live": found.version, "first": found.first_version}
        table.add_row(
            v.version, v.parent or "-", v.arm, v.bucket or "-", str(v.num_train_rows), f"{v.created:.0f}",
            ", ".join(role for role, version in serves.items() if version == v.version),
        )  # fmt: skip
    console.print(table)


def change_version(url: str, token: str | None, action: str, console: Console, *, version: str | None = None) -> None:
    """Pin, unpin or roll back; prints the new generation."""
    body = {"version": version} if version else {}
    answer = msgspec.json.decode(_call("POST", url, token, f"/paceline/{action}", body), type=CommandResult)
    console.print(f"{action}: generation {answer.gen}, live {answer.version}")
