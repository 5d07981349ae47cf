"""Answers keep to their grammar, and drafting, batching and preemption change no token of them."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections import Counter
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from paceline.errors import CapacityError, RequestError
from paceline.serving.draft_tree import TreeBatch
from paceline.serving.grammar import MAX_TEXT_BYTES, GrammarFactory
from paceline.serving.grammar_state import GrammarState
from paceline.serving.request import GrammarSpec, SamplingParams
from paceline.serving.sampling import SamplingBatch
from paceline.serving.scripted_drafters import OracleDrafter
from paceline.serving.verify import draw_all, verify
from tests.fakes import EOS_ID, tiny_tokenizer
from tests.serving.constrained import (
    KINDS,
    PERSON,
    PROMPT,
    VOCAB,
    Answers,
    factory,
    make_drafter,
    make_engine,
    plain,
    run,
    submit,
    text_of,
    texts,
)

MODEL = Path(__file__).parents[2] / "paceline" / "models" / "target"
REGEX = GrammarSpec(kind="regex", text="(ab|cd)+[0-9]{2,}z")
DEAD_END = GrammarSpec(kind="regex", text="[ab]{6}(Q|QQ)")  # the vocabulary has no capital Q


def ids(text: str) -> list[int]:
    return tiny_tokenizer(VOCAB).encode(text, add_special_tokens=False)


def allowed_text(state) -> set[str]:
    return set(tiny_tokenizer(VOCAB).convert_ids_to_tokens(state.allowed().nonzero()[0].tolist()))


# ---- the state of one answer ------------------------------------------------------------------------------------
def test_masks_follow_the_answer_and_end_with_it() -> None:
    state = factory().start(REGEX)
    assert allowed_text(state) == {"a", "c"}
    for token in ids("ab12"):
        state.advance(token)
    assert allowed_text(state) == {*"0123456789z"}
    state.advance(*ids("z"))
    assert allowed_text(state) == {"<|end|>"}
    state.advance(EOS_ID)
    assert state.allowed() is None and state.error is None


def test_tokens_that_are_cut_are_taken_back() -> None:
    state = factory().start(REGEX)
    for token in ids("ab12"):
        state.advance(token)
    state.keep(2)
    assert allowed_text(state) == {"a", "c", *"0123456789"}
    for token in [*ids("12z"), EOS_ID]:
        state.advance(token)
    state.rewind()
    assert allowed_text(state) == {"a", "c", *"0123456789"}
    for token in [*ids("12z"), EOS_ID]:
        state.advance(token)
    state.keep(3)  # the end is drawn again
    assert allowed_text(state) == {"<|end|>"}


def test_a_complete_answer_may_end_with_the_requests_stop_tokens() -> None:
    stop = ids("!")
    state = factory().start(GrammarSpec(kind="regex", text="ab?"), stop_token_ids=[*stop, 10**6])
    assert allowed_text(state) == {"a"}
    state.advance(*ids("a"))
    assert allowed_text(state) == {"b", "!", "<|end|>"}
    state.advance(*stop)
    assert state.allowed() is None


def test_ignoring_the_end_token_keeps_it_for_where_nothing_else_is_left() -> None:
    state = factory().start(GrammarSpec(kind="regex", text="ab?"), ignores_eos=True)
    state.advance(*ids("a"))
    assert allowed_text(state) == {"b"}
    state.advance(*ids("b"))
    assert allowed_text(state) == {"<|end|>"}


def test_states_of_one_grammar_are_independent() -> None:
    one, two = factory().start(REGEX), factory().start(REGEX)
    one.advance(*ids("a"))
    assert allowed_text(one) == {"b"} and allowed_text(two) == {"a", "c"}


def test_blanks_inside_json_are_bounded_unless_the_schema_says_how() -> None:
    state = factory().start(GrammarSpec(kind="json_object"))
    state.advance(*ids("{"))
    for token in ids("\n" + " " * 31):
        assert {" ", "}"} <= allowed_text(state)
        state.advance(token)
    assert " " not in allowed_text(state) and "}" in allowed_text(state)
    own = GrammarSpec(kind="json_schema", text='{"type":"object","x-guidance":{"whitespace_flexible":false}}')
    state = factory().start(own)
    state.advance(*ids("{"))
    assert allowed_text(state) == {'"', "}"}


def test_a_failure_behind_tokens_that_are_taken_back_is_forgotten_and_met_again() -> None:
    state = factory().start(DEAD_END)
    for token in ids("ababab"):
        state.advance(token)
    assert state.allowed() is None and state.error is not None
    state.keep(4)
    assert state.error is None and allowed_text(state) == {"a", "b"}
    for token in ids("bb"):
        state.advance(token)
    assert state.allowed() is None and state.error is not None
    state.keep(2)
    assert state.allowed() is None and state.error is not None, "nothing was taken back"


# ---- the law of what is drawn -----------------------------------------------------------------------------------
@pytest.mark.parametrize("is_on_host", [False, True])
def test_the_law_is_the_targets_renormalised_over_what_the_grammar_allows(is_on_host, monkeypatch) -> None:
    """Integer weights w: with the midpoints of a grid of sum(w) uniforms, w of them draw each token. Exact."""
    vocab, history = 9, [3, 4]  # ids 3.. are a, b, c, d, e, f
    compiler = GrammarFactory(tiny_tokenizer(vocab), vocab, [EOS_ID])
    spec = GrammarSpec(kind="regex", text="(a|b|d)(a|c)?|cf?e")
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 5, size=(vocab, vocab))  # of the next token, by the newest token
    host_tree = make_tree([(4, 0), (3, 1), (5, 0), (8, 3), (6, 0), (EOS_ID, 1)], anchor=history[-1], on_host=is_on_host)
    params = SamplingParams(temperature=1.0, grammar=spec)
    law: Counter = Counter()
    want: Counter = Counter()

    def allowed(path: list[int]) -> list[int]:
        state = compiler.start(spec)
        for token in path:
            state.advance(token)
        mask = state.allowed()
        return [] if mask is None else mask.nonzero()[0].tolist()

    def decode(points: list[float]) -> list[int]:
        """The answer's first tokens when the draw at output position i takes the uniform points[i]."""
        table = torch.tensor([*points, *[0.5] * 8], dtype=torch.float64)
        monkeypatch.setattr(SamplingBatch, "uniforms", lambda _s, _owner, at: table[at - len(history)])
        state, out = compiler.start(spec), []
        batch = SamplingBatch.from_params([params], [0], grammars=[state])
        while len(out) < len(points) and EOS_ID not in out:
            anchor = [*history, *out][-1]
            tree = TreeBatch.roots(torch.tensor([anchor])) if out else host_tree
            logits = torch.from_numpy(np.log(weights[tree.token_ids.numpy()])).float()
            plan = verify(tree, logits, batch, torch.tensor([len(history) + len(out) - 1]))
            path, bonus = plan.on_host()[0]
            new = [*(int(tree.token_ids[r]) for r in path[1:]), bonus]
            if EOS_ID in new:
                new = new[: new.index(EOS_ID) + 1]
            state.keep(len(new))
            out += new
        return out[: len(points)]

    for first in allowed([]):
        for second in allowed([first]):
            want[first, second] = int(weights[history[-1], first] * weights[first, second])
    total = int(weights[history[-1], allowed([])].sum())
    for k in range(total):
        first = decode([(k + 0.5) / total])[0]
        inner = int(weights[first, allowed([first])].sum())
        for j in range(inner):
            pair = decode([(k + 0.5) / total, (j + 0.5) / inner])
            law[tuple(pair)] += 1
    assert law == want and len(law) > 8


