"""Versions commands: `paceline versions ...`, which list and set the drafter versions of a running service."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from paceline.cli.options import command

if TYPE_CHECKING:
    from paceline.infra.service.versions import ListOptions

versions_app = typer.Typer(
    help="List, pin, try and roll back drafter versions of a running service.", no_args_is_help=True
)
_MODULE = "paceline.infra.service.versions"
_CHANGES = {
    "pin": ("VersionOptions", "Serve this version to new requests until 'versions unpin'; the policy pauses."),
    "unpin": ("ServiceAddress", "Let the policy decide again."),
    "rollback": ("ServiceAddress", "Go back to the version before the one that serves now (as a new generation)."),
    "canary": ("VersionOptions", "Try this version on a share of requests until its verdict."),
}


@command(versions_app, "list", f"{_MODULE}:ListOptions")
def versions_list(options: ListOptions, console: Console) -> None:
    """Drafter versions with parent, arm, bucket, rows learned and what serves now."""
    from paceline.infra.service.versions import print_versions

    print_versions(options.service, console, as_json=options.json)


def _changer(action: str) -> Callable[[Any, Console], None]:
    def run(options: Any, console: Console) -> None:
        from paceline.infra.service.versions import change_version

        service, version = getattr(options, "service", options), getattr(options, "version", None)
        change_version(service, action, console, version=version)

    return run


for _name, (_record, _help) in _CHANGES.items():
    _run = _changer(_name)
    _run.__doc__ = _help
    command(versions_app, _name, f"{_MODULE}:{_record}")(_run)
