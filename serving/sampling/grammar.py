"""Grammar factory: compiles a request's grammar to token masks, without harm from grammars that are wrong, huge or hostile.

Grammars are compiled by llguidance (https://github.com/guidance-ai/llguidance): an Earley parser over a lexer of regular
expression derivatives, which gives the mask of a state in some tens of microseconds.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Collection
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
from tokenizers import Tokenizer

from paceline.errors import CapacityError, RequestError
from paceline.serving.sampling.bans import bans_of
from paceline.serving.sampling.fair_threads import FairThreads
from paceline.serving.sampling.grammar_state import GrammarState
from paceline.serving.sampling.request import GrammarSpec
from paceline.serving.sampling.text_stream import TokenText

if TYPE_CHECKING:  # loaded with the first grammar
    from llguidance import LLMatcher, LLTokenizer

MAX_PATTERN_BYTES = 4_096
"""Longest `pattern` inside a JSON schema, or `whitespace_pattern` of its `x-guidance`."""
MAX_MULTIPLE = 100_000
"""Largest `multipleOf`, in units of its last digit, and least common multiple of all where a schema combines its parts: the compiler
makes a state for each remainder, 23 MB for 100,000, and knows no end."""
_COMBINING = {"allOf", "anyOf", "oneOf", "$ref"}
_NOT_COMBINED = {
    "title",
    "description",
    "default",
    "examples",
    "$comment",
    "$defs",
    "definitions",
    "$schema",
    "$id",
    "deprecated",
}
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
# Between two parts of a JSON answer: a model that would go on with blanks for ever has to go on with the answer.
_JSON_RULE = re.compile(r"%json\s*")
_STACK_BYTES = 256 * 2**20  # virtual: the compiler recurses once per rule of a chain, far beyond a usual stack
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,  # some ms at worst; `ipv6` and classes of Unicode's letters need half of it
    "step_max_items": 2_000,
    "max_items_in_row": 1_000,
    "max_lexer_states": 20_000,  # 0.5 to 2 kB each, per grammar
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
MAX_RENEWAL_S = 0.02
"""Rounds wait while a grammar is compiled again; one that takes longer is not."""


class CompiledGrammar:
    """One grammar before the first token, shared by all of its answers; who holds it saves the next one a compilation.

    The answers share the lexer, too, which learns states of every text: once they are too many it fails all of them, and the
    grammar is compiled again.
    """

    def __init__(self, matcher: LLMatcher, *, is_quick: bool) -> None:
        """is_quick: it took no longer than rounds may wait."""
        self.matcher = matcher
        """Only copied, under the factory's lock."""
        self.is_quick = is_quick
        self.is_spent = False
        """No answer can begin with it."""
        self.num_answers = 0
        """That have begun with it."""