def make_tree(nodes: list[tuple[int, int]], anchor: int, *, on_host: bool) -> TreeBatch:
    """(token, parent row) in order, as one request's tree; built by the host path or packed."""
    from paceline.serving.draft_tree import HostTree

    tokens, parents = [anchor, *(t for t, _ in nodes)], [-1, *(p for _, p in nodes)]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    ancestors = np.eye(len(tokens), dtype=bool)
    for row in range(1, len(tokens)):
        ancestors[row] |= ancestors[parents[row]]
    host = HostTree(
        token_ids=tokens, parents=parents, depths=depths, scores=[0.0] * len(tokens), cells=[-1] * len(tokens)
    )
    return TreeBatch(
        token_ids=torch.tensor(tokens), parents=torch.tensor(parents), depths=torch.tensor(depths),
        scores=torch.zeros(len(tokens)), cu_nodes=torch.tensor([0, len(tokens)]), ancestors=torch.from_numpy(ancestors),
        host=host if on_host else None,
    )  # fmt: skip


def test_a_draw_at_every_row_is_refused() -> None:
    state = factory().start(REGEX)
    batch = SamplingBatch.from_params([SamplingParams(grammar=REGEX)], [0], grammars=[state])
    tree = make_tree([(3, 0)], anchor=3, on_host=False)
    with pytest.raises(ValueError, match="level by level"):
        draw_all(tree, torch.zeros(2, VOCAB), batch, torch.tensor([1]))
    with pytest.raises(ValueError, match="GrammarState"):
        SamplingBatch.from_params([SamplingParams(grammar=REGEX)], [0])


