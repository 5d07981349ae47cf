"""Observations: feedback folded into open epochs, and what each bucket cost per group and drafter version in a closed one.

Feedback arrives row by row (FeedbackBatch, which `summed` reduces), or summed already: from a log or a simulated
service.
"""

from __future__ import annotations

import msgspec

from paceline.bandit.beliefs.ratio import RatioSums
from paceline.contracts import FeedbackBatch, Group


class CellSums(msgspec.Struct, frozen=True, kw_only=True):
    """Rounds of one (bucket, group, drafter version) at one batch size, summed by request."""

    bucket: str
    group: str
    version: str
    batch_size: int = 1
    """Requests in the rounds."""
    num_rounds: int
    """Rounds, with or without a draft."""
    drafted_rounds: int
    drafted_s: float
    """Device seconds of the drafted rounds."""
    plain_s: float
    """Device seconds of the rounds without a draft."""
    plain_tokens: int
    requests: dict[str, list[float]]
    """Request id -> [device seconds, emitted tokens, drafted rounds, accepted + bonus tokens of those rounds].

    An entry may pool several requests; standard errors stay right as long as its noise is that of the pool.
    """


class RoundMean(msgspec.Struct, frozen=True, kw_only=True):
    """Mean device seconds of like rounds, for the comparison of rounds with and without a training job."""

    batch_size: int
    is_drafted: bool
    is_training: bool
    num_rounds: int
    mean_s: float
    """Per request of the round."""


class FeedbackSums(msgspec.Struct, frozen=True, kw_only=True):
    """What producers report for a span of time."""

    cells: list[CellSums]
    rounds: list[RoundMean] = []
    num_dropped: int = 0


class HostContext(msgspec.Struct, frozen=True, kw_only=True):
    """What the host knows and the feedback does not say; read at every tick."""

    live_version: str
    """Version that new adaptive requests are pinned to ('' = none)."""
    first_version: str
    """Version of the hold-back group."""
    rows: dict[str, int]
    """Bucket -> supervised rows that the trace store holds now (this target only)."""
    rows_written: dict[str, int] = {}
    """Bucket -> rows ever written; tells fresh rows apart after the store evicted old ones. Falls back to `rows`."""
    versions: list[str] = []
    """Versions that could be made live; live and first always count. Empty = every version that was ever live."""
    job_running: bool = False
    """A training job is in flight (also one that this controller did not order)."""
    num_replicas: int = 1
    learned_rows: dict[str, dict[str, int]] = {}
    """Version -> bucket -> rows it was trained on, as manifests say; what the controller saw itself takes precedence."""
    shadow: dict[str, dict[str, float]] = {}
    """Bucket -> version -> acceptance length by replay, as manifests say; fills gaps that TrainResults left."""
    frozen: list[str] = []
    """Buckets on which no training may be ordered now (a canary of theirs was rolled back)."""


class Cell(msgspec.Struct):
    """One (group, version) of a bucket in the open epoch; requests map id -> [seconds, tokens, drafted rounds, kept]."""

    num_rounds: int = 0
    plain_s: float = 0.0
    """Device seconds of rounds without a draft."""
    plain_tokens: int = 0
    drafted_s: float = 0.0
    drafted_rounds: int = 0
    requests: dict[str, list[float]] = {}


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
    time_per_token: RatioSums
    """Seconds over emitted tokens, by request."""
    acceptance_length: RatioSums
    """(num_accepted_tokens + 1) over drafted rounds, by request; rounds decoded without a draft are left out."""


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


def summed(batch: FeedbackBatch) -> FeedbackSums:
    """A batch's rows, in any order, as sums. Device seconds = share_ms / 1000."""
    cells: dict[tuple[str, str, str, int], Cell] = {}
    rounds: dict[tuple[int, bool, bool], list[float]] = {}
    rows = zip(
        batch.bucket, batch.group, batch.drafter_version, batch.batch_size, batch.request_id, batch.share_ms,
        batch.num_emitted_tokens, batch.num_draft_tokens, batch.num_accepted_tokens, batch.is_training, strict=True,
    )  # fmt: skip
    for bucket, group, version, size, request_id, share_ms, tokens, num_drafts, num_accepted, is_training in rows:
        seconds, is_drafted = share_ms / 1000.0, num_drafts > 0
        cell = cells.setdefault((bucket, group, version, size), Cell())
        cell.num_rounds += 1
        entry = cell.requests.setdefault(request_id, [0.0, 0.0, 0.0, 0.0])
        entry[0] += seconds
        entry[1] += tokens
        if is_drafted:
            cell.drafted_s += seconds
            cell.drafted_rounds += 1
            entry[2] += 1.0
            entry[3] += num_accepted + 1.0
        else:
            cell.plain_s += seconds
            cell.plain_tokens += tokens
        seen = rounds.setdefault((size, is_drafted, is_training), [0, 0.0])
        seen[0] += 1
        seen[1] += seconds
    return FeedbackSums(
        cells=[
            CellSums(bucket=b, group=g, version=v, batch_size=size, **msgspec.structs.asdict(cell))
            for (b, g, v, size), cell in cells.items()
        ],
        rounds=[
            RoundMean(batch_size=size, is_drafted=drafted, is_training=busy, num_rounds=int(n), mean_s=total_s / n)
            for (size, drafted, busy), (n, total_s) in rounds.items()
        ],
        num_dropped=batch.num_dropped,
    )


def fold(windows: dict[str, Window], feedback: FeedbackSums) -> None:
    """Add sums to the open epochs, in place."""
    for sums in feedback.cells:
        window = windows.setdefault(sums.bucket, Window())
        cell = window.cells.setdefault(sums.group, {}).setdefault(sums.version, Cell())
        cell.num_rounds += sums.num_rounds
        cell.drafted_rounds += sums.drafted_rounds
        cell.drafted_s += sums.drafted_s
        cell.plain_s += sums.plain_s
        cell.plain_tokens += sums.plain_tokens
        for request_id, values in sums.requests.items():
            entry = cell.requests.setdefault(request_id, [0.0, 0.0, 0.0, 0.0])
            for j, value in enumerate(values):
                entry[j] += value
        window.batch_rows += sums.num_rounds
        window.batch_sum += sums.num_rounds * sums.batch_size


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
                    time_per_token=per_token,
                    acceptance_length=length,
                )
            )
    size = window.batch_sum / window.batch_rows if window.batch_rows else 0.0
    return BucketObservation(bucket=bucket, start=start, end=end, batch_size=size, stats=tuple(stats))


def speculative(stats: VersionStats) -> bool:
    """Whether these rows belong to a drafter group (plain requests have none)."""
    return stats.group != Group.PLAIN
