"""Response: an answer as the Responses API writes it: items in the order of the text, and the events of a stream."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from paceline.serving.sampling.request import RoundEvent
from paceline.serving.wire.calls import CallDelta
from paceline.serving.wire.choice import Choice, Piece, stats_body
from paceline.serving.wire.format import Answer, sse

Event = dict[str, Any]


class ResponseAnswer:
    """One growing answer: that of a chat with one choice, in the words of the Responses API. A WireAnswer."""

    def __init__(self, chat: Answer, *, answer_id: str, told: Mapping[str, Any]) -> None:
        """told: what every response repeats of its request."""
        self._chat, self._told = chat, told
        self._id = f"resp_{answer_id}"
        self._items = OutputItems(chat.choices[0], answer_id)
        self._sequence = itertools.count()

    # ---- the chat's ---------------------------------------------------------------------------------------------
    @property
    def choices(self) -> Sequence[Choice]:
        return self._chat.choices

    @property
    def num_completion_tokens(self) -> int:
        return self._chat.num_completion_tokens

    def take(self, index: int, event: RoundEvent) -> Piece:
        """Fold one round's event of the choice `index`."""
        return self._chat.take(index, event)

    # ---- a whole answer -----------------------------------------------------------------------------------------
    def body(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The whole answer at once, from all of its pieces."""
        for piece in pieces:
            for _ in self._items.add(piece):
                pass
        return self._ended(pieces[-1])

    # ---- a stream -----------------------------------------------------------------------------------------------
    def opening(self) -> bytes:
        """Before the first tokens."""
        response = self._response("in_progress")
        return self._written({"type": f"response.{name}", "response": response} for name in ("created", "in_progress"))

    def part(self, piece: Piece) -> bytes:
        """What a round adds."""
        events = self._items.add(piece)
        if piece.finish_reason is None:
            return self._written(events)
        written = self._written(events)
        response = self._ended(piece)
        return written + self._written([{"type": f"response.{response['status']}", "response": response}])

    def closing(self) -> bytes:
        """Nothing: the last piece has told the end."""
        return b""

    def failure(self, message: str, *, kind: str, code: str) -> bytes:
        """The end of an answer that broke off. code: of the service; clients know two words."""
        error = {"code": "invalid_prompt" if kind == "invalid_request_error" else "server_error", "message": message}
        response = self._response("failed", error={**error, "type": code})
        return self._written([{"type": "response.failed", "response": response}])

    def _written(self, events: Iterable[Event]) -> bytes:
        """Server-sent events, numbered; other than a chat's they have names."""
        return b"".join(
            b"event: " + event["type"].encode() + b"\n" + sse({**event, "sequence_number": next(self._sequence)})
            for event in events
        )  # fmt: skip

    # ---- the response -------------------------------------------------------------------------------------------
    def _ended(self, last: Piece) -> dict[str, Any]:
        if last.finish_reason == "length":
            response = self._response("incomplete", incomplete_details={"reason": "max_output_tokens"})
        else:
            response = self._response("completed", completed_at=int(time.time()))
        chat = self._chat.usage()
        usage = {
            "input_tokens": chat["prompt_tokens"],
            "input_tokens_details": {**chat["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": chat["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": chat["total_tokens"],
        }
        return {**response, "usage": usage, "paceline": stats_body(last.stats)}

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        return {
            "id": self._id, "object": "response", "created_at": self._chat.created, "status": status,
            "background": False, "completed_at": None, "error": None, "incomplete_details": None,
            "model": self._chat.model_name, "output": self._items.so_far(), "previous_response_id": None,
            "store": False, "truncation": "disabled", "usage": None, **self._told, **more,
        }  # fmt: skip


class OutputItems:
    """Messages and calls of one answer as they grow, the newest one open."""

    def __init__(self, choice: Choice, answer_id: str) -> None:
        self._choice, self._answer_id = choice, answer_id
        self._done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._call_index: int | None = None
        """Of the open item, where it is a call."""
        self._texts: list[str] = []
        """Of the open item: its text, or its arguments."""
        self._scores: list[dict[str, Any]] = []

    def so_far(self) -> list[dict[str, Any]]:
        """The items; one that is open is incomplete."""
        return [*self._done, *([] if self._open is None else [self._whole("incomplete")])]

    def add(self, piece: Piece) -> Iterator[Event]:
        """Fold a piece; yields the events that tell of it. The last piece closes the items."""
        at, scores = 0, self._choice.token_scores(piece.entries)
        for call in piece.calls:
            yield from self._say(piece.text[at : call.at], scores)
            at, scores = call.at, []
            yield from self._call(call)
        yield from self._say(piece.text[at:], scores)
        if piece.finish_reason is not None:
            if not self._done and self._open is None:
                yield from self._begin_message()
            is_cut = piece.finish_reason == "length" or (piece.finish_reason == "stop" and self._call_index is not None)
            yield from self._close("incomplete" if is_cut else "completed")

    def _say(self, text: str, scores: list[dict[str, Any]]) -> Iterator[Event]:
        if not text and not scores:
            return
        if self._open is None or self._open["type"] != "message":
            yield from self._begin_message()
        self._texts.append(text)
        self._scores += scores
        yield self._event("output_text.delta", content_index=0, delta=text, logprobs=scores)

    def _call(self, call: CallDelta) -> Iterator[Event]:
        if self._call_index != call.index:
            yield from self._close("completed")
            yield self._begin(
                f"fc_{self._answer_id}_{len(self._done)}", type="function_call", call_id=self._choice.call_id(call.index),
                name=call.name, arguments="",
            )  # fmt: skip
            self._call_index = call.index
        if call.arguments:
            self._texts.append(call.arguments)
            yield self._event("function_call_arguments.delta", delta=call.arguments)

    def _begin_message(self) -> Iterator[Event]:
        yield from self._close("completed")
        yield self._begin(f"msg_{self._answer_id}_{len(self._done)}", type="message", role="assistant", content=[])
        yield self._event("content_part.added", content_index=0, part=_text_part("", []))

    def _begin(self, item_id: str, **item: Any) -> Event:
        self._open = {"id": item_id, "status": "in_progress", **item}
        self._texts, self._scores, self._call_index = [], [], None
        return {"type": "response.output_item.added", "output_index": len(self._done), "item": dict(self._open)}

    def _close(self, status: str) -> Iterator[Event]:
        """End the open item, if there is one."""
        if self._open is None:
            return
        item = self._whole(status)
        if item["type"] == "message":
            part = item["content"][0]
            yield self._event("output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"])
            yield self._event("content_part.done", content_index=0, part=part)
        else:
            yield self._event("function_call_arguments.done", arguments=item["arguments"])
        yield {"type": "response.output_item.done", "output_index": len(self._done), "item": item}
        self._done.append(item)
        self._open = self._call_index = None

    def _whole(self, status: str) -> dict[str, Any]:
        """The open item with all that it holds."""
        assert self._open is not None
        text = "".join(self._texts)
        if self._open["type"] == "message":
            return {**self._open, "status": status, "content": [_text_part(text, self._scores)]}
        return {**self._open, "status": status, "arguments": text}

    def _event(self, name: str, **values: Any) -> Event:
        assert self._open is not None
        where = {"item_id": self._open["id"], "output_index": len(self._done)}
        return {"type": f"response.{name}", **where, **values}


def _text_part(text: str, scores: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}
