"""How do the events of several engines become the events of one answer?

A replica that dies takes its request along. The next one is given the same request with the output tokens that the client
already has; draws depend on (seed, position) only, so it goes on as the first would have. What the dead replica had
computed but not sent is computed again and never seen twice.
"""

from __future__ import annotations

import random
from dataclasses import replace

from paceline.serving.request import GenerationRequest, RequestStats, RoundEvent

_SUMMED = ("num_rounds", "num_draft_tokens", "num_accepted_tokens", "draft_ms", "verify_ms", "round_ms")


class Splice:
    """The tokens and statistics of one request over all engines that worked on it."""

    def __init__(self, request: GenerationRequest) -> None:
        """Gives the request a seed when it has none, so that every engine draws the same."""
        if request.params.seed is None:
            request = replace(request, params=replace(request.params, seed=random.getrandbits(62)))
        self._request = request
        self._token_ids: list[int] = []
        self._ended: RequestStats | None = None  # sums over the engines that are gone
        self._offset_ms = 0.0
        self._latest: RequestStats | None = None
        self.num_tries = 0

    @property
    def request(self) -> GenerationRequest:
        return self._request

    def next_request(self, elapsed_ms: float = 0.0) -> GenerationRequest:
        """What the next engine is given: the request behind the tokens so far, under an id of its own.

        The id differs from try to try, since an engine that only seems dead may still work under the last one.
        elapsed_ms: since the request came.
        """
        request, self._offset_ms, self._ended = self._request, elapsed_ms, self._latest
        if self.num_tries > 0:
            request = replace(request, request_id=f"{request.request_id}~{self.num_tries}")
        if self._latest is not None:  # prompt log-probabilities came with the first event
            request = replace(request, resumed_token_ids=tuple(self._token_ids), prompt_logprobs=None)
        self.num_tries += 1
        return request

    def take(self, event: RoundEvent) -> RoundEvent:
        """The event as the client sees it: under the request's own id, statistics summed."""
        self._token_ids += event.token_ids
        self._latest = stats = self._sum(event.stats)
        return replace(event, request_id=self._request.request_id, stats=stats)

    def end(self, finish_reason: str, error: str | None = None, elapsed_ms: float = 0.0) -> RoundEvent:
        """A last event that no engine sent."""
        stats = self._latest or RequestStats(
            drafter_version="", num_rounds=0, num_draft_tokens=0, num_accepted_tokens=0, num_emitted_tokens=0,
            draft_ms=0.0, verify_ms=0.0, total_ms=0.0, bucket=self._request.bucket,
        )  # fmt: skip
        return RoundEvent(
            request_id=self._request.request_id, token_ids=(), num_accepted_tokens=0, logprobs=None, stop_match=None,
            finish_reason=finish_reason, stats=replace(stats, total_ms=elapsed_ms), error=error,
        )  # fmt: skip

    def _sum(self, stats: RequestStats) -> RequestStats:
        total_ms = stats.total_ms + self._offset_ms
        ended = self._ended
        if ended is None:
            return replace(stats, total_ms=total_ms)
        sums = {name: getattr(ended, name) + getattr(stats, name) for name in _SUMMED}
        return replace(stats, **sums, total_ms=total_ms, num_cached_tokens=ended.num_cached_tokens)
