"""What was spent and what was saved, in device-seconds?"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from paceline.contracts import Decision, LedgerEntry

COSTS = ("training", "shadow", "interference", "staging")
KINDS = (*COSTS, "saving")
MAX_ENTRIES = 20_000
"""Entries kept one by one; older ones live on in the totals, and their ids are refused by age."""


class Ledger(msgspec.Struct):
    """Entries with unique ids and running totals per kind; folding an id twice changes nothing."""

    entries: dict[str, LedgerEntry] = {}
    """By entry_id, in the order of booking."""
    totals: dict[str, float] = {}
    horizon_ts: float = float("-inf")
    """Entries up to this time were compacted; a late entry of that age is taken for a duplicate."""

    def add(self, entry: LedgerEntry) -> bool:
        """Book an entry; False when its id (or one of its age) was booked before. Raises ValueError on a wrong kind."""
        if entry.kind not in KINDS:
            raise ValueError(f"ledger entry kind must be one of {', '.join(KINDS)}, got {entry.kind!r}")
        if entry.entry_id in self.entries or entry.ts <= self.horizon_ts:
            return False
        self.entries[entry.entry_id] = entry
        self.totals[entry.kind] = self.totals.get(entry.kind, 0.0) + entry.seconds
        if len(self.entries) > MAX_ENTRIES:
            for key in list(self.entries)[: MAX_ENTRIES // 4]:
                self.horizon_ts = max(self.horizon_ts, self.entries.pop(key).ts)
        return True

    def spent_s(self) -> float:
        """Training, shadow scoring, interference and staging."""
        return sum(self.totals.get(kind, 0.0) for kind in COSTS)

    def saved_s(self) -> float:
        """Savings against the hold-back group (negative when adaptation hurt)."""
        return self.totals.get("saving", 0.0)

    def net_s(self) -> float:
        return self.saved_s() - self.spent_s()

    def of_decision(self, decision_id: int) -> tuple[float, float]:
        """(spent, saved) of one decision."""
        prefix = f"d{decision_id}:"
        own = [e for key, e in self.entries.items() if key.startswith(prefix)]
        return sum(e.seconds for e in own if e.kind in COSTS), sum(e.seconds for e in own if e.kind == "saving")


def entry_id(decision_id: int | None, kind: str, detail: str = "") -> str:
    """The unique name of a booking: its decision ('d7:', or 'd0:' for none), kind and epoch or job."""
    return f"d{decision_id or 0}:{kind}" + (f":{detail}" if detail else "")


def contradictions(ledger: Ledger, decisions: Iterable[Decision], tolerance_s: float = 1e-6) -> list[str]:
    """Where ledger and decisions disagree; empty when consistent.

    Every finished train decision's realised_cost_s is the sum of its entries, every realised_saving_s likewise, totals
    are the sums of entries, and every entry names a decision of the list (or none). Compacted ledgers skip the sums.
    """
    found = []
    by_id = {d.decision_id: d for d in decisions}
    if ledger.horizon_ts == float("-inf"):
        for kind in KINDS:
            total = sum(e.seconds for e in ledger.entries.values() if e.kind == kind)
            if abs(total - ledger.totals.get(kind, 0.0)) > tolerance_s:
                found.append(
                    f"total of {kind} is {ledger.totals.get(kind, 0.0):.6f} s, its entries sum to {total:.6f} s"
                )
        for d in by_id.values():
            spent, saved = ledger.of_decision(d.decision_id)
            if abs(spent - (d.realised_cost_s or 0.0)) > tolerance_s:
                found.append(f"decision {d.decision_id} cost {d.realised_cost_s}, its entries sum to {spent:.6f} s")
            if abs(saved - (d.realised_saving_s or 0.0)) > tolerance_s:
                found.append(f"decision {d.decision_id} saved {d.realised_saving_s}, its entries sum to {saved:.6f} s")
        for key in ledger.entries:
            owner = int(key[1:].split(":", 1)[0])
            if owner and owner not in by_id:
                found.append(f"entry {key} names an unknown decision")
    return found
