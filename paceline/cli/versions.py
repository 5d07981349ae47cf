"""Options of `paceline versions`; infra/service/versions.py carries them out."""

from __future__ import annotations

from typing import Annotated, Optional

import typer
from rich.console import Console

versions_app = typer.Typer(
    help="List, pin, try and roll back drafter versions of a running service.", no_args_is_help=True
)

_Url = Annotated[str, typer.Option(help="Address of the running service.", envvar="PACELINE_URL")]
_Token = Annotated[
    Optional[str],
    typer.Option(
        help="Bearer token of the service; to change something the admin token, where the service has one.",
        envvar=["PACELINE_ADMIN_TOKEN", "PACELINE_API_TOKEN"],
    ),
]


@versions_app.command("list", help="Drafter versions with parent, arm, bucket, rows learned and what serves now.")
def versions_list(url: _Url = "http://127.0.0.1:8000", token: _Token = None, json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:  # fmt: skip
    from paceline.infra.service.versions import print_versions

    print_versions(url, token, Console(), as_json=json)


def _change(url: str, token: str | None, action: str, version: str | None = None) -> None:
    from paceline.infra.service.versions import change_version

    change_version(url, token, action, Console(), version=version)


@versions_app.command("pin", help="Serve this version to new requests until 'versions unpin'; the policy pauses.")
def versions_pin(version: str, url: _Url = "http://127.0.0.1:8000", token: _Token = None) -> None:
    _change(url, token, "pin", version=version)


@versions_app.command("unpin", help="Let the policy decide again.")
def versions_unpin(url: _Url = "http://127.0.0.1:8000", token: _Token = None) -> None:
    _change(url, token, "unpin")


@versions_app.command("rollback", help="Go back to the version before the one that serves now (as a new generation).")
def versions_rollback(url: _Url = "http://127.0.0.1:8000", token: _Token = None) -> None:
    _change(url, token, "rollback")


@versions_app.command("canary", help="Try this version on a share of requests until its verdict.")
def versions_canary(version: str, url: _Url = "http://127.0.0.1:8000", token: _Token = None) -> None:
    _change(url, token, "canary", version=version)
