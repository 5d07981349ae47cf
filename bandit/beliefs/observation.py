"""Observations: feedback folded into open epochs, and what each bucket cost per group and drafter version in a closed one.

Feedback arrives as sums: replicas make them of their rounds (`summed`), logs and simulated services have them.
"""

from __future__ import annotations

import zlib

import msgspec

from paceline.bandit.beliefs.ratio import RatioSums
from paceline.contracts import SPAN_S, CellSums, FeedbackSums, Group, RequestSums, RoundMean, RoundStats, SizeSums

MAX_REQUESTS = 128
"""Requests of a cell with totals of their own in one epoch; later ones share as many pools, by hash. Sums stay exact,
and standard errors right, since a request is whole in one pool; they are then known to 1 / sqrt(2 x 128) = 6.3%."""

_POOLS = tuple(f"pool {i}" for i in range(MAX_REQUESTS))


class HostContext(msgspec.Struct, frozen=True, kw_only=True):
    """What the host knows and the feedback does not say; read at every tick."""

    live_version: str
    """Version that new adaptive requests are pinned to whose class has none of its own ('' = none)."""
    first_version: str
    """Version of the hold-back group."""
    rows: dict[str, int]
    """Bucket -> supervised rows that the trace store holds now (this target only)."""
    rows_written: dict[str, int] = {}
    """Bucket -> rows ever written; tells fresh rows apart after the store evicted old ones. Falls back to `rows`."""
    versions: list[str] = []
    """Versions that a class could be given; live and first always count. Empty = every version that ever served."""
    job_running: bool = False
    """A training job is in flight (also one that this controller did not order)."""
    num_replicas: int = 1
    learned_rows: dict[str, dict[str, int]] = {}
    """Version -> bucket -> rows it was trained on, as manifests say; what the controller saw itself takes precedence."""
    shadow: dict[str, dict[str, float]] = {}
    """Bucket -> version -> acceptance length by replay, as manifests say; fills gaps that TrainResults left."""
    frozen: list[str] = []
    """Buckets on which no training may be ordered now (a canary of theirs was rolled back)."""
    class_versions: dict[str, str] = {}
    """Bucket -> version of its own."""
    pools: dict[str, str] = {}
    """Bucket -> a name that it shares with those it was one with once: while they have one version, they learn together."""
    assigned: list[str] = []
    """Buckets that nothing is decided for: an operator chose their version, or there is room for none of their own."""

    def version_of(self, bucket: str) -> str:
        """Version that new adaptive requests of a bucket are pinned to."""
        return self.class_versions.get(bucket, self.live_version)


class _Open(msgspec.Struct):
    """A cell while rows are added to it."""

    sizes: dict[int, SizeSums] = {}
    requests: dict[str, RequestSums] = {}
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class Cell(msgspec.Struct):
    """One (group, version) of a bucket in the open epoch; requests map id or pool -> [seconds, tokens, drafted rounds, kept]."""

    num_rounds: int = 0
    plain_s: float = 0.0
    """Device seconds of rounds without a draft."""
    plain_tokens: int = 0
    drafted_s: float = 0.0
    drafted_rounds: int = 0
    text_rounds: int = 0
    text_s: float = 0.0
    text_tokens: float = 0.0
    requests: dict[str, list[int | float]] = {}


class Window(msgspec.Struct):
    """The open epoch of one bucket: group -> version -> cell."""

    cells: dict[str, dict[str, Cell]] = {}
    batch_rows: int = 0
    batch_sum: int = 0


class VersionStats(msgspec.Struct, frozen=True, kw_only=True):
    """One (group, version) of a bucket in one closed epoch."""

    group: str
    version: str
    num_tokens: int
    device_s: float
    num_rounds: int
    drafted_rounds: int
    drafted_s: float
    plain_s: float
    plain_tokens: int
    text_rounds: int = 0
    """Others, which a text drafter had; they say nothing about the version."""
    text_s: float = 0.0
    text_tokens: float = 0.0
    time_per_token: RatioSums
    """Seconds over emitted tokens, by request."""
    acceptance_length: RatioSums
    """(num_accepted_tokens + 1) over drafted rounds, by request; rounds decoded without a draft of the version are left out."""


class BucketObservation(msgspec.Struct, frozen=True, kw_only=True):
    """One bucket in one closed epoch."""

    bucket: str
    start: float
    end: float
    batch_size: float
    """Mean number of requests in the rounds."""
    stats: tuple[VersionStats, ...]

    def num_tokens(self, group: str | None = None) -> int:
        """Emitted tokens of a group, or of all groups."""
        return sum(s.num_tokens for s in self.stats if group is None or s.group == group)

    def lengths(self) -> dict[str, RatioSums]:
        """Version -> acceptance length of its drafted rounds, all drafter groups together."""
        pools: dict[str, RatioSums] = {}
        for s in self.stats:
            if s.version and speculative(s) and s.drafted_rounds:
                pools.setdefault(s.version, RatioSums()).merge(s.acceptance_length)
        return pools

    def load(self, group: str | None = None) -> float:
        """Emitted tokens per second of the epoch."""
        return self.num_tokens(group) / max(self.end - self.start, 1e-9)


