"""Grammars that are wrong, huge or hostile are refused in bounded time; tokenizers fit or are refused with a reason."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path

import llguidance.hf
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paceline.errors import CapacityError, RequestError
from paceline.serving.sampling import grammar as grammar_module
from paceline.serving.sampling.grammar import GrammarFactory, convert_tokenizer
from paceline.serving.sampling.grammar_state import GrammarState
from paceline.serving.sampling.request import MAX_TEXT_BYTES, GrammarSpec
from paceline.serving.sampling.text_stream import TextStream, TokenText
from tests.helpers.constrained import PERSON, REGEX, VOCAB, Answers, allowed_text, factory, make_engine, submit
from tests.helpers.fakes import EOS_ID, tiny_tokenizer

MODEL = Path(__file__).parents[3] / "paceline" / "models" / "target"


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
    "long blanks": ("json_schema", json.dumps({"x-guidance": {"whitespace_pattern": "a?" * 5000}})),
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


MANY = {"type": "integer", "multipleOf": 9_999_991}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", json.dumps(MANY)),
        ("json_schema", json.dumps({"properties": {"default": {"items": MANY}}})),
        ("json_schema", json.dumps({"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]})),
        ("json_schema", json.dumps({"multipleOf": 9973, "anyOf": [{"multipleOf": 9967}]})),
        ("json_schema", json.dumps({"$defs": {"a": {"multipleOf": 9973}}, "$ref": "#/$defs/a", "multipleOf": 9967})),
        ("json_schema", '{"multipleOf": 0.123457}'),
        ("lark", f"start: a\na: %json {json.dumps(MANY)}"),
    ],
)
def test_a_multiple_with_too_many_remainders_is_refused_before_it_is_compiled(kind, text) -> None:
    with pytest.raises(RequestError, match="multipleOf must have at most"):
        submit(make_engine(), Answers(), "r", grammar=GrammarSpec(kind=kind, text=text))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "multipleOf": 0.01},
        {"type": "number", "multipleOf": 1e-6},
        {"type": "integer", "multipleOf": 3600},
        {"type": "number", "allOf": [{"multipleOf": 0.25}, {"multipleOf": 5}]},
        {"properties": {"price": {"multipleOf": 0.01}, "seconds": {"multipleOf": 3600}, "kb": {"multipleOf": 1024}}},
        {
            "$defs": {"a": {"type": "number", "multipleOf": 0.001}},
            "properties": {"x": {"$ref": "#/$defs/a", "description": "one"}, "y": {"anyOf": [{"multipleOf": 1000}, {"type": "null"}]}},
        },
    ],
)  # fmt: skip
def test_multiples_that_people_ask_for_are_taken(schema) -> None:
    submit(make_engine(), Answers(), "r", grammar=GrammarSpec(kind="json_schema", text=json.dumps(schema)))


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

    monkeypatch.setattr("paceline.serving.sampling.grammar.compile_grammar", slow)
    compiler = GrammarFactory(tiny_tokenizer(VOCAB), VOCAB, [EOS_ID], max_compiling=1, timeout_s=0.05)
    with pytest.raises(RequestError, match=r"within 0\.05 s"):
        compiler.start(REGEX)
    with pytest.raises(CapacityError, match="try again"):
        compiler.start(REGEX)
    go.set()
    assert done.wait(10)
    assert threading.stack_size() == 0


def test_compiled_grammars_are_kept_up_to_a_limit(monkeypatch) -> None:
    from paceline.serving.sampling import grammar

    compiled = []
    real = grammar.compile_grammar
    monkeypatch.setattr(grammar, "compile_grammar", lambda t, s: compiled.append(s.text) or real(t, s))
    compiler = GrammarFactory(tiny_tokenizer(VOCAB), VOCAB, [EOS_ID], max_cached=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        compiler.start(GrammarSpec(kind="regex", text=text))
    assert compiled == ["a", "b", "c", "b"]


def test_a_prepared_grammar_outlives_the_limit_while_it_is_held(monkeypatch) -> None:
    from paceline.serving.sampling import grammar

    compiled = []
    real = grammar.compile_grammar
    monkeypatch.setattr(grammar, "compile_grammar", lambda t, s: compiled.append(s.text) or real(t, s))
    compiler = GrammarFactory(tiny_tokenizer(VOCAB), VOCAB, [EOS_ID], max_cached=1)
    spec = GrammarSpec(kind="regex", text="a")
    held = compiler.prepare(spec)
    for text in ("b", "c"):
        compiler.start(GrammarSpec(kind="regex", text=text))
    compiler.start(spec)
    assert compiled == ["a", "b", "c"] and held is compiler.prepare(spec)
    del held
    compiler.start(GrammarSpec(kind="regex", text="b"))
    compiler.start(spec)
    assert compiled == ["a", "b", "c", "b", "a"], "nobody held it any more"


def test_tenants_share_no_compiled_grammar_and_a_flood_of_one_gives_up_its_own(monkeypatch) -> None:
    compiled = []
    real = grammar_module.compile_grammar
    monkeypatch.setattr(grammar_module, "compile_grammar", lambda t, s: compiled.append(s.text) or real(t, s))
    compiler = GrammarFactory(tiny_tokenizer(VOCAB), VOCAB, [EOS_ID], max_cached=3)
    for tenant in ("acme", "bolt", "", "acme", "bolt"):
        compiler.start(REGEX, tenant=tenant)
    assert compiled == [REGEX.text] * 3
    for text in "abcdef":
        compiler.start(GrammarSpec(kind="regex", text=text), tenant="flood")
    compiler.start(REGEX, tenant="bolt")
    assert compiled == [REGEX.text] * 3 + list("abcdef")


def test_a_tenant_whose_grammars_compile_slowly_holds_up_no_other(monkeypatch) -> None:
    go, real = threading.Event(), grammar_module.compile_grammar
    monkeypatch.setattr(grammar_module, "compile_grammar", lambda t, s: (s == REGEX or go.wait(30)) and real(t, s))
    compiler = GrammarFactory(tiny_tokenizer(VOCAB), VOCAB, [EOS_ID], timeout_s=60.0)
    specs = [GrammarSpec(kind="regex", text=text) for text in "abcdef"]
    threads = [threading.Thread(target=compiler.start, args=(s,), kwargs={"tenant": "slow"}) for s in specs]
    for thread in threads:
        thread.start()
    try:
        compiler.start(REGEX, tenant="acme")
    finally:
        go.set()
        for thread in threads:
            thread.join(30)


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


def byte_ids(text: str) -> list[int]:
    return tiny_tokenizer(300).encode(text, add_special_tokens=False)


def follow(state: GrammarState, text: str) -> str | None:
    """Walk through a text; the state's error."""
    for token_id in byte_ids(text):
        allowed = state.allowed()
        if allowed is None:
            break
        assert allowed[token_id], f"{text} is not in the grammar"
        state.advance(token_id)
        state.keep(1)
    return state.error


