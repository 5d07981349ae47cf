"""Data split: the logged requests that a training job may learn from, and those kept to judge it.

The split is by a hash of the request id, never by row: rows of one text depend on each other. The hash is salted, so
that it is independent of the hashes that choose hold-back groups and trace shares.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from paceline.errors import TraceError
from paceline.serving.sampling.request import RequestTrace

log = logging.getLogger(__name__)
HELD_OUT_SHARE = 0.25
MIN_HELD_OUT = 4
"""Held-out requests below which nothing is judged."""
MAX_HELD_OUT = 64
"""Newest held-out requests that a job scores."""


class ShardReader(Protocol):
    """The part of the trace store that a job reads."""

    def read_shard(self, shard_id: str) -> list[RequestTrace]: ...


class TrainData(NamedTuple):
    """What a job learns from and what it is judged on."""

    fresh: list[RequestTrace]
    rehearsal: list[RequestTrace]
    held_out: list[RequestTrace]
    num_unreadable: int
    """Shards that were gone or damaged and traces of another target or with non-finite features."""

    @property
    def num_rows(self) -> int:
        """Supervised rows to train on."""
        return count_rows(self.fresh) + count_rows(self.rehearsal)


def split_hash(request_id: str) -> float:
    """A uniform number in [0, 1) that depends on the request id only."""
    return int.from_bytes(hashlib.sha256(f"held-out:{request_id}".encode()).digest()[:8], "big") / 2**64


def count_rows(traces: Iterable[RequestTrace]) -> int:
    """Supervised rows: output tokens."""
    return sum(len(t.token_ids) - t.prompt_len for t in traces)


def split_held_out(traces: Sequence[RequestTrace]) -> tuple[list[RequestTrace], list[RequestTrace]]:
    """Return (training, held-out), order kept.

    A request is held out when its hash is below HELD_OUT_SHARE; while that gives fewer than MIN_HELD_OUT, the next
    lowest hashes join, up to half of the requests. Requests without a round (one output token) are never held out.
    """
    ranked = sorted((t for t in traces if len(t.token_ids) - t.prompt_len >= 2), key=lambda t: split_hash(t.request_id))
    wanted = sum(split_hash(t.request_id) < HELD_OUT_SHARE for t in ranked)
    wanted = max(wanted, min(MIN_HELD_OUT, len(ranked) // 2))
    chosen = {id(t) for t in ranked[:wanted]}
    return [t for t in traces if id(t) not in chosen], [t for t in traces if id(t) in chosen]


def _is_usable(trace: RequestTrace, target_version: str) -> bool:
    return trace.target_version == target_version and bool(torch.isfinite(torch.as_tensor(trace.features)).all())


def _read(store: ShardReader, shard_id: str, target_version: str) -> tuple[list[RequestTrace], int]:
    try:
        traces = store.read_shard(shard_id)
    except TraceError as e:
        log.warning("training goes on without a shard: %s", e)
        return [], 1
    good = [t for t in traces if _is_usable(t, target_version)]
    return good, len(traces) - len(good)


def _unique(traces: Iterable[RequestTrace]) -> list[RequestTrace]:
    return list({t.request_id: t for t in traces}.values())


def load_train_data(
    store: ShardReader,
    shard_ids: Sequence[str],
    rehearsal_shard_ids: Sequence[str],
    target_version: str,
    *,
    num_rows: int,
    rehearsal_share: float,
    rng: np.random.Generator,
) -> TrainData:
    """Read the newest requests of a bucket and a random choice of rehearsal requests.

    Args:
        shard_ids: the bucket's shards, oldest first; read from the newest until the job has what it needs.
        rehearsal_shard_ids: shards of other buckets, drawn in random order.
        num_rows: fresh supervised rows to train on (the last request may exceed it).
        rehearsal_share: rehearsal rows as a share of all training rows, in [0, 1).
    Returns: the data; requests below the hold-out hash never train, not even as rehearsal.
    """
    bad, newest_first = 0, []
    for shard_id in reversed(shard_ids):
        traces, num_bad = _read(store, shard_id, target_version)
        bad += num_bad
        newest_first += traces[::-1]
        train, held_out = split_held_out(_unique(newest_first))
        if count_rows(train) >= num_rows and len(held_out) >= MAX_HELD_OUT:
            break
    train, held_out = split_held_out(_unique(newest_first))
    fresh = _take(train, num_rows)
    wanted = int(count_rows(fresh) * rehearsal_share / (1 - rehearsal_share))
    pool: list[RequestTrace] = []
    order = [rehearsal_shard_ids[i] for i in rng.permutation(len(rehearsal_shard_ids))]
    for shard_id in order:
        if count_rows(pool) >= 2 * wanted:  # twice what is needed keeps the draw mixed
            break
        traces, num_bad = _read(store, shard_id, target_version)
        bad += num_bad
        pool += [t for t in traces if split_hash(t.request_id) >= HELD_OUT_SHARE]
    pool = _unique(pool)
    rehearsal = _take([pool[i] for i in rng.permutation(len(pool))], wanted)
    return TrainData(fresh[::-1], rehearsal, held_out[:MAX_HELD_OUT][::-1], bad)


def _take(traces: Sequence[RequestTrace], num_rows: int) -> list[RequestTrace]:
    out: list[RequestTrace] = []
    rows = 0
    for t in traces:
        if rows >= num_rows:
            break
        out.append(t)
        rows += len(t.token_ids) - t.prompt_len
    return out
