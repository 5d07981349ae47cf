"""Ledger: device-seconds spent and saved as running totals, and the bank, what may still be spent of them.

Entries leave as they are booked and are kept elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from paceline.bandit.ledger.totals import COSTS, KINDS, LedgerTotals, fold_entries
from paceline.contracts import Decision, LedgerEntry

MAX_IDS = 64
"""Costs of jobs and swaps whose ids are remembered: those of the latest dozens of jobs."""
_REPEATABLE = ("training", "shadow", "staging")


class Ledger(msgspec.Struct):
    """Totals of all that was ever booked. The one place that refuses an entry which was booked before.

    Savings and interference carry the number of an epoch, which ends once. Costs of jobs and swaps come from a host that
    may repeat itself, so their ids are remembered. What a crash makes the host do again is no repetition: the state it
    restores has not seen the entry either.
    """

    totals: LedgerTotals = msgspec.field(default_factory=LedgerTotals)
    cost_ids: list[str] = []
    """Ids of the latest costs of jobs and swaps, oldest first."""

    def add(self, entry: LedgerEntry) -> bool:
        """Book an entry; False when it is a cost that was booked before. Raises ValueError on a wrong kind."""
        if entry.entry_id in self.cost_ids:
            return False
        self.totals.add(entry)
        if entry.kind in _REPEATABLE:
            self.cost_ids = [*self.cost_ids, entry.entry_id][-MAX_IDS:]
        return True


def entry_id(decision_id: int | None, kind: str, detail: str = "") -> str:
    """The unique name of a booking: its decision ('d7:', or 'd0:' for none), kind and epoch or job."""
    return f"d{decision_id or 0}:{kind}" + (f":{detail}" if detail else "")


def contradictions(
    totals: LedgerTotals, entries: Iterable[LedgerEntry], decisions: Iterable[Decision], tolerance_s: float = 1e-6
) -> list[str]:
    """Where totals, all entries ever booked and decisions disagree; empty when consistent.

    Every finished train decision's realised_cost_s is the sum of its entries, every realised_saving_s likewise, totals
    are the sums of entries, ids are unique, and every entry names a decision of the list (or none).
    """
    found = []
    by_id = {d.decision_id: d for d in decisions}
    entries = list(entries)
    own = {e.entry_id: e for e in entries}
    if len(own) < len(entries):
        found.append(f"{len(entries) - len(own)} entries were booked twice")
    booked = fold_entries(entries)
    for key in sorted({*booked.cells, *totals.cells}, key=str):
        for kind in KINDS:
            mine, total = (t.cells[key].seconds.get(kind, 0.0) if key in t.cells else 0.0 for t in (booked, totals))
            if abs(mine - total) > tolerance_s:
                found.append(f"total of {kind} for {key} is {total:.6f} s, its entries sum to {mine:.6f} s")
    sums: dict[int, list[float]] = {}
    for name, entry in own.items():
        owner = int(name[1:].split(":", 1)[0])
        if owner and owner not in by_id:
            found.append(f"entry {name} names an unknown decision")
        sums.setdefault(owner, [0.0, 0.0])[entry.kind not in COSTS] += entry.seconds
    for d in by_id.values():
        spent, saved = sums.get(d.decision_id, (0.0, 0.0))
        if abs(spent - (d.realised_cost_s or 0.0)) > tolerance_s:
            found.append(f"decision {d.decision_id} cost {d.realised_cost_s}, its entries sum to {spent:.6f} s")
        if abs(saved - (d.realised_saving_s or 0.0)) > tolerance_s:
            found.append(f"decision {d.decision_id} saved {d.realised_saving_s}, its entries sum to {saved:.6f} s")
    return found


class Bank(msgspec.Struct, frozen=True, kw_only=True):
    """Balance = credit + measured savings less one standard error - spent - reserved; device-seconds.

    The credit is the starting balance, or the income so far where that has become more. Spending only out of the balance
    bounds the loss by it (bandits with knapsacks, Badanidiyuru et al. 2013, arXiv 1305.2545): whatever was saved was
    measured, so that is the worst case, but for what the latest job or swap costs beyond what was expected of it: that is
    charged as it is known, and nothing more is bought before the balance covers it.
    """

    start_s: float
    income_s: float = 0.0
    """Share of the time that was served so far."""
    saved_s: float
    saved_error_s: float
    spent_s: float
    reserved_s: float = 0.0
    """Held for the job in flight."""

    @property
    def credit_s(self) -> float:
        return max(self.start_s, self.income_s)

    @property
    def balance_s(self) -> float:
        saved = self.saved_s - self.saved_error_s if self.saved_s > 0 else self.saved_s
        return self.credit_s + max(saved, min(self.saved_s, 0.0)) - self.spent_s - self.reserved_s

    def hope_s(self, income_s: float) -> float:
        """The balance if the credit were the income, and at least `income_s`."""
        return self.balance_s - self.credit_s + max(self.income_s, income_s)

    def time_limit_s(self, job_time_limit_s: float, rate: float, after_s: float) -> float:
        """Longest run of a job that the balance covers.

        `rate` device-seconds are spent per second of the job: its price and the interference; `after_s` is kept for
        shadow scoring and staging, which follow it.
        """
        left = max(self.balance_s - after_s, 0.0)
        return job_time_limit_s if left > rate * job_time_limit_s or rate <= 0 else left / rate
