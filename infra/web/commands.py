"""Commands: the orders that a running service takes, their fields, and the controller's method behind each."""

from __future__ import annotations

import json
import sys
from typing import Any

from paceline.errors import RequestError

FIELDS: dict[str, dict[str, type]] = {
    "pin": {"version": str},
    "unpin": {},
    "canary": {"version": str, "bucket": str},
    "assign": {"bucket": str, "version": str},
    "unassign": {"bucket": str},
    "rollback": {"version": str},
    "pause": {},
    "resume": {},
    "policy": {"policy": str},
    "bank": {"bank_s": float},
    "train": {"bucket": str, "arm": str},
}
"""Command -> its fields."""
OPTIONAL = {("rollback", "version"), ("canary", "bucket"), ("train", "arm")}
_METHODS = {"resume": "pause", "policy": "set_policy", "bank": "set_bank"}


def parse_command(name: str, raw: bytes) -> tuple[str, tuple[Any, ...]]:
    """(method of the controller, its arguments) of a command and its JSON body; raises RequestError with the fix."""
    if name not in FIELDS:
        raise RequestError(f"command must be one of {', '.join(FIELDS)}, got {name!r}")
    fields = FIELDS[name]
    takes = ", ".join(fields) or "none"
    try:
        body = json.loads(raw or b"{}")
    except (ValueError, RecursionError) as e:
        raise RequestError(f"the body must be JSON: {e}") from e
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    unknown = sorted(set(body) - set(fields))
    if unknown:
        raise RequestError(f"{unknown[0]} is not a field of {name}; it takes {takes}")
    args = []
    for field, kind in fields.items():
        value = body.get(field)
        if value is None and (name, field) in OPTIONAL:
            continue
        args.append(_checked(field, kind, value))
    if name in ("pause", "resume"):
        args = [name == "pause"]
    return _METHODS.get(name, name), tuple(args)


def _checked(field: str, kind: type, value: Any) -> Any:
    if value is None or value == "":
        raise RequestError(f"{field} must be given")
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise RequestError(f"{field} must be a number, got {value!r}")
        return float(value)
    if not isinstance(value, kind):
        raise RequestError(f"{field} must be a string, got {value!r}")
    return value
