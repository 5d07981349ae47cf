"""Helpers of the tests of grammars and token biases: a tiny engine and requests of every kind."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping

from paceline.config import EngineConfig, TreeConfig
from paceline.serving.drafters.interface import Drafter
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.drafters.text import PromptLookupDrafter
from paceline.serving.engine.engine import Engine
from paceline.serving.sampling.grammar import GrammarFactory
from paceline.serving.sampling.grammar_state import GrammarState
from paceline.serving.sampling.request import GenerationRequest, GrammarSpec, RequestStatus, RoundEvent, SamplingParams
from paceline.serving.target_model.model import TargetModel
from tests.helpers.fakes import tiny_target, tiny_tokenizer
from tests.helpers.scripted_drafters import OracleDrafter, RandomDrafter

VOCAB = 64
PAGE = 4
PROMPT = (10, 11, 12, 13, 10, 11, 12, 13, 10, 11)
REGEX = GrammarSpec(kind="regex", text="(ab|cd)+[0-9]{2,}z")
DEAD_END = GrammarSpec(kind="regex", text="[ab]{6}(Q|QQ)")  # the vocabulary has no capital Q


@functools.cache
def target() -> TargetModel:
    return tiny_target(vocab=VOCAB, layers=2, width=16, context=128)


def text_of(token_ids: Iterable[int]) -> str:
    return target().tokenizer.decode(list(token_ids), skip_special_tokens=True)


def ids(text: str) -> list[int]:
    return tiny_tokenizer(VOCAB).encode(text, add_special_tokens=False)


def allowed_text(state: GrammarState) -> set[str]:
    """The tokens that may come next, as text."""
    mask = state.allowed()
    assert mask is not None
    return set(tiny_tokenizer(VOCAB).convert_ids_to_tokens(mask.nonzero()[0].tolist()))


def make_engine(drafter: Drafter | None = None, *, num_pages: int = 200, **config) -> Engine:
    """An engine that drafts in every round when it has a drafter."""
    slots = DrafterSlots(drafter, "v0") if drafter is not None else DrafterSlots()
    tree = TreeConfig(max_draft_tokens=8, policy="fixed")
    num_bytes = num_pages * PAGE * (target().kv_row_bytes + slots.kv_row_bytes)
    return Engine(target(), slots, EngineConfig(page_tokens=PAGE, kv_bytes=num_bytes, tree=tree, **config))


def make_drafter(name: str, texts: Mapping[str, list[int]]) -> Drafter:
    """texts: request id -> prompt and output, for the oracle."""
    if name == "oracle":
        return OracleDrafter(texts, hit_rate=0.9)
    if name == "random":
        return RandomDrafter(VOCAB, seed=3)
    return PromptLookupDrafter()


class Answers:
    """What every request was answered, by request id."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, RoundEvent] = {}

    def __call__(self, event: RoundEvent) -> None:
        assert event.request_id not in self.last, "an event after the last one"
        self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
        if event.finish_reason is not None:
            self.last[event.request_id] = event


def submit(engine: Engine, answers: Answers, request_id: str, prompt: Iterable[int] = PROMPT, **params) -> None:
    values = {"temperature": 0.0, "max_tokens": 30, **params}
    engine.submit(
        GenerationRequest(request_id=request_id, prompt_token_ids=tuple(prompt), params=SamplingParams(**values)),
        answers,
    )


def run(engine: Engine, max_steps: int = 2000) -> None:
    """Step until idle; after every step each grammar stands where the committed tokens lead."""
    for _ in range(max_steps):
        is_busy = engine.step()
        engine.check_integrity()
        check_states(engine)
        if not is_busy:
            assert engine.allocator.num_free_pages == engine.allocator.num_pages
            return
    raise AssertionError("the engine does not come to an end")


@functools.cache
def factory() -> GrammarFactory:
    return GrammarFactory(target().tokenizer, VOCAB, target().eos_token_ids)


