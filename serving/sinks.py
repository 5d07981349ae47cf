"""Where the engine's by-products go; protocols owned by serving, implemented elsewhere. Calls must never block."""

from __future__ import annotations

from typing import Protocol

from paceline.serving.request import RequestTrace


class FeedbackSink(Protocol):
    """Takes one row per request and round."""

    def record_round(self, row: tuple) -> None:
        """Append one row in the field order of ROUND_COLUMNS; drops and counts when full."""


class TraceSink(Protocol):
    """Takes the trace of a finished request."""

    def wants(self, bucket: str) -> bool:
        """Whether a trace of a new request of this bucket should be kept (sampling, byte budget)."""

    def record_trace(self, trace: RequestTrace) -> None:
        """Append one trace; drops and counts when full."""


ROUND_COLUMNS = (
    "request_id", "bucket", "group", "drafter_version", "is_greedy", "round_index", "num_draft_tokens",
    "num_accepted_tokens", "num_emitted_tokens", "batch_size", "draft_ms", "verify_ms", "share_ms", "is_training", "ts",
)  # fmt: skip
