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

    def wants(self, request_id: str, bucket: str) -> bool:
        """Whether this new request should be traced (sampling, room); asked once, at admission.

        The answer holds for the request's life: a request that is not wanted collects nothing.
        """

    def record_trace(self, trace: RequestTrace) -> None:
        """Append the trace of a request that was wanted; drops and counts when full."""


ROUND_COLUMNS = (
    "request_id", "bucket", "group", "drafter_version", "is_greedy", "round_index", "num_draft_tokens",
    "num_accepted_tokens", "num_emitted_tokens", "batch_size", "draft_ms", "verify_ms", "share_ms", "is_training", "ts",
)  # fmt: skip
