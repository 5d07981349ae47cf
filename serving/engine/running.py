"""Running request: what the engine remembers of one request between rounds, and where it ends.

With n = context_len: tokens x_0..x_n are committed (prompt + output), rows 0..n-1 are in the target KV and x_n, the
anchor, is not. The drafter has seen rows 0..drafted_len-1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.serving.engine.buckets import DEFAULT_BUCKET
from paceline.serving.sampling.request import (
    GenerationRequest,
    RequestStats,
    RequestStatus,
    RoundEvent,
    TokenLogprob,
    advance_status,
)
from paceline.serving.sampling.text_stream import TextStream, TokenText
from paceline.serving.target_model.prefix_cache import DraftWriter

if TYPE_CHECKING:
    from paceline.serving.sampling.draw import TokenCounts, TokenLimits
    from paceline.serving.sampling.grammar_state import GrammarState
from paceline.serving.drafters.slots import DrafterSlots, Pin
from paceline.serving.target_model.kv_cache import PageAllocator


@dataclass(slots=True)
class TraceRows:
    """The growing trace of one request: parts of arrays that it shares with other requests."""

    parts: list[np.ndarray] = field(default_factory=list)
    """(n, 2, k) int32 each, on the host: ids of the best tokens, bits of their float32 log-probabilities."""
    bounds: list[int] = field(default_factory=list)
    """First row and end of each part, in turn."""

    def joined(self) -> np.ndarray:
        """(T, 2, k) int32 of the T output tokens, copied."""
        starts, stops = self.bounds[::2], self.bounds[1::2]
        return np.concatenate([p[a:b] for p, a, b in zip(self.parts, starts, stops, strict=True)])

    def append(self, rows: np.ndarray, start: int, stop: int) -> None:
        """Take rows start..stop-1 of an array."""
        self.parts.append(rows)
        self.bounds += (start, stop)


@dataclass(slots=True, eq=False)
class RunningRequest:
    """Mutable state of one request; touched by the engine thread only after submission."""

    request: GenerationRequest
    on_event: Callable[[RoundEvent], None]
    arrival: int
    seed: int
    token_limit: int
    """Prompt and output tokens at which the request ends with 'length'."""
    stop_token_ids: frozenset[int]
    stop_checker: StopStringChecker | None
    counts: TokenCounts | None
    """Tokens seen, for penalties; None without penalties."""
    submitted_s: float
    limits: TokenLimits | None = None
    """Tokens that may be drawn; None = all."""
    grammar: GrammarState | None = None
    """Where the answer stands in its grammar; always that of the committed output tokens between rounds."""

    admitted_s: float | None = None
    """First admission, in the engine's clock as submitted_s."""
    first_token_s: float | None = None
    """When its first tokens were emitted here."""
    status: RequestStatus = RequestStatus.WAITING
    is_pinned: bool = False
    slot: str | None = None
    version: str = ""
    delta: int = -1
    """Of the slot's drafter, -1 = its own weights."""
    tokens: list[int] = field(default_factory=list)
    context_len: int = 0
    drafted_len: int = 0
    rows: torch.Tensor | None = None  # (row_capacity,) int64, pool row of each position
    trace: TraceRows | None = None
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    """Of the prompt's first tokens, as far as they are known; empty unless the request asks for them."""
    is_too_long_to_draft: bool = False
    """Beside others its context took more memory in drafting than there was."""
    draft_writer: DraftWriter | None = None
    """What drafter KV at shared rows is found by; None when the drafter's rows cannot be shared."""
    rank: tuple[float, int] = (0.0, 0)
    """Order of admission; the active request with the largest rank is preempted first. Set by the scheduler."""
    num_cached_tokens: int = 0
    was_preempted: bool = False
    bucket: str = DEFAULT_BUCKET
    """Traffic class that the request is counted under; it changes at most once, at the end of the prompt."""
    awaits_class: bool = False
    """Whether the prompt is to tell the class."""

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_truncated_tokens: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    round_ms: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)
        if self.request.prompt_logprobs is not None:
            self.prompt_logprobs.append(None)  # nothing predicts the first token
        resumed = list(self.request.resumed_token_ids)
        if resumed:  # from here on the request is like one that was preempted behind these tokens
            if self.grammar is not None:
                for token_id in resumed:
                    self.grammar.advance(token_id)
            self.append_output(resumed)
            if self.stop_checker is not None:
                self.stop_checker.first_match(resumed)

    def move_to(self, device: torch.device) -> None:
        """Have what is drawn with on the device."""
        for part in (self.counts, self.limits):
            if part is not None:
                part.move_to(device)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def prefill_len(self) -> int:
        """Rows to compute before the request can decode: the prompt, or everything but the anchor after preemption."""
        return max(self.prompt_len, len(self.tokens) - 1)

    @property
    def row_capacity(self) -> int:
        return 0 if self.rows is None else self.rows.numel()

    @property
    def is_greedy(self) -> bool:
        return self.request.params.temperature == 0.0

    def advance(self, to: RequestStatus) -> None:
        self.status = advance_status(self.status, to)

    def append_output(self, token_ids: list[int]) -> None:
        """Commit emitted tokens."""
        self.tokens += token_ids
        if self.counts is not None:
            self.counts.add(token_ids)
        if self.limits is not None:
            self.limits.add(token_ids)
        if self.grammar is not None:
            self.grammar.keep(len(token_ids))

    def forget_rows(self) -> None:
        """Drop everything that preemption loses; tokens, seed, pin, counters and trace stay."""
        self.context_len = self.drafted_len = 0
        self.rows = None

    def stats(self, now_s: float) -> RequestStats:
        return RequestStats(
            drafter_version=self.version,
            num_rounds=self.num_rounds,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_emitted_tokens=self.num_output,
            num_truncated_tokens=self.num_truncated_tokens,
            bucket=self.bucket,
            draft_ms=self.draft_ms,
            verify_ms=self.verify_ms,
            round_ms=self.round_ms,
            total_ms=(now_s - self.submitted_s) * 1e3,
            num_cached_tokens=self.num_cached_tokens,
        )

    def event(self, now_s: float, token_ids: tuple[int, ...] = (), **fields: Any) -> RoundEvent:
        """A RoundEvent of this request; everything not named is empty."""
        return RoundEvent(request_id=self.request.request_id, token_ids=token_ids, stats=self.stats(now_s), **fields)


