"""How did spending and saving add up over time, and by kind, bucket and version?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

NUM_POINTS = 240
_SAVING = "saving"


def over_time(entries: list[dict[str, Any]], totals: dict[str, Any], num_points: int = NUM_POINTS) -> dict[str, list]:
    """Cumulative spent, saved and net at up to `num_points` times; the last point is the totals.

    Entries are the newest ones only; what was booked before them is the offset, so that the lines end at the totals.
    """
    rows = sorted(entries, key=lambda e: (e["ts"], e["entry_id"]))
    spent = float(totals.get("spent_s") or 0.0) - sum(e["seconds"] for e in rows if e["kind"] != _SAVING)
    saved = float(totals.get("saved_s") or 0.0) - sum(e["seconds"] for e in rows if e["kind"] == _SAVING)
    out: dict[str, list] = {"ts": [], "spent_s": [], "saved_s": [], "net_s": []}
    stride = max(1, -(-len(rows) // num_points))
    for i, e in enumerate(rows):
        if e["kind"] == _SAVING:
            saved += e["seconds"]
        else:
            spent += e["seconds"]
        if i % stride == stride - 1 or i == len(rows) - 1:
            for key, value in (("ts", e["ts"]), ("spent_s", spent), ("saved_s", saved), ("net_s", saved - spent)):
                out[key].append(round(value, 4))
    return out


def breakdown(entries: Iterable[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """[{name, spent_s, saved_s}] of the entries, summed by 'kind', 'bucket', 'version' or 'arm'; the largest first."""
    sums: dict[str, dict[str, float]] = {}
    for e in entries:
        name = str(e.get(by) or "(none)")
        row = sums.setdefault(name, {"spent_s": 0.0, "saved_s": 0.0})
        row["saved_s" if e["kind"] == _SAVING else "spent_s"] += e["seconds"]
    rows = [{"name": name, **row} for name, row in sums.items()]
    return sorted(rows, key=lambda r: (-r["spent_s"] - abs(r["saved_s"]), r["name"]))


def of_cells(cells: Iterable[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """Like `breakdown`, from the controller's totals per bucket, arm and version: also of entries that are gone."""
    sums: dict[str, dict[str, float]] = {}
    for cell in cells:
        row = sums.setdefault(str(cell.get(by) or "(none)"), {"spent_s": 0.0, "saved_s": 0.0})
        row["spent_s"] += cell["spent_s"]
        row["saved_s"] += cell["saved_s"]
    rows = [{"name": name, **row} for name, row in sums.items()]
    return sorted(rows, key=lambda r: (-r["spent_s"] - abs(r["saved_s"]), r["name"]))


def ledger_section(state: dict[str, Any]) -> dict[str, Any]:
    """Totals, lines over time and break-downs."""
    entries, totals = state.get("ledger_entries") or [], state.get("ledger") or {}
    by_kind = [
        {"name": kind, "spent_s": 0.0 if kind == _SAVING else s, "saved_s": s if kind == _SAVING else 0.0}
        for kind, s in sorted((totals.get("by_kind") or {}).items())
    ]
    cells = state.get("ledger_cells")
    split = {by: (of_cells(cells, by) if cells else breakdown(entries, by))[:20] for by in ("bucket", "version", "arm")}
    return {
        "totals": {k: totals.get(k) or 0.0 for k in ("spent_s", "saved_s", "net_s")},
        "bank_s": (state.get("bandit") or {}).get("bank_s"),
        "lines": over_time(entries, totals),
        "by": {"kind": by_kind, **split},
        "num_entries": len(entries),
    }
