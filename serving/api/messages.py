"""Chat messages: a conversation as clients send it and as chat templates take it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, field_validator, model_validator

MAX_PARTS = 1024
"""Parts or tool calls of a message: every bad one costs an error of its own."""


class StrictModel(BaseModel):
    """A part of a request body: no unknown fields, no conversion between types."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class ToolFunction(StrictModel):
    name: str
    arguments: str


class ToolCall(StrictModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: ToolFunction


class Message(StrictModel):
    """One message of a conversation, handed to the model's chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @field_validator("content", "tool_calls", mode="before")
    @classmethod
    def _few_parts(cls, parts: Any) -> Any:
        if isinstance(parts, list) and len(parts) > MAX_PARTS:
            raise ValueError(f"a message must have at most {MAX_PARTS} parts, got {len(parts)}")
        return parts

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("content must be text or a list of text parts")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to a message of the role 'assistant'")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("tool_call_id belongs to a message of the role 'tool'")
        return self

    def text(self) -> str:
        """The content with its parts joined; '' when there is none."""
        return self.content if isinstance(self.content, str) else "".join(p.text for p in self.content or ())

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it; 'developer' is another word for 'system'."""
        out: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text()}
        if self.tool_calls:
            out["tool_calls"] = [c.model_dump(exclude_none=True) for c in self.tool_calls]
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        return out


class Conversation(StrictModel):
    """Messages and how the chat template writes them; the last three fields are extensions."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=4096)
    add_generation_prompt: bool | None = None
    """Write the beginning of the assistant's turn; default: unless continue_final_message is set."""
    continue_final_message: bool = False
    """Leave the last message open, so that the answer goes on where it ends."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template, such as enable_thinking."""

    @model_validator(mode="after")
    def _one_ending(self) -> Conversation:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other; give one of them")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message needs a last message of the role 'assistant'")
        return self

    @property
    def opens_turn(self) -> bool:
        """Whether the beginning of the assistant's turn is written."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
