"""Answers keep to their grammar, and drafting, batching and preemption change no token of them."""

from __future__ import annotations

import json
import re
from collections import Counter

import jsonschema
import pytest

from paceline.serving.sampling.grammar_state import GrammarState
from tests.helpers.constrained import (
    DEAD_END,
    KINDS,
    PERSON,
    PROMPT,
    Answers,
    ids,
    make_drafter,
    make_engine,
    plain,
    run,
    submit,
    text_of,
    texts,
)
from tests.helpers.fakes import EOS_ID
from tests.helpers.scripted_drafters import OracleDrafter


def check_answer(name: str, tokens: list[int], reason: str) -> None:
    spec, text = KINDS[name].get("grammar"), text_of(tokens)
    if spec is None or reason == "length":
        return
    assert reason == "stop" and tokens[-1] == EOS_ID
    if spec.kind == "json_schema":
        jsonschema.validate(json.loads(text), PERSON)
    elif spec.kind == "json_object":
        assert isinstance(json.loads(text), dict)
    elif spec.kind == "regex":
        assert re.fullmatch(spec.text, text)


def test_finished_answers_keep_to_their_grammar() -> None:
    reasons = Counter()
    for name in KINDS:
        tokens, reason = plain(name)
        check_answer(name, list(tokens), reason)
        reasons[reason] += 1
    assert plain("endless")[1] == "length" and reasons["stop"] >= 4
    engine, answers = make_engine(), Answers()
    for seed in range(24):
        submit(engine, answers, f"schema {seed}", **{**KINDS["schema"], "seed": seed, "max_tokens": 40})
    run(engine)
    for request_id, event in answers.last.items():
        check_answer("schema", answers.tokens[request_id], str(event.finish_reason))
    assert len({tuple(t) for t in answers.tokens.values()}) > 20
    assert all(e.finish_reason == "stop" for e in answers.last.values())  # no answer of the schema has 40 characters


@pytest.mark.parametrize("max_running", [1, 2, 8])
@pytest.mark.parametrize("drafter", ["random", "oracle", "lookup"])
def test_answers_are_those_of_plain_decoding(drafter, max_running) -> None:
    engine, answers = make_engine(make_drafter(drafter, texts()), max_running=max_running), Answers()
    for name, params in KINDS.items():
        submit(engine, answers, name, **params)
    run(engine)
    for name in KINDS:
        assert (tuple(answers.tokens[name]), answers.last[name].finish_reason) == plain(name), name


def test_drafts_are_accepted_inside_a_grammar() -> None:
    engine, answers = make_engine(OracleDrafter(texts())), Answers()
    for name, params in KINDS.items():
        submit(engine, answers, name, **params)
    run(engine)
    for name, event in answers.last.items():
        stats = event.stats
        assert stats.acceptance_length > 3 or stats.num_rounds == 1, name
        assert stats.num_emitted_tokens == 1 + stats.num_rounds + stats.num_accepted_tokens - stats.num_truncated_tokens


def test_preemption_and_page_shortage_change_nothing(monkeypatch) -> None:
    num_ahead: Counter = Counter()  # by state: tokens drawn and not yet committed
    was_cut, num_continued = set(), 0
    advance, keep = GrammarState.advance, GrammarState.keep

    def seen_advance(self, token_id):
        nonlocal num_continued
        if id(self) in was_cut:
            was_cut.remove(id(self))
            num_continued += 1
        num_ahead[id(self)] += 1
        advance(self, token_id)

    def seen_keep(self, num_tokens):
        if 0 < num_tokens < num_ahead[id(self)]:
            was_cut.add(id(self))
        num_ahead[id(self)] = 0
        keep(self, num_tokens)

    for name in KINDS:
        plain(name)
    monkeypatch.setattr(GrammarState, "advance", seen_advance)
    monkeypatch.setattr(GrammarState, "keep", seen_keep)
    monkeypatch.setattr("tests.helpers.constrained.check_states", lambda _engine: None)
    engine, answers = make_engine(OracleDrafter(texts(), hit_rate=0.8), num_pages=24, max_running=6), Answers()
    for name, params in KINDS.items():
        submit(engine, answers, name, **params)
    run(engine)
    assert engine.scheduler.num_preemptions > 0
    assert num_continued > 0, "no round was cut by a shortage of pages"
    for name in KINDS:
        assert (tuple(answers.tokens[name]), answers.last[name].finish_reason) == plain(name), name


