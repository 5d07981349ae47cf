"""Calls: tool calls are read out of an answer's text as it grows, so that a stream and a whole answer hold the same."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes a call."""

    begin: str
    """Before each call, or before all of a list; '' = a call is an answer that is a JSON object."""
    end: str
    """Behind each call."""
    between: str
    """Between two calls."""
    shape: Literal["object", "list", "named", "tagged"] = "object"
    """A JSON object `{"name": ..., key: ...}`, a list of such, `name {...}`, or a tag for the name and for each argument."""
    key: str = "arguments"
    """Of the JSON object."""
    behind_name: str = ""
    """Between a name and the arguments that follow it."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Parts of a call that may be special tokens and are read all the same."""
        return self.begin, self.end, self.behind_name, _CALL_ID


HERMES = CallFormat("<tool_call>", "</tool_call>", "\n")
"""Nous Hermes, Qwen 2.5 and Qwen 3."""
CODER = CallFormat("<tool_call>", "</tool_call>", "\n", "tagged")
"""Qwen3-Coder, Qwen 3.5 and later."""
LLAMA = CallFormat("", "", "; ", key="parameters")
"""Llama 3.1 and later, for functions that are described as JSON."""
MARKED = CallFormat("<|call|>", "\n", "", "named", behind_name=" ")
"""The bundled target."""
MISTRAL = CallFormat("[TOOL_CALLS]", "", ", ", "list", behind_name="[ARGS]")
"""Mistral up to version 7 of its tokenizer."""
MISTRAL_NAMED = CallFormat("[TOOL_CALLS]", "", "", "named", behind_name="[ARGS]")
"""Mistral from version 11 on; what either writes is read of both."""
PYTHON_TAG = "<|python_tag|>"
"""Before a Llama call, or not."""
FUNCTION_TAG, PARAMETER_TAG, FUNCTION_END, PARAMETER_END = "<function=", "<parameter=", "</function>", "</parameter>"
"""Inside a tagged call."""
_CALL_ID = "[CALL_ID]"
"""Before an id of the model's own, which is not passed on."""

_MAX_HEAD = 256
"""Characters within which a bare object must have shown that it is a call: a name of 64 and the keys around it."""
_MAX_HELD = 1024
"""Characters of a value in which the beginning of its end is looked for: a model that repeats a tag for ever must not be read again
and again."""
_MAX_BRANCHES = 64
"""Looks at a schema, after which it may be of anything: what refers to itself has no end."""
_MAX_COPIED = 4096
"""Entries that looks at a schema may copy: every branch has those around it too."""
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([\w.-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)'
)
_NAMED_HEAD = re.compile(r"[ \t]*([\w.-]{1,64})[ \t]*(?:\[CALL_ID\]\w*)?(?:\[ARGS\][ \t]*)?(?=\{)")
_BEGUN_NAMED_HEAD = re.compile(rf"[\w.\[\] \t-]{{0,{_MAX_HEAD}}}")


def _begun_tag(*tags: str) -> str:
    """Pattern of what such a tag may begin with, also nothing."""
    return "|".join(re.escape(tag[:n]) for tag in tags for n in range(len(tag), -1, -1))


# A function's tag is a call's where a tag that belongs to it follows, for a text may just speak of it.
_INSIDE = (PARAMETER_TAG, FUNCTION_END, CODER.end)
_FUNCTION = re.compile(rf"(?:<tool_call>)?\s*<function=([\w.-]{{1,64}})>\s*(?={'|'.join(_INSIDE)})")
_BEGUN_FUNCTION = re.compile(
    rf"(?:<tool_call>)?\s*(?:{_begun_tag(FUNCTION_TAG)}|<function=[\w.-]{{1,64}}(?:>\s*(?:{_begun_tag(*_INSIDE)}))?)"
)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")


def _value_end(*at_end: str) -> re.Pattern[str]:
    """The end of a value: its closing tag or one that was left out, each told by what follows, for a value may hold them.

    Behind one that was left out, the name of the next parameter is a group. at_end: what else may follow.
    """
    call = "|".join((CODER.begin, FUNCTION_TAG, *at_end))
    return re.compile(
        rf"\n?(?:</parameter>\s*(?={PARAMETER_TAG}|{FUNCTION_END}|{CODER.end}|{call})"
        rf"|(?=</function>\s*(?:{CODER.end}|{call})|</tool_call>\s*(?:{call})))"
        rf"|\n(?={_PARAMETER.pattern})" + "".join(rf"|\n?{end}" for end in at_end)
    )


