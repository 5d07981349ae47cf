"""Ledger section: how spending and saving add up over time, and by kind, bucket, version and arm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.bandit.controller.view import LedgerCell
from paceline.contracts import LedgerEntry
from paceline.infra.controller.snapshot import LedgerSums, Snapshot

NUM_POINTS = 240
NUM_ROWS = 20
_SAVING = "saving"


def over_time(entries: Iterable[LedgerEntry], sums: LedgerSums, num_points: int = NUM_POINTS) -> dict[str, list]:
    """Cumulative spent, saved and net at up to `num_points` times; the last point is the totals.

    Entries are the newest ones only; what was booked before them is the offset, so that the lines end at the totals.
    """
    rows = sorted(entries, key=lambda e: (e.ts, e.entry_id))
    spent = sums.spent_s - sum(e.seconds for e in rows if e.kind != _SAVING)
    saved = sums.saved_s - sum(e.seconds for e in rows if e.kind == _SAVING)
    out: dict[str, list] = {"ts": [], "spent_s": [], "saved_s": [], "net_s": []}
    stride = max(1, -(-len(rows) // num_points))
    for i, e in enumerate(rows):
        if e.kind == _SAVING:
            saved += e.seconds
        else:
            spent += e.seconds
        if i % stride == stride - 1 or i == len(rows) - 1:
            for key, value in (("ts", e.ts), ("spent_s", spent), ("saved_s", saved), ("net_s", saved - spent)):
                out[key].append(round(value, 4))
    return out


def breakdown(cells: Iterable[LedgerCell], by: str) -> list[dict[str, Any]]:
    """[{name, spent_s, saved_s}] of the controller's totals, summed by 'bucket', 'version' or 'arm'; the largest first."""
    sums: dict[str, dict[str, float]] = {}
    for cell in cells:
        row = sums.setdefault(getattr(cell, by) or "(none)", {"spent_s": 0.0, "saved_s": 0.0})
        row["spent_s"] += cell.spent_s
        row["saved_s"] += cell.saved_s
    rows = [{"name": name, **row} for name, row in sums.items()]
    return sorted(rows, key=lambda r: (-r["spent_s"] - abs(r["saved_s"]), r["name"]))


def ledger_section(state: Snapshot) -> dict[str, Any]:
    """Totals, lines over time and break-downs."""
    sums = state.ledger
    by_kind = [
        {"name": kind, "spent_s": 0.0 if kind == _SAVING else s, "saved_s": s if kind == _SAVING else 0.0}
        for kind, s in sorted(sums.by_kind.items())
    ]
    split = {by: breakdown(state.ledger_cells, by)[:NUM_ROWS] for by in ("bucket", "version", "arm")}
    return {
        "totals": {"spent_s": sums.spent_s, "saved_s": sums.saved_s, "net_s": sums.net_s},
        "bank_s": state.bandit.bank_s if state.bandit is not None else None,
        "lines": over_time(state.ledger_entries, sums),
        "by": {"kind": by_kind, **split},
        "num_entries": len(state.ledger_entries),
    }