def test_states_survive_preemption() -> None:
    engine, answers = make_engine(OracleDrafter(texts()), num_pages=24, max_running=6), Answers()
    for name, params in KINDS.items():
        submit(engine, answers, name, **params)
    run(engine)  # compares every state with its committed tokens after each round
    assert engine.scheduler.num_preemptions > 0


def test_an_aborted_answer_leaves_the_others_alone() -> None:
    engine, answers = make_engine(OracleDrafter(texts())), Answers()
    for name, params in KINDS.items():
        submit(engine, answers, name, **params)
    engine.step()
    engine.step()
    engine.abort("schema")
    run(engine)
    assert answers.last["schema"].finish_reason == "abort"
    for name in KINDS.keys() - {"schema"}:
        assert tuple(answers.tokens[name]) == plain(name)[0]


def test_stop_strings_and_stop_tokens_end_answers_inside_a_grammar() -> None:
    tokens = list(plain("schema")[0])
    engine, answers = make_engine(OracleDrafter(texts())), Answers()
    submit(engine, answers, "string", **{**KINDS["schema"], "stop": ('"k"',)})
    submit(engine, answers, "token", **{**KINDS["schema"], "stop_token_ids": tuple(ids("}"))})
    run(engine)
    assert answers.last["string"].stop_match == '"k"'
    assert answers.tokens["string"] == tokens[: len(answers.tokens["string"])]
    assert answers.tokens["token"] == tokens[:-1]  # the brace ends the answer, as it is one of its stop tokens


def test_logprobs_are_those_of_the_unprocessed_distribution() -> None:
    engine, answers = make_engine(), Answers()
    events = []
    submit(engine, lambda e: (events.append(e), answers(e)), "schema", **{**KINDS["schema"], "logprobs": 1})
    run(engine)
    first = events[0].logprobs[0]
    assert first.token_id == ids("{")[0] and first.logprob < -1e-3  # the only token that the grammar allows
    assert sum(len(e.logprobs or ()) for e in events) == len(answers.tokens["schema"])


@pytest.mark.parametrize("drafter", [None, "random"])
def test_a_grammar_that_fails_half_way_ends_its_request_alone(drafter) -> None:
    made = make_drafter(drafter, {}) if drafter else None
    engine, answers = make_engine(made), Answers()
    broken = {"grammar": DEAD_END, "logprobs": 0}
    submit(engine, answers, "broken", **broken)
    run(engine)
    for name, params in KINDS.items():
        submit(engine, answers, name, **params)
    submit(engine, answers, "broken too", **broken)
    run(engine)
    for name in ("broken", "broken too"):
        assert answers.last[name].finish_reason == "error"
        assert "grammar" in str(answers.last[name].error)
        assert re.fullmatch("[ab]{0,6}", text_of(answers.tokens[name]))
    for name in KINDS:
        assert (tuple(answers.tokens[name]), answers.last[name].finish_reason) == plain(name), name
    assert engine.output.num_errors == {}  # no drafter is to blame


@pytest.mark.parametrize("drafter", [None, "random"])
def test_what_was_drawn_before_a_grammar_fails_counts(drafter) -> None:
    made = make_drafter(drafter, {}) if drafter else None
    engine, answers = make_engine(made), Answers()
    submit(engine, answers, "cut", grammar=DEAD_END, max_tokens=6)
    submit(engine, answers, "broken", grammar=DEAD_END, max_tokens=8)
    run(engine)
    assert answers.last["cut"].finish_reason == "length" and len(answers.tokens["cut"]) == 6
    assert answers.last["broken"].finish_reason == "error" and answers.last["broken"].is_own_fault
    assert answers.tokens["broken"] == answers.tokens["cut"]


def test_pages_that_run_out_before_a_grammar_fails_cost_no_token() -> None:
    def serve(num_pages: int, drafter) -> Answers:
        engine, answers = make_engine(drafter, num_pages=num_pages, prefix_caching=False), Answers()
        submit(engine, answers, "other", max_tokens=20, ignore_eos=True)
        submit(engine, answers, "broken", grammar=DEAD_END)
        run(engine)
        assert answers.last["broken"].finish_reason == "error"
        return answers

    want = serve(100, None).tokens
    known = OracleDrafter({name: [*PROMPT, *tokens] for name, tokens in want.items()})
    num_rounds = []
    for num_pages in (8, 9, 10, 100):
        got = serve(num_pages, known)
        assert got.tokens == want
        num_rounds.append(got.last["broken"].stats.num_rounds)
    assert num_rounds[0] > num_rounds[-1], "no path was cut in front of the failure"