class StopStringChecker:
    """Incremental detokenisation of one request; made only when it has stop strings."""

    def __init__(
        self,
        tokens: TokenText,
        stop: Sequence[str],
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special: bool = True,
        min_tokens: int = 0,
        kept_ids: Sequence[int] = (),
    ) -> None:
        """min_tokens: a match counts that a token behind so many completes. kept_ids: as of `TextStream`."""
        self._num_early = min_tokens
        self._stream = TextStream(
            tokens, prompt_token_ids=prompt_token_ids, skip_special=skip_special, kept_ids=kept_ids
        )
        self._stop = tuple(stop)
        self._keep = max(len(s) for s in stop) - 1
        self._tail = ""  # text that a match may still begin in

    def first_match(self, token_ids: Sequence[int]) -> tuple[int, str] | None:
        """Append tokens; returns (number of them up to and including the one that completes a match, stop string).

        Among matches completed by the same token the one that begins first in the text wins.
        """
        for i, token_id in enumerate(token_ids):
            piece = self._stream.push((token_id,))
            if not piece:
                continue
            text, num_old = self._tail + piece, len(self._tail)
            if len(self._stream.starts) > self._num_early:
                found = [(at, s) for s in self._stop if (at := text.find(s, max(num_old + 1 - len(s), 0))) >= 0]
                if found:
                    return i + 1, min(found)[1]
            self._tail = text[-self._keep :] if self._keep else ""
        return None


