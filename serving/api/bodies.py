"""Request bodies: conversations and OpenAI's other fields, each honoured or refused with a reason."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator, model_validator

from paceline.errors import RequestError
from paceline.serving.sampling.request import GrammarSpec, SamplingParams

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


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    type: Literal["json_object"]


class JsonSchema(StrictModel):
    """OpenAI's wrapper of a schema; name, description and strict change nothing: the schema is always kept to."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def grammar_spec(
    response_format: ResponseFormat | None, guided_regex: str | None, guided_grammar: str | None
) -> GrammarSpec | None:
    """What the engine is asked for; None = any text.

    Raises: ValueError when more than one form is given; RequestError when a text is empty.
    """
    specs = []
    if isinstance(response_format, JsonObjectFormat):
        specs.append(GrammarSpec(kind="json_object"))
    elif isinstance(response_format, JsonSchemaFormat):
        # The order of a schema's properties is kept: it is the order in which the answer has them.
        text = json.dumps(response_format.json_schema.json_schema, ensure_ascii=False, separators=(",", ":"))
        specs.append(GrammarSpec(kind="json_schema", text=text))
    if guided_regex is not None:
        specs.append(GrammarSpec(kind="regex", text=guided_regex))
    if guided_grammar is not None:
        specs.append(GrammarSpec(kind="lark", text=guided_grammar))
    if len(specs) > 1:
        raise ValueError("response_format, guided_regex and guided_grammar exclude each other; give one of them")
    return specs[0] if specs else None


MAX_CHOICES = 16
"""Largest `n`."""
MAX_TIMEOUT_S = 86_400.0
MAX_STOPS = 16
MIN_TEMPERATURE = 1e-6
"""Below it the most likely token is drawn anyhow."""
_INT64 = 2**63
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")

# Fields of OpenAI's API that are known but not offered: values that ask for nothing are let through.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "suffix": ((None, ""), "infilling is not offered by this model"),
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
    "service_tier": ((None, "auto", "default"), "there is one service tier; the extension `priority` orders requests"),
    "store": ((None, False), "answers are not stored"),
    "prompt_cache_key": ((None,), "the prefix cache is chosen by the prompt's tokens alone"),
    "prompt_cache_retention": ((None,), "cached prefixes stay until their memory is needed"),
    "safety_identifier": ((None,), "use `user`"),
    "chat_template": ((None,), "the model's own chat template is used"),
    "documents": ((None, []), "write the documents into the messages"),
    "prompt_logprobs": ((None,), "use `echo` together with `logprobs` on /v1/completions"),
    "truncate_prompt_tokens": ((None,), "prompts are never cut; send fewer tokens"),
    "min_tokens": ((None, 0), "an answer ends where the model ends it; `ignore_eos` goes on to the limit"),
    "bad_words": ((None, []), "use `logit_bias` with -100 for the tokens"),
    "allowed_token_ids": ((None,), "use `logit_bias` for the tokens"),
    "include_stop_str_in_output": ((None, False), "the text ends before the stop string"),
    "use_beam_search": ((None, False), "answers are sampled; use `n` for several"),
    "length_penalty": ((None, 1.0), "there is no beam search"),
}  # fmt: skip