# ---- whole answers ----------------------------------------------------------------------------------------------
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
    monkeypatch.setattr("tests.serving.constrained.check_states", lambda _engine: None)
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


# ---- grammars that are wrong, huge or hostile -------------------------------------------------------------------
def nested(depth: int) -> str:
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


def chain(num: int) -> str:
    """A schema of `num` definitions, each inside the one before."""
    parts = [f'"{i}":{{"items":{{"$ref":"#/$defs/{i + 1}"}}}}' for i in range(num)]
    return f'{{"$ref":"#/$defs/0","$defs":{{{",".join(parts)},"{num}":{{"type":"string"}}}}}}'


HOSTILE = {
    "no JSON": ("json_schema", '{"type":'),
    "no object": ("json_schema", "[1]"),
    "unknown type": ("json_schema", '{"type":"banana"}'),
    "not implemented": ("json_schema", '{"not":{"type":"string"}}'),
    "unsatisfiable": ("json_schema", '{"type":"string","minLength":5,"maxLength":2}'),
    "endless recursion": ("json_schema", '{"$ref":"#"}'),
    "endless nesting": ("json_schema", nested(2000)),
    "remote": ("json_schema", '{"$ref":"http://127.0.0.1:9/x"}'),
    "file": ("json_schema", '{"$ref":"file:///etc/passwd"}'),
    "a megabyte": ("json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(40_000)}})),
    "long pattern": ("json_schema", json.dumps({"items": [{"patternProperties": {"a?" * 5000: {}}}]})),
    "too many combinations": (
        "json_schema",
        json.dumps({"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}, "required": [f"a{i}{j}"]} for j in range(6)]}
                              for i in range(12)]}),
    ),
    "bad regex": ("regex", "(["),
    "look-around": ("regex", "(?=a)b"),
    "empty regex": ("regex", r"[^\s\S]"),
    "long regex": ("regex", "a?" * 30_000),
    "deep regex": ("regex", "(" * 2000 + "a" + ")" * 2000),
    "bad lark": ("lark", "start start"),
    "no start": ("lark", 'foo: "a"'),
    "left recursion": ("lark", "start: e\ne: e"),
    "deep lark": ("lark", "start: " + "(" * 8000 + '"a"' + ")" * 8000),
    "unknown characters": ("regex", "Q+"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_in_bounded_time(name) -> None:
    kind, text = HOSTILE[name]
    start = time.monotonic()
    with pytest.raises(RequestError):
        submit(make_engine(), Answers(), "r", grammar=GrammarSpec(kind=kind, text=text))
    assert time.monotonic() - start < 20  # thousandths of that on an idle machine


def test_long_chains_of_rules_do_not_exhaust_the_stack() -> None:
    rules = "\n".join(f"a{i:x}:a{i + 1:x}" for i in range(1680))
    for spec in (
        GrammarSpec(kind="json_schema", text=chain(1500)),
        GrammarSpec(kind="lark", text=f'start:a0\n{rules}\na{1680:x}:"b"'),
    ):
        assert len(spec.text) > 0.6 * MAX_TEXT_BYTES[spec.kind]
        state = factory().start(spec)
        allowed = state.allowed()
        assert allowed is not None
        state.advance(int(allowed.nonzero()[0][0]))
        assert state.error is None


def test_a_slow_compilation_is_given_up_and_bounded_in_number(monkeypatch) -> None:
    go, done = threading.Event(), threading.Event()

    def slow(tokenizer, spec):
        go.wait(30)
        done.set()
        raise RequestError("late")

    monkeypatch.setattr("paceline.serving.grammar.compile_grammar", slow)
    compiler = GrammarFactory(tiny_tokenizer(VOCAB), VOCAB, [EOS_ID], max_compiling=1, timeout_s=0.05)
    with pytest.raises(RequestError, match=r"within 0\.05 s"):
        compiler.start(REGEX)
    with pytest.raises(CapacityError, match="try again"):
        compiler.start(REGEX)
    go.set()
    assert done.wait(10)
    assert threading.stack_size() == 0


def test_compiled_grammars_are_kept_up_to_a_limit(monkeypatch) -> None:
    from paceline.serving import grammar

    compiled = []
    real = grammar.compile_grammar
    monkeypatch.setattr(grammar, "compile_grammar", lambda t, s: compiled.append(s.text) or real(t, s))
    compiler = GrammarFactory(tiny_tokenizer(VOCAB), VOCAB, [EOS_ID], max_cached=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        compiler.start(GrammarSpec(kind="regex", text=text))
    assert compiled == ["a", "b", "c", "b"]


def test_many_threads_get_states_of_their_own() -> None:
    compiler = GrammarFactory(tiny_tokenizer(VOCAB), VOCAB, [EOS_ID], timeout_s=60.0)
    specs = [GrammarSpec(kind="regex", text=t) for t in ("a+b", "c+d", "ef")]
    states: list = []
    threads = [threading.Thread(target=lambda s=s: states.append((s, compiler.start(s)))) for s in specs * 6]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(states) == 18
    assert all(allowed_text(state) == {spec.text[0]} for spec, state in states)


# ---- tokenizers -------------------------------------------------------------------------------------------------
def test_tokenizers_without_support_are_refused_with_a_reason() -> None:
    class Slow:
        pass

    for tokenizer, eos, reason in (
        (Slow(), [1], "fast tokenizer"),
        (tiny_tokenizer(VOCAB), [], "end-of-text"),
        (Slow(), [1], "fast tokenizer"),
    ):
        compiler = GrammarFactory(tokenizer, VOCAB, eos)
        for _ in range(2):
            with pytest.raises(RequestError, match=reason):
                compiler.start(REGEX)
    from tokenizers import decoders

    strange = tiny_tokenizer(VOCAB)
    strange.backend_tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(RequestError, match="tokenizer"):
        GrammarFactory(strange, VOCAB, [EOS_ID]).start(REGEX)


@pytest.mark.skipif(not (MODEL / "tokenizer.json").is_file(), reason="no bundled model")
def test_the_bundled_targets_tokenizer_walks_through_json() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    compiler = GrammarFactory(tokenizer, 4100, [tokenizer.eos_token_id])  # logits may be wider than the vocabulary
    text = json.dumps({"n": 42, "k": "yy", "l": [True, False]})
    state = compiler.start(GrammarSpec(kind="json_schema", text=json.dumps(PERSON)))
    for token in tokenizer.encode(text, add_special_tokens=False):
        allowed = state.allowed()
        assert allowed is not None and allowed.shape == (4100,) and allowed[token] and not allowed[4096:].any()
        state.advance(token)
    allowed = state.allowed()
    assert allowed is not None and allowed.nonzero()[0].tolist() == [tokenizer.eos_token_id]


def test_byte_level_tokens_may_split_characters() -> None:
    """With 300 ids every byte is a token of its own: a character of three bytes takes three draws."""
    tokenizer = tiny_tokenizer(300)
    state = GrammarFactory(tokenizer, 300, [EOS_ID]).start(GrammarSpec(kind="regex", text="[日月]"))
    for token, fork in itertools.zip_longest(tokenizer.encode("日", add_special_tokens=False), [1, 2, 1]):
        allowed = state.allowed()
        assert allowed is not None and allowed[token] and allowed.sum() == fork
        state.advance(token)
    assert state.error is None