_VALUE_END, _LAST_VALUE_END, _GIVEN_VALUE_END = _value_end(), _value_end(r"\Z"), re.compile("\n</parameter>\n")
_BEGUN_VALUE_END = re.compile(
    r"\n?(?:</(?:parameter|function|tool_call)>\s*)*"
    rf"(?:<parameter=[^<>\n]*|{_begun_tag(CODER.begin, FUNCTION_TAG, PARAMETER_END, *_INSIDE)})\Z"
)
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""As some templates write them."""
_TYPES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip


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
    it holds. Those between tags become JSON by their types, the first of a name where there are several.
    """

    def __init__(
        self, form: CallFormat, functions: Mapping[str, Any], *, is_parallel: bool = True, is_forced: bool = False,
        keeps_form: bool = False,
    ) -> None:  # fmt: skip
        """No text yet.

        Args:
            functions: name -> JSON schema of its arguments.
            is_parallel: False = calls behind the first are dropped.
            is_forced: the answer is nothing but calls.
            keeps_form: a grammar sees to it that calls are written as they should be.
        """
        self._form, self._functions, self._is_parallel, self._is_forced = form, functions, is_parallel, is_forced
        self._value_end = _GIVEN_VALUE_END if keeps_form else _VALUE_END
        self._marks = (form.begin, FUNCTION_TAG) if form.shape == "tagged" else (form.begin,)
        self._mark = form.begin  # the one before the head
        self._state = "text"  # text | head | arguments or parameters and value | tail
        self._text = ""  # not yet divided
        self._is_over = False  # no text follows, and the model ended it
        self._blanks = ""  # at the end of the content so far; dropped before a call
        self._may_begin = True  # a bare call stands at the beginning or behind another
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self._is_open = False  # the object around the arguments
        self._goes_on = False  # it has more keys, or its end was seen
        self._in_list = False  # the call is one of a list
        self._held: str | None = None  # arguments that are no object, passed on when they are whole
        self._schema: dict[str, Any] = {}  # of the arguments between tags
        self._properties: dict[str, Any] = {}  # in it
        self._given: set[str] = set()  # their names so far
        self._types: set[str] | None = None  # of the one that is read; None = it is dropped
        self._lead, self._value = "", ""  # what stands before it, and itself so far where it is passed on whole
        self._is_fresh = False  # nothing of it was read
        self._content: list[str] = []
        self._deltas: list[CallDelta] = []
        self._num_seen = 0
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """Take more text; returns the content and the parts of calls that are sure."""
        self._text += text
        self._divide()
        return self._take()

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are calls, all of them with the end of their arguments."""
        is_open = self._state in ("arguments", "parameters", "value") and (self._is_parallel or self._num_seen == 1)
        return self.num_calls > 0 and not is_open

    def finish(self, *, is_cut: bool = False) -> tuple[str, list[CallDelta]]:
        """The answer is over: what was held back, but for the beginning of a call.

        is_cut: it was ended before the model did; otherwise only forced answers end within a call, but for closing tags.
        """
        self._is_over = not is_cut
        if self._state in ("parameters", "value"):
            self._divide()
        if self._state == "head":
            if not self._whole(self._text) and not (self._is_forced or (is_cut and self._begins_call())):
                self._say(self._mark + self._text)
        elif self._state == "text" and not self._is_forced:
            self._say(self._text)
        elif self._held is not None:
            self._flush(is_whole=False)
        self._text = ""
        if not self.num_calls:
            self._content.append(self._blanks)
        return self._take()

    def _divide(self) -> None:
        while (self._text or self._is_over) and getattr(self, f"_in_{self._state}")():
            pass

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
        text = self._text
        if not self._form.begin:
            return self._in_bare_text()
        found = min(((at, mark) for mark in self._marks if (at := text.find(mark)) >= 0), default=None)
        if found is not None:
            at, self._mark = found
            self._say(text[:at])
            self._text, self._state = text[at + len(self._mark) :], "head"
            return True
        keep = max(_begun(text, mark) for mark in self._marks)
        self._say(text[: len(text) - keep])
        self._text = text[len(text) - keep :]
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
        if self._form.shape == "tagged":
            return self._in_tagged_head()
        named, is_mistral = self._form.shape == "named", self._form.begin == MISTRAL.begin
        text = self._text
        if not self._form.begin:
            text = text.lstrip(" \t\r\n;").removeprefix(PYTHON_TAG)
        if is_mistral:
            text = text.lstrip()
            named = not text.startswith(("[", "{"))
            text = text if named else text.removeprefix("[").lstrip()
        match = _NAMED_HEAD.match(text, 0, _MAX_HEAD) if named else _HEAD.match(text)
        if match is not None and match[1] in self._functions:
            self._call(match[1])
            self._text, self._state = text[match.end() :], "arguments"
            self._depth, self._in_string, self._is_escaped = 0, False, False
            self._held = None if self._text.startswith(("{", "[")) else ""
            self._is_open, self._in_list = not named, is_mistral and not named
            return True
        if is_mistral:
            return self._no_head() if match is not None else self._in_other_head(text, named)
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

    def _no_head(self) -> bool:
        """The mark is content, and what follows it may hold calls."""
        self._say(self._mark)
        self._state = "text"
        return True

    def _in_other_head(self, text: str, named: bool) -> bool:
        """A head of Mistral's that may still become one, or an object whose keys come in another order."""
        if named or text[:1] not in ("", "{"):
            return not _BEGUN_NAMED_HEAD.fullmatch(text) and self._no_head()
        try:
            at = json.JSONDecoder().raw_decode(text)[1]
        except (ValueError, RecursionError):
            return False
        if not self._whole(text[:at]):
            return self._no_head()
        self._text, self._state, self._in_list, self._is_open = text[at:], "tail", True, False
        return True

    def _in_tagged_head(self) -> bool:
        text = self._mark + self._text
        match = _FUNCTION.match(text)
        if match is not None and match[1] in self._functions:
            self._call(match[1])
            self._schema, self._given = self._functions[match[1]], set()
            self._properties = properties_of(self._schema)
            self._text, self._state = text[match.end() :], "parameters"
            return True
        return not (match is None and _BEGUN_FUNCTION.fullmatch(text)) and self._no_head()

    def _begins_call(self) -> bool:
        """Whether what stands behind the marker can be the beginning of a call; without a marker it may be an answer."""
        text = self._text.strip()
        if self._form.shape == "tagged":
            text = (self._mark + self._text).removeprefix(CODER.begin).strip()
            tags = [f"{FUNCTION_TAG}{name}>" for name in self._functions]
            return any(tag.startswith(text) or text.startswith(tag) for tag in tags)
        if self._form.begin == MISTRAL.begin and text[:1] in ("[", "{"):
            return text.lstrip("[ \n")[:1] in ("", "{")
        if self._form.shape in ("list", "named"):
            return any(name.startswith(text.partition("[")[0]) for name in self._functions)
        return bool(self._form.begin) and text[:1] in ("", "{")

    def _whole(self, text: str) -> bool:
        """Whether a text is a call, in whatever order of its keys; then it is noted."""
        try:
            call = json.loads(text)
            name = call.get("name") if isinstance(call, dict) else None
            if not isinstance(name, str) or name not in self._functions:
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
        self._state, self._goes_on = "tail", False
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
        if self._in_list and rest:
            self._text, self._in_list = rest[1:] if rest[0] in ",]" else rest, False
            self._mark, self._state = f"{form.begin}[", "head" if rest[0] == "," else "text"
            return True
        if end:  # a brace too many is no answer
            rest = rest.lstrip("} \t\r\n")
        if not rest or (end.startswith(rest) and rest != end):
            return False
        self._text, self._state, self._may_begin = rest.removeprefix(end), "text", True
        return bool(self._text)

    def _in_parameters(self) -> bool:
        """Read on to the next parameter or to the end of the call; what is neither is dropped."""
        text = self._text.lstrip()
        match = _PARAMETER.match(text)
        if match is not None:
            key = match[1]
            found = branches(self._properties.get(key), self._schema)
            self._types = None if key in self._given else {str(branch.get("type")) for branch in found}
            self._lead = f"{', ' if self._given else '{'}{json.dumps(key, ensure_ascii=False)}: "
            self._text, self._state, self._value, self._is_fresh = text[match.end() :], "value", "", True
            self._given.add(key)
            if self._types == {"string"}:
                self._pass_on(self._lead + '"')
            return True
        if text.startswith((FUNCTION_END, CODER.end, CODER.begin, FUNCTION_TAG)) or (self._is_over and not text):
            self._pass_on("}" if self._given else "{}")
            self._text, self._state = text.removeprefix(FUNCTION_END), "tail"
            return True
        if not self._is_over and len(text) <= _MAX_HELD and _BEGUN_VALUE_END.fullmatch(text):
            self._text = text
            return False
        at = text.find("<", 1)
        self._text = text[at:] if at > 0 else ""
        return True

    def _in_value(self) -> bool:
        """Read on in the value of a parameter: a text is passed on as it comes, another when it is whole."""
        if self._is_fresh:
            self._text, self._is_fresh = self._text.removeprefix("\n"), False
            return True
        text, ends = self._text, _LAST_VALUE_END if self._is_over else self._value_end
        expected = self._properties.keys() - self._given
        end = next((m for m in ends.finditer(text) if m.lastindex is None or m[1] in expected), None)
        begun = end or _BEGUN_VALUE_END.search(text, max(0, len(text) - _MAX_HELD))
        value = text[: begun.start()] if begun else text
        self._text = text[end.end() if end else len(value) :]
        if self._types == {"string"}:
            self._pass_on(json.dumps(value, ensure_ascii=False)[1:-1] + ('"' if end else ""))
        else:
            self._value += value
            if end and self._types is not None:
                self._pass_on(self._lead + _json_of(self._value, self._types))
        self._state = "parameters" if end else "value"
        return end is not None

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


