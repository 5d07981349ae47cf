"""Calls: tool calls are read out of an answer's text as it grows, so that a stream and a whole answer hold the same."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes a call."""

    begin: str
    """Before each call; '' = a call is an answer that is a JSON object."""
    end: str
    """Behind each call."""
    arguments_key: str | None = "arguments"
    """Of the JSON object `{"name": ..., key: ...}`; None = `name {...}`."""


HERMES = CallFormat("<tool_call>", "</tool_call>")
"""Nous Hermes, Qwen 2.5 and Qwen 3."""
LLAMA = CallFormat("", "", "parameters")
"""Llama 3.1 and later, for functions that are described as JSON."""
MARKED = CallFormat("<|call|>", "\n", None)
"""The bundled target."""
PYTHON_TAG = "<|python_tag|>"
"""Before a Llama call, or not."""

_MAX_HEAD = 256
"""Characters within which a bare object must have shown that it is a call: a name of 64 and the keys around it."""
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([\w.-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)'
)
_NAMED_HEAD = re.compile(r"[ \t]*([\w.-]{1,64})[ \t]*(?=\{)")


class CallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a piece of text adds to a call."""

    index: int
    name: str | None = None
    """With the first piece."""
    arguments: str = ""
    at: int = 0
    """Characters of the piece's content that come before it."""


