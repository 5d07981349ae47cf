"""Drafter versions of a running service, from the command line: list, pin, unpin, roll back."""

from __future__ import annotations

import httpx
from rich.console import Console
from rich.table import Table

from paceline.errors import PacelineError


def _call(method: str, url: str, token: str | None, path: str, body: dict | None = None) -> dict:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        response = httpx.request(method, url.rstrip("/") + path, json=body, headers=headers, timeout=30.0)
    except httpx.HTTPError as e:
        raise PacelineError(f"no service answers at {url} ({type(e).__name__}); start one with `paceline serve`") from e
    if response.status_code >= 400:
        raise PacelineError(f"{url}{path} answered {response.status_code}: {response.text[:300]}")
    return response.json()


def print_versions(url: str, token: str | None, console: Console, *, as_json: bool) -> None:
    """Print the registry's versions and which one serves."""
    rows = _call("GET", url, token, "/paceline/versions")
    if as_json:
        console.print_json(data=rows)
        return
    table = Table(title=f"generation {rows.get('gen')}, live {rows.get('version')}, first {rows.get('first_version')}")
    for name in ("version", "parent", "arm", "bucket", "train rows", "created", "serves"):
        table.add_column(name)
    for v in rows["versions"]:
        serves = [w for w, k in (("live", "version"), ("first", "first_version")) if rows.get(k) == v["version"]]
        table.add_row(
            v["version"], v.get("parent") or "-", v["arm"], v.get("bucket") or "-", str(v["num_train_rows"]), f"{v['created']:.0f}",
            ", ".join(serves),
        )  # fmt: skip
    console.print(table)


def change_version(url: str, token: str | None, action: str, console: Console, *, version: str | None = None) -> None:
    """Pin, unpin or roll back; prints the new generation."""
    body = {"version": version} if version else {}
    answer = _call("POST", url, token, f"/paceline/{action}", body)
    console.print(f"{action}: generation {answer.get('gen')}, live {answer.get('version')}")
