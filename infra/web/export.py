"""Export: what the dashboard shows as one JSON document, or as one CSV table per part."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from paceline.contracts import Decision, LedgerEntry, ReplicaReport
from paceline.infra.controller.snapshot import VersionInfo
from paceline.infra.web.feed import Document

Rows = Iterable[dict[str, Any]]


def as_json(document: Document) -> bytes:
    """Everything that the page shows, as one object."""
    parts = {name: msgspec.Raw(raw) for name, raw in document.parts.items()}
    return msgspec.json.encode({"ts": document.ts, **parts, "traffic": document.bins})


def _traffic(document: Document) -> Rows:
    for b in document.bins:
        for bucket, groups in b["buckets"].items():
            for group, (length, speed, tokens, rounds) in groups.items():
                yield {
                    "ts": b["ts"], "seconds": b["seconds"], "bucket": bucket, "group": group, "acceptance_length": length,
                    "tokens_per_device_s": speed, "tokens": tokens, "rounds": rounds,
                }  # fmt: skip


def _rows(records: Iterable[msgspec.Struct], nested: str = "") -> Rows:
    """Plain rows of records, the field `nested` last and as JSON."""
    for record in records:
        row = msgspec.to_builtins(record)
        yield row | {nested: json.dumps(row.pop(nested))} if nested else row


def _fields(kind: type[msgspec.Struct], nested: str = "") -> list[str]:
    """Columns of a table of records, which has them without a row, too."""
    names = [f.encode_name for f in msgspec.structs.fields(kind)]
    return sorted(names, key=lambda name: name == nested)


TABLES: dict[str, tuple[list[str], Callable[[Document], Rows]]] = {
    "traffic": (
        ["ts", "seconds", "bucket", "group", "acceptance_length", "tokens_per_device_s", "tokens", "rounds"],
        _traffic,
    ),
    "decisions": (_fields(Decision, "context"), lambda document: _rows(document.state.decisions, "context")),
    "ledger": (_fields(LedgerEntry), lambda document: _rows(document.state.ledger_entries)),
    "versions": (_fields(VersionInfo, "metrics"), lambda document: _rows(document.state.versions, "metrics")),
    "replicas": (_fields(ReplicaReport), lambda document: _rows(document.state.replicas)),
}
"""Name of a CSV table -> its columns and its rows."""


def as_csv(rows: Rows, columns: Iterable[str] = ()) -> bytes:
    """CSV with a header row: the columns, then what else rows have. Text that a spreadsheet would run as a formula gets a leading
    apostrophe."""
    rows = list(rows)
    names = list(dict.fromkeys([*columns, *(k for row in rows for k in row)]))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\r\n")
    if names:
        writer.writeheader()
    for row in rows:
        writer.writerow({k: _cell(v) for k, v in row.items()})
    return out.getvalue().encode()


def _cell(value: Any) -> Any:
    if isinstance(value, dict | list | tuple):
        value = json.dumps(value)
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value
