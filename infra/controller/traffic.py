"""Traffic: totals and a recent window of acceptance and speed per bucket and group."""

from __future__ import annotations

import msgspec

from paceline.contracts import FeedbackBatch, Group, is_canary
from paceline.infra.controller.snapshot import GroupSums, TrafficBin
from paceline.serving.engine.buckets import OTHER_BUCKET

MAX_BUCKETS = 128
"""Names that the service tells apart over all replicas and their lives; a replica has a limit of its own."""
BIN_S = 5.0
NUM_BINS = 240
RECENT_S = 30.0
CANARY = "canary"
"""Group of the adaptive requests that a version on trial serves or was switched off for; the others stay 'adaptive'."""


class GroupTotals(msgspec.Struct, kw_only=True):
    """Sums over rows of one bucket and group."""

    rounds: int = 0
    accepted: int = 0
    drafted: int = 0
    emitted: int = 0
    device_ms: float = 0.0

    def add(self, accepted: int, drafted: int, emitted: int, share_ms: float) -> None:
        self.rounds += 1
        self.accepted += accepted
        self.drafted += drafted
        self.emitted += emitted
        self.device_ms += share_ms

    def plus(self, other: GroupTotals) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

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
    """(bin number of BIN_S seconds, bucket -> group -> sums), oldest first."""

    def bounded(self, batch: FeedbackBatch) -> FeedbackBatch:
        """The batch with its buckets limited to MAX_BUCKETS names; rows of a later name count under OTHER_BUCKET.

        Replicas keep the names that they see first, and forget them when they restart: their union has no limit.
        """
        known = set(self.totals)
        names: dict[str, str] = {}
        for bucket in batch.bucket:
            if bucket in names:
                continue
            if bucket in known or bucket == OTHER_BUCKET or len(known - {OTHER_BUCKET}) < MAX_BUCKETS:
                known.add(bucket)
                names[bucket] = bucket
            else:
                names[bucket] = OTHER_BUCKET
        if all(name == bucket for bucket, name in names.items()):
            return batch
        return msgspec.structs.replace(batch, bucket=[names[bucket] for bucket in batch.bucket])

    def observe(self, batch: FeedbackBatch, tried_version: str = "", tried_percent: int = 0) -> None:
        """Add the rows of a batch whose buckets are `bounded`.

        Args:
            tried_version: version whose adaptive rows count under CANARY; '' = none is on trial.
            tried_percent: its share while it is on trial. Adaptive rows without a version (the drafter of their request was
                switched off) count under CANARY where the hash of the request says so; 0 = nowhere.
        """
        rows = zip(
            batch.bucket, batch.group, batch.drafter_version, batch.num_accepted_tokens, batch.num_draft_tokens,
            batch.num_emitted_tokens, batch.share_ms, batch.ts, batch.request_id, strict=True,
        )  # fmt: skip
        for bucket, group, version, accepted, drafted, emitted, share_ms, ts, request_id in rows:
            if tried_version and group == Group.ADAPTIVE:
                is_off = not version and is_canary(request_id, tried_version, tried_percent)
                group = CANARY if is_off or version == tried_version else group
            _cell(self.totals, bucket, group).add(accepted, drafted, emitted, share_ms)
            _cell(self._bin(int(ts // BIN_S)), bucket, group).add(accepted, drafted, emitted, share_ms)

    def _bin(self, number: int) -> dict[str, dict[str, GroupTotals]]:
        for n, cells in reversed(self.bins):
            if n == number:
                return cells
            if n < number:
                break
        cells = {}
        self.bins = sorted([*self.bins, (number, cells)], key=lambda b: b[0])[-NUM_BINS:]
        return cells

    def recent(self, now: float) -> dict[str, dict[str, GroupTotals]]:
        """bucket -> group -> sums of the last RECENT_S."""
        first = int((now - RECENT_S) // BIN_S)
        recent: dict[str, dict[str, GroupTotals]] = {}
        for number, cells in self.bins:
            if number >= first:
                for bucket, groups in cells.items():
                    for group, sums in groups.items():
                        _cell(recent, bucket, group).plus(sums)
        return recent

    def series(self, since: float = 0.0) -> list[TrafficBin]:
        """The bins that end after `since`, oldest first. Thread-safe, never blocks."""
        for _ in range(20):
            try:
                return [
                    TrafficBin(
                        ts=n * BIN_S, buckets={b: {g: s.view() for g, s in gs.items()} for b, gs in cells.items()}
                    )
                    for n, cells in list(self.bins)
                    if (n + 1) * BIN_S > since
                ]
            except RuntimeError:  # the controller's thread added a bucket to the open bin while it was read
                continue
        return []


def _cell(cells: dict[str, dict[str, GroupTotals]], bucket: str, group: str) -> GroupTotals:
    return cells.setdefault(bucket, {}).setdefault(group, GroupTotals())
