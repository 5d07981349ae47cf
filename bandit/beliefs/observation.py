"""Observations: feedback folded into open epochs, and what each bucket cost per group and drafter version in a closed one.

Feedback arrives row by row (FeedbackBatch), or summed already (FeedbackSums: from a log or a simulated service).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from paceline.bandit.beliefs.ratio import RatioSums
from paceline.contracts import FeedbackBatch, Group


class CellSums(msgspec.Struct, frozen=True, kw_only=True):
    """Rounds of one (bucket, group, drafter version), summed by request."""

    bucket: str
    group: str
    version: str
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
    """What one producer reports for a span of time; folded like a FeedbackBatch, once per (replica, boot, seq)."""

    replica_id: str
    boot_epoch: int
    seq: int
    batch_size: int
    """Requests in the rounds."""
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


class JobCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Device-seconds of a job beyond TrainResult.train_s and shadow_s, measured by the host."""

    staging_s: float = 0.0
    """Loading, validating and copying the weights, summed over replicas."""


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

    def load(self, group: str | None = None) -> float:
        """Emitted tokens per second of the epoch."""
        return self.num_tokens(group) / max(self.end - self.start, 1e-9)


def _codes(values: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    names, codes = np.unique(np.asarray(list(values), dtype=object).astype(str), return_inverse=True)
    return names, codes.reshape(-1)


def fold(windows: dict[str, Window], batch: FeedbackBatch | FeedbackSums) -> None:
    """Add a batch's rows to the open epochs, in place. Device seconds = share_ms / 1000; rows in any order."""
    if isinstance(batch, FeedbackSums):
        for cell_sums in batch.cells:
            _fold_sums(windows, cell_sums, batch.batch_size)
        return
    n = len(batch.request_id)
    if n == 0:
        return
    axes = [_codes(c) for c in (batch.bucket, batch.group, batch.drafter_version, batch.request_id)]
    key = np.zeros(n, dtype=np.int64)
    for names, codes in axes:
        key = key * len(names) + codes
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    inverse = inverse.reshape(-1)
    seconds = np.asarray(batch.share_ms, dtype=np.float64) / 1000.0
    tokens = np.asarray(batch.num_emitted_tokens, dtype=np.float64)
    drafted = np.asarray(batch.num_draft_tokens) > 0
    kept = np.asarray(batch.num_accepted_tokens, dtype=np.float64) + 1.0

    def total(weights: np.ndarray) -> np.ndarray:
        return np.bincount(inverse, weights=weights, minlength=len(first))

    sums = {
        "rounds": total(np.ones(n)),
        "s": total(seconds),
        "tokens": total(tokens),
        "drafted": total(drafted.astype(np.float64)),
        "kept": total(np.where(drafted, kept, 0.0)),
        "drafted_s": total(np.where(drafted, seconds, 0.0)),
        "plain_tokens": total(np.where(drafted, 0.0, tokens)),
        "batch": total(np.asarray(batch.batch_size, dtype=np.float64)),
    }
    for u, i in enumerate(first):
        window = windows.setdefault(batch.bucket[i], Window())
        cell = window.cells.setdefault(batch.group[i], {}).setdefault(batch.drafter_version[i], Cell())
        cell.num_rounds += int(sums["rounds"][u])
        cell.drafted_rounds += int(sums["drafted"][u])
        cell.drafted_s += float(sums["drafted_s"][u])
        cell.plain_s += float(sums["s"][u] - sums["drafted_s"][u])
        cell.plain_tokens += int(sums["plain_tokens"][u])
        entry = cell.requests.setdefault(batch.request_id[i], [0.0, 0.0, 0.0, 0.0])
        for j, name in enumerate(("s", "tokens", "drafted", "kept")):
            entry[j] += float(sums[name][u])
        window.batch_rows += int(sums["rounds"][u])
        window.batch_sum += round(sums["batch"][u])


def _fold_sums(windows: dict[str, Window], sums: CellSums, batch_size: int) -> None:
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
    window.batch_sum += sums.num_rounds * batch_size


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
