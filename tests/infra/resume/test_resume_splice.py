"""An answer cut anywhere and resumed on another engine is the answer that one engine would have given."""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group
from paceline.errors import RequestError
from paceline.infra.resume.client import Splice
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.sampling.request import GenerationRequest, RoundEvent, SamplingParams
from paceline.serving.sampling.text_stream import TokenText
from tests.helpers.fakes import tiny_target
from tests.helpers.scripted_drafters import RepeatDrafter

VOCAB, NUM_TOKENS = 64, 20
PROMPT = (10, 11, 12, 13, 14, 10, 11)
TREE = TreeConfig(max_draft_tokens=6, policy="fixed")
PARAMS = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "sampled": {"temperature": 1.3, "top_k": 20, "seed": 5, "logprobs": 0},
    "penalised": {
        "temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.4,
    },
    "penalised sample": {"temperature": 1.0, "top_p": 0.9, "seed": 9, "presence_penalty": 2.0, "frequency_penalty": 1.1},
    "unseeded": {"temperature": 1.0},
}  # fmt: skip


@functools.cache
def target():
    return tiny_target(vocab=VOCAB, layers=3, context=128)


@functools.cache
def engine(has_drafter: bool, nth: int) -> Engine:
    """One of several replicas; they share nothing but the target."""
    slots = DrafterSlots(RepeatDrafter(num_slots=3), "v1") if has_drafter else DrafterSlots()
    config = EngineConfig(max_running=4, kv_bytes=2**20, page_tokens=4, prefill_chunk_tokens=5, tree=TREE)
    return Engine(target(), slots, config)


def run(engine: Engine, request: GenerationRequest, num_events: int | None = None) -> list[RoundEvent]:
    """The first events that `engine` sends for a request (all when None); the rest are lost with it."""
    events: list[RoundEvent] = []
    engine.submit(request, events.append)
    while not engine.is_idle and (num_events is None or len(events) < num_events):
        engine.step()
    engine.abort(request.request_id)
    engine.step()
    engine.check_integrity()
    assert engine.is_idle
    return events if num_events is None else events[:num_events]


def ask(**params) -> GenerationRequest:
    values = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **params}
    return GenerationRequest(request_id="r", prompt_token_ids=PROMPT, params=SamplingParams(**values))


def spliced(request: GenerationRequest, has_drafter: bool, cuts: list[int]) -> tuple[Splice, list[RoundEvent]]:
    """All events of a request whose n-th engine dies after cuts[n] events; the last one lives."""
    splice, events = Splice(request), []
    for nth, num_events in enumerate([*cuts, None]):
        for event in run(engine(has_drafter, nth), splice.next_request(), num_events):
            events.append(splice.take(event))
            if event.finish_reason is not None:
                return splice, events
    raise AssertionError("the last engine did not finish")


def tokens(events: list[RoundEvent]) -> list[int]:
    return [t for e in events for t in e.token_ids]


def check_same(events: list[RoundEvent], whole: list[RoundEvent]) -> None:
    assert tokens(events) == tokens(whole)
    assert [e.finish_reason for e in events[:-1]] == [None] * (len(events) - 1)
    last, want = events[-1], whole[-1]
    assert (last.finish_reason, last.stop_match, last.error) == (want.finish_reason, want.stop_match, None)
    assert {e.request_id for e in events} == {"r"}
    ours, theirs = ([lp for e in x for lp in e.logprobs or ()] for x in (events, whole))
    assert [(lp.token_id, [t for t, _ in lp.top]) for lp in ours] == [(lp.token_id, [t for t, _ in lp.top]) for lp in theirs]  # fmt: skip
    assert [lp.logprob for lp in ours] == pytest.approx([lp.logprob for lp in theirs], abs=1e-4)
    num_emitted = 0
    for event in events:
        num_emitted += len(event.token_ids)
        s = event.stats
        assert s.num_emitted_tokens == num_emitted
        assert num_emitted == 1 + s.num_rounds + s.num_accepted_tokens - s.num_truncated_tokens


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("has_drafter", [False, True])
def test_one_cut_at_every_event(kind: str, has_drafter: bool) -> None:
    request = Splice(ask(**PARAMS[kind])).request  # with a seed
    whole = run(engine(has_drafter, 0), request)
    assert len(tokens(whole)) == NUM_TOKENS
    for cut in range(len(whole)):
        splice, events = spliced(request, has_drafter, [cut])
        assert splice.num_tries == 2
        check_same(events, whole)
        if not has_drafter:  # the same rounds, event for event
            assert [(e.token_ids, e.stats.num_rounds) for e in events] == [(e.token_ids, e.stats.num_rounds) for e in whole]  # fmt: skip


@settings(max_examples=60)
@given(
    kind=st.sampled_from(list(PARAMS)),
    has_drafter=st.booleans(),
    cuts=st.lists(st.integers(0, 6), min_size=2, max_size=4),
    max_tokens=st.integers(1, NUM_TOKENS),
    at=st.integers(0, NUM_TOKENS - 2),
    has_stop=st.booleans(),
)
def test_any_cuts_with_any_end(
    kind: str, has_drafter: bool, cuts: list[int], max_tokens: int, at: int, has_stop: bool
) -> None:
    request = Splice(ask(**PARAMS[kind])).request
    params = dataclasses.replace(request.params, max_tokens=max_tokens)
    if has_stop:  # three tokens of the answer: a cut may fall inside
        ids = tokens(run(engine(has_drafter, 0), request))[at : at + 3]
        params = dataclasses.replace(params, stop=(TokenText(target().tokenizer).decode(ids, True) or "never",))
    request = dataclasses.replace(request, params=params)
    whole = run(engine(has_drafter, 0), request)
    check_same(spliced(request, has_drafter, cuts)[1], whole)


