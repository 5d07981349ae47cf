"""Wire format: OpenAI's bodies, chunks, usage and errors around the choices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from paceline.serving.sampling.request import RoundEvent
from paceline.serving.wire.choice import Choice, Piece, stats_body

_encode = msgspec.json.Encoder().encode
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
"""Characters that clients take for the end of a line, and so of an event, though only line feeds are; and how JSON may write them."""


def to_json(body: dict[str, Any]) -> bytes:
    return _encode(body)


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event, whose data is one line to every client."""
    data = _encode(body)
    for character, escaped in _LINE_ENDS:
        data = data.replace(character, escaped)
    return b"data: " + data + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class WireAnswer(Protocol):
    """One growing answer: takes round events, and writes what the client gets."""

    @property
    def choices(self) -> Sequence[Choice]: ...

    @property
    def num_completion_tokens(self) -> int: ...

    def take(self, index: int, event: RoundEvent) -> Piece:
        """Fold one round's event of the choice `index`."""

    def body(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The whole answer at once, from the pieces of all choices."""

    def opening(self) -> bytes:
        """Server-sent events before the first tokens; b"" = none, as for the others."""

    def part(self, piece: Piece) -> bytes:
        """Those of a piece."""

    def closing(self) -> bytes:
        """Those after the last piece."""

    def failure(self, message: str, *, kind: str, code: str) -> bytes:
        """Those of an answer that broke off; nothing follows."""


class Answer:
    """An answer of completions or chat: hands round events to its choices, then builds chunks or a body.

    The `paceline` object stands beside the choices when there is one choice, and in each of them when there are several.
    """

    def __init__(
        self, choices: Sequence[Choice], *, answer_id: str, model_name: str, is_chat: bool, num_prompts: int = 1,
        with_usage: bool = False, with_running_usage: bool = False,
    ) -> None:  # fmt: skip
        """num_prompts: whose choices stand side by side, as many of each. with_usage: a last chunk with the usage; with_running_usage: the usage so far in every chunk."""
        self.choices = choices
        self.id, self.model_name, self.is_chat = answer_id, model_name, is_chat
        self.created = int(time.time())
        per_prompt = len(choices) // num_prompts
        self._by_prompt = [choices[i : i + per_prompt] for i in range(0, len(choices), per_prompt)]
        self._with_usage, self._with_running_usage = with_usage, with_running_usage
        self._has_chunk = False

    @property
    def num_completion_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(c.num_tokens for c in self.choices)

    def take(self, index: int, event: RoundEvent) -> Piece:
        """Fold one round's event of the choice `index`."""
        return self.choices[index].take(event)

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """One streaming chunk; a choice's last one has the finish reason and the `paceline` object."""
        body = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        body["choices"] = [self.choices[piece.index].chunk(piece)]
        if self.is_chat and not self._has_chunk:
            body |= self.choices[0].told_prompt()
        self._has_chunk = True
        if self._with_usage:
            body["usage"] = self.usage() if self._with_running_usage else None
        if piece.finish_reason is not None and len(self.choices) == 1:
            body["paceline"] = stats_body(piece.stats)
        return body

    def usage_chunk(self) -> dict[str, Any]:
        """The extra last chunk of stream_options.include_usage."""
        body = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        return {**body, "choices": [], "usage": self.usage(), **self._stats()}

    def opening(self) -> bytes:
        """Nothing."""
        return b""

    def part(self, piece: Piece) -> bytes:
        """One chunk."""
        return sse(self.chunk(piece))

    def closing(self) -> bytes:
        """The usage, where it is asked for, and the mark without which a stream is incomplete."""
        return (sse(self.usage_chunk()) if self._with_usage else b"") + SSE_DONE

    def failure(self, message: str, *, kind: str, code: str) -> bytes:
        """An error event."""
        return sse(error_body(message, kind=kind, code=code))

    def body(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The whole answer at once, from the pieces of all choices."""
        by_choice: list[list[Piece]] = [[] for _ in self.choices]
        for piece in pieces:
            by_choice[piece.index].append(piece)
        body = self._head("chat.completion" if self.is_chat else "text_completion")
        body["choices"] = [c.body(own) for c, own in zip(self.choices, by_choice, strict=True)]
        if self.is_chat:
            body |= self.choices[0].told_prompt()
            scores = self.choices[0].prompt_logprobs()
            if scores is not None:
                body["prompt_logprobs"] = scores
        return {**body, "usage": self.usage(), **self._stats()}

    def usage(self) -> dict[str, Any]:
        """Tokens so far: each prompt once, whatever the number of its choices; cached is what all of them found cached."""
        prompt, completion = sum(own[0].num_prompt_tokens for own in self._by_prompt), self.num_completion_tokens
        known = [[c.stats.num_cached_tokens for c in own if c.stats is not None] for own in self._by_prompt]
        cached = sum(min(own, default=0) for own in known)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _stats(self) -> dict[str, Any]:
        stats = self.choices[0].stats
        return {"paceline": stats_body(stats)} if len(self.choices) == 1 and stats is not None else {}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model_name}
