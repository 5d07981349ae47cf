"""Operators' commands: `paceline versions ...` and `paceline policy ...`, which ask and order a running service."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from paceline.cli.options import command

if TYPE_CHECKING:
    from paceline.infra.service.versions import ListOptions

versions_app = typer.Typer(
    help="List, pin, try, roll back and assign drafter versions of a running service.", no_args_is_help=True
)
policy_app = typer.Typer(
    help="Pause and set the policy of a running service, and order a training job.", no_args_is_help=True
)
_MODULE = "paceline.infra.service.versions"
_CHANGES = {
    "pin": ("VersionOptions", "Serve this version to new requests until 'versions unpin'; the policy pauses."),
    "unpin": ("ServiceAddress", "Let the policy decide again."),
    "rollback": (
        "ServiceAddress",
        "Take back what the policy gave to classes; where it gave none, go back to the live version before.",
    ),
    "canary": ("CanaryOptions", "Try this version on a share of requests until its verdict."),
    "assign": ("AssignOptions", "Serve a class of requests with this version until 'versions unassign'."),
    "unassign": ("UnassignOptions", "Serve a class with the live version again."),
}


@command(versions_app, "list", f"{_MODULE}:ListOptions")
def versions_list(options: ListOptions, console: Console) -> None:
    """Drafter versions with parent, arm, bucket, rows learned and what serves now."""
    from paceline.infra.service.versions import print_versions

    print_versions(options.service, console, as_json=options.json)


_POLICY = {
    "pause": ("pause", "ServiceAddress", "Decide nothing until 'policy resume'; what serves goes on serving."),
    "resume": ("resume", "ServiceAddress", "Decide again."),
    "set": ("policy", "PolicyOptions", "Decide by another policy; beliefs and ledger stay."),
    "train": ("train", "TrainOptions", "Train for a class now, at any price; gate and guard follow."),
    "bank": ("bank", "BankOptions", "Set what jobs may cost beyond what was saved."),
}


def _orderer(action: str, help: str) -> Callable[[Any, Console], None]:
    def run(options: Any, console: Console) -> None:
        from paceline.infra.service.versions import order

        service = getattr(options, "service", options)
        names = {f.name for f in fields(options)} - {"service", "url", "token"}
        order(service, action, console, **{name: getattr(options, name) for name in names})

    run.__doc__ = help
    return run


for _name, (_record, _help) in _CHANGES.items():
    command(versions_app, _name, f"{_MODULE}:{_record}")(_orderer(_name, _help))
for _name, (_action, _record, _help) in _POLICY.items():
    command(policy_app, _name, f"{_MODULE}:{_record}")(_orderer(_action, _help))
