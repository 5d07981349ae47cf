"""Choice: one choice of an answer, grown from round events, and its form on the wire."""

from __future__ import annotations

import uuid
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from paceline.serving.sampling.request import RequestStats, RoundEvent, TokenLogprob
from paceline.serving.sampling.text_stream import TextStream, TokenText
from paceline.serving.wire.calls import CallDelta, CallParser, merged

Entry = tuple[int, TokenLogprob | None, int]
"""(token id, its log-probability, characters before it); no log-probability for the first token of a prompt."""

Segment = tuple[str, bool]
"""(text, whether it is of accepted draft tokens)."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What one round adds to a choice."""

    index: int
    """Of the choice."""
    text: str
    token_ids: list[int]
    entries: list[Entry]
    """The tokens whose text is no longer held back; empty unless log-probabilities are wanted."""
    finish_reason: str | None
    stats: RequestStats
    segments: list[Segment]
    """The text as the model wrote it, cut where its origin changes; empty unless wanted."""
    calls: list[CallDelta] = []
    """What the round adds to tool calls; their text is not in `text`."""
    stop_reason: str | int | None = None
    """The stop string or asked-for stop token that ended the choice, as vLLM tells it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceStyle:
    """What the client wants to see of every choice."""

    is_chat: bool
    num_top: int | None
    """Alternatives per token; None = no log-probabilities."""
    num_prompt_top: int | None = None
    """Alternatives per token of the prompt; None = its log-probabilities are not told by themselves."""
    with_token_ids: bool
    with_segments: bool = False
    """Whether text was drafted is told."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that the client named as ends."""
    with_own_stats: bool
    """The `paceline` object stands in the choice: several choices have one each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Echo:
    """The prompt as it is put before an answer."""

    text: str
    starts: Sequence[int]
    """Characters before each prompt token."""


def make_echo(tokens: TokenText, token_ids: Sequence[int], *, skip_special: bool) -> Echo:
    """Write the prompt's tokens as text, the way answers are written."""
    stream = TextStream(tokens, skip_special=skip_special)
    stream.push(token_ids)
    stream.finish()
    return Echo(text=stream.text, starts=stream.starts)