@pytest.mark.parametrize("has_drafter", [False, True])
def test_a_stop_string_that_straddles_the_cut_ends_the_answer(has_drafter: bool) -> None:
    request = ask(temperature=0.0)
    ids = tokens(run(engine(has_drafter, 0), request))
    text = TokenText(target().tokenizer).decode(ids[6:10], True)
    request = dataclasses.replace(request, params=dataclasses.replace(request.params, stop=(text,)))
    whole = run(engine(has_drafter, 0), request)
    assert whole[-1].stop_match == text and len(tokens(whole)) <= 10
    for cut in range(len(whole)):
        check_same(spliced(request, has_drafter, [cut])[1], whole)


def test_penalties_would_notice_if_resumed_tokens_counted_as_prompt() -> None:
    params = {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    request = ask(**params)
    whole = tokens(run(engine(False, 0), request))
    as_prompt = []
    for cut in range(1, NUM_TOKENS, 3):
        wrong = GenerationRequest(
            request_id="w",
            prompt_token_ids=(*PROMPT, *whole[:cut]),
            params=SamplingParams(**params, ignore_eos=True, max_tokens=NUM_TOKENS - cut),
        )
        as_prompt.append(whole[:cut] + tokens(run(engine(False, 1), wrong)))
    assert any(other != whole for other in as_prompt)


def test_what_a_request_is_goes_along_and_its_statistics_add_up() -> None:
    request = dataclasses.replace(
        ask(temperature=1.0), bucket="b", group=Group.STATIC, is_traced=False, tenant="t", priority=3, deadline_s=9.0,
        prompt_logprobs=1,
    )  # fmt: skip
    splice = Splice(request)
    first = splice.next_request()
    assert first == splice.request and first.params.seed is not None
    events = run(engine(True, 0), dataclasses.replace(first, deadline_s=None, prompt_logprobs=None), 3)
    seen = [splice.take(e) for e in events][-1].stats
    second = splice.next_request(elapsed_ms=5000.0)
    assert second.resumed_token_ids == tuple(tokens(events))
    same = {"request_id": "r", "resumed_token_ids": (), "prompt_logprobs": 1}
    assert dataclasses.replace(second, **same) == first
    assert second.request_id == "r~1" and second.prompt_logprobs is None
    own = run(engine(True, 1), dataclasses.replace(second, deadline_s=None))[-1]
    total = splice.take(own).stats
    for name in ("num_rounds", "num_draft_tokens", "num_accepted_tokens", "draft_ms", "verify_ms", "round_ms"):
        assert getattr(total, name) == pytest.approx(getattr(seen, name) + getattr(own.stats, name))
    assert total.total_ms == pytest.approx(own.stats.total_ms + 5000.0)
    assert total.num_emitted_tokens == NUM_TOKENS


def test_an_engine_that_died_before_its_first_event_leaves_no_mark() -> None:
    splice = Splice(dataclasses.replace(ask(temperature=0.0), prompt_logprobs=1))
    splice.next_request()
    second = splice.next_request()
    assert second == dataclasses.replace(splice.request, request_id="r~1")


@pytest.mark.parametrize("ids", [(5,) * NUM_TOKENS, (VOCAB,), (-1,)])
def test_an_engine_refuses_what_cannot_be_resumed(ids: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match="resumed_token_ids must be"):
        engine(False, 0).submit(dataclasses.replace(ask(), resumed_token_ids=ids), lambda e: None)


@pytest.mark.parametrize("num_top", [0, 3])
def test_prompt_log_probabilities_behind_resumed_tokens_are_refused_and_not_forgotten(num_top: int) -> None:
    with pytest.raises(RequestError, match="prompt_logprobs must be None together with resumed_token_ids"):
        dataclasses.replace(ask(), prompt_logprobs=num_top, resumed_token_ids=(5, 6))


def test_resumed_requests_survive_preemption_on_a_full_engine() -> None:
    config = EngineConfig(max_running=4, kv_bytes=1, page_tokens=4, prefill_chunk_tokens=5, tree=TREE)
    row = target().kv_row_bytes
    small = Engine(target(), DrafterSlots(), dataclasses.replace(config, kv_bytes=row * 4 * 13))
    whole = {n: tokens(run(engine(False, 0), dataclasses.replace(ask(temperature=0.0), prompt_token_ids=(*PROMPT, n)))) for n in range(4)}  # fmt: skip
    events: dict[int, list[RoundEvent]] = {n: [] for n in whole}
    rng = random.Random(0)
    for n, ids in whole.items():
        cut = rng.randrange(1, NUM_TOKENS - 8)
        small.submit(
            dataclasses.replace(
                ask(temperature=0.0), request_id=str(n), prompt_token_ids=(*PROMPT, n), resumed_token_ids=tuple(ids[:cut])
            ),
            events[n].append,
        )  # fmt: skip
        whole[n] = ids[cut:]
    while not small.is_idle:
        small.step()
        small.check_integrity()
    assert small.scheduler.num_preemptions > 0
    assert {n: tokens(e) for n, e in events.items()} == whole