def summed(rows: RoundStats, num_dropped: int = 0) -> FeedbackSums:
    """Rows, in any order, as sums. Device seconds = share_ms / 1000; a request begins with the row of round_index <= 1."""
    cells: dict[tuple[str, str, str, int], _Open] = {}
    rounds: dict[tuple[int, bool, bool, bool], list[float]] = {}
    columns = zip(
        rows.bucket, rows.group, rows.drafter_version, rows.ts, rows.batch_size, rows.request_id, rows.share_ms,
        rows.num_emitted_tokens, rows.num_draft_tokens, rows.num_accepted_tokens, rows.draft_ms, rows.round_index,
        rows.is_greedy, rows.is_training, rows.is_from_text or [False] * rows.num_rows, strict=True,
    )  # fmt: skip
    for (
        bucket, group, version, ts, size, request_id, share_ms, tokens, num_drafts, num_accepted, draft_ms, index,
        is_greedy, is_training, is_text,
    ) in columns:  # fmt: skip
        seconds, is_drafted = share_ms / 1000.0, num_drafts > 0
        key = (bucket, group, version, int(ts // SPAN_S))
        cell = cells.get(key)
        if cell is None:
            cell = cells[key] = _Open()
        sums = cell.sizes.get(size)
        if sums is None:
            sums = cell.sizes[size] = SizeSums()
        request = cell.requests.get(request_id)
        if request is None:
            request = cell.requests[request_id] = RequestSums(is_greedy=is_greedy)
        cell.num_draft_tokens += num_drafts
        cell.num_accepted_tokens += num_accepted
        sums.num_tokens += tokens
        request.seconds += seconds
        request.num_tokens += tokens
        request.num_rounds += 1
        request.num_run += not is_text and (is_drafted or draft_ms > 0)
        request.batch_sum += size
        if index <= 1 and request.first_ts is None:
            request.first_ts = ts
        sums.num_rounds += not is_text
        if is_text:
            sums.text_rounds += 1
            sums.text_s += seconds
            sums.text_tokens += tokens
        elif is_drafted:
            sums.drafted_s += seconds
            sums.drafted_rounds += 1
            request.drafted_rounds += 1
            request.kept += num_accepted + 1
        else:
            sums.plain_s += seconds
            sums.plain_tokens += tokens
        like = (size, is_drafted or is_text, is_training, is_text)
        seen = rounds.get(like)
        if seen is None:
            seen = rounds[like] = [0, 0.0]
        seen[0] += 1
        seen[1] += seconds
    return FeedbackSums(
        cells=[
            CellSums(bucket=b, group=g, version=v, span=span, **msgspec.structs.asdict(cell))
            for (b, g, v, span), cell in cells.items()
        ],
        rounds=[
            RoundMean(
                batch_size=size,
                is_drafted=drafted,
                is_training=busy,
                num_rounds=int(n),
                mean_s=total_s / n,
                is_from_text=from_text,
            )
            for (size, drafted, busy, from_text), (n, total_s) in rounds.items()
        ],
        num_dropped=num_dropped,
    )


def fold(windows: dict[str, Window], feedback: FeedbackSums) -> None:
    """Add sums to the open epochs, in place."""
    for sums in feedback.cells:
        window = windows.get(sums.bucket)
        if window is None:
            window = windows[sums.bucket] = Window()
        versions = window.cells.setdefault(sums.group, {})
        cell = versions.get(sums.version)
        if cell is None:
            cell = versions[sums.version] = Cell()
        for size, rounds in sums.sizes.items():
            cell.num_rounds += rounds.num_rounds
            cell.drafted_rounds += rounds.drafted_rounds
            cell.drafted_s += rounds.drafted_s
            cell.plain_s += rounds.plain_s
            cell.plain_tokens += rounds.plain_tokens
            cell.text_rounds += rounds.text_rounds
            cell.text_s += rounds.text_s
            cell.text_tokens += rounds.text_tokens
            window.batch_rows += rounds.num_rounds + rounds.text_rounds
            window.batch_sum += (rounds.num_rounds + rounds.text_rounds) * size
        requests = cell.requests
        for request_id, values in sums.requests.items():
            entry = requests.get(request_id)
            if entry is None:
                entry = _entry(requests, request_id)
            entry[0] += values.seconds
            entry[1] += values.num_tokens
            entry[2] += values.drafted_rounds
            entry[3] += values.kept


def _entry(requests: dict[str, list[int | float]], request_id: str) -> list[int | float]:
    """Where a request without an entry of its own counts: in a new one while there are few, else in its pool."""
    if len(requests) >= MAX_REQUESTS:
        request_id = _POOLS[zlib.crc32(request_id.encode()) % MAX_REQUESTS]
        entry = requests.get(request_id)
        if entry is not None:
            return entry
    entry = requests[request_id] = [0.0, 0, 0, 0]
    return entry


def close(bucket: str, window: Window, start: float, end: float) -> BucketObservation:
    """Reduce a window to its observation; the per-request totals are gone afterwards."""
    stats = []
    for group in sorted(window.cells):
        for version in sorted(window.cells[group]):
            cell = window.cells[group][version]
            per_token, length = RatioSums(), RatioSums()
            for seconds, tokens, drafted, kept in cell.requests.values():
                per_token.add(seconds, tokens)
                if drafted > 0:
                    length.add(kept, drafted)
            stats.append(
                VersionStats(
                    group=group,
                    version=version,
                    num_tokens=round(per_token.x),
                    device_s=per_token.y,
                    num_rounds=cell.num_rounds,
                    drafted_rounds=cell.drafted_rounds,
                    drafted_s=cell.drafted_s,
                    plain_s=cell.plain_s,
                    plain_tokens=cell.plain_tokens,
                    text_rounds=cell.text_rounds,
                    text_s=cell.text_s,
                    text_tokens=cell.text_tokens,
                    time_per_token=per_token,
                    acceptance_length=length,
                )
            )
    size = window.batch_sum / window.batch_rows if window.batch_rows else 0.0
    return BucketObservation(bucket=bucket, start=start, end=end, batch_size=size, stats=tuple(stats))


def speculative(stats: VersionStats) -> bool:
    """Whether these rows belong to a drafter group (plain requests have none)."""
    return stats.group != Group.PLAIN