class Choice:
    """One growing choice: takes round events, gives the pieces that may be sent, then chunks or a body."""

    def __init__(
        self, index: int, tokens: TokenText, stream: TextStream, style: ChoiceStyle, *,
        prompt_token_ids: Sequence[int], echo: Echo | None = None, parser: CallParser | None = None,
    ) -> None:  # fmt: skip
        """parser: reads tool calls out of the text; None = there are none."""
        self._parser = parser
        self._prompt_scores: Sequence[TokenLogprob | None] = ()
        self._call_ids: list[str] = []
        self.index = index
        self._tokens, self._stream, self._style, self._echo = tokens, stream, style, echo
        self._prompt_token_ids = prompt_token_ids
        self._waiting: list[Entry] = []
        self._is_accepted: list[bool] = []
        """Of each token so far; kept where segments are wanted."""
        self._num_told = 0
        """Characters that segments have told of."""
        self.num_tokens = 0
        self.stats: RequestStats | None = None
        """Of the newest event."""
        self._has_event = self._has_chunk = self._has_told = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._prompt_token_ids)

    def told_prompt(self) -> dict[str, Any]:
        """The prompt's tokens, where they are asked for."""
        return {"prompt_token_ids": list(self._prompt_token_ids)} if self._style.with_token_ids else {}

    def take(self, event: RoundEvent) -> Piece:
        """Fold one round's event."""
        first = len(self._stream.starts)
        # what stopped it is no part of the answer's text
        num_stops = int(event.finish_reason == "stop" and event.stop_match is None and len(event.token_ids) > 0)
        text = self._stream.push(event.token_ids[: len(event.token_ids) - num_stops])
        self._stream.skip(num_stops)
        if event.finish_reason is not None:
            text += self._stream.finish(event.stop_match)
        self.num_tokens += len(event.token_ids)
        self.stats = event.stats
        if event.prompt_logprobs is not None:
            self._prompt_scores = event.prompt_logprobs
        if self._style.num_top is not None and event.logprobs:
            starts = self._stream.starts[first:]
            self._waiting += [(r.token_id, r, at) for r, at in zip(event.logprobs, starts, strict=False)]
        entries = self._release(event.finish_reason)
        if self._echo is not None:
            entries = [(t, r, at + len(self._echo.text)) for t, r, at in entries]
            if not self._has_event:
                text = self._echo.text + text
                entries = self._prompt_entries(event) + entries
        self._has_event = True
        segments = self._segments(event) if self._style.with_segments else []
        calls, finish_reason = list[CallDelta](), event.finish_reason
        if self._parser is not None:
            text, calls = self._parser.push(text)
            if finish_reason is not None:
                is_cut = finish_reason == "length" or event.stop_match is not None
                rest, more = self._parser.finish(is_cut=is_cut)
                calls += [msgspec.structs.replace(delta, at=delta.at + len(text)) for delta in more]
                text += rest
                if finish_reason == "stop" and self._parser.has_whole_calls:
                    finish_reason = "tool_calls"
        return Piece(
            index=self.index,
            text=text,
            token_ids=list(event.token_ids),
            entries=entries,
            finish_reason=finish_reason,
            stats=event.stats,
            segments=segments,
            calls=merged(calls),
            stop_reason=self._stop_reason(event),
        )

    def _stop_reason(self, event: RoundEvent) -> str | int | None:
        if event.finish_reason != "stop" or event.stop_match is not None or not event.token_ids:
            return event.stop_match
        last = event.token_ids[-1]
        return last if last in self._style.stop_token_ids else None

    def _segments(self, event: RoundEvent) -> list[Segment]:
        """What was sent since the last event, cut where accepted draft tokens begin and end; an echo was not drafted."""
        self._is_accepted += [i < event.num_accepted_tokens for i in range(len(event.token_ids))]
        out: list[Segment] = []
        if self._echo is not None and not self._has_told:
            out.append((self._echo.text, False))
        self._has_told = True
        starts, text = self._stream.starts, self._stream.text
        for i in range(max(0, bisect_right(starts, self._num_told) - 1), len(starts)):
            begin, end = max(starts[i], self._num_told), starts[i + 1] if i + 1 < len(starts) else len(text)
            out.append((text[begin : min(end, len(text))], self._is_accepted[i]))
        self._num_told = len(text)
        return join_segments(out)

    def _prompt_entries(self, event: RoundEvent) -> list[Entry]:
        if self._echo is None or event.prompt_logprobs is None:
            return []
        return list(zip(self._prompt_token_ids, event.prompt_logprobs, self._echo.starts, strict=True))

    def _release(self, finish_reason: str | None) -> list[Entry]:
        """Tokens whose text was sent; at the end also tokens without text, but nothing of a stop string."""
        if finish_reason is not None and not self._stream.is_stopped:
            out, self._waiting = self._waiting, []
            return out
        sent = len(self._stream.text)
        out = [w for w in self._waiting if w[2] < sent]
        self._waiting = [w for w in self._waiting if w[2] >= sent]
        return out

    # ---- bodies -------------------------------------------------------------------------------------------------
    def chunk(self, piece: Piece) -> dict[str, Any]:
        """The element of `choices` of one streaming chunk."""
        out: dict[str, Any] = {"index": self.index, "logprobs": self._logprobs(piece.entries)}
        if self._style.is_chat:
            delta: dict[str, Any] = {} if self._has_chunk else {"role": "assistant"}
            delta["content"] = piece.text if piece.text or not piece.calls else None
            if piece.calls:
                delta["tool_calls"] = [self._call_delta(call) for call in piece.calls]
            out["delta"] = delta
        else:
            out["text"] = piece.text
        out["finish_reason"] = piece.finish_reason
        if piece.finish_reason is not None:
            out["stop_reason"] = piece.stop_reason
        if self._style.with_token_ids:
            out["token_ids"] = piece.token_ids
            if not self._has_chunk:
                out |= self.told_prompt()
        if self._style.with_segments:
            out["segments"] = piece.segments
        if self._style.with_own_stats and piece.finish_reason is not None:
            out["paceline"] = stats_body(piece.stats)
        self._has_chunk = True
        return out

    def body(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The element of `choices` of a whole answer, from all pieces of this choice."""
        text = "".join(p.text for p in pieces)
        out: dict[str, Any] = {"index": self.index, "logprobs": self._logprobs([w for p in pieces for w in p.entries])}
        if self._style.is_chat:
            out["message"] = {"role": "assistant", "content": text, "refusal": None}
            calls = merged(sorted((c for p in pieces for c in p.calls), key=lambda c: c.index))
            if calls:
                out["message"] |= {"content": text or None, "tool_calls": [self._call_body(c) for c in calls]}
        else:
            out["text"] = text
            if self._style.num_prompt_top is not None:
                out["prompt_logprobs"] = self.prompt_logprobs()
        out["finish_reason"], out["stop_reason"] = pieces[-1].finish_reason, pieces[-1].stop_reason
        if self._style.with_token_ids:
            out |= self.told_prompt()
            out["token_ids"] = [t for p in pieces for t in p.token_ids]
        if self._style.with_segments:
            out["segments"] = join_segments([segment for p in pieces for segment in p.segments])
        if self._style.with_own_stats:
            out["paceline"] = stats_body(pieces[-1].stats)
        return out

    def prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        """The prompt's tokens with their alternatives as vLLM writes them, None for the first; None = nobody asked."""
        num_top = self._style.num_prompt_top
        if num_top is None:
            return None
        out: list[dict[str, Any] | None] = []
        for score in self._prompt_scores:
            if score is None:
                out.append(None)
                continue
            ranked = [(t, lp, i + 1) for i, (t, lp) in enumerate(score.top)]
            own = next((r for r in ranked if r[0] == score.token_id), (score.token_id, score.logprob, score.rank))
            out.append(
                {
                    str(t): {"logprob": lp, "rank": rank, "decoded_token": self._tokens.token_text(t)}
                    for t, lp, rank in (own, *ranked[:num_top])
                }
            )
        return out

    def call_id(self, index: int) -> str:
        """The id of a tool call, made with the first look at it."""
        while len(self._call_ids) <= index:
            self._call_ids.append(f"call_{uuid.uuid4().hex[:24]}")
        return self._call_ids[index]

    def _call_body(self, call: CallDelta) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": self.call_id(call.index), "type": "function", "function": function}

    def _call_delta(self, call: CallDelta) -> dict[str, Any]:
        if call.name is not None:
            return {"index": call.index, **self._call_body(call)}
        return {"index": call.index, "function": {"arguments": call.arguments}}

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        num_top = self._style.num_top
        if num_top is None:
            return None
        if self._style.is_chat:
            return {"content": self.token_scores(entries), "refusal": None}
        top = [
            None if r is None else {self._text(t): lp for t, lp in (*r.top[:num_top], (own, r.logprob))}
            for own, r, _ in entries
        ]
        return {
            "tokens": [self._text(t) for t, _, _ in entries],
            "token_logprobs": [None if r is None else r.logprob for _, r, _ in entries],
            "top_logprobs": top if num_top else None,
            "text_offset": [at for _, _, at in entries],
        }

    def token_scores(self, entries: Sequence[Entry]) -> list[dict[str, Any]]:
        """Tokens with their log-probabilities and alternatives, as chat answers write them."""
        return [
            {**self._token(t, r.logprob), "top_logprobs": [self._token(*pair) for pair in r.top[: self._style.num_top]]}
            for t, r, _ in entries
            if r is not None
        ]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokens.token_bytes(token_id)
        return {"token": raw.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(raw)}

    def _text(self, token_id: int) -> str:
        """A token as text; bytes that are no whole character are written out, so that two tokens never share a key."""
        raw = self._tokens.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def join_segments(segments: Sequence[Segment]) -> list[Segment]:
    """Neighbours of one origin as one, empty ones left out."""
    out: list[Segment] = []
    for text, is_accepted in segments:
        if text and out and out[-1][1] == is_accepted:
            out[-1] = (out[-1][0] + text, is_accepted)
        elif text:
            out.append((text, is_accepted))
    return out


def stats_body(stats: RequestStats) -> dict[str, Any]:
    """The `paceline` object: which drafter served the request and what it achieved.

    num_accepted_tokens excludes the bonus tokens, acceptance_length includes them; both are taken before the end of the
    answer cuts the last round by num_truncated_tokens. Of a whole answer therefore
    acceptance_length * num_rounds = num_emitted_tokens - 1 + num_truncated_tokens (prefill emits the first token).
    `bucket` is the traffic class that the request was counted under. Times are this request's share, in ms.
    """
    return {
        "drafter_version": stats.drafter_version,
        "bucket": stats.bucket,
        "acceptance_length": round(stats.acceptance_length, 4),
        "num_rounds": stats.num_rounds,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_emitted_tokens": stats.num_emitted_tokens,
        "num_truncated_tokens": stats.num_truncated_tokens,
        "draft_ms": round(stats.draft_ms, 3),
        "verify_ms": round(stats.verify_ms, 3),
        "total_ms": round(stats.total_ms, 3),
        "round_ms": round(stats.round_ms, 3),
    }
