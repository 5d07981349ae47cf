"""What was spent and what was saved, in device-seconds?"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from paceline.bandit.ledger.totals import COSTS, KINDS, LedgerTotals, fold_entries
from paceline.contracts import Decision, LedgerEntry

__all__ = ["COSTS", "KINDS", "Ledger", "contradictions", "entry_id"]

MAX_ENTRIES = 20_000
"""Entries kept one by one; older ones live on in the totals, and their ids are refused by age."""


class Ledger(msgspec.Struct):
    """Entries with unique ids and running sums of all that were ever booked; folding an id twice changes nothing."""

    entries: dict[str, LedgerEntry] = {}
    """By entry_id, in the order of booking."""
    sums: LedgerTotals = msgspec.field(default_factory=LedgerTotals)
    """Also of entries that were compacted since."""
    horizon_ts: float = float("-inf")
    """Entries up to this time were compacted; a late entry of that age is taken for a duplicate."""

    def __post_init__(self) -> None:
        """A ledger stored before it kept sums has entries only."""
        if self.entries and not self.sums.cells:
            self.sums = fold_entries(self.entries.values())

    def add(self, entry: LedgerEntry) -> bool:
        """Book an entry; False when its id (or one of its age) was booked before. Raises ValueError on a wrong kind."""
        if entry.kind not in KINDS:
            raise ValueError(f"ledger entry kind must be one of {', '.join(KINDS)}, got {entry.kind!r}")
        if entry.entry_id in self.entries or entry.ts <= self.horizon_ts:
            return False
        self.entries[entry.entry_id] = entry
        self.sums.add(entry)
        if len(self.entries) > MAX_ENTRIES:
            for key in list(self.entries)[: MAX_ENTRIES // 4]:
                self.horizon_ts = max(self.horizon_ts, self.entries.pop(key).ts)
        return True

    @property
    def totals(self) -> dict[str, float]:
        """Kind -> device-seconds ever booked."""
        return self.sums.by_kind()

    def spent_s(self) -> float:
        """Training, shadow scoring, interference and staging."""
        return self.sums.spent_s()

    def saved_s(self) -> float:
        """Savings against the hold-back group (negative when adaptation hurt)."""
        return self.sums.saved_s()

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
        booked, summed = fold_entries(ledger.entries.values()), ledger.sums
        for key in sorted({*booked.cells, *summed.cells}, key=str):
            for kind in KINDS:
                own, total = (t.cells[key].seconds.get(kind, 0.0) if key in t.cells else 0.0 for t in (booked, summed))
                if abs(own - total) > tolerance_s:
                    found.append(f"total of {kind} for {key} is {total:.6f} s, its entries sum to {own:.6f} s")
        for d in by_id.values():
            spent, saved = ledger.of_decision(d.decision_id)
            if abs(spent - (d.realised_cost_s or 0.0)) > tolerance_s:
                found.append(f"decision {d.decision_id} cost {d.realised_cost_s}, its entries sum to {spent:.6f} s")
            if abs(saved - (d.realised_saving_s or 0.0)) > tolerance_s:
                found.append(f"decision {d.decision_id} saved {d.realised_saving_s}, its entries sum to {saved:.6f} s")
        for name in ledger.entries:
            owner = int(name[1:].split(":", 1)[0])
            if owner and owner not in by_id:
                found.append(f"entry {name} names an unknown decision")
    return found