def cut_tokens(request: RunningRequest, token_ids: list[int]) -> tuple[list[int], str | None, str | None]:
    """Cut one round's new tokens where the request ends.

    Returns: (tokens to emit, finish reason or None, stop string or None). A stop token or the token that completes a
    stop string is the last one emitted; at the token limit the reason is 'length' unless the last token stops anyway.
    When the request's grammar cannot be followed behind one of these tokens, the reason is 'error' and that is the last
    one emitted.
    """
    grammar = request.grammar
    # Tokens that a shortage of pages has cut may end before the failure: then it is met again by a later round.
    if grammar is not None and grammar.error is not None and len(token_ids) > grammar.num_ahead:
        # What was drawn before the grammar failed counts, and may end the answer before the failure would.
        token_ids, reason, match = _cut(request, token_ids[: grammar.num_ahead])
        return token_ids, reason or "error", match
    return _cut(request, token_ids)


def _cut(request: RunningRequest, token_ids: list[int]) -> tuple[list[int], str | None, str | None]:
    room = request.token_limit - len(request.tokens)
    if len(token_ids) > room:
        token_ids = token_ids[:room]
    reason: str | None = "length" if len(token_ids) == room else None
    stops = request.stop_token_ids
    if stops:
        for i, token_id in enumerate(token_ids):
            if token_id in stops:
                token_ids, reason = token_ids[: i + 1], "stop"
                break
    if request.stop_checker is not None:
        found = request.stop_checker.first_match(token_ids[:-1] if reason == "stop" else token_ids)
        if found is not None:
            return token_ids[: found[0]], "stop", found[1]
    return token_ids, reason, None


class DrafterPins:
    """Pins admitted requests to drafter slots until they end. Engine thread only."""

    def __init__(self, allocator: PageAllocator, slots: DrafterSlots) -> None:
        self._allocator, self._slots = allocator, slots

    def pin(self, request: RunningRequest) -> bool:
        """Choose the drafter version once, a preempted request keeps its own; whether it was chosen now."""
        is_new = not request.is_pinned
        if is_new:
            request.slot, request.version, request.delta = self._choose(request)
            request.is_pinned = True
        self._note_writer(request)
        return is_new

    def follow_class(self, request: RunningRequest) -> None:
        """Pin a request anew whose prompt has told its class, before its first draft; it loses nothing but rows that its
        new drafter reads again."""
        pin = self._choose(request)
        if (pin.slot, pin.delta) == (request.slot, request.delta):
            self._slots.unpin(pin.slot, pin.delta)
            return
        self.unpin(request)
        (request.slot, request.version, request.delta), request.is_pinned = pin, True
        request.drafted_len, request.draft_writer = 0, None
        self._note_writer(request)
        if request.draft_writer is not None:
            request.drafted_len = self._allocator.num_drafted_rows(request.request_id, request.draft_writer)

    def _choose(self, request: RunningRequest) -> Pin:
        return self._slots.pin(request.request.group, request.request_id, request.bucket)

    def _note_writer(self, request: RunningRequest) -> None:
        drafter = self._slots.drafter(request.slot)
        if request.slot is not None and drafter is not None and drafter.caps.is_row_local:
            request.draft_writer = (request.slot, self._slots.num_loads(request.slot))

    def unpin(self, request: RunningRequest) -> None:
        """Let the drafter version of a request that has ended go."""
        self.forget(request)
        if request.is_pinned:
            self._slots.unpin(request.slot, request.delta)
            request.is_pinned = False

    def may_share(self, request: RunningRequest) -> bool:
        """Whether a request may use cached rows: not when it wants their logits."""
        return self._allocator.cache.is_enabled and request.request.prompt_logprobs is None

    def adopt_shared_rows(self, request: RunningRequest) -> None:
        """Skip the drafter over those shared rows whose drafter KV the same weights wrote; their features are in the pool."""
        if request.context_len == 0:
            return
        request.drafted_len = 0
        if request.draft_writer is not None:
            request.drafted_len = self._allocator.num_drafted_rows(request.request_id, request.draft_writer)

    def forget(self, request: RunningRequest) -> None:
        """Let the request's drafter drop what it keeps per request."""
        drafter = self._slots.drafter(request.slot)
        if drafter is not None and request.slot is not None:
            try:
                drafter.release(request.request_id)
            except Exception as e:  # a broken drafter costs speed, never a request
                self._slots.mark_failed(request.slot, f"release raised {type(e).__name__}: {e}")
