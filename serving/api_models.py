"""What may an HTTP request ask for? OpenAI's request bodies; every field is honoured or refused with a reason."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from paceline.errors import RequestError
from paceline.serving.request import SamplingParams
from paceline.serving.response_format import ResponseFormat, grammar_spec

_INT64 = 2**63

# Fields of OpenAI's API that are known but not offered: values that ask for nothing are let through.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((None, 1), "one choice is generated per request; send the request several times"),
    "best_of": ((None, 1), "one choice is generated per request; send the request several times"),
    "echo": ((None, False), "the prompt is not repeated in the answer; prepend it yourself"),
    "suffix": ((None, ""), "infilling is not offered by this model"),
    "logit_bias": ((None, {}), "token biases are not applied"),
    "tools": ((None, []), "tool calls are not parsed out of the answer; describe the tools in the prompt"),
    "tool_choice": ((None, "none"), "tool calls are not parsed out of the answer"),
    "parallel_tool_calls": ((None,), "tool calls are not parsed out of the answer"),
    "functions": ((None, []), "tool calls are not parsed out of the answer"),
    "function_call": ((None, "none"), "tool calls are not parsed out of the answer"),
    "modalities": ((None, ["text"]), "only text is generated"),
    "audio": ((None,), "only text is generated"),
    "prediction": ((None,), "the service drafts by itself"),
    "reasoning_effort": ((None,), "the model has no reasoning levels"),
    "verbosity": ((None,), "the model has no verbosity levels"),
    "web_search_options": ((None,), "there is no web search"),
    "service_tier": ((None, "auto", "default"), "there is one service tier"),
    "store": ((None, False), "answers are not stored"),
    "prompt_cache_key": ((None,), "prompts are not cached across requests"),
    "safety_identifier": ((None,), "use `user`"),
}  # fmt: skip


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Metadata(_Strict):
    """Labels of a request that the service acts on."""

    bucket: str | None = None
    """Traffic class; same as the header x-paceline-bucket."""
    paceline_group: Literal["adaptive", "static", "plain"] | None = None
    """Same as the header x-paceline-group."""
    paceline_tenant: str | None = None
    """Whose request it is, for opting out of traces; same as the header x-paceline-tenant."""


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ToolFunction(_Strict):
    name: str
    arguments: str


class ToolCall(_Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: ToolFunction


class Message(_Strict):
    """One message of a conversation, handed to the model's chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("content must be text or a list of text parts")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to a message of the role 'assistant'")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("tool_call_id belongs to a message of the role 'tool'")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it; 'developer' is another word for 'system'."""
        text = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content or ())
        out: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            out["tool_calls"] = [c.model_dump(exclude_none=True) for c in self.tool_calls]
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        return out


class GenerateBody(_Strict):
    """Fields common to both routes; the last group are extensions (`extra_body` of the openai client)."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=-_INT64, lt=_INT64)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, max_length=256)
    """An opaque label of the caller; it changes nothing in the answer."""
    metadata: Metadata | None = None
    response_format: ResponseFormat | None = None
    """The answer keeps to this form; ends by itself where the form is complete."""

    guided_regex: str | None = None
    """The whole answer matches this regular expression (no look-around)."""
    guided_grammar: str | None = None
    """The answer is a sentence of this Lark grammar, in llguidance's dialect."""
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=64)
    ignore_eos: bool | None = None
    skip_special_tokens: bool = True
    """False: markers such as <|call|> stay in the text."""
    return_token_ids: bool = False
    """Add prompt_token_ids and token_ids to the choice."""

    @field_validator("stop")
    @classmethod
    def _stop_list(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if stop is not None and (not stop or (isinstance(stop, list) and not all(stop))):
            raise ValueError("stop must be a non-empty string or a list of them")
        return stop

    @model_validator(mode="after")
    def _options_need_stream(self) -> GenerateBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed together with stream: true")
        return self

    @model_validator(mode="after")
    def _one_form(self) -> GenerateBody:
        grammar_spec(self.response_format, self.guided_regex, self.guided_grammar)
        return self

    def num_wanted(self) -> int | None:
        """The longest answer asked for, in tokens; None = as long as the context allows."""
        return self.max_tokens

    def num_logprobs(self) -> int | None:
        """Alternatives wanted per token; None = no log-probabilities."""
        raise NotImplementedError

    def sampling(self, *, max_tokens: int) -> SamplingParams:
        """The engine's parameters; raises RequestError where a value is out of range."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        values = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
        }
        return SamplingParams(
            **{k: v for k, v in values.items() if v is not None},  # type: ignore[arg-type]
            max_tokens=max_tokens,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=self.num_logprobs(),
            grammar=grammar_spec(self.response_format, self.guided_regex, self.guided_grammar),
        )


class CompletionBody(GenerateBody):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) != 1:
                raise ValueError("prompt must be one prompt; send a request for each")
            prompt = prompt[0]
        if len(prompt) == 0:
            raise ValueError("prompt must not be empty")
        return prompt

    def num_wanted(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default on this route

    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatBody(GenerateBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed together with logprobs: true")
        return self

    def num_wanted(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class FieldError(RequestError):
    """A field of the body is wrong; `param` names it."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


def parse_body(raw: bytes, kind: type[GenerateBody]) -> Any:
    """Read a request body; raises FieldError that names the field and the rule."""
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise FieldError(f"the body must be JSON: {e}", None) from e
    if not isinstance(values, dict):
        raise FieldError(f"the body must be a JSON object, got {type(values).__name__}", None)
    for name in [k for k in values if k in REFUSED]:
        neutral, reason = REFUSED[name]
        value = values.pop(name)
        if not any(value == x and type(value) is type(x) for x in neutral):
            raise FieldError(f"{name} is not supported: {reason}", name)
    try:
        return kind.model_validate(values)
    except ValidationError as e:
        raise _field_error(e) from e


def _field_error(error: ValidationError) -> FieldError:
    """The most telling of pydantic's complaints; unions of the prompt's forms complain once per form."""
    first = max(error.errors(), key=lambda e: e["type"] == "extra_forbidden")
    path = [str(p) for p in first["loc"] if not (isinstance(p, str) and ("[" in p or p in ("str", "int", "list")))]
    name = ".".join(path) or None
    if first["type"] == "extra_forbidden":
        return FieldError(f"{name} is not a field of this request; remove it", name)
    message = first["msg"].removeprefix("Value error, ")
    return FieldError(f"{name}: {message}" if name and not message.startswith(name) else message, name)
