"""Fields: bodies are read from JSON, and every name in them is honoured, refused with a reason or named as ignored.

A name that is in none of the three is refused as unknown.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, model_validator

from paceline.errors import RequestError


class StrictModel(BaseModel):
    """A part of a request body: no unknown fields, no conversion between types."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, values: Any) -> Any:
        """Of the fields that are not there only the first: each would cost an error of its own."""
        if (
            cls.model_config["extra"] != "forbid"
            or not isinstance(values, dict)
            or len(values) <= len(cls.model_fields)
        ):
            return values
        names = {field.alias or name for name, field in cls.model_fields.items()}
        strange = next(k for k in values if k not in names)
        return {k: v for k, v in values.items() if k in names} | {strange: values[strange]}


Known = tuple[tuple[Any, ...], str]
"""Of a field that is not honoured: the values that ask for nothing, and the reason."""

REFUSED: dict[str, Known] = {
    "suffix": ((None, ""), "infilling is not offered by this model"),
    "functions": ((None, []), "use `tools` of /v1/chat/completions"),
    "function_call": ((None, "none"), "use `tool_choice`"),
    "tools": ((None, []), "tools belong to /v1/chat/completions"),
    "tool_choice": ((None, "none"), "tools belong to /v1/chat/completions"),
    "modalities": ((None, ["text"]), "only text is generated"),
    "audio": ((None,), "only text is generated"),
    "web_search_options": ((None,), "there is no web search"),
    "chat_template": ((None,), "the model's own chat template is used"),
    "documents": ((None, []), "write the documents into the messages"),
    "include_stop_str_in_output": ((None, False), "the text ends before the stop string"),
    "cache_salt": ((None,), "a tenant has a prefix cache of its own; use the header x-paceline-tenant"),
    "use_beam_search": ((None, False), "answers are sampled; use `n` for several"),
    "length_penalty": ((None, 1.0), "there is no beam search"),
    "echo": ((None, False), "the messages of a chat are not repeated; /v1/completions has `echo`"),
    "kv_transfer_params": ((None,), "prompts are read where answers are written"),
}  # fmt: skip
"""Fields that are known but not offered; values that ask for nothing are let through."""

IGNORED: dict[str, Known] = {
    "store": ((None, False), "answers are not stored"),
    "user": ((None,), "the caller changes nothing in an answer"),
    "safety_identifier": ((None,), "the caller changes nothing in an answer"),
    "prompt_cache_key": ((None,), "the prefix cache is found by the prompt's tokens alone"),
    "prompt_cache_retention": ((None,), "cached prefixes stay until their memory is needed"),
    "prompt_cache_options": ((None,), "the prefix cache is found by the prompt's tokens alone"),
    "service_tier": ((None, "auto", "default"), "there is one tier; the extension `priority` orders requests"),
    "reasoning_effort": ((None,), "the model has no levels; `chat_template_kwargs` has what its template knows"),
    "verbosity": ((None,), "the model has no verbosity levels"),
    "parallel_tool_calls": ((None,), "there are no `tools`"),
    "prediction": ((None,), "the service drafts by itself"),
    "guided_decoding_backend": ((None,), "there is one"),
    "spaces_between_special_tokens": ((None, True), "the tokenizer says where spaces stand"),
}
"""Hints that no answer depends on: any value is taken and the field named in the header x-paceline-ignored."""

RESPONSES_REFUSED: dict[str, Known] = {
    "previous_response_id": ((None,), "answers are not stored; send the whole conversation as `input`"),
    "conversation": ((None,), "conversations are not stored; send the whole conversation as `input`"),
    "background": ((None, False), "answers are not stored; keep the connection, for instance with `stream`"),
    "prompt": ((None,), "prompts are not stored; send `instructions` and `input`"),
    "context_management": ((None, []), "shorten `input`, or say with `truncate_prompt_tokens` how much of it is read"),
    "moderation": ((None,), "nothing is moderated here"),
}
"""The same of /v1/responses."""

RESPONSES_IGNORED: dict[str, Known] = {
    **{name: IGNORED[name] for name in ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "service_tier")},
    "store": ((None, False), "answers are not stored, so none can be fetched or continued by its id"),
    "truncation": ((None, "disabled"), "nothing is left out; `truncate_prompt_tokens` says how much of `input` is read"),
    "reasoning": ((None, {}), "the model has no levels; `chat_template_kwargs` of /v1/chat/completions has what its template knows"),
    "max_tool_calls": ((None,), "no tools are hosted, whose calls it counts"),
    "image": ((None,), "only text is read"),
}  # fmt: skip
"""The same of /v1/responses."""


