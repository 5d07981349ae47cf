"""Ledger totals: running sums per bucket, arm, version and kind, with the error of the saving."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from paceline.bandit.ledger.savings import HALF_LIFE_S
from paceline.contracts import LedgerEntry

COSTS = ("training", "shadow", "interference", "staging")
KINDS = (*COSTS, "saving")
MAX_CELLS = 2_000
"""(bucket, arm, version) combinations kept apart; beyond that the longest untouched ones merge into version 'older'."""
MERGED_VERSION = "older"
Z95 = 1.959964
"""Half-width of a 95% interval in standard errors."""


class ErrorSum(msgspec.Struct):
    """Variance of a sum of savings whose errors share a sample that fades with HALF_LIFE_S.

    Savings of one bucket compare with the same discounted hold-back sample, so bookings t seconds apart have errors of
    correlation 0.5 ** (t / HALF_LIFE_S) under steady traffic (Var(sum) of an AR(1) series, kept as a recursion).
    """

    variance: float = 0.0
    """Seconds squared."""
    shared_s: float = 0.0
    """Sum of all standard errors so far, each weighted with its correlation to the latest."""
    ts: float = 0.0

    def add(self, standard_error_s: float, ts: float) -> None:
        """Fold the next booking; a time before the latest counts as the latest."""
        ts = max(ts, self.ts)
        carried = self.shared_s * 0.5 ** ((ts - self.ts) / HALF_LIFE_S)
        self.variance += standard_error_s * (standard_error_s + 2.0 * carried)
        self.shared_s, self.ts = carried + standard_error_s, ts

    def merge(self, other: ErrorSum) -> None:
        """Add another sum's errors as if fully correlated: an upper bound, since the common history is gone."""
        self.variance = (math.sqrt(self.variance) + math.sqrt(other.variance)) ** 2
        self.shared_s += other.shared_s
        self.ts = max(self.ts, other.ts)


class Cell(msgspec.Struct):
    """Everything booked under one (bucket, arm, version)."""

    seconds: dict[str, float] = {}
    """Kind -> device-seconds."""
    error: ErrorSum = msgspec.field(default_factory=ErrorSum)
    last_ts: float = 0.0
    num_entries: int = 0


class LedgerCell(msgspec.Struct, frozen=True, kw_only=True):
    """Everything booked under one (bucket, arm, version), device-seconds."""

    bucket: str
    arm: str | None
    version: str | None
    training_s: float
    shadow_s: float
    interference_s: float
    staging_s: float
    saving_s: float
    spent_s: float
    saved_s: float
    saved_low_s: float
    """Ends of the 95% interval of saved_s."""
    saved_high_s: float
    net_s: float
    num_entries: int


class LedgerTotals(msgspec.Struct):
    """Running totals of a ledger: the one fold behind the bank, the state view, the demo, replays and exports.

    The caller folds an entry once (ids are the ledger's business) and entries of a bucket in the order of their times.
    """

    cells: dict[tuple[str, str | None, str | None], Cell] = {}
    """(bucket, arm, version) -> sums."""
    errors: dict[str, ErrorSum] = {}
    """Bucket -> error of its savings, over all arms and versions."""

    def add(self, entry: LedgerEntry) -> None:
        """Fold one entry. Raises ValueError on a kind that is not one of KINDS."""
        if entry.kind not in KINDS:
            raise ValueError(f"ledger entry kind must be one of {', '.join(KINDS)}, got {entry.kind!r}")
        key = (entry.bucket, entry.arm, entry.version)
        cell = self.cells.get(key)
        if cell is None:
            cell = self.cells[key] = Cell()
            if len(self.cells) > MAX_CELLS:
                self._merge_oldest(key)
        cell.seconds[entry.kind] = cell.seconds.get(entry.kind, 0.0) + entry.seconds
        cell.num_entries += 1
        cell.last_ts = max(cell.last_ts, entry.ts)
        if entry.kind == "saving":
            cell.error.add(entry.standard_error_s, entry.ts)
            self.errors.setdefault(entry.bucket, ErrorSum()).add(entry.standard_error_s, entry.ts)

    def _merge_oldest(self, keep: tuple[str, str | None, str | None]) -> None:
        found = [key for key in self.cells if key != keep and key[2] != MERGED_VERSION]
        if not found:
            return
        oldest = min(found, key=lambda key: self.cells[key].last_ts)
        gone = self.cells.pop(oldest)
        into = self.cells.setdefault((oldest[0], oldest[1], MERGED_VERSION), Cell())
        for kind, seconds in gone.seconds.items():
            into.seconds[kind] = into.seconds.get(kind, 0.0) + seconds
        into.error.merge(gone.error)
        into.num_entries += gone.num_entries
        into.last_ts = max(into.last_ts, gone.last_ts)

    def by_kind(self) -> dict[str, float]:
        """Kind -> device-seconds; kinds without an entry are left out."""
        out: dict[str, float] = {}
        for cell in self.cells.values():
            for kind, seconds in cell.seconds.items():
                out[kind] = out.get(kind, 0.0) + seconds
        return out

    def spent_s(self) -> float:
        """Training, shadow scoring, interference and staging."""
        return sum(seconds for kind, seconds in self.by_kind().items() if kind in COSTS)

    def saved_s(self) -> float:
        """Savings against the hold-back group (negative when adaptation hurt)."""
        return self.by_kind().get("saving", 0.0)

    def saved_error_s(self) -> float:
        """Standard error of `saved_s`: buckets are independent, bookings within one are not."""
        return math.sqrt(sum(e.variance for e in self.errors.values()))

    def saved_interval_s(self) -> tuple[float, float]:
        """95% interval of `saved_s`; the same half-width holds for the net, since spending is metered."""
        half = Z95 * self.saved_error_s()
        return self.saved_s() - half, self.saved_s() + half

    def rows(self) -> list[LedgerCell]:
        """One row a (bucket, arm, version), in this order."""
        out = []
        for bucket, arm, version in sorted(self.cells, key=lambda key: tuple(part or "" for part in key)):
            cell = self.cells[(bucket, arm, version)]
            spent = sum(cell.seconds.get(kind, 0.0) for kind in COSTS)
            saved = cell.seconds.get("saving", 0.0)
            half = Z95 * math.sqrt(cell.error.variance)
            out.append(
                LedgerCell(
                    bucket=bucket, arm=arm, version=version, num_entries=cell.num_entries, spent_s=spent, saved_s=saved,
                    saved_low_s=saved - half, saved_high_s=saved + half, net_s=saved - spent,
                    **{f"{kind}_s": cell.seconds.get(kind, 0.0) for kind in KINDS},
                )
            )  # fmt: skip
        return out


def fold_entries(entries: Iterable[LedgerEntry]) -> LedgerTotals:
    """Totals of a list of entries with unique ids, folded in the order of their times."""
    totals = LedgerTotals()
    for entry in sorted(entries, key=lambda e: (e.ts, e.entry_id)):
        totals.add(entry)
    return totals
