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
    help="List, pin, try, roll back and assign drafter versions of a running service.", no_args_is_help=True
)
_MODULE = "paceline.infra.service.versions"
_CHANGES = {
    "pin": ("VersionOptions", "Serve this version to new requests until 'versions unpin'; the policy pauses."),
    "unpin": ("ServiceAddress", "Let the policy decide again."),
    "rollback": ("ServiceAddress", "Go back to the version before the one that serves now (as a new generation)."),
    "canary": ("CanaryOptions", "Try this version on a share of requests until its verdict."),
    "assign": ("AssignOptions", "Serve a class of requests with this version until 'versions unassign'."),
    "unassign": ("UnassignOptions", "Serve a class with the live version again."),
}


@command(versions_app, "list", f"{_MODULE}:ListOptions")
def versions_list(options: ListOptions, console: Console) -> None:
    """Drafter versions with parent, arm, bucket, rows learned and what serves now."""
    from paceline.infra.service.versions import print_versions

    print_versions(options.service, console, as_json=options.json)


def _changer(action: str) -> Callable[[Any, Console], None]:
    def run(options: Any, console: Console) -> None:
        from paceline.infra.service.versions import change_version

        fields = {name: getattr(options, name, None) for name in ("bucket", "version")}
        change_version(getattr(options, "service", options), action, console, **fields)

    return run


for _name, (_record, _help) in _CHANGES.items():
    _run = _changer(_name)
    _run.__doc__ = _help
    command(versions_app, _name, f"{_MODULE}:{_record}")(_run)
