"""Learning text: the logged requests that a learner has not read yet, and those of other classes that it rehearses.

A learner scores a request before it learns it, so no request is held out; what it must never do is read one twice. It
remembers digests of request ids, no text.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from paceline.adapt.data.trace_store import count_rows
from paceline.errors import TraceError
from paceline.serving.sampling.request import RequestTrace

log = logging.getLogger(__name__)


class ShardReader(Protocol):
    """The part of the trace store that a burst reads."""

    def read_shard(self, shard_id: str) -> list[RequestTrace]: ...


class LearningText(NamedTuple):
    """What a burst may read."""

    fresh: list[RequestTrace]
    """Requests of the class, oldest first."""
    rehearsal: list[RequestTrace]
    """Requests of other classes, in random order."""
    num_unreadable: int
    """Shards that were gone or damaged and traces of another target, with features of other layers or non-finite numbers."""

    @property
    def num_rows(self) -> int:
        """Supervised rows to train on."""
        return count_rows(self.fresh) + count_rows(self.rehearsal)


def request_digest(request_id: str) -> int:
    """A number of 63 bits that stands for a request id."""
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big") >> 1


class Features(NamedTuple):
    """What a drafter reads of its target; None: not known."""

    size: int | None = None
    """Width of a row."""
    tap_layers: tuple[int, ...] | None = None
    """Target layers whose outputs make it: services of one target may tap others, as their drafters want."""


_ANY = Features()


def _is_usable(trace: RequestTrace, target_version: str, wanted: Features) -> bool:
    features, logprobs = torch.as_tensor(trace.features), torch.as_tensor(trace.topk_logprobs)
    found = Features(features.shape[1], trace.tap_layers)
    is_other = any(None not in pair and pair[0] != pair[1] for pair in zip(found, wanted, strict=True))
    is_finite = bool(torch.isfinite(features).all()) and not bool(torch.isnan(logprobs).any())
    return not is_other and trace.target_version == target_version and is_finite


def _read(store: ShardReader, shard_id: str, target_version: str, wanted: Features) -> tuple[list[RequestTrace], int]:
    """The shard's requests that hold a round (two output tokens or more), and how much of it is of no use."""
    try:
        traces = store.read_shard(shard_id)
    except TraceError as e:
        log.warning("training goes on without a shard: %s", e)
        return [], 1
    good = [t for t in traces if _is_usable(t, target_version, wanted)]
    return [t for t in good if len(t.token_ids) - t.prompt_len >= 2], len(traces) - len(good)


def _unique(traces: Iterable[RequestTrace]) -> list[RequestTrace]:
    return list({t.request_id: t for t in traces}.values())


def load_learning_text(
    store: ShardReader,
    shard_ids: Sequence[str],
    rehearsal_shard_ids: Sequence[str],
    target_version: str,
    *,
    num_rows: int,
    rehearsal_share: float,
    rng: np.random.Generator,
    seen: Container[int] = (),
    features: Features = _ANY,
) -> LearningText:
    """Read the newest requests of a class that are not in `seen`, and a random choice of rehearsal requests.

    Args:
        shard_ids: the class's shards, oldest first; read from the newest until there is enough.
        rehearsal_shard_ids: shards of other classes, drawn in random order.
        num_rows: fresh supervised rows (the last request may exceed it).
        rehearsal_share: rehearsal rows as a share of all rows, in [0, 1).
        seen: digests of the requests that the learner has read.
        features: what the drafter reads.
    """
    bad, newest_first = 0, []
    for shard_id in reversed(shard_ids):
        traces, num_bad = _read(store, shard_id, target_version, features)
        bad += num_bad
        newest_first += [t for t in traces[::-1] if request_digest(t.request_id) not in seen]
        newest_first = _unique(newest_first)
        if count_rows(newest_first) >= num_rows:
            break
    fresh = _take(newest_first, num_rows)
    wanted = int(count_rows(fresh) * rehearsal_share / (1 - rehearsal_share))
    pool: list[RequestTrace] = []
    order = [rehearsal_shard_ids[i] for i in rng.permutation(len(rehearsal_shard_ids))]
    for shard_id in order:
        if count_rows(pool) >= 2 * wanted:  # twice what is needed keeps the draw mixed
            break
        traces, num_bad = _read(store, shard_id, target_version, features)
        bad += num_bad
        pool += traces
    pool = _unique(pool)
    return LearningText(fresh[::-1], [pool[i] for i in rng.permutation(len(pool))] if wanted else [], bad)


def _take(traces: Sequence[RequestTrace], num_rows: int) -> list[RequestTrace]:
    out: list[RequestTrace] = []
    rows = 0
    for t in traces:
        if rows >= num_rows:
            break
        out.append(t)
        rows += count_rows([t])
    return out
