"""Feedback from a few rows, for tests."""

from __future__ import annotations

from typing import Any

from paceline.bandit.beliefs.observation import summed
from paceline.contracts import FeedbackBatch, FeedbackSums, RoundStats
from paceline.infra.replica.feedback import make_batch

DEFAULTS: dict[str, Any] = {
    "request_id": "q",
    "bucket": "a",
    "group": "adaptive",
    "drafter_version": "v0",
    "is_greedy": False,
    "round_index": 0,
    "num_draft_tokens": 8,
    "num_accepted_tokens": 1,
    "num_emitted_tokens": 2,
    "batch_size": 4,
    "draft_ms": 0.5,
    "verify_ms": 1.0,
    "share_ms": 10.0,
    "is_training": False,
    "ts": 0.0,
    "is_from_text": False,
}


def sums_of(rows: list[dict[str, Any]]) -> FeedbackSums:
    """The sums of rows; a row names what differs from DEFAULTS."""
    return summed(RoundStats(**{name: [row.get(name, value) for row in rows] for name, value in DEFAULTS.items()}))


def round_rows(rows: list[tuple]) -> RoundStats:
    """Rows in the order of the record's fields; all of them may leave out the last one."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(DEFAULTS)
    names = RoundStats.__struct_fields__[: max(len(columns), len(DEFAULTS) - 1)]
    return RoundStats(**{name: list(c) for name, c in zip(names, columns, strict=True)})


def dicts_of(rows: RoundStats) -> list[dict[str, Any]]:
    """One dict a row."""
    columns = {name: column for name in rows.__struct_fields__ if (column := getattr(rows, name))}
    return [{name: column[i] for name, column in columns.items()} for i in range(rows.num_rows)]


def trial_row(
    request_id: str, version: str, index: int = 1, *, ms: float = 10.0, group: str = "adaptive", ts: float = 1.0,
    drafts: int = 4, draft_ms: float = 1.0, tokens: int = 3,
) -> tuple:  # fmt: skip
    accepted = min(drafts, 2)
    return (
        request_id, "math", group, version, True, index, drafts, accepted, tokens, 1, draft_ms, 6.0, ms, False, ts
    )  # fmt: skip


def trial_batch(*rows: tuple) -> FeedbackBatch:
    return make_batch([round_rows(list(rows))], replica_id="a", boot_epoch=1, seq=1, target_version="t", num_dropped=0)
