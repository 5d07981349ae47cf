"""Generation request: what it asks for, what a round gives back, and the states in between."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from paceline.contracts import ASKED_GROUP, CLASS_PREFIX, Group
from paceline.errors import IllegalTransitionError, RequestError

_INT31 = 2**31
MAX_TEXT_BYTES = {"json_schema": 65_536, "regex": 4_096, "lark": 16_384, "gbnf": 8_192, "calls": 65_536}
"""Longest text by kind: some regular expressions cost time and memory with the square of their length, and so does the
translation of GBNF."""
MAX_STOP_CHARS = 1024
MAX_BIASES = 1024
MAX_BANS = 2048
"""Banned sequences of a request: two ways to write each of 1024 words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarSpec:
    """What an answer must look like."""

    kind: str
    """json_object | json_schema | regex | lark | gbnf | calls (Lark with JSON schemas in it, made of a request's tools)."""
    text: str = ""
    """The JSON schema, regular expression, Lark or GBNF grammar; '' for json_object."""

    def __post_init__(self) -> None:
        kinds = ("json_object", "json_schema", "regex", "lark", "gbnf", "calls")
        if self.kind not in kinds:
            raise RequestError(f"grammar kind must be one of {', '.join(kinds)}, got {self.kind!r}")
        if (self.kind == "json_object") != (self.text == ""):
            raise RequestError("a grammar needs a text, and only json_object has none")
        limit = MAX_TEXT_BYTES.get(self.kind, 0)
        if (size := len(self.text)) > limit or (size := len(self.text.encode(errors="surrogatepass"))) > limit:
            raise RequestError(f"a grammar of kind {self.kind} must have at most {limit} bytes, got {size}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are drawn from the target's distribution; greedy when temperature is 0."""

    temperature: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 = all."""
    top_p: float = 1.0
    """Keep the most likely tokens up to this share of the mass, at least one."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """None draws a random seed at admission. A token's draw depends on (seed, position) only."""
    max_tokens: int = 128
    """Output tokens at most; 0 runs the prompt and draws nothing (with prompt_logprobs: scoring)."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    """Whether stop strings are looked for in the text without special tokens, as the reader sees it."""
    kept_token_ids: tuple[int, ...] = ()
    """Special tokens that belong to that text all the same: the marks of calls."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Top log-probabilities per emitted token; None = off, 0 = only the emitted token's own."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, number added to its logit) before everything else; at most 1024 ids, each in [-100, 100]."""
    grammar: GrammarSpec | None = None
    """Only tokens that keep the answer within this grammar are drawn."""
    min_tokens: int = 0
    """Output tokens before which nothing ends the answer: no end token is drawn, and a stop string counts that a later
    token completes."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these tokens are drawn; () = all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output must not contain; what the prompt begins is not looked at."""

    def __post_init__(self) -> None:
        checks = (
            (
                self.temperature == 0 or 1e-30 <= self.temperature <= 100.0,
                "temperature must be in [0, 100], 0 or at least 1e-30",
                self.temperature,
            ),
            (0 <= self.top_k < _INT31, "top_k must be in [0, 2**31) (0 = all)", self.top_k),
            (0.0 <= self.top_p <= 1.0, "top_p must be in [0, 1]", self.top_p),
            (0.0 <= self.min_p <= 1.0, "min_p must be in [0, 1]", self.min_p),
            (
                0.001 <= self.repetition_penalty <= 10.0,
                "repetition_penalty must be in [0.001, 10]",
                self.repetition_penalty,
            ),
            (-2.0 <= self.presence_penalty <= 2.0, "presence_penalty must be in [-2, 2]", self.presence_penalty),
            (-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty must be in [-2, 2]", self.frequency_penalty),
            (self.max_tokens >= 0, "max_tokens must be >= 0", self.max_tokens),
            (len(self.stop) <= 16 and all(self.stop), "stop must be at most 16 non-empty strings", self.stop),
            (self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs must be in [0, 20]", self.logprobs),
            (
                all(len(s) <= MAX_STOP_CHARS for s in self.stop),
                f"stop strings must have at most {MAX_STOP_CHARS} characters",
                "",
            ),
            (
                all(0 <= t < _INT31 for t in self.stop_token_ids),
                "stop_token_ids must be token ids",
                self.stop_token_ids,
            ),
            (
                len(self.logit_bias) <= MAX_BIASES,
                f"logit_bias must have at most {MAX_BIASES} entries",
                len(self.logit_bias),
            ),
            (
                all(-100.0 <= b <= 100.0 for _, b in self.logit_bias),
                "logit_bias values must be in [-100, 100]",
                self.logit_bias,
            ),
            (len(self.bad_words) <= MAX_BANS, f"bad_words must have at most {MAX_BANS} sequences", len(self.bad_words)),
            (all(self.bad_words), "bad_words must be sequences of at least one token", ""),
            (
                0 <= self.min_tokens <= self.max_tokens or self.min_tokens == 0,
                f"min_tokens must be in [0, max_tokens = {self.max_tokens}]",
                self.min_tokens,
            ),
            (
                self.grammar is None or not (self.min_tokens or self.allowed_token_ids),
                "min_tokens and allowed_token_ids must be absent where the answer has a form, which says itself what may come",
                "",
            ),
        )
        for ok, rule, value in checks:
            if not ok:
                raise RequestError(f"{rule}, got {str(value)[:200]}" if value != "" else rule)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One request as the engine takes it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    bucket: str | None = None
    """Traffic class as the client names it, which the engine may count under another (buckets.py); None: the engine sorts
    the request into one by its prompt (classes.py)."""
    group: Group = Group.ADAPTIVE
    is_asked: bool = False
    """The client chose the group itself: its rounds count as ASKED_GROUP, since chance did not assign them."""
    is_traced: bool = True
    """False: no feature trace is ever written for this request (opt-out)."""
    tenant: str = ""
    """Whose request it is; '' when it does not say."""
    is_own: bool = False
    """Its bucket is its tenant's own: no other tenant's text trains the drafters that it gets, nor its text theirs."""
    priority: int = 0
    """Lower values are admitted first and preempted last; arrival decides among equals."""
    deadline_s: float | None = None
    """Time of the engine's clock after which the request ends with finish reason 'deadline'; None = never."""
    prompt_logprobs: int | None = None
    """Top log-probabilities per prompt token, as SamplingParams.logprobs; None = off. They are sent with the first token,
    so a resumed request has none."""
    resumed_token_ids: tuple[int, ...] = ()
    """Output tokens that a replica which then died has emitted: the answer goes on behind them, and max_tokens, penalties,
    stop strings and draws count them as its own. They are not emitted again."""
    traceparent: str = ""
    """W3C trace context of the HTTP request's span, for OpenTelemetry; '' = it has none."""

    @property
    def counted_group(self) -> str:
        """What its rounds count under."""
        return ASKED_GROUP if self.is_asked else self.group.value

    def __post_init__(self) -> None:
        if not -_INT31 < self.priority < _INT31:
            raise RequestError(f"priority must be in (-2**31, 2**31), got {str(self.priority)[:32]}")
        if self.bucket is not None and self.bucket.startswith(CLASS_PREFIX):
            raise RequestError(
                f"bucket must not begin with {CLASS_PREFIX!r}, which the engine's own classes do, got {self.bucket[:32]!r}"
            )
        if self.deadline_s is not None and not math.isfinite(self.deadline_s):
            raise RequestError(f"deadline_s must be finite or None, got {self.deadline_s}")
        if self.resumed_token_ids and self.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs must be None together with resumed_token_ids, as they are sent with the first token, "
                f"got {self.prompt_logprobs} and {len(self.resumed_token_ids)} ids"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    """Log-probability under the target's unprocessed distribution."""
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None
    """Of a prompt's token: 1 = it is the most likely one."""


class RequestStats(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Totals of a request so far.

    Prefill emits the first token (none with max_tokens = 0) and no round; a round emits its accepted tokens and one bonus
    token, and the end of the request may cut the last round. So, from the first token on,
    num_emitted_tokens = 1 + num_rounds + num_accepted_tokens - num_truncated_tokens.
    """

    drafter_version: str
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    """Draft tokens that the target agreed with; before the last round is cut, as in the feedback rows."""
    num_emitted_tokens: int
    """Tokens of the answer (`completion_tokens`)."""
    draft_ms: float
    """The request's share of the time inside drafters."""
    verify_ms: float
    """Its share of the verify forwards."""
    total_ms: float
    """From submission until now."""
    round_ms: float = 0.0
    """Its share of its decode rounds: drafting, verify and everything around them; no prefill, no queue."""
    num_truncated_tokens: int = 0
    """Tokens of the last round behind its stop token, stop string or length limit: verified, but not emitted."""
    bucket: str = "default"
    """Traffic class that the request is counted under."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV rows were found in the prefix cache."""

    @property
    def acceptance_length(self) -> float:
        """Tokens per round before truncation, bonus included; pool over requests by num_rounds, not by request."""
        return self.num_accepted_tokens / self.num_rounds + 1 if self.num_rounds else 1.0


class RoundEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one round emitted for one request; the last event has a finish_reason."""

    request_id: str
    token_ids: tuple[int, ...]
    num_accepted_tokens: int = 0
    """How many of these tokens were accepted draft tokens, the first ones (0 for prefill's first token)."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    """None | 'stop' | 'length' | 'abort' | 'deadline' | 'error'."""
    stop_match: str | None = None
    """The stop string that ended the request: the text before it is the answer."""
    stats: RequestStats
    error: str | None = None
    is_own_fault: bool = False
    """An error that the request itself brought about: it would end the same way again."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One per prompt token with the first event of a request that asked for them; None for the first token."""


class RequestStatus(StrEnum):
    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"


_S = RequestStatus
NEXT_STATUS: dict[RequestStatus, frozenset[RequestStatus]] = {
    _S.WAITING: frozenset({_S.PREFILL, _S.ABORTED}),
    _S.PREFILL: frozenset({_S.RUNNING, _S.PREEMPTED, _S.FINISHED, _S.ABORTED}),
    _S.RUNNING: frozenset({_S.PREEMPTED, _S.FINISHED, _S.ABORTED}),
    _S.PREEMPTED: frozenset({_S.PREFILL, _S.ABORTED}),
    _S.FINISHED: frozenset(),
    _S.ABORTED: frozenset(),
}


def advance_status(status: RequestStatus, to: RequestStatus) -> RequestStatus:
    """Return `to` if the table allows it; raises IllegalTransitionError otherwise."""
    if to not in NEXT_STATUS[status]:
        raise IllegalTransitionError(f"request {status.value} -> {to.value} is not allowed")
    return to


@dataclass(slots=True)
class RequestTrace:
    """Everything a trace needs from one finished request; tensors are on the CPU."""

    request_id: str
    bucket: str
    temperature: float
    prompt_len: int
    token_ids: list[int]
    """Prompt and output, T tokens."""
    features: Any  # torch.Tensor (T - 1, m * Dm): rows 0..T-2, in the target's dtype
    topk_ids: Any  # torch.Tensor (T - prompt_len, k) int32: the target's top-k for each output token
    topk_logprobs: Any  # torch.Tensor (T - prompt_len, k) float32, at temperature 1, unprocessed
    target_version: str
    finish_reason: str = ""
    extra: dict = field(default_factory=dict)
    tap_layers: tuple[int, ...] | None = None
    """Target layers whose outputs the features are; None: not told."""