NOTE = GrammarSpec(
    kind="json_schema",
    text=json.dumps({"type": "object", "properties": {"note": {"type": "string", "maxLength": 5000}}, "required": ["note"]}),
)  # fmt: skip


def test_an_answer_that_teaches_the_lexer_too_much_goes_on_and_ends_no_other() -> None:
    compiler = GrammarFactory(tiny_tokenizer(300), 300, [EOS_ID])
    other = compiler.start(NOTE)
    assert follow(other, '{"no') is None
    long = compiler.start(NOTE)
    assert follow(long, f'{{"note":"{"x" * 4000}') is None  # 9 states a character, of which a lexer has 20,000
    for state, rest in ((long, 'y"}'), (other, 'te":"x"}'), (compiler.start(NOTE), '{"note":""}')):
        first, *drafted = byte_ids(rest)
        for token_id in (first, *drafted):
            state.allowed()
            state.advance(token_id)
        state.keep(1)  # the others were not emitted
        assert follow(state, rest[1:]) is None
        allowed = state.allowed()
        assert allowed is not None and allowed[EOS_ID]


def test_a_grammar_that_compiles_slowly_fails_the_answer_and_serves_the_next_one(monkeypatch) -> None:
    monkeypatch.setattr(grammar_module, "MAX_RENEWAL_S", 0.0)
    compiler = GrammarFactory(tiny_tokenizer(300), 300, [EOS_ID])
    text = f'{{"note":"{"x" * 4000}"}}'
    long = compiler.start(NOTE)
    assert "too many states" in str(follow(long, text))
    assert long.is_own_fault, "no other answer has taught the lexer anything"
    assert follow(compiler.start(NOTE), '{"note":"short"}') is None


