"""Request bodies: what the two generation routes are asked, each field honoured or refused with a reason."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, PrivateAttr, field_validator, model_validator

from paceline.errors import RequestError
from paceline.serving.sampling.request import MAX_BIASES, GrammarSpec, SamplingParams
from paceline.serving.wire.fields import (
    RESPONSES_IGNORED,
    RESPONSES_REFUSED,
    FieldError,
    Known,
    RequestBody,
    StrictModel,
    parse_values,
)
from paceline.serving.wire.forms import ResponseFormat, StructuredOutputs, Texts, form_of
from paceline.serving.wire.items import (
    FunctionTools,
    InputItems,
    NamedFunctionTool,
    PaddingOptions,
    TextOptions,
    messages_of,
)
from paceline.serving.wire.messages import Conversation

MAX_CHOICES = 16
"""Largest `n`."""
MAX_PROMPTS = 128
"""Prompts of a body; with `n` each at most MAX_ANSWERS choices."""
MAX_ANSWERS = 256
"""As many as an engine's queue holds (`engine.max_waiting`): a body is admitted as a whole."""
MAX_SCORES = 2**20
"""Log-probabilities of prompt tokens in an answer, some 540 bytes each until it is sent: 49,932 tokens with 20 alternatives."""
MAX_LABELS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
"""Of `metadata`: OpenAI's limits."""
MAX_TIMEOUT_S = 86_400.0
MAX_STOPS = 16
MAX_BAD_WORDS, MAX_WORD_CHARS = 1024, 128
MIN_TEMPERATURE = 1e-6
"""Below it the most likely token is drawn anyhow."""
_INT64 = 2**63
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Extension: every chunk carries the usage so far, the last one too."""
    include_obfuscation: bool | None = None
    """Padding against readers of the network: a hint that is not followed."""

    @model_validator(mode="after")
    def _usage_is_wanted(self) -> StreamOptions:
        if self.continuous_usage_stats and self.include_usage is False:
            raise ValueError("continuous_usage_stats must be left out where include_usage is false")
        return self

    @property
    def wants_usage(self) -> bool:
        return bool(self.include_usage or self.continuous_usage_stats)


class Metadata(StrictModel):
    """Labels of a request: three that the service acts on, and any others, which change nothing."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, str]

    bucket: str | None = None
    """Traffic class; same as the header x-paceline-bucket."""
    paceline_group: Literal["adaptive", "static", "plain"] | None = None
    """Same as the header x-paceline-group."""
    paceline_tenant: str | None = None
    """Whose request it is, for opting out of traces; same as the header x-paceline-tenant."""

    @model_validator(mode="before")
    @classmethod
    def _few_and_short(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if len(values) > MAX_LABELS:
            raise ValueError(f"metadata must have at most {MAX_LABELS} keys, got {len(values)}")
        own = next((k for k in values if k.startswith("paceline_") and k not in cls.model_fields), None)
        if own is not None:
            raise ValueError(f"{own[:64]} is no label of this service, which has {', '.join(cls.model_fields)}")
        if any(len(k) > MAX_KEY_CHARS for k in values):
            raise ValueError(f"metadata keys must have at most {MAX_KEY_CHARS} characters")
        if any(isinstance(v, str) and len(v) > MAX_VALUE_CHARS for v in values.values()):
            raise ValueError(f"metadata values must have at most {MAX_VALUE_CHARS} characters")
        return values


class CommonBody(RequestBody):
    """Fields that every generation route takes; the forms and those from `top_k` on are extensions (`extra_body` of the openai client)."""

    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=-_INT64, lt=_INT64)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    """Token id, written as a string -> number added to its logit, in [-100, 100]; at most 1024 ids."""
    stream: bool | None = None
    metadata: Metadata | None = None
    guided_json: dict[str, Any] | str | None = None
    """A JSON schema, or its text."""
    guided_regex: str | None = None
    """The whole answer matches this regular expression (no look-around)."""
    guided_choice: Texts | None = None
    """The answer is one of these texts."""
    guided_grammar: str | None = None
    """The answer is a sentence of this grammar: Lark in llguidance's dialect, or GBNF."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's name for these: `json`, `regex`, `choice`, `grammar` or `json_object`."""
    json_schema: dict[str, Any] | str | None = None
    """SGLang's name of guided_json."""
    regex: str | None = None
    """SGLang's name of guided_regex."""
    ebnf: str | None = None
    """A GBNF grammar."""

    top_k: int | None = Field(default=None, ge=-1)
    """Only the k most likely tokens are drawn; 0, and -1 as in vLLM: all."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=64)
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    """Tokens before which nothing ends the answer: no end token is drawn, no stop string counts. Not together with a form."""
    allowed_token_ids: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Only these tokens are drawn; not together with a form."""
    bad_words: list[str] | None = None
    """Words that are not generated, at the beginning and behind a space; at most 1024."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    """Only the last so many tokens of a prompt are read; -1: as many as leave room for the answer."""
    skip_special_tokens: bool = True
    """False: markers such as <|call|> stay in the text."""
    priority: int | None = Field(default=None, ge=-1000, le=1000)
    """Requests with a lower number are admitted first; 0 when not given."""
    timeout_s: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT_S)
    """Seconds after which the request ends without an answer; same as the header x-request-timeout-ms."""

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_biases(cls, bias: Any) -> Any:
        """Counted before they are read: each bad one costs an error of its own."""
        if isinstance(bias, dict) and len(bias) > MAX_BIASES:
            raise ValueError(f"logit_bias must have at most {MAX_BIASES} ids, got {len(bias)}")
        return bias

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
        if stop == "" or (isinstance(stop, list) and not all(stop)):
            raise ValueError("stop must be a non-empty string or a list of them")
        return stop

    @field_validator("bad_words", mode="before")
    @classmethod
    def _few_words(cls, words: Any) -> Any:
        """One look at every element; each bad one would cost an error of its own."""
        if isinstance(words, list):
            if len(words) > MAX_BAD_WORDS:
                raise ValueError(f"bad_words must be at most {MAX_BAD_WORDS} texts, got {len(words)}")
            if not all(isinstance(w, str) and 0 < len(w) <= MAX_WORD_CHARS for w in words):
                raise ValueError(f"bad_words must be texts of 1 to {MAX_WORD_CHARS} characters")
        return words

    @field_validator("allowed_token_ids", mode="before")
    @classmethod
    def _token_ids(cls, token_ids: Any) -> Any:
        """Each id once, in one tuple for all choices; one look at every element, or each bad one costs an error of its own."""
        if token_ids is None:
            return None
        if not isinstance(token_ids, list) or not all(type(t) is int and 0 <= t < 2**31 for t in token_ids):
            raise ValueError("allowed_token_ids must be a list of token ids")
        return tuple(sorted(set(token_ids)))


class GenerateBody(CommonBody):
    """Fields of completions and chat completions alike; the last three are extensions."""

    _form: GrammarSpec | None = PrivateAttr(default=None)
    max_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    """Choices of the answer."""
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    """The answer keeps to this form; ends by itself where the form is complete."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)
    """Alternatives for each token of the prompt; not in a stream."""
    return_token_ids: bool | None = None
    """Add prompt_token_ids and token_ids to the choice; a chat has the former beside its choices, too."""
    return_segments: bool = False
    """Add to the choice its text in segments, [text, whether it was drafted and accepted]."""

    @model_validator(mode="after")
    def _options_need_stream(self) -> GenerateBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed together with stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs must be absent in a stream; its chunks have no place for them")
        return self

    @model_validator(mode="after")
    def _one_form(self) -> GenerateBody:
        self._form = form_of(self)
        return self

    @property
    def form(self) -> GrammarSpec | None:
        """What the answer must look like; None = any text."""
        return self._form

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def ignored(self) -> list[str]:
        hints = {
            "metadata": self.metadata is not None and self.metadata.model_extra,
            "include_obfuscation": self.stream_options is not None and self.stream_options.include_obfuscation,
        }
        return [*self._ignored, *(name for name, is_given in hints.items() if is_given)]

    def num_wanted(self) -> int | None:
        """The longest answer asked for, in tokens; None = as long as the context allows."""
        return self.max_tokens

    def num_logprobs(self) -> int | None:
        """Alternatives wanted per token; None = no log-probabilities."""
        raise NotImplementedError

    def sampling(self, *, max_tokens: int) -> SamplingParams:
        """The engine's parameters, but for the tokens of bad words; raises FieldError where a value is out of range."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        temperature = self.temperature
        if temperature is not None and 0 < temperature < MIN_TEMPERATURE:
            temperature = 0.0
        values = {
            "temperature": temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens,
        }
        try:
            return SamplingParams(
                **{k: v for k, v in values.items() if v is not None},  # type: ignore[arg-type]
                max_tokens=max_tokens,
                stop=stop,
                stop_token_ids=tuple(self.stop_token_ids or ()),
                skip_special_tokens=self.skip_special_tokens,
                logprobs=self.num_logprobs(),
                logit_bias=tuple((int(k), float(v)) for k, v in (self.logit_bias or {}).items()),
                grammar=self.form,
                allowed_token_ids=self.allowed_token_ids or (),
            )
        except RequestError as e:
            raise FieldError.of_rule(str(e), type(self).model_fields) from e


class CompletionBody(GenerateBody):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    max_tokens: int | None = Field(default=None, ge=0)
    """0, together with echo, scores the prompt and generates nothing."""
    add_special_tokens: bool = True
    """Add the tokens that the tokenizer puts around a text."""
    echo: bool | None = None
    """Put the prompt before the answer; with logprobs its tokens' log-probabilities too."""
    best_of: int | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _known_form(cls, prompt: Any) -> Any:
        """One look at every element: a union would write an error for each of them and for each of its forms."""
        each = prompt if isinstance(prompt, list) else [prompt]
        if len(each) == 1 and isinstance(each[0], str | list):
            prompt, each = each[0], each[0] if isinstance(each[0], list) else each
        kinds = set(map(type, each))  # of millions in some tens of ms: other requests wait
        is_ids, is_many = kinds <= {int}, kinds == {str} or kinds == {list}
        if is_many and isinstance(prompt, list) and len(prompt) > MAX_PROMPTS:
            raise ValueError(f"prompt must be at most {MAX_PROMPTS} prompts, got {len(prompt)}")
        if not is_ids and not (is_many and all(set(map(type, p)) <= {int} for p in each if isinstance(p, list))):
            raise ValueError("prompt must be a text, a list of token ids, or a list of texts or of such lists")
        if not prompt or (not is_ids and not all(each)):
            raise ValueError("prompt must not be empty")
        return prompt

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each of which is answered by itself."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt  # type: ignore[list-item,return-value]

    @model_validator(mode="after")
    def _consistent(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be >= 1, got 0; 0 is only allowed together with echo: true")
        if self.num_choices * len(self.prompts) > MAX_ANSWERS:
            raise ValueError(
                f"n must be at most {MAX_ANSWERS} / {len(self.prompts)} prompts, got {self.num_choices}: send fewer at once"
            )
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
    parallel_tool_calls: bool | None = None
    """False: at most one call an answer; others are dropped."""

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed together with logprobs: true")
        return self

    def num_wanted(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


_LOGPROBS = "message.output_text.logprobs"
_CHAT_NAMES = {
    "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format", "logprobs": "include",
}  # fmt: skip
"""Field of a chat -> what stands for it in a ResponsesBody."""


class ResponsesBody(CommonBody):
    """POST /v1/responses: a chat in other words, whose answer nobody stores."""

    refused_fields: ClassVar[Mapping[str, Known]] = RESPONSES_REFUSED
    ignored_fields: ClassVar[Mapping[str, Known]] = RESPONSES_IGNORED

    input: InputItems
    """A text, or messages, calls and their results; `reasoning` among them changes nothing."""
    instructions: str | None = None
    """A message of the system before the others."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    text: TextOptions | None = None
    """`format`: the form that the answer keeps to."""
    tools: FunctionTools | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    """none: no call; auto (default with tools): as the model wants; required or a named function: nothing but calls."""
    parallel_tool_calls: bool | None = None
    """False: at most one call an answer; others are dropped."""
    include: Annotated[
        list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None, Field(max_length=16)
    ] = None
    """message.output_text.logprobs: log-probabilities of the text's tokens, without tools; the other has nothing to give."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    """Alternatives to each token, together with its log-probability."""
    stream_options: PaddingOptions | None = None

    @model_validator(mode="after")
    def _text_is_scored(self) -> ResponsesBody:
        if self.wants_logprobs and self.tools and self.tool_choice != "none":
            raise ValueError("include must not ask for log-probabilities together with tools, whose calls have none")
        return self

    @property
    def ignored(self) -> list[str]:
        pads = self.stream_options is not None and self.stream_options.include_obfuscation
        return [*self._ignored, "include_obfuscation"] if pads else self._ignored

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def as_chat(self) -> ChatBody:
        """The chat that is answered; raises FieldError under the names of this body."""
        common = set(CommonBody.model_fields) & self.model_fields_set
        values = self._dumped(include=common, exclude_unset=True)  # unset labels would count as keys of the metadata
        values["messages"] = messages_of(self.instructions, self.input)
        if self.max_output_tokens is not None:
            values["max_tokens"] = self.max_output_tokens
        form = None if self.text is None else self.text.for_chat()
        if form is not None:
            values["response_format"] = form
        if self.tools:
            values |= {
                "tools": [tool.for_chat() for tool in self.tools],
                "parallel_tool_calls": self.parallel_tool_calls,
            }
        if isinstance(self.tool_choice, NamedFunctionTool):
            values["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        elif self.tool_choice is not None:
            values["tool_choice"] = self.tool_choice
        if self.wants_logprobs:
            values |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        with self.own_names():
            return parse_values(values, ChatBody)

    @staticmethod
    @contextlib.contextmanager
    def own_names() -> Iterator[None]:
        """Inside, a FieldError about the chat is one about this body."""
        try:
            yield
        except FieldError as e:
            raise e.renamed(_CHAT_NAMES) from e

    def told(self) -> dict[str, Any]:
        """What the answer repeats of its request."""
        usual: dict[str, Any] = {
            "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0,
            "text": None, "tool_choice": "auto", "tools": [], "top_logprobs": 0, "top_p": 1.0,
        }  # fmt: skip
        own = self._dumped(include=set(usual) - {"tools"}, exclude_unset=True)
        told = {**usual, **{name: value for name, value in own.items() if value is not None}}
        told["text"] = {"format": {"type": "text"}, **(told["text"] or {})}
        told["tools"] = self._dumped(include={"tools"})["tools"] or []
        return told

    def _dumped(self, **how: Any) -> dict[str, Any]:
        """Fields as they were sent; raises FieldError where they cannot be written."""
        try:
            return self.model_dump(mode="json", by_alias=True, **how)
        except (ValueError, RecursionError) as e:  # JSON is written with fewer levels than it is read with
            raise FieldError("the body must not be nested so deeply", None) from e