def check_states(engine: Engine) -> None:
    """The mask of every unfinished answer is that of a fresh state that is fed the committed tokens."""
    for request in engine.output.by_id.values():
        params = request.request.params
        if request.grammar is None or request.status is RequestStatus.WAITING:
            continue
        fresh = factory().start(
            params.grammar, stop_token_ids=params.stop_token_ids, ignores_eos=params.ignore_eos, bad_words=params.bad_words
        )  # fmt: skip
        output = request.tokens[request.prompt_len :]
        for token_id in output:
            fresh.advance(token_id)
        want, got = fresh.allowed(), request.grammar.allowed()
        assert (want is None) == (got is None)
        assert want is None or (want == got).all(), f"{request.request_id}: the state is not that of {output}"


def schema(**values: object) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", text=json.dumps({**values, "x-guidance": {"whitespace_flexible": False}}))


PERSON = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "k": {"enum": ["x", "yy", "xyz"]},
        "l": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["n", "k", "l"],
    "additionalProperties": False,
}
JSON_OBJECT = GrammarSpec(kind="json_object")
LARK = GrammarSpec(kind="lark", text='start: item (", " item)* "."\nitem: /[a-e]{1,3}/ | "(" item ")"')
KINDS: dict[str, dict] = {
    "schema-greedy": {"grammar": schema(**PERSON)},
    "schema": {"grammar": schema(**PERSON), "temperature": 1.0, "seed": 1},
    "schema-hot": {"grammar": schema(**PERSON), "temperature": 1.5, "seed": 2, "top_p": 0.9, "repetition_penalty": 1.2},
    "object": {"grammar": JSON_OBJECT, "temperature": 1.0, "seed": 3, "max_tokens": 40},
    "object-greedy": {"grammar": JSON_OBJECT, "logit_bias": ((54, 20.0),)},
    "regex": {"grammar": GrammarSpec(kind="regex", text="(ab|cd)+[0-9]{2,}z"), "temperature": 1.0, "seed": 4, "top_k": 5},
    "lark": {"grammar": LARK, "temperature": 1.0, "seed": 5, "frequency_penalty": 0.5},
    "endless": {"grammar": GrammarSpec(kind="regex", text="[a-e ]*"), "temperature": 1.0, "seed": 6, "ignore_eos": True},
    "free-greedy": {"ignore_eos": True},
    "free": {"temperature": 1.0, "seed": 7, "ignore_eos": True},
}  # fmt: skip


@functools.cache
def plain(name: str) -> tuple[tuple[int, ...], str]:
    """Tokens and finish reason of a kind of request: alone, without a drafter."""
    engine, answers = make_engine(), Answers()
    submit(engine, answers, name, **KINDS[name])
    run(engine)
    return tuple(answers.tokens[name]), str(answers.last[name].finish_reason)


def texts() -> dict[str, list[int]]:
    return {name: [*PROMPT, *plain(name)[0]] for name in KINDS}


def answer(drafter=None, **params) -> list[int]:
    """Tokens of one request served alone."""
    engine, answers = make_engine(drafter), Answers()
    submit(engine, answers, "r", **params)
    run(engine)
    return answers.tokens["r"]


def check_drafting_and_batching(drafter: str, kinds: dict[str, dict], want: dict[str, list[int]], least: int) -> None:
    """The answers of `kinds` are `want`, in turn and together; a drafter that knows them has `least` tokens accepted of each."""
    known = {name: [*PROMPT, *tokens] for name, tokens in want.items()}
    for max_running in (1, 6):
        engine, answers = make_engine(make_drafter(drafter, known), max_running=max_running), Answers()
        for name, params in kinds.items():
            submit(engine, answers, name, **params)
        run(engine)
        assert answers.tokens == want
        if drafter == "oracle":
            assert all(e.stats.num_accepted_tokens >= least for e in answers.last.values())