class GrammarFactory:
    """Compiles grammars for one target. Thread-safe; slow, so it is called by those who submit requests."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        max_cached: int = 16,
        max_compiling: int = 2,
        timeout_s: float = 10.0,
    ) -> None:
        """Nothing is converted before the first grammar.

        Args:
            vocab_size: width of the target's logits; ids beyond the tokenizer's are never allowed.
            max_cached: compiled grammars kept; of more, the tenant with the most gives up the one that it used longest ago.
            max_compiling: grammars compiled at once, half of them of one tenant.
            timeout_s: longest compilation, and longest wait for another one's.
        """
        self._hf_tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_cached, self._timeout_s = max_cached, timeout_s
        self._lock = threading.Lock()
        self._threads = FairThreads("grammar", max_compiling, stack_bytes=_STACK_BYTES)
        # Of the engine's thread, which must not wait for others.
        self._renewals = FairThreads("grammar-renewal", 1, stack_bytes=_STACK_BYTES)
        self._tokenizer: LLTokenizer | None = None
        self._refusal: str | None = None  # why this tokenizer cannot be used
        # By tenant, too: how long a grammar takes must not tell what others have sent.
        self._compiled: OrderedDict[tuple[str, GrammarSpec], CompiledGrammar] = OrderedDict()
        # Also those beyond the limit that somebody still holds between `prepare` and `start`.
        self._held: WeakValueDictionary[tuple[str, GrammarSpec], CompiledGrammar] = WeakValueDictionary()

    def start(
        self,
        spec: GrammarSpec,
        *,
        stop_token_ids: Collection[int] = (),
        ignores_eos: bool = False,
        bad_words: tuple[tuple[int, ...], ...] = (),
        tenant: str = "",
    ) -> GrammarState:
        """The state of an answer that has no token yet. tenant: whose grammar it is; '' = nobody's.

        Raises: RequestError (grammar wrong, unsatisfiable, too large or too slow; tokenizer without support),
            CapacityError (others are compiling).
        """
        compiled = self.prepare(spec, tenant)
        with self._lock:
            compiled.num_answers += 1
            origin = compiled.matcher
            matcher = origin.deep_copy()

        def renew() -> LLMatcher | None:
            nonlocal origin
            found = self._renewed(compiled, spec, origin)
            if found is None:
                return None
            origin = found
            with self._lock:
                return found.deep_copy()

        return GrammarState(
            matcher,
            self._vocab_size,
            eos_token_ids=self._eos_token_ids,
            stop_token_ids=stop_token_ids,
            ignores_eos=ignores_eos,
            renew=renew,
            may_be_others_fault=lambda: compiled.is_spent and compiled.num_answers > 1,
            bans=bans_of(bad_words, self._vocab_size) if bad_words else None,
        )

    def prepare(self, spec: GrammarSpec, tenant: str = "") -> CompiledGrammar:
        """Compile a grammar; a `start` takes no time while the caller holds the result. Raises like `start`."""
        key = (tenant, spec)
        with self._lock:
            compiled = self._held.get(key)
            if compiled is not None and not compiled.is_spent:
                self._keep(key, compiled)
                return compiled
        check_schema(spec)
        compiled = self._compile(self._ready_tokenizer(), spec, tenant)
        with self._lock:
            self._keep(key, compiled)
        return compiled

    def _renewed(self, compiled: CompiledGrammar, spec: GrammarSpec, spent: LLMatcher) -> LLMatcher | None:
        """The grammar's matcher with another lexer than that of `spent`; None where it is not quickly made, and the next
        answer compiles it anew."""
        with self._lock:
            tokenizer = self._tokenizer
            if compiled.matcher is not spent:  # for another answer
                return compiled.matcher
            compiled.is_spent = not compiled.is_quick
        if compiled.is_spent or tokenizer is None:
            return None
        made = self._renewals.submit("", lambda: compile_grammar(tokenizer, spec))
        if made.exception() is not None:  # no thread, or no memory
            return None
        with self._lock:
            compiled.matcher = made.result()
        return compiled.matcher

    def _keep(self, key: tuple[str, GrammarSpec], compiled: CompiledGrammar) -> None:
        """It is the latest one used; the caller has the lock."""
        self._held[key] = self._compiled[key] = compiled
        self._compiled.move_to_end(key)
        while len(self._compiled) > self._max_cached:
            num_of = Counter(tenant for tenant, _ in self._compiled)
            del self._compiled[max(self._compiled, key=lambda k: num_of[k[0]])]  # the first of those, used longest ago

    def _ready_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None and self._refusal is None:
                try:
                    self._tokenizer = convert_tokenizer(self._hf_tokenizer, self._vocab_size, self._eos_token_ids)
                except RequestError as e:
                    self._refusal = str(e)
            if self._tokenizer is None:
                raise RequestError(str(self._refusal))
            return self._tokenizer

    def _compile(self, tokenizer: LLTokenizer, spec: GrammarSpec, tenant: str) -> CompiledGrammar:
        """Compile in a thread with a deep stack; the caller waits at most `timeout_s` for one, and as long for the result."""
        has_begun = threading.Event()

        def work() -> tuple[LLMatcher, float]:
            has_begun.set()
            start = time.thread_time()  # of a busy machine, too
            return compile_grammar(tokenizer, spec), time.thread_time() - start

        done = self._threads.submit(tenant, work)
        done.add_done_callback(lambda _: has_begun.set())  # there may be no thread
        if not has_begun.wait(self._timeout_s) and done.cancel():
            raise CapacityError("too many grammars are being compiled; try again later")
        try:
            matcher, seconds = done.result(self._timeout_s)
        except TimeoutError:
            raise RequestError(f"the grammar must compile within {self._timeout_s:g} s; simplify it") from None
        return CompiledGrammar(matcher, is_quick=seconds < MAX_RENEWAL_S)  # nothing of its thread holds it


def check_schema(spec: GrammarSpec) -> None:
    """Raise RequestError where a JSON schema, also one inside a Lark grammar, has what `check_bounds` refuses."""
    if spec.kind != "json_schema":
        for found in _JSON_RULE.finditer(spec.text):
            try:
                schema, _ = json.JSONDecoder().raw_decode(spec.text, found.end())
            except (ValueError, RecursionError):  # the compiler says it better
                continue
            check_bounds(schema)
        return
    try:
        schema = json.loads(spec.text)
    except (ValueError, RecursionError) as e:
        raise RequestError(f"the JSON schema must be JSON: {e}") from e
    if not isinstance(schema, dict):
        raise RequestError(f"the JSON schema must be an object, got {type(schema).__name__}")
    check_bounds(schema)


def check_bounds(schema: Any) -> None:
    """Raise RequestError when a pattern in a JSON schema is too long, or its numbers have too many remainders."""
    stack: list[Any] = [schema]
    multiples: set[Decimal] = set()
    is_combined = False
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack += node
        elif isinstance(node, dict):
            properties = node.get("patternProperties")
            patterns = [
                node.get("pattern"),
                node.get("whitespace_pattern"),
                *(properties if isinstance(properties, dict) else ()),
            ]
            longest = max((len(p.encode(errors="surrogatepass")) for p in patterns if isinstance(p, str)), default=0)
            if longest > MAX_PATTERN_BYTES:
                raise RequestError(f"a pattern must have at most {MAX_PATTERN_BYTES} bytes, got {longest}")
            value = node.get("multipleOf")
            if isinstance(value, int | float) and 0 < value < math.inf:  # the compiler refuses others
                multiples.add(Decimal(str(+value)).normalize())  # +: true is 1
            keys = node.keys() - _NOT_COMBINED
            is_combined |= "allOf" in keys or (bool(keys & _COMBINING) and len(keys) > 1)
            stack += node.values()
    _check_multiples(multiples, is_combined=is_combined)


def _check_multiples(multiples: Collection[Decimal], *, is_combined: bool) -> None:
    """Raise RequestError when a number must be a multiple of something that has too many remainders."""
    for group in [list(multiples)] if is_combined else [[m] for m in multiples]:
        places = max([0, *(-int(m.as_tuple().exponent) for m in group)])
        if math.lcm(*(int(m.scaleb(places)) for m in group)) > MAX_MULTIPLE:
            together = ", and so together where a schema combines its parts" if is_combined else ""
            raise RequestError(f"a multipleOf must have at most {MAX_MULTIPLE} units of its last digit{together}")


def json_schema_with_blanks(schema: dict[str, Any]) -> str:
    """Text of a JSON schema that stands inside a Lark grammar, with the blanks that a schema alone is compiled with.

    Raises: RequestError when it is nested too deeply.
    """
    options = {} if "x-guidance" in schema else {"x-guidance": _JSON_OPTIONS}
    try:
        return json.dumps({**schema, **options}, ensure_ascii=False, separators=(",", ":"))
    except RecursionError as e:
        raise RequestError(f"a JSON schema must not be nested so deeply: {e}") from e


def compile_grammar(tokenizer: LLTokenizer, spec: GrammarSpec) -> LLMatcher:
    """A matcher before the first token; raises RequestError with the library's reason.

    The first mask is computed here: some grammars turn out to be empty or too complex only then.
    """
    from llguidance import LLMatcher, LLParserLimits
    from llguidance.gbnf_to_lark import gbnf_to_lark

    what = (
        "JSON schema" if spec.kind.startswith("json") else "regular expression" if spec.kind == "regex" else "grammar"
    )
    try:
        if spec.kind == "regex":
            source = LLMatcher.grammar_from_regex(spec.text)
        elif spec.kind in ("lark", "gbnf", "calls"):
            source = LLMatcher.grammar_from_lark(gbnf_to_lark(spec.text) if spec.kind == "gbnf" else spec.text)
        else:
            options = None if '"x-guidance"' in spec.text else _JSON_OPTIONS  # the schema's own settings of the library
            source = LLMatcher.grammar_from_json_schema(spec.text or '{"type": "object"}', options)
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**_LIMITS))
        if not matcher.is_error():
            has_first = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8).any()
            if not matcher.is_error() and has_first:
                return matcher
        reason = matcher.get_error().strip()
    except Exception as e:  # ValueError of the library's front ends
        reason = str(e).strip()
    raise RequestError(f"the {what} cannot be used: {reason[:500] or 'no answer satisfies it'}")


_DECODERS = {"ByteLevel", "Fuse", "Replace", "ByteFallback", "Strip", "Metaspace"}
"""Parts of decoders behind which every token has bytes of its own."""


def convert_tokenizer(tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    """llguidance's view of a transformers tokenizer: the bytes of every token; takes up to a second.

    Raises: RequestError when there is no fast backend, no end-of-text token, or a decoder whose tokens have no bytes.
    """
    from llguidance import LLTokenizer

    if not eos_token_ids:
        raise RequestError("answers in a grammar need a target with an end-of-text token, and this one has none")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RequestError(
            "answers in a grammar need a fast tokenizer (tokenizer.json), and this target has a slow one"
        )
    settings, eos = json.loads(backend.to_str()), sorted(eos_token_ids)
    decoder = settings.get("decoder") or {}
    if unknown := sorted({part["type"] for part in decoder.get("decoders", [decoder]) if part} - _DECODERS):
        raise RequestError(
            f"answers in a grammar are not possible with this target's tokenizer, whose decoder is {', '.join(unknown)}"
        )
    try:
        return LLTokenizer(_PlainTokens(tokenizer, settings, vocab_size, eos), n_vocab=vocab_size, eos_token=eos)  # type: ignore[arg-type]
    except Exception as e:  # the library has no class of its own for tokenizers that it cannot take
        raise RequestError(f"answers in a grammar are not possible with this target's tokenizer: {e}") from e


class _PlainTokens:
    """A tokenizer in the form that LLTokenizer takes: every token has bytes, and texts go on inside another.

    A special token's written form in a grammar's text is text: the library's own reading would take it for the token.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Any, settings: dict[str, Any], vocab_size: int, eos: list[int]) -> None:
        """settings: tokenizer.json."""
        self._backend = Tokenizer.from_str(json.dumps(_spelling(settings)))
        self._backend.encode_special_tokens = True
        self._backend.no_padding()
        self._backend.no_truncation()
        self._unk = tokenizer.unk_token_id
        num, tokens = min(vocab_size, len(tokenizer)), TokenText(tokenizer)
        self.eos_token_id = eos[0]
        self.bos_token_id = tokenizer.bos_token_id
        known = [tokens.token_bytes(i) for i in range(num)]
        # 0xff, which no text holds, marks special tokens in the library
        self.tokens = [b"" if text[:1] == b"\xff" else text for text in known] + [b""] * (vocab_size - num)
        self.special_token_ids = sorted({*tokens.special_ids, *eos})

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        # A text that the vocabulary cannot spell must not pass for <unk>.
        return [t for t in self._backend.encode(text, add_special_tokens=False).ids if t != self._unk]


def _spelling(settings: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json of one that spells a text's own bytes: no space before it, no other form of its characters."""
    first, normal = settings.get("pre_tokenizer") or {}, settings.get("normalizer") or {}
    for part in (first, *first.get("pretokenizers", ())):
        if part.get("add_prefix_space"):
            part["add_prefix_space"] = False
        if part.get("prepend_scheme"):
            part["prepend_scheme"] = "never"
    parts = [part for part in normal.get("normalizers", [normal]) if part.get("type") == "Replace"]
    settings["normalizer"] = {"type": "Sequence", "normalizers": parts} if parts else None
    return settings