class StreamOptions(StrictModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Extension: every chunk carries the usage so far."""
    include_obfuscation: Literal[False] | None = None

    @model_validator(mode="after")
    def _usage_is_wanted(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats is only allowed together with include_usage: true")
        return self


class Metadata(StrictModel):
    """Labels of a request that the service acts on."""

    bucket: str | None = None
    """Traffic class; same as the header x-paceline-bucket."""
    paceline_group: Literal["adaptive", "static", "plain"] | None = None
    """Same as the header x-paceline-group."""
    paceline_tenant: str | None = None
    """Whose request it is, for opting out of traces; same as the header x-paceline-tenant."""


class GenerateBody(StrictModel):
    """Fields common to both routes; the last group are extensions (`extra_body` of the openai client)."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=-_INT64, lt=_INT64)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    """Token id, written as a string -> number added to its logit, in [-100, 100]; at most 1024 ids."""
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    """Choices of the answer."""
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
    return_segments: bool = False
    """Add to the choice its text in segments, [text, whether it was drafted and accepted]."""
    priority: int | None = Field(default=None, ge=-1000, le=1000)
    """Requests with a lower number are admitted first; 0 when not given."""
    timeout_s: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT_S)
    """Seconds after which the request ends without an answer; same as the header x-request-timeout-ms."""

    @field_validator("logit_bias")
    @classmethod
    def _bias_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        bad = next((k for k in bias or () if not _TOKEN_ID.fullmatch(k)), None)
        if bad is not None:
            raise ValueError(f"logit_bias must have token ids as keys, such as '50256', got {bad[:32]!r}")
        if bias and not all(-100.0 <= v <= 100.0 for v in bias.values()):
            raise ValueError("logit_bias values must be in [-100, 100]")
        return bias

    @field_validator("stop", mode="before")
    @classmethod
    def _few_stops(cls, stop: Any) -> Any:
        if isinstance(stop, list) and len(stop) > MAX_STOPS:
            raise ValueError(f"stop must be at most {MAX_STOPS} strings, got {len(stop)}")
        return stop

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

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

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
        temperature = self.temperature
        if temperature is not None and 0 < temperature < MIN_TEMPERATURE:
            temperature = 0.0
        values = {
            "temperature": temperature,
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
            skip_special_tokens=self.skip_special_tokens,
            logprobs=self.num_logprobs(),
            logit_bias=tuple((int(k), float(v)) for k, v in (self.logit_bias or {}).items()),
            grammar=grammar_spec(self.response_format, self.guided_regex, self.guided_grammar),
        )


class CompletionBody(GenerateBody):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    max_tokens: int | None = Field(default=None, ge=0)
    """0, together with echo, scores the prompt and generates nothing."""
    echo: bool | None = None
    """Put the prompt before the answer; with logprobs its tokens' log-probabilities too."""
    best_of: int | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _known_form(cls, prompt: Any) -> Any:
        """One look at every element: a union would write an error for each of them and for each of its forms."""
        inner = prompt[0] if isinstance(prompt, list) and prompt and isinstance(prompt[0], list) else prompt
        is_ids = isinstance(inner, list) and not (len(inner) == 1 and isinstance(inner[0], str))
        if is_ids and not all(type(t) is int for t in inner):
            raise ValueError("prompt must be a text, a list of token ids, or a list that holds one of these")
        return prompt

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

    @model_validator(mode="after")
    def _consistent(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be >= 1, got 0; 0 is only allowed together with echo: true")
        if self.best_of is not None and self.best_of != self.num_choices:
            raise ValueError(
                f"best_of must equal n={self.num_choices}, got {self.best_of}: every choice is returned, none is "
                "generated to be thrown away; set n and choose by logprobs"
            )
        return self

    def num_wanted(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default on this route

    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatBody(Conversation, GenerateBody):
    """POST /v1/chat/completions."""

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


def parse_body(raw: bytes, kind: type[BaseModel]) -> Any:
    """Read a request body; raises FieldError that names the field and the rule."""
    return parse_values(parse_json(raw), kind)


def parse_json(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body; raises FieldError when it is none."""
    try:
        values = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise FieldError(f"the body must be JSON: {e}", None) from e
    if not isinstance(values, dict):
        raise FieldError(f"the body must be a JSON object, got {type(values).__name__}", None)
    if b"\\ud" in raw.lower():  # an escaped half of a character: no tokenizer takes it, and no answer can repeat it
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise FieldError("the body must be Unicode text, got half of a surrogate pair", None) from None
    return values


def parse_values(values: dict[str, Any], kind: type[BaseModel]) -> Any:
    """The body of the given kind; raises FieldError that names the field and the rule."""
    for name in [k for k in values if k in REFUSED]:
        neutral, reason = REFUSED[name]
        value = values.pop(name)
        if not any(value == x and type(value) is type(x) for x in neutral):
            raise FieldError(f"{name} is not supported: {reason}", name)
    strange = next((k for k in values if k not in kind.model_fields), None)
    if strange is not None:
        raise FieldError(f"{strange[:64]} is not a field of this request; remove it", strange[:64])
    try:
        return kind.model_validate(values)
    except ValidationError as e:
        raise _field_error(e, kind) from e


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _field_error(error: ValidationError, kind: type[BaseModel]) -> FieldError:
    """The most telling of pydantic's complaints; unions of the prompt's forms complain once per form."""
    first = max(error.errors(), key=lambda e: e["type"] == "extra_forbidden")
    path = [str(p) for p in first["loc"] if not (isinstance(p, str) and ("[" in p or p in ("str", "int", "list")))]
    name = ".".join(path) or None
    if first["type"] == "extra_forbidden":
        return FieldError(f"{name} is not a field of this request; remove it", name)
    message = first["msg"].removeprefix("Value error, ")
    first_word = message.partition(" ")[0]
    if name is None and first_word in kind.model_fields:  # a rule about several fields names the one to change first
        name = first_word
    return FieldError(f"{name}: {message}" if name and not message.startswith(name) else message, name)