class CallParser:
    """Divides one answer into content and calls of known functions; what is no such call stays content.

    Blanks around calls are dropped. Arguments are passed on as the model writes them, JSON or not; a JSON text of them as what
    it holds.
    """

    def __init__(
        self, form: CallFormat, names: Collection[str], *, is_parallel: bool = True, is_forced: bool = False
    ) -> None:
        """is_parallel: False = calls behind the first are dropped. is_forced: the answer is nothing but calls."""
        self._form, self._names, self._is_parallel, self._is_forced = form, frozenset(names), is_parallel, is_forced
        self._state = "text"  # text | head | arguments | tail
        self._text = ""  # not yet divided
        self._blanks = ""  # at the end of the content so far; dropped before a call
        self._may_begin = True  # a bare call stands at the beginning or behind another
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._is_open = False  # the object around the arguments
        self._goes_on = False  # it has more keys, or its end was seen
        self._held: str | None = None  # arguments that are no object, passed on when they are whole
        self._content: list[str] = []
        self._deltas: list[CallDelta] = []
        self._num_seen = 0
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """Take more text; returns the content and the parts of calls that are sure."""
        self._text += text
        while self._text and getattr(self, f"_in_{self._state}")():
            pass
        return self._take()

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are calls, all of them with the end of their arguments."""
        is_open = self._state == "arguments" and (self._is_parallel or self._num_seen == 1)
        return self.num_calls > 0 and not is_open

    def finish(self, *, is_cut: bool = False) -> tuple[str, list[CallDelta]]:
        """The answer is over: what was held back, but for the beginning of a call.

        is_cut: it was ended before the model did; otherwise only forced answers end within a call.
        """
        if self._state == "head":
            if not self._whole(self._text) and not (self._is_forced or (is_cut and self._begins_call())):
                self._say(self._form.begin + self._text)
        elif self._state == "text" and not self._is_forced:
            self._say(self._text)
        elif self._held is not None:
            self._flush(is_whole=False)
        self._text = ""
        if not self.num_calls:
            self._content.append(self._blanks)
        return self._take()

    def _take(self) -> tuple[str, list[CallDelta]]:
        out = "".join(self._content), self._deltas
        self._content, self._deltas = [], []
        return out

    def _say(self, text: str) -> None:
        kept = text.rstrip()
        if kept:
            self._content.append(self._blanks + kept)
            self._blanks = ""
        self._blanks += text[len(kept) :]

    def _call(self, name: str, arguments: str = "") -> None:
        self._blanks = ""
        self._num_seen += 1
        if self._is_parallel or self._num_seen == 1:
            self.num_calls += 1
            self._deltas.append(CallDelta(index=self._num_seen - 1, name=name, arguments=arguments, at=self._at()))

    # ---- states: True = go on with what is left ---------------------------------------------------------------
    def _in_text(self) -> bool:
        begin = self._form.begin
        if not begin:
            return self._in_bare_text()
        before, found, after = self._text.partition(begin)
        if found:
            self._say(before)
            self._text, self._state = after, "head"
            return True
        keep = _begun(before, begin)
        self._say(before[: len(before) - keep])
        self._text = before[len(before) - keep :]
        return False

    def _in_bare_text(self) -> bool:
        if self._may_begin and self._num_seen:  # blanks behind a call, whichever piece they came in
            self._text = self._text.lstrip()
        rest = self._text.lstrip() if not self._num_seen else self._text.lstrip(" \t\r\n;")
        if self._may_begin and PYTHON_TAG.startswith(rest):
            return False
        if self._may_begin and rest.removeprefix(PYTHON_TAG).lstrip().startswith("{"):
            self._state = "head"
            return True
        if self._may_begin and rest.startswith(PYTHON_TAG) and not rest.removeprefix(PYTHON_TAG).strip():
            return False
        self._may_begin = False
        self._say(self._text)
        self._text = ""
        return False

    def _in_head(self) -> bool:
        named = self._form.arguments_key is None
        text = self._text
        if not self._form.begin:
            text = text.lstrip(" \t\r\n;").removeprefix(PYTHON_TAG)
        match = (_NAMED_HEAD if named else _HEAD).match(text)
        if match is not None and match[1] in self._names:
            self._call(match[1])
            self._text, self._state = text[match.end() :], "arguments"
            self._depth, self._in_string, self._is_escaped = 0, False, False
            self._held = None if self._text.startswith(("{", "[")) else ""
            return True
        if not self._form.begin:
            if match is None and len(text) <= _MAX_HEAD:
                return False
            self._may_begin, self._state = False, "text"
            return True
        whole, found, after = self._text.partition(self._form.end)
        if match is None and not found:
            return False
        if found and match is None and self._whole(whole):  # else a name that comes first and is unknown
            self._text = after
        else:
            self._say(self._form.begin)
        self._state = "text"
        return True

    def _begins_call(self) -> bool:
        """Whether what stands behind the marker can be the beginning of a call; without a marker it may be an answer."""
        text = self._text.strip()
        if self._form.arguments_key is None:
            return any(name.startswith(text) for name in self._names)
        return bool(self._form.begin) and text[:1] in ("", "{")

    def _whole(self, text: str) -> bool:
        """Whether a text is a call, in whatever order of its keys; then it is noted."""
        try:
            call = json.loads(text)
            name = call.get("name") if isinstance(call, dict) else None
            if not isinstance(name, str) or name not in self._names:
                return False
            arguments = _as_arguments(call.get("arguments", call.get("parameters")))
        except (ValueError, RecursionError):
            return False
        self._call(name, arguments)
        return True

    def _in_arguments(self) -> bool:
        """Pass on one JSON value; an object, or whatever stands there until the object around it goes on."""
        at = self._end_of_value()
        if at is None:
            self._pass_on(self._text)
            self._text = ""
            return False
        self._pass_on(self._text[:at])
        if self._held is not None:
            self._flush(is_whole=True)
        self._text, self._depth = self._text[at:], 1  # of the object around it
        self._is_open, self._goes_on = self._form.arguments_key is not None, False
        self._state = "tail"
        return True

    def _end_of_value(self) -> int | None:
        """Read on in a JSON value; characters up to its end, or to what ends it if it is no object."""
        for i, c in enumerate(self._text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif c == "\\":
                    self._is_escaped = True
                elif c == '"':
                    self._in_string = False
            elif c == '"':
                self._in_string = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth <= 0:  # below: the end of the object around a value that is none itself
                    return i + 1 if self._depth == 0 else i
            elif c == "," and self._depth == 0:
                return i
        return None

    def _flush(self, *, is_whole: bool) -> None:
        """Pass on what was held back: a string stands for the JSON that it holds, nothing and null for no arguments."""
        text, self._held = (self._held or "").strip(), None
        if is_whole:
            with contextlib.suppress(ValueError):  # no JSON: as it is
                text = _as_arguments(json.loads(text or "null"))
        self._pass_on(text)

    def _pass_on(self, text: str) -> None:
        if self._held is not None:
            self._held += text
            return
        if text and (self._is_parallel or self._num_seen == 1):
            self._deltas.append(CallDelta(index=self._num_seen - 1, arguments=text, at=self._at()))

    def _at(self) -> int:
        return sum(map(len, self._content))

    def _in_tail(self) -> bool:
        form = self._form
        if self._is_open and not self._skip_object():
            return False
        end = form.end.strip()
        rest = self._text.lstrip()
        if end:  # a brace too many is no answer
            rest = rest.lstrip("} \t\r\n")
        if not rest or (end.startswith(rest) and rest != end):
            return False
        self._text, self._state, self._may_begin = rest.removeprefix(end), "text", True
        return bool(self._text)

    def _skip_object(self) -> bool:
        """Read on to the end of the object around the arguments, whatever other keys it has; whether it was reached."""
        if not self._goes_on:
            self._text = self._text.lstrip()
            if self._text[:1] not in (",", "}", ""):  # no JSON: it ends here
                self._is_open = False
                return True
            self._goes_on = bool(self._text)
        text, end = self._text, self._form.end.strip()
        stop = text.find(end) if end else -1  # where it stands, even inside a text that does not end, the call is over
        has_end = stop >= 0
        if not has_end:
            stop = len(text) - _begun(text, end)
        self._text = text[:stop]
        at = self._end_of_value()
        self._text = text[stop if at is None else at :]
        self._is_open = at is None and not has_end
        return not self._is_open


def _begun(text: str, mark: str) -> int:
    """Characters at the end of a text with which a mark may begin."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def _as_arguments(value: Any) -> str:
    """JSON of a call's arguments, which some models write as a string that holds it."""
    if value is None or value == "":
        return "{}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()  # half of a surrogate pair stays escaped


def merged(deltas: list[CallDelta]) -> list[CallDelta]:
    """Deltas with one entry a call."""
    out: list[CallDelta] = []
    for delta in deltas:
        if out and out[-1].index == delta.index:
            out[-1] = CallDelta(
                index=delta.index, name=out[-1].name or delta.name, arguments=out[-1].arguments + delta.arguments,
                at=out[-1].at,
            )  # fmt: skip
        else:
            out.append(delta)
    return out
