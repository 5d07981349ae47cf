"""Formats: the number of the controller's stored state, and how the state of an older release becomes today's.

A state is a map of fields, each in MessagePack. Its number grows when a release changes what a field means; fields that are
only added need no step, since a missing one takes its default. A state of a higher number is refused, never guessed at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from paceline.contracts import DesiredState
from paceline.errors import StateError

FORMAT = 2
"""What this release writes."""

Fields = dict[str, msgspec.Raw]


def _from_unnumbered(fields: Fields) -> Fields:
    """States that were written before they had a number differ in nothing else."""
    return fields


def _versions_were_assigned(fields: Fields) -> Fields:
    """Only operators gave classes versions of their own."""
    desired = msgspec.msgpack.decode(fields["desired"], type=DesiredState | None) if "desired" in fields else None
    assigned = [] if desired is None else sorted(desired.class_versions)
    return fields | {"assigned": msgspec.Raw(msgspec.msgpack.encode(assigned))}


MIGRATIONS: tuple[Callable[[Fields], Fields], ...] = (_from_unnumbered, _versions_were_assigned)
"""The step from each number to the next."""
assert len(MIGRATIONS) == FORMAT


def upgraded(stored: Mapping[str, bytes], where: str) -> Fields:
    """The fields of a stored state in today's format.

    where: what holds it, for the sentence of an error.
    Raises: StateError for a newer format; msgspec.DecodeError when the number is unreadable.
    """
    fields = {name: msgspec.Raw(data) for name, data in stored.items()}
    number = msgspec.msgpack.decode(fields["format"], type=int) if "format" in fields else 0
    if not 0 <= number <= FORMAT:
        raise StateError(
            f"{where} must have format {FORMAT} or an older one, got {number}: a newer release wrote it; start that "
            "release, or restore a backup that this one can read"
        )
    for step in MIGRATIONS[number:]:
        fields = step(fields)
    return fields | {"format": msgspec.Raw(msgspec.msgpack.encode(FORMAT))}
