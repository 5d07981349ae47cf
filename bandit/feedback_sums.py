"""How is feedback handed over when its rows are summed already: by a log, or by a simulated service?"""

from __future__ import annotations

import msgspec


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
