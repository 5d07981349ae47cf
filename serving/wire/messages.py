"""Messages: conversations and the tools in them, as clients send them and as chat templates take them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, field_validator, model_validator

from paceline.names import SPEAKER_RULE, is_speaker
from paceline.serving.wire.fields import StrictModel

MAX_PARTS = 1024
"""Parts or tool calls of a message: every bad one costs an error of its own."""
MAX_TOOLS = 128
"""OpenAI's limit."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,), "function_call": (None,), "annotations": (None, []), "images": (None, []),
}  # fmt: skip
"""Fields of an answer's message that clients send back as they got them -> what they hold when they say nothing."""


def _without(values: Any, *names: str) -> Any:
    return {k: v for k, v in values.items() if k not in names} if isinstance(values, dict) else values


def refusal_as(part: Any, kind: str) -> Any:
    """A part of an assistant's message that says why there is no answer as a part of text, which it is for the model."""
    if not (isinstance(part, dict) and part.get("type") == "refusal" and "text" not in part):
        return part
    return {**_without(part, "type", "refusal"), "type": kind, "text": part.get("refusal")}


CacheControl = Annotated[
    dict[str, Any] | None, Field(description="Changes nothing: the prefix cache is found by the prompt's tokens alone.")
]


class TextPart(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    prompt_cache_breakpoint: CacheControl = None

    @model_validator(mode="before")
    @classmethod
    def _refusal_as_text(cls, values: Any) -> Any:
        return refusal_as(values, "text")


class ToolFunction(StrictModel):
    name: str
    arguments: str

    @model_validator(mode="before")
    @classmethod
    def _without_parsed(cls, values: Any) -> Any:
        """The openai client adds what it made of the arguments, and sends it back."""
        return _without(values, "parsed_arguments")


class ToolCall(StrictModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: ToolFunction
    index: int | None = None
    """As in the chunks of a stream; it says nothing here."""

    def for_template(self, *, wants_objects: bool) -> dict[str, Any]:
        """The call as chat templates expect it; wants_objects: with its arguments as an object where they are one."""
        arguments: Any = self.function.arguments
        if wants_objects:
            try:
                found = json.loads(arguments)
            except (ValueError, RecursionError):
                found = None
            arguments = found if isinstance(found, dict) else arguments
        out: dict[str, Any] = {"type": "function", "function": {"name": self.function.name, "arguments": arguments}}
        return out if self.id is None else {"id": self.id, **out}


class Message(StrictModel):
    """One message of a conversation, handed to the model's chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    """Who speaks, among several of a role; the template writes it or does not."""
    refusal: str | None = None
    """What the assistant said in place of an answer; it is the content where there is none."""
    reasoning_content: str | None = None
    """What the assistant thought before its answer; for templates that write it."""
    reasoning: str | None = None
    """Another name of reasoning_content."""
    cache_control: CacheControl = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, values: Any) -> Any:
        values = _without(
            values, "parsed", "provider_specific_fields"
        )  # what openai's client and LiteLLM add to answers
        if isinstance(values, dict):
            return {k: v for k, v in values.items() if k not in _NEUTRAL or v not in _NEUTRAL[k]}
        return values

    @field_validator("content", "tool_calls", mode="before")
    @classmethod
    def _few_parts(cls, parts: Any) -> Any:
        if isinstance(parts, list) and len(parts) > MAX_PARTS:
            raise ValueError(f"a message must have at most {MAX_PARTS} parts, got {len(parts)}")
        return parts

    @field_validator("content", mode="before")
    @classmethod
    def _text_alone(cls, parts: Any) -> Any:
        for part in parts if isinstance(parts, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in ("text", "refusal"):
                raise ValueError(
                    f"content must be text or parts of the type 'text', got {kind[:32]!r}: only text is read"
                )
        return parts

    @field_validator("name")
    @classmethod
    def _known_name(cls, name: str | None) -> str | None:
        if name is not None and not is_speaker(name):
            raise ValueError(f"name {SPEAKER_RULE}")
        return name

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError("content must be text or a list of text parts")
        if self.refusal is not None and self.role != "assistant":
            raise ValueError("refusal belongs to a message of the role 'assistant'")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to a message of the role 'assistant'")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("tool_call_id belongs to a message of the role 'tool'")
        return self

    def text(self) -> str:
        """The content with its parts on lines of their own, else the refusal; '' when there is none."""
        content = self.content if isinstance(self.content, str) else "\n".join(p.text for p in self.content or ())
        return content or self.refusal or ""

    def for_template(self, *, wants_objects: bool = True) -> dict[str, Any]:
        """The message as chat templates expect it; 'developer' is another word for 'system'."""
        out: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text()}
        thought = self.reasoning if self.reasoning_content is None else self.reasoning_content
        for name, value in (("name", self.name), ("reasoning_content", thought), ("tool_call_id", self.tool_call_id)):
            if value is not None:
                out[name] = value
        if self.tool_calls:
            out["tool_calls"] = [c.for_template(wants_objects=wants_objects) for c in self.tool_calls]
        return out


class FunctionSpec(StrictModel):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; None = no arguments are described."""
    strict: bool | None = None
    """Changes nothing: a call that `tool_choice` asks for always keeps to the schema, others are the model's own."""
    cache_control: CacheControl = None

    @field_validator("parameters")
    @classmethod
    def _of_an_object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema and schema.get("type", "object") != "object":
            raise ValueError("parameters must be the JSON schema of an object")
        return schema


class Tool(StrictModel):
    type: Literal["function"]
    function: FunctionSpec
    cache_control: CacheControl = None

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict", "cache_control"})
        return {"type": "function", "function": {"description": "", "parameters": {"type": "object"}, **function}}


class NamedFunction(StrictModel):
    name: str


class NamedTool(StrictModel):
    """The call of one function is asked for."""

    type: Literal["function"]
    function: NamedFunction


class Conversation(StrictModel):
    """Messages and how the chat template writes them; the last four fields are extensions."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=4096)
    tools: list[Tool] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """none: no call; auto (default with tools): as the model wants; required or a named function: nothing but calls."""
    add_generation_prompt: bool | None = None
    """Write the beginning of the assistant's turn; default: unless continue_final_message is set."""
    continue_final_message: bool = False
    """Leave the last message open, so that the answer goes on where it ends."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template, such as enable_thinking."""
    add_special_tokens: bool = False
    """Add the tokens that the tokenizer puts around a text to those that the template writes."""

    @model_validator(mode="after")
    def _known_tools(self) -> Conversation:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("tools must have a name each")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice must name one of the tools, got {self.tool_choice.function.name[:64]!r}")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice must be 'none' or 'auto' without tools, got 'required'")
        return self

    @model_validator(mode="after")
    def _one_ending(self) -> Conversation:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other; give one of them")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message needs a last message of the role 'assistant'")
        return self

    @field_validator("tools", mode="before")
    @classmethod
    def _few_tools(cls, tools: Any) -> Any:
        """Before each bad one costs an error of its own."""
        if isinstance(tools, list) and len(tools) > MAX_TOOLS:
            raise ValueError(f"tools must be at most {MAX_TOOLS}, got {len(tools)}")
        return tools

    @property
    def opens_turn(self) -> bool:
        """Whether the beginning of the assistant's turn is written."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that this answer may call."""
        return [] if self.tool_choice == "none" else self.tools or []
