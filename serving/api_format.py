"""What does an answer look like on the wire? OpenAI's bodies, chunks and errors, built from round events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.serving.request import RequestStats, RoundEvent, TokenLogprob
from paceline.serving.text_stream import TextStream, TokenText

_encode = msgspec.json.Encoder().encode


def to_json(body: dict[str, Any]) -> bytes:
    return _encode(body)


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(body) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


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


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What one round adds to an answer."""

    text: str
    token_ids: list[int]
    logprobs: list[tuple[TokenLogprob, int]]
    """(log-probability, characters before the token) of the tokens whose text is no longer held back."""
    finish_reason: str | None
    stats: RequestStats


class Answer:
    """One growing answer: takes round events, gives the pieces that may be sent, then chunks or a body."""

    def __init__(
        self, *, tokens: TokenText, stream: TextStream, answer_id: str, model_name: str, is_chat: bool,
        prompt_token_ids: Sequence[int], has_logprobs: bool, num_top: int, with_token_ids: bool, with_usage: bool,
    ) -> None:  # fmt: skip
        self.tokens, self.stream = tokens, stream
        self.id, self.model_name, self.is_chat = answer_id, model_name, is_chat
        self.created = int(time.time())
        self.prompt_token_ids = list(prompt_token_ids)
        self.has_logprobs, self.num_top = has_logprobs, num_top
        self.with_token_ids, self.with_usage = with_token_ids, with_usage
        self._waiting: list[tuple[TokenLogprob, int]] = []
        self._num_tokens = 0
        self._num_chunks = 0

    def take(self, event: RoundEvent) -> Piece:
        """Fold one round's event."""
        first = len(self.stream.starts)
        text = self.stream.push(event.token_ids)
        if event.finish_reason is not None:
            text += self.stream.finish(event.stop_match)
        self._num_tokens += len(event.token_ids)
        if self.has_logprobs:
            self._waiting += zip(event.logprobs or (), self.stream.starts[first:], strict=False)
        return Piece(
            text=text,
            token_ids=list(event.token_ids),
            logprobs=self._release(event.finish_reason),
            finish_reason=event.finish_reason,
            stats=event.stats,
        )

    def _release(self, finish_reason: str | None) -> list[tuple[TokenLogprob, int]]:
        """Tokens whose text was sent; at the end also tokens without text, but nothing of a stop string."""
        if finish_reason is not None and not self.stream.is_stopped:
            out, self._waiting = self._waiting, []
            return out
        sent = len(self.stream.text)
        out = [w for w in self._waiting if w[1] < sent]
        self._waiting = [w for w in self._waiting if w[1] >= sent]
        return out

    # ---- bodies -------------------------------------------------------------------------------------------------
    def chunk(self, piece: Piece) -> dict[str, Any]:
        """One streaming chunk; the last one has the finish reason and the `paceline` object."""
        choice: dict[str, Any] = {"index": 0, "logprobs": self._logprobs(piece.logprobs)}
        if self.is_chat:
            choice["delta"] = {"role": "assistant"} if self._num_chunks == 0 else {}
            choice["delta"]["content"] = piece.text
        else:
            choice["text"] = piece.text
        choice["finish_reason"] = piece.finish_reason
        if self.with_token_ids:
            choice["token_ids"] = piece.token_ids
            if self._num_chunks == 0:
                choice["prompt_token_ids"] = self.prompt_token_ids
        self._num_chunks += 1
        body = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        body["choices"] = [choice]
        if self.with_usage:
            body["usage"] = None
        if piece.finish_reason is not None:
            body["paceline"] = stats_body(piece.stats)
        return body

    def usage_chunk(self, stats: RequestStats) -> dict[str, Any]:
        """The extra last chunk of stream_options.include_usage."""
        body = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        return {**body, "choices": [], "usage": self.usage(), "paceline": stats_body(stats)}

    def body(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The whole answer at once."""
        text = "".join(p.text for p in pieces)
        choice: dict[str, Any] = {"index": 0, "logprobs": self._logprobs([w for p in pieces for w in p.logprobs])}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice["finish_reason"] = pieces[-1].finish_reason
        if self.with_token_ids:
            choice["prompt_token_ids"] = self.prompt_token_ids
            choice["token_ids"] = [t for p in pieces for t in p.token_ids]
        body = self._head("chat.completion" if self.is_chat else "text_completion")
        return {**body, "choices": [choice], "usage": self.usage(), "paceline": stats_body(pieces[-1].stats)}

    def usage(self) -> dict[str, int]:
        prompt, completion = len(self.prompt_token_ids), self._num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model_name}

    def _logprobs(self, records: Sequence[tuple[TokenLogprob, int]]) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        if self.is_chat:
            content = [
                {**self._token(r.token_id, r.logprob), "top_logprobs": [self._token(*t) for t in r.top[: self.num_top]]}
                for r, _ in records
            ]
            return {"content": content, "refusal": None}
        tokens = [self._text(r.token_id) for r, _ in records]
        top = [{self._text(t): lp for t, lp in (*r.top[: self.num_top], (r.token_id, r.logprob))} for r, _ in records]
        return {
            "tokens": tokens,
            "token_logprobs": [r.logprob for r, _ in records],
            "top_logprobs": top if self.num_top else None,
            "text_offset": [at for _, at in records],
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self.tokens.token_bytes(token_id)
        return {"token": raw.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(raw)}

    def _text(self, token_id: int) -> str:
        """A token as text; bytes that are no whole character are written out, so that two tokens never share a key."""
        raw = self.tokens.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)