class RequestBody(StrictModel):
    """A whole body."""

    model: str | None = None
    """As in /v1/models; None = the one that is served."""
    refused_fields: ClassVar[Mapping[str, Known]] = REFUSED
    ignored_fields: ClassVar[Mapping[str, Known]] = IGNORED
    """Of this route, by name."""
    _ignored: list[str] = PrivateAttr(default_factory=list)

    @property
    def ignored(self) -> list[str]:
        """Names of the hints in it that changed nothing, for the header x-paceline-ignored."""
        return self._ignored

    def leave_aside(self, hints: list[str]) -> None:
        """Note hints that were taken out of the body."""
        self._ignored += hints


class FieldError(RequestError):
    """A field of the body is wrong; `param` names it, `code` is OpenAI's for what clients act on."""

    def __init__(self, message: str, param: str | None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code

    @classmethod
    def of_rule(cls, rule: str, fields: Collection[str], param: str | None = None) -> FieldError:
        """The error of a rule; a rule about several fields names the one to change first."""
        first_word = rule.partition(" ")[0]
        if param is None and first_word in fields:
            param = first_word
        return cls(f"{param}: {rule}" if param and not rule.startswith(param) else rule, param)

    def renamed(self, names: Mapping[str, str]) -> FieldError:
        """The same of a route that has other names for some fields: name of the first part of `param` -> its own."""
        first = (self.param or "").partition(".")[0]
        own = names.get(first)
        if own is None:
            return self
        head, text = str(self.param), str(self)
        return FieldError(own + text.removeprefix(head) if text.startswith(head) else text, own, self.code)


def parse_body(raw: bytes, kind: type[BaseModel]) -> Any:
    """Read a request body; raises FieldError that names the field and the rule."""
    return parse_values(parse_json(raw), kind)


_EXACT = 2.0**53
"""Below it every whole number has a float of its own."""


def _number(text: str) -> float | int:
    """A number with a point; a whole one as JSON of languages without integers writes it (`100.0`) is an integer."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < _EXACT else value


def parse_json(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body; raises FieldError when it is none."""
    try:
        values = json.loads(raw.decode("utf-8-sig"), parse_constant=_no_constant, parse_float=_number)
    except (ValueError, RecursionError) as e:
        raise FieldError(f"the body must be JSON: {e}", None) from e
    if not isinstance(values, dict):
        raise FieldError(f"the body must be a JSON object, got {type(values).__name__}", None)
    if b"\\ud" in raw.lower():  # an escaped half of a character: no tokenizer takes it, and no answer can repeat it
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise FieldError("the body must be Unicode text, got half of a surrogate pair", None) from None
        except RecursionError as e:
            raise FieldError(f"the body must be JSON: {e}", None) from e
    return values


def parse_values(values: dict[str, Any], kind: type[BaseModel]) -> Any:
    """The body of the given kind; raises FieldError that names the field and the rule."""
    ignored = []
    owner = kind if issubclass(kind, RequestBody) else RequestBody
    refused, others = owner.refused_fields, owner.ignored_fields
    for name in [k for k in values if k not in kind.model_fields and (k in refused or k in others)]:
        neutral, reason = refused.get(name) or others[name]
        value = values.pop(name)
        if not any(value == x and type(value) is type(x) for x in neutral):
            if name in refused:
                raise FieldError(f"{name} is not supported: {reason}", name)
            ignored.append(name)
    strange = next((k for k in values if k not in kind.model_fields), None)
    if strange is not None:
        raise FieldError(f"{strange[:64]} is not a field of this request; remove it", strange[:64])
    try:
        body = kind.model_validate(values)
    except ValidationError as e:
        raise _field_error(e, kind, values) from e
    except RecursionError as e:  # JSON is written with fewer levels than it is read with
        raise FieldError("the body must not be nested so deeply", None) from e
    if isinstance(body, RequestBody):
        body.leave_aside(ignored)
    return body


def _sent_path(loc: Sequence[int | str], values: Any, *, is_missing: bool) -> Iterator[str]:
    """The keys and positions of pydantic's path that are the body's own; the others name members of unions.

    is_missing: the last one is not there.
    """
    for i, part in enumerate(loc):
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            if not is_missing or i < len(loc) - 1:
                continue
        yield str(part)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _field_error(error: ValidationError, kind: type[BaseModel], values: dict[str, Any]) -> FieldError:
    """The most telling of pydantic's complaints, since unions complain once per member: the one that looked deepest."""
    first = max(error.errors(), key=lambda e: (e["type"] == "extra_forbidden", len(e["loc"])))
    name = ".".join(_sent_path(first["loc"], values, is_missing=first["type"] == "missing")) or None
    if first["type"] == "extra_forbidden":
        return FieldError(f"{name} is not a field of this request; remove it", name)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] in ("model_type", "model_attributes_type"):
        message = "must be a JSON object"
    return FieldError.of_rule(message, kind.model_fields, name)
