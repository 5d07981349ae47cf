"""Export: what the dashboard shows as one JSON document, or as one CSV table per part."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

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
                    "ts": b["ts"], "bucket": bucket, "group": group, "acceptance_length": length,
                    "tokens_per_device_s": speed, "tokens": tokens, "rounds": rounds,
                }  # fmt: skip


def _rows(records: Iterable[msgspec.Struct], nested: str = "") -> Rows:
    """Plain rows of records, the field `nested` last and as JSON."""
    for record in records:
        row = msgspec.to_builtins(record)
        yield row | {nested: json.dumps(row.pop(nested))} if nested else row


TABLES: dict[str, Callable[[Document], Rows]] = {
    "traffic": _traffic,
    "decisions": lambda document: _rows(document.state.decisions, "context"),
    "ledger": lambda document: _rows(document.state.ledger_entries),
    "versions": lambda document: _rows(document.state.versions, "metrics"),
    "replicas": lambda document: _rows(document.state.replicas),
}
"""Name of a CSV table -> its rows."""


def as_csv(rows: Rows) -> bytes:
    """CSV with a header row; '' without rows. Text that a spreadsheet would run as a formula gets a leading apostrophe."""
    rows = list(rows)
    names = list(dict.fromkeys(k for row in rows for k in row))
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
