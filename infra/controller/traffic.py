"""Traffic: totals and a recent window of acceptance and speed per bucket and group."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import TypeVar

import msgspec

from paceline.contracts import CLASS_PREFIX, SPAN_S, CellSums, FeedbackBatch, FeedbackSums, Group, is_canary
from paceline.infra.controller.snapshot import GroupSums, TrafficBin
from paceline.serving.engine.buckets import OTHER_BUCKET, BucketNames

S = TypeVar("S", bound=FeedbackSums)

MAX_BUCKETS = 128
"""Names that the service tells apart over all replicas and their lives, `default` included; a replica has a limit of its
own."""
TIERS = ((1, 240), (12, 180), (144, 120))
"""(SPAN_S a bin, bins): the past 20 minutes by 5 s, what is older by 1 minute for 3 hours and by 12 minutes for a day."""
_WIDENED = tuple((width, finer * count) for (finer, count), (width, _) in reversed(list(pairwise(TIERS))))
"""(SPAN_S of a bin, its age in SPAN_S from which on it is so wide), the widest first."""
RECENT_S = 30.0
CANARY = "canary"
"""Group of the adaptive requests that a version on trial serves or was switched off for; the others stay 'adaptive'."""


class GroupTotals(msgspec.Struct, array_like=True, kw_only=True):
    """Sums over rows of one bucket and group."""

    rounds: int = 0
    accepted: int = 0
    drafted: int = 0
    emitted: int = 0
    device_ms: float = 0.0

    def add(self, other: GroupTotals) -> None:
        self.rounds += other.rounds
        self.accepted += other.accepted
        self.drafted += other.drafted
        self.emitted += other.emitted
        self.device_ms += other.device_ms

    def view(self) -> GroupSums:
        """acceptance_length = accepted / rounds + 1; tokens_per_s = emitted tokens per second of device time."""
        return GroupSums(
            rounds=self.rounds,
            tokens=self.emitted,
            acceptance_length=self.accepted / self.rounds + 1.0 if self.rounds else None,
            acceptance_rate=self.accepted / self.drafted if self.drafted else None,
            tokens_per_s=self.emitted / (self.device_ms / 1e3) if self.device_ms > 0 else None,
        )


class TrafficStats(msgspec.Struct, kw_only=True):
    """Totals and time bins; encodable, so that they survive a restart of the controller."""

    totals: dict[str, dict[str, GroupTotals]] = {}
    """bucket -> group -> sums since the beginning."""
    bins: list[tuple[int, dict[str, dict[str, GroupTotals]]]] = []
    """(number of the SPAN_S that it begins with, bucket -> group -> sums), oldest first; see TIERS."""
    names: BucketNames = msgspec.field(default_factory=lambda: BucketNames(MAX_BUCKETS))
    """Clients' buckets that are told apart, and whose they are."""
    touched: set[int] = set()
    """Numbers of the bins that were added to since the last commit."""

    def bounded(self, batch: S, kept: Collection[str] = ()) -> tuple[S, list[str]]:
        """The batch with its buckets limited to MAX_BUCKETS names, and the names that gave way to its own.

        Rows of a name without a place count under OTHER_BUCKET. Replicas forget their names when they restart, so their
        union has no limit; here as there every tenant has an even part. Classes of unnamed traffic are bounded by the
        controller's own numbers. What a name that gave way had counts under OTHER_BUCKET from now on.

        Args:
            kept: names that give way to nobody: they have a drafter version of their own, or a job or trial runs for them.
        """
        names = self.names
        if not names.owners and self.totals:  # of a release that did not tell whose they are
            for bucket in self.totals:
                names.resolve(None if _is_free(bucket) else bucket)
        tenants = batch.tenants if isinstance(batch, FeedbackBatch) else {}
        before = list(names.owners)
        found = {
            bucket: bucket if _is_free(bucket) else names.resolve(bucket, tenants.get(bucket, ""), kept)
            for bucket in dict.fromkeys(cell.bucket for cell in batch.cells)
        }
        gone = [name for name in before if name not in names.owners]
        for name in gone:
            for group, sums in self.totals.pop(name, {}).items():
                _cell(self.totals, OTHER_BUCKET, group).add(sums)
        if all(bucket == to for bucket, to in found.items()):
            return batch, gone
        cells = [
            cell if found[cell.bucket] == cell.bucket else msgspec.structs.replace(cell, bucket=found[cell.bucket])
            for cell in batch.cells
        ]
        return msgspec.structs.replace(batch, cells=cells), gone

    def observe(
        self, batch: FeedbackSums, tried_version: str = "", tried_percent: int = 0, tried_bucket: str = ""
    ) -> None:
        """Add the rows of a batch whose buckets are `bounded`.

        Args:
            tried_version: version whose adaptive rows count under CANARY; '' = none is on trial.
            tried_percent: its share while it is on trial. Adaptive rows without a version (the drafter of their request was
                switched off) count under CANARY where the hash of the request says so; 0 = nowhere.
            tried_bucket: class that it is tried on; '' = all.
        """
        span, in_bin = None, self.totals
        for cell in batch.cells:
            group, bucket = cell.group, cell.bucket
            if cell.span != span:
                span = cell.span
                in_bin = self._bin(span)
            if tried_version and group == Group.ADAPTIVE:
                if cell.version == tried_version:
                    group = CANARY
                elif not cell.version and tried_bucket in ("", bucket):
                    for group, sums in _split(cell, tried_version, tried_percent).items():
                        _cell(self.totals, bucket, group).add(sums)
                        _cell(in_bin, bucket, group).add(sums)
                    continue
            sums = _totals(cell)
            _cell(self.totals, bucket, group).add(sums)
            _cell(in_bin, bucket, group).add(sums)

    def _bin(self, number: int) -> dict[str, dict[str, GroupTotals]]:
        """The cells that a span counts in; they are not kept where it is older than all tiers."""
        newest = max(number, self.bins[-1][0]) if self.bins else number
        start, _ = _place(number, newest)
        found = next((cells for n, cells in reversed(self.bins) if n == start), None)
        self.touched.add(start)
        if found is None:
            found = {}
            self.bins = sorted([*self.bins, (start, found)], key=lambda b: b[0])
            self._merge_old()
        return found

    def _merge_old(self) -> None:
        """Make the bins as wide as those of their age are."""
        newest, merged = self.bins[-1][0], dict[int, dict[str, dict[str, GroupTotals]]]()
        for number, cells in self.bins:
            start, _ = _place(number, newest)
            if newest - start >= TIERS[-1][0] * TIERS[-1][1]:
                continue
            if start not in merged:
                merged[start] = cells
            else:
                for bucket, groups in cells.items():
                    for group, sums in groups.items():
                        _cell(merged[start], bucket, group).add(sums)
            if start != number:
                self.touched.add(start)
        self.bins = list(merged.items())

    def recent(self, now: float) -> dict[str, dict[str, GroupTotals]]:
        """bucket -> group -> sums of the last RECENT_S."""
        first = int((now - RECENT_S) // SPAN_S)
        recent: dict[str, dict[str, GroupTotals]] = {}
        for number, cells in self.bins:
            if number >= first:
                for bucket, groups in cells.items():
                    for group, sums in groups.items():
                        _cell(recent, bucket, group).add(sums)
        return recent

    def series(self, since: float = 0.0) -> list[TrafficBin]:
        """The bins that end after `since`, oldest first. Thread-safe, never blocks."""
        for _ in range(20):
            try:
                bins = list(self.bins)
                newest = bins[-1][0] if bins else 0
                return [
                    TrafficBin(
                        ts=n * SPAN_S, seconds=width * SPAN_S,
                        buckets={b: {g: s.view() for g, s in gs.items()} for b, gs in cells.items()},
                    )
                    for n, cells in bins
                    if (n + (width := _place(n, newest)[1])) * SPAN_S > since
                ]  # fmt: skip
            except RuntimeError:  # the controller's thread added a bucket to the open bin while it was read
                continue
        return []


def _place(number: int, newest: int) -> tuple[int, int]:
    """First span and number of spans of the bin that a span is in; a bin is widened when the whole of it is old enough."""
    for width, age in _WIDENED:
        start = number // width * width
        if newest - (start + width - 1) >= age:
            return start, width
    return number, 1


def _is_free(bucket: str) -> bool:
    """Whether a bucket takes no client's place."""
    return bucket == OTHER_BUCKET or bucket.startswith(CLASS_PREFIX)


def _totals(cell: CellSums) -> GroupTotals:
    rounds, emitted, seconds = 0, 0.0, 0.0
    for sums in cell.sizes.values():
        rounds += sums.num_rounds + sums.text_rounds
        emitted += sums.num_tokens
        seconds += sums.drafted_s + sums.plain_s + sums.text_s
    return GroupTotals(
        rounds=rounds, accepted=cell.num_accepted_tokens, drafted=cell.num_draft_tokens, emitted=round(emitted),
        device_ms=1e3 * seconds,
    )  # fmt: skip


def _split(cell: CellSums, version: str, percent: int) -> dict[str, GroupTotals]:
    """A cell of requests without a drafter by whether they are the canary's; nothing is drafted in it."""
    found: dict[str, GroupTotals] = {}
    for request_id, sums in cell.requests.items():
        totals = found.setdefault(CANARY if is_canary(request_id, version, percent) else cell.group, GroupTotals())
        totals.rounds += sums.num_rounds
        totals.emitted += round(sums.num_tokens)
        totals.device_ms += 1e3 * sums.seconds
    return found


def _cell(cells: dict[str, dict[str, GroupTotals]], bucket: str, group: str) -> GroupTotals:
    groups = cells.get(bucket)
    if groups is None:
        groups = cells[bucket] = {}
    found = groups.get(group)
    if found is None:
        found = groups[group] = GroupTotals()
    return found
