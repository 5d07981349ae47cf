"""Versions commands: `paceline versions ...`, which list and set the drafter versions of a running service."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.console import Console

from paceline.cli.options import command

if TYPE_CHECKING:
    from paceline.infra.service.versions import ListOptions, ServiceAddress, VersionOptions

versions_app = typer.Typer(
    help="List, pin, try and roll back drafter versions of a running service.", no_args_is_help=True
)
_MODULE = "paceline.infra.service.versions"


@command(versions_app, "list", f"{_MODULE}:ListOptions")
def versions_list(options: ListOptions, console: Console) -> None:
    """Drafter versions with parent, arm, bucket, rows learned and what serves now."""
    from paceline.infra.service.versions import print_versions

    print_versions(options.service, console, as_json=options.json)


def _change(service: ServiceAddress, action: str, console: Console, version: str | None = None) -> None:
    from paceline.infra.service.versions import change_version

    change_version(service, action, console, version=version)


@command(versions_app, "pin", f"{_MODULE}:VersionOptions")
def versions_pin(options: VersionOptions, console: Console) -> None:
    """Serve this version to new requests until 'versions unpin'; the policy pauses."""
    _change(options.service, "pin", console, options.version)


@command(versions_app, "unpin", f"{_MODULE}:ServiceAddress")
def versions_unpin(service: ServiceAddress, console: Console) -> None:
    """Let the policy decide again."""
    _change(service, "unpin", console)


@command(versions_app, "rollback", f"{_MODULE}:ServiceAddress")
def versions_rollback(service: ServiceAddress, console: Console) -> None:
    """Go back to the version before the one that serves now (as a new generation)."""
    _change(service, "rollback", console)


@command(versions_app, "canary", f"{_MODULE}:VersionOptions")
def versions_canary(options: VersionOptions, console: Console) -> None:
    """Try this version on a share of requests until its verdict."""
    _change(options.service, "canary", console, options.version)
