"""Items: what a request of the Responses API holds, and the conversation of a chat that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag, model_validator

from paceline.serving.wire.fields import StrictModel
from paceline.serving.wire.forms import JsonObjectFormat, TextFormat
from paceline.serving.wire.messages import MAX_PARTS, MAX_TOOLS, CacheControl, FunctionSpec, Tool, refusal_as

MAX_ITEMS = 4096
_ITEM_KINDS = ("message", "function_call", "function_call_output", "reasoning")
_PART_KINDS = ("input_text", "output_text", "refusal")
_OF_ANSWERS = ("annotations", "logprobs", "parsed", "parsed_arguments")
"""What answers, and openai's client that parses them, add to items: it says nothing when it comes back."""


def _without_extras(values: Any) -> Any:
    """An item without what answers add and without fields that hold nothing: clients send back what they were given."""
    if not isinstance(values, dict):
        return values
    return {k: v for k, v in values.items() if k not in _OF_ANSWERS and v is not None}


class ItemText(StrictModel):
    """A part of a message or of a call's result."""

    type: Literal["input_text", "output_text"]
    text: str
    prompt_cache_breakpoint: CacheControl = None

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, values: Any) -> Any:
        return refusal_as(_without_extras(values), "output_text")


def _as_parts(content: Any) -> Any:
    """One look at every part; a text is one part."""
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    if not isinstance(content, list):
        raise ValueError("must be a text or a list of text parts")
    if len(content) > MAX_PARTS:
        raise ValueError(f"must have at most {MAX_PARTS} parts, got {len(content)}")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _PART_KINDS:
            raise ValueError(
                f"must be parts of the type {' or '.join(_PART_KINDS)}, got {str(kind)[:32]!r}: only text is read"
            )
    return content


ItemContent = Annotated[
    list[ItemText], FailFast(), BeforeValidator(_as_parts, json_schema_input_type=str | list[ItemText])
]


class _Item(StrictModel):
    """Fields that an item has once it was part of an answer; they change nothing."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, values: Any) -> Any:
        return _without_extras(values)


class MessageItem(_Item):
    """A message of whoever speaks."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: ItemContent
    phase: Literal["commentary", "final_answer"] | None = None
    """Changes nothing: the chat template has no word for it."""


class FunctionCallItem(_Item):
    """A call that the model has made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionResultItem(_Item):
    """What a call has brought."""

    type: Literal["function_call_output"]
    call_id: str
    output: ItemContent


class ReasoningItem(_Item):
    """What another model has thought; changes nothing."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None


def _kind_of(item: Any) -> str:
    return str(item.get("type", "message")) if isinstance(item, dict) else str(getattr(item, "type", ""))


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind_of),
]


def _as_items(given: Any) -> Any:
    """One look at every item; a text is a message of the user."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ValueError("input must be a text or a list of items that is not empty")
    if len(given) > MAX_ITEMS:
        raise ValueError(f"input must have at most {MAX_ITEMS} items, got {len(given)}")
    for item in given:
        kind = _kind_of(item) if isinstance(item, dict) else type(item).__name__
        if kind == "item_reference":
            raise ValueError("input must hold the items themselves: answers are not stored, so none can be referred to")
        if kind not in _ITEM_KINDS:
            raise ValueError(f"input must be items of the type {', '.join(_ITEM_KINDS)}, got {kind[:32]!r}")
    return given


InputItems = Annotated[
    list[InputItem], FailFast(), BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem])
]


def messages_of(instructions: str | None, items: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages of a chat: instructions first; calls that follow a message of the assistant are that message's."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        if isinstance(item, MessageItem):
            messages.append({"role": item.role, "content": _text(item.content)})
        elif isinstance(item, FunctionResultItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, FunctionCallItem):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def _text(parts: Sequence[ItemText]) -> str:
    return "\n".join(part.text for part in parts)


class FunctionTool(FunctionSpec):
    """A function that the model may call."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, values: Any) -> Any:
        values = _without_extras(values)
        if isinstance(values, dict) and values.get("defer_loading") is False:
            values.pop("defer_loading")
        return values

    def for_chat(self) -> Tool:
        """The same tool as a chat has it."""
        values = {name: getattr(self, name) for name in FunctionSpec.model_fields}
        return Tool(type="function", function=FunctionSpec(**values))


def _functions(tools: Any) -> Any:
    """One look at every tool."""
    if isinstance(tools, list):
        if len(tools) > MAX_TOOLS:
            raise ValueError(f"tools must be at most {MAX_TOOLS}, got {len(tools)}")
        for tool in tools:
            kind = tool.get("type") if isinstance(tool, dict) else None
            if kind != "function":
                raise ValueError(
                    f"tools must be of the type 'function', got {str(kind)[:32]!r}: no other tool is hosted here"
                )
    return tools


FunctionTools = Annotated[list[FunctionTool], BeforeValidator(_functions)]


class NamedFunctionTool(StrictModel):
    """The call of one function is asked for."""

    type: Literal["function"]
    name: str


class TextSchemaFormat(StrictModel):
    """A JSON schema that the text keeps to; description and strict change nothing: it is always kept to."""

    type: Literal["json_schema"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextOptions(StrictModel):
    """What the text looks like."""

    format: Annotated[TextFormat | JsonObjectFormat | TextSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Changes nothing: the model has no verbosity levels."""

    def for_chat(self) -> dict[str, Any] | None:
        """The same form as a chat's `response_format`."""
        own = self.format
        if isinstance(own, TextSchemaFormat):
            return {"type": own.type, "json_schema": {"name": own.name, "schema": own.json_schema}}
        if isinstance(own, JsonObjectFormat) and own.json_schema is not None:
            return {"type": own.type, "schema": own.json_schema}
        return None if own is None else {"type": own.type}


class PaddingOptions(StrictModel):
    """Of a stream of the Responses API."""

    include_obfuscation: bool | None = None
    """Padding against readers of the network: a hint that is not followed."""