def test_an_answer_that_fails_by_what_others_taught_a_slow_grammars_lexer_may_be_sent_again(monkeypatch) -> None:
    monkeypatch.setattr(grammar_module, "MAX_RENEWAL_S", 0.0)
    compiler = GrammarFactory(tiny_tokenizer(300), 300, [EOS_ID])
    short, long = compiler.start(NOTE), compiler.start(NOTE)
    assert follow(long, f'{{"note":"{"x" * 4000}"}}') is not None
    assert follow(short, '{"note":"yz"}') is not None and not short.is_own_fault
    again = compiler.start(NOTE)
    assert follow(again, '{"note":"yz"}') is None


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"format": "ipv6"}, "fe80::1"),
        ({"pattern": r"^\p{Lu}[\p{L}\p{N} ]{0,60}$"}, "Ärger 1"),
    ],
)
def test_usual_formats_are_within_what_a_step_may_take(schema: dict, value: str) -> None:
    properties = {"a": {"type": "string", **schema}}
    spec = GrammarSpec(
        kind="json_schema", text=json.dumps({"type": "object", "properties": properties, "required": ["a"]})
    )
    assert follow(GrammarFactory(tiny_tokenizer(300), 300, [EOS_ID]).start(spec), f'{{"a":"{value}","b":1}}') is None


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


@pytest.mark.parametrize("text", ["say <|end|> now", "<|end|>", "<|end|>!"])
def test_a_special_tokens_name_in_a_grammar_is_text(text: str) -> None:
    tokenizer = tiny_tokenizer(300)
    state = GrammarFactory(tokenizer, 300, [EOS_ID]).start(
        GrammarSpec(kind="json_schema", text=json.dumps({"const": text}))
    )
    drawn = []
    while (allowed := state.allowed()) is not None and drawn[-1:] != [EOS_ID]:
        assert allowed.any() and len(drawn) < 40
        drawn.append(int(allowed.nonzero()[0][-1]))
        state.advance(drawn[-1])
    assert state.error is None and drawn[-1] == EOS_ID
    assert json.loads(TextStream(TokenText(tokenizer)).push(drawn)) == text


def test_a_lark_grammar_still_names_special_tokens() -> None:
    tokenizer = tiny_tokenizer(300)
    state = GrammarFactory(tokenizer, 300, [EOS_ID]).start(GrammarSpec(kind="lark", text='start: "a" <|end|>'))
    a = tokenizer.encode("a", add_special_tokens=False)[0]
    assert state.allowed().nonzero()[0].tolist() == [a]  # type: ignore[union-attr]
    state.advance(a)
    assert state.allowed().nonzero()[0].tolist() == [EOS_ID]  # type: ignore[union-attr]


def spelling(kind: str) -> PreTrainedTokenizerFast:
    """A small tokenizer of a kind that puts a space before a text, or not."""
    byte_names = [f"<0x{b:02X}>" for b in range(256)]
    made = Tokenizer(models.BPE(byte_fallback=kind != "bytes", unk_token="<unk>", fuse_unk=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "bytes":
        made.normalizer = normalizers.NFC()
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    elif kind == "llama":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    elif kind == "gemma":
        made.normalizer, made.decoder = normalizers.Replace(" ", "▁"), decoders.Sequence(parts)
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else []
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "</s>", *byte_names], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(Path(__file__).read_text("utf-8").splitlines(), trainer)
    settings = json.loads(made.to_str())
    settings["added_tokens"] = [t for t in settings["added_tokens"] if t["content"] not in byte_names]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(settings)), eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize("kind", ["bytes", "llama", "gemma", "metaspace"])
def test_what_a_grammar_fixes_is_spelled_as_inside_a_text_and_names_of_special_tokens_too(kind: str) -> None:
    tokenizer = spelling(kind)
    view, eos = convert_tokenizer(tokenizer, len(tokenizer), [1]), 1
    known = llguidance.hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=[eos])
    for text in ("fixed", " fixed", "a grammar", "  two\n lines", "日本 ü"):
        assert kind == "bytes" or view.tokenize_str(text) == known.tokenize_str(text)  # which puts a space before it
        assert view.decode_bytes(view.tokenize_str(text)) == text.encode()
    for text in ("</s>", "say </s> now", "<unk>", "xe\u0301y", "xﬁ y"):
        assert eos not in view.tokenize_str(text) and view.decode_bytes(view.tokenize_str(text)) == text.encode()


def test_byte_level_tokens_may_split_characters() -> None:
    """With 300 ids every byte is a token of its own: a character of three bytes takes three draws."""
    tokenizer = tiny_tokenizer(300)
    state = GrammarFactory(tokenizer, 300, [EOS_ID]).start(GrammarSpec(kind="regex", text="[日月]"))
    for token, fork in itertools.zip_longest(tokenizer.encode("日", add_special_tokens=False), [1, 2, 1]):
        allowed = state.allowed()
        assert allowed is not None and allowed[token] and allowed.sum() == fork
        state.advance(token)
    assert state.error is None