def _json_of(text: str, types: set[str]) -> str:
    """JSON of a value that stands between tags: what is JSON of its types is that, all else a text."""
    written = _PYTHON.get(text.strip(), text.strip())
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        found = _types_of(msgspec.json.decode(written)) - {"string"}
        if "string" not in types or found & types:
            return written
    return json.dumps(text, ensure_ascii=False)


def properties_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Name -> schema of the arguments that an object's schema describes."""
    found = branches(schema, schema)[0].get("properties")
    return found if isinstance(found, dict) else {}


def branches(schema: Any, root: dict[str, Any]) -> list[dict[str, Any]]:
    """Schemas of one type each, of which a value keeps to one; one without a type where that cannot be said.

    root: what references point into.
    """
    found: list[dict[str, Any]] = []
    todo, num_copied = [schema], 0
    for _ in range(_MAX_BRANCHES):
        if not todo:
            return found
        node = todo.pop(0)
        node = node if isinstance(node, dict) else {}
        key = next((k for k in ("$ref", "anyOf", "oneOf", "allOf") if k in node), "")
        parts: Any = [_target(root, node[key])] if key == "$ref" else node.get(key)
        is_split = (
            isinstance(parts, list)
            and 0 < len(parts) <= _MAX_BRANCHES
            and all(isinstance(part, dict) for part in parts)
        )
        if is_split and (key != "allOf" or len(parts) == 1):
            num_copied += len(node) * len(parts)
            if len(todo) + len(parts) > _MAX_BRANCHES or num_copied > _MAX_COPIED:
                break
            todo += [{k: v for k, v in node.items() if k != key} | part for part in parts]
        else:
            found += _typed(node)
    return [schema]


def _typed(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """A schema as one for each of its types, with the values of that type where it lists some."""
    types, values = schema.get("type"), [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and types is None:
        types = list(dict.fromkeys(_TYPES[type(value)] for value in values))
    types = types if isinstance(types, list) else [types]
    if not types or not all(isinstance(t, str) for t in types):
        return [schema]
    if not isinstance(values, list):
        return [{**schema, "type": t} for t in types]
    own = {t: [value for value in values if t in _types_of(value)] for t in types}
    return [{**schema, "type": t, "enum": own[t]} for t in types if own[t]] or [schema]


def _types_of(value: Any) -> set[str]:
    return {_TYPES[type(value)], *(("number",) if type(value) is int else ())}


def _target(root: dict[str, Any], ref: Any) -> Any:
    """What a reference inside a schema points to; None = nothing."""
    found: Any = root if str(ref).startswith("#") else None
    for part in str(ref).split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


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
