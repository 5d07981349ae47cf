"""Tool calls are read out of an answer whatever the pieces it comes in, and what is no call stays text."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.serving.wire.calls import (
    CODER,
    HERMES,
    LLAMA,
    MARKED,
    MISTRAL,
    MISTRAL_NAMED,
    CallFormat,
    CallParser,
    branches,
    merged,
)

NAMES = {
    "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "array"}}},
    "add": {
        "properties": {
            "a": {"type": "integer"},
            "text": {"type": "string"},
            "maybe": {"type": ["string", "null"]},
            "size": {"type": ["number", "string"]},
            "either": {"anyOf": [{"$ref": "#/$defs/flag"}, {"type": "number"}]},
            "kind": {"enum": ["1", "x"]},
            "free": {},
        },
        "$defs": {"flag": {"allOf": [{"type": "boolean"}]}},
    },
}
ARGS = '{"city": "Zürich }{ \\"x\\"", "days": [1, {"a": "]"}]}'


def read(form: CallFormat, pieces, *, is_parallel: bool = True) -> tuple[str, list[tuple[str | None, str]]]:
    """Content, and name and arguments of each call."""
    parser = CallParser(form, NAMES, is_parallel=is_parallel)
    found = [*map(parser.push, pieces), parser.finish()]
    calls = merged([c for _, deltas in found for c in deltas])
    assert [c.index for c in calls] == list(range(parser.num_calls))
    assert all(c.name in NAMES and c.arguments.encode() for c in calls)
    return "".join(text for text, _ in found), [(c.name, c.arguments) for c in calls]


def hermes(*calls: tuple[str, str]) -> str:
    texts = ['<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'.format(*call) for call in calls]
    return "\n".join(texts)


def coder(name: str, *parameters: tuple[str, str]) -> str:
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"


ONE = '{"name": "add", "arguments": {"a": 1}}'
PAGE = "<a>\n</parameter>\n <parameter name='x'>\t\"é\\\n</function>;\n</tool_call> x"

ANSWERS = [
    (HERMES, hermes(("add", "{}")), "", [("add", "{}")]),
    (HERMES, "I look.\n\n" + hermes(("get_weather", ARGS), ("add", "{}")) + "\n", "I look.", [("get_weather", ARGS), ("add", "{}")]),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "no \\"JSON"}</tool_call>', "", [("add", 'no "JSON')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "cut', "", [("add", '"cut')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
    (HERMES, '<tool_call>{"arguments": null, "name": "add"}</tool_call>', "", [("add", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}, "id": "c}1", "x": [{}]}\n</tool_call> done', "done",
     [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1},</tool_call>' + hermes(("get_weather", "{}")), "",
     [("add", '{"a": 1}'), ("get_weather", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}, "id": "x</tool_call> y' + hermes(("add", "{}")), "y",
     [("add", '{"a": 1}'), ("add", "{}")]),
    (HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}}\n</tool_call>', "", [("add", '{"a": 1}')]),
    (HERMES, hermes(("rm", "{}")), hermes(("rm", "{}")), []),
    (HERMES, "a <tool_call> b", "a <tool_call> b", []),
    (HERMES, "a <tool_ca", "a <tool_ca", []),
    (HERMES, "  plain \n text \n", "  plain \n text \n", []),
    (HERMES, "<tool_call>[1</tool_call> x", "<tool_call>[1</tool_call> x", []),
    (HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
    (HERMES, hermes(("add", "{}"))[:-12] + " done", "done", [("add", "{}")]),
    (LLAMA, '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    (LLAMA, '<|python_tag|>{"type": "function", "name": "add", "parameters": {}}; {"name": "add", "parameters": {"b": 2}}', "",
     [("add", "{}"), ("add", '{"b": 2}')]),
    (LLAMA, '{\n "name": "add",\n "parameters": {\n  "a": 1\n }\n}\n', "", [("add", '{\n  "a": 1\n }')]),
    (HERMES, '<tool_call>{"arguments": {"a": "\\ud800ü"}, "name": "add"}</tool_call>', "", [("add", '{"a": "\\ud800ü"}')]),
    (LLAMA, '{"name": "add", "parameters": }', "", [("add", "{}")]),
    (LLAMA, '{"name": "add", "parameters": {"a": 1}, "type": "function"}', "", [("add", '{"a": 1}')]),
    (LLAMA, '{"name": "add", "parameters": {"a": 1}, "type": "function"}; {"name": "add", "parameters": {}}', "",
     [("add", '{"a": 1}'), ("add", "{}")]),
    (LLAMA, '{"name": "add", "parameters": {"a": 1} as you see', "as you see", [("add", '{"a": 1}')]),
    (LLAMA, '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    (LLAMA, '{"name": "rm", "parameters": {}}', '{"name": "rm", "parameters": {}}', []),
    (LLAMA, "It is {warm}.", "It is {warm}.", []),
    (LLAMA, "{" + " " * 400 + "}", "{" + " " * 400 + "}", []),
    (MARKED, "Yes.<|call|>add {\"a\": 1}\n<|call|>add {}\n", "Yes.", [("add", '{"a": 1}'), ("add", "{}")]),
    (MARKED, "<|call|>rm {}\n", "<|call|>rm {}\n", []),
    (MARKED, '<|call|>add \n\n{"arguments": "x", "name": "add"}\n', '<|call|>add \n\n{"arguments": "x", "name": "add"}\n', []),
    (HERMES, '<tool_call>{"name": "x", "arguments": 1, "name": "add"}</tool_call>',
     '<tool_call>{"name": "x", "arguments": 1, "name": "add"}</tool_call>', []),
    (CODER, "I look.\n\n" + coder("get_weather", ("city", "Zürich\n(CH)"), ("days", "[1,\n 2]")) + "\n" + coder("add"), "I look.",
     [("get_weather", '{"city": "Zürich\\n(CH)", "days": [1,\n 2]}'), ("add", "{}")]),
    (CODER, coder("add", ("text", "")) + coder("add", ("text", "\n x\n")), "", [("add", '{"text": ""}'), ("add", '{"text": "\\n x\\n"}')]),
    (CODER, "<tool_call><function=add><parameter=text>x</parameter></function></tool_call>", "", [("add", '{"text": "x"}')]),
    (CODER, coder("add", ("text", PAGE), ("a", "1")), "", [("add", json.dumps({"text": PAGE, "a": 1}, ensure_ascii=False))]),
    (CODER, coder("add", ("text", "5"), ("maybe", "5"), ("either", "5"), ("kind", "1"), ("free", "5")), "",
     [("add", '{"text": "5", "maybe": "5", "either": 5, "kind": "1", "free": 5}')]),
    (CODER, coder("add", ("text", "null"), ("maybe", "None"), ("either", "True"), ("free", '"x"'), ("size", "5")), "",
     [("add", '{"text": "null", "maybe": null, "either": true, "free": "x", "size": 5}')]),
    (CODER, coder("add", ("a", "two"), ("maybe", '"x"'), ("either", "NaN"), ("free", "[" * 3000)), "",
     [("add", '{"a": "two", "maybe": "\\"x\\"", "either": "NaN", "free": "' + "[" * 3000 + '"}')]),
    (CODER, coder("add", ("other", "1e999"), ("more", " 1.0 ")), "", [("add", '{"other": "1e999", "more": 1.0}')]),
    (CODER, coder("add", ("a", "1"), ("text", "x"), ("a", "2"), ("text", "y"), ("free", "3")), "",
     [("add", '{"a": 1, "text": "x", "free": 3}')]),
    (CODER, "Well.\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "Well.", [("add", '{"a": 1}')]),
    (CODER, "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n" + coder("add"), "", [("add", '{"a": 1}'), ("add", "{}")]),
    (CODER, "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</tool_call> done", "done", [("add", '{"a": 1}')]),
    (CODER, "<function=add>\n<parameter=text>\nx\n<parameter=a>\n1\n</function>\n</tool_call>", "", [("add", '{"text": "x", "a": 1}')]),
    (CODER, "<function=add>\n<parameter=text>\nx\n<parameter=no>\n1\n</tool_call>", "",
     [("add", '{"text": "x\\n<parameter=no>\\n1"}')]),
    (CODER, "<function=add>\n<parameter=text>\nx\n</tool_call>\n" + coder("add"), "", [("add", '{"text": "x"}'), ("add", "{}")]),
    (CODER, "<function=add>\n<parameter=text>\nx\n</parameter>\n", "", [("add", '{"text": "x"}')]),
    (CODER, "<function=add>\n<parameter=text>\nx\n", "", [("add", '{"text": "x"}')]),
    (CODER, "<function=add>\n<parameter=a>", "", [("add", '{"a": ""}')]),
    (CODER, coder("add", ("", "so <x>"), ("a", "1"), ("text=", "\n")), "", [("add", '{"a": 1, "text=": "\\n"}')]),
    (CODER, coder("rm", ("a", "1")), coder("rm", ("a", "1")), []),
    (CODER, "Write <function=add> or <tool_call> x", "Write <function=add> or <tool_call> x", []),
    (CODER, "<tool_call> <functio", "<tool_call> <functio", []),
    (CODER, hermes(("add", "{}")), hermes(("add", "{}")), []),
    (MISTRAL, f"I look. [TOOL_CALLS][{ONE}]", "I look.", [("add", '{"a": 1}')]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "get_weather", "arguments": ' + ARGS + ', "id": "c}][,1"}, ' + ONE + "]\n", "",
     [("get_weather", ARGS), ("add", '{"a": 1}')]),
    (MISTRAL, '[TOOL_CALLS][{"arguments": {"a": 1}, "id": "x", "name": "add"}, {"name": "add"}] so', "so",
     [("add", '{"a": 1}'), ("add", "{}")]),
    (MISTRAL, f"[TOOL_CALLS] [\n {ONE} , {ONE}", "", [("add", '{"a": 1}')] * 2),
    (MISTRAL, f"[TOOL_CALLS]{ONE}[TOOL_CALLS]{ONE}", "", [("add", '{"a": 1}')] * 2),
    (MISTRAL, f'[TOOL_CALLS][{ONE}, {{"name": "rm", "arguments": {{}}}}]', '[TOOL_CALLS][ {"name": "rm", "arguments": {}}]',
     [("add", '{"a": 1}')]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "rm", "arguments": {}}]', '[TOOL_CALLS] [{"name": "rm", "arguments": {}}]', []),
    (MISTRAL, '[TOOL_CALLS][{"arguments": {}, "name": "rm"}]', '[TOOL_CALLS][{"arguments": {}, "name": "rm"}]', []),
    (MISTRAL, "[TOOL_CALLS][1, 2] [TOOL_CALLS][{", "[TOOL_CALLS][1, 2] [TOOL_CALLS][{", []),
    (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1}', "", [("add", '{"a": 1}')]),
    (MISTRAL_NAMED, 'I look. [TOOL_CALLS]get_weather[ARGS]' + ARGS + "[TOOL_CALLS]add[ARGS]{}", "I look.", [("get_weather", ARGS), ("add", "{}")]),
    (MISTRAL_NAMED, '[TOOL_CALLS]add[CALL_ID]abcDEF123[ARGS] {"a": 1} so', "so", [("add", '{"a": 1}')]),
    (MISTRAL_NAMED, '[TOOL_CALLS]add{"a": 1}', "", [("add", '{"a": 1}')]),
    (MISTRAL_NAMED, f"[TOOL_CALLS] [{ONE}]", "", [("add", '{"a": 1}')]),
    (MISTRAL_NAMED, "[TOOL_CALLS]rm[ARGS]{}[TOOL_CALLS]add[ARGS]{}", "[TOOL_CALLS]rm[ARGS]{}", [("add", "{}")]),
    (MISTRAL_NAMED, "so [TOOL_CALLS] is it", "so [TOOL_CALLS] is it", []),
    (MISTRAL_NAMED, "[TOOL_CALLS]add" + " " * 300 + "{}", "[TOOL_CALLS]add" + " " * 300 + "{}", []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), ANSWERS)
def test_calls_and_content_are_told_apart_however_the_text_is_cut(form, text, content, calls) -> None:
    for pieces in ([text], list(text), [text[i : i + 3] for i in range(0, len(text), 3)], [text[:7], text[7:]]):
        got, found = read(form, pieces)
        assert (got.strip() if calls else got, found) == (content.strip() if calls else content, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [(HERMES, hermes(("add", '{"a": 1}'))), (LLAMA, '{"name": "add", "parameters": {"a": 1}}'), (MARKED, '<|call|>add {"a": 1}\n'),
     (CODER, coder("add", ("a", "1"))), (MISTRAL, f"[TOOL_CALLS] [{ONE}]"), (MISTRAL_NAMED, '[TOOL_CALLS]add[ARGS]{"a": 1}')],
)  # fmt: skip
def test_a_forced_call_is_no_content_wherever_it_is_cut(form: CallFormat, text: str) -> None:
    for end in range(len(text) + 1):
        parser = CallParser(form, NAMES, is_forced=True)
        content, deltas = parser.push(text[:end])
        rest, more = parser.finish(is_cut=True)
        (call,) = merged([*deltas, *more]) or (None,)
        arguments = "" if call is None else call.arguments
        assert content + rest == "" and '{"a": 1}'.startswith(arguments)
        assert parser.has_whole_calls == (arguments == '{"a": 1}')


@pytest.mark.parametrize(
    ("form", "text", "content"),
    [
        (HERMES, "I look. <tool_call>", "I look."),
        (HERMES, 'I look. <tool_call>\n{"name": "ad', "I look."),
        (HERMES, "so <tool_call> is", "so <tool_call> is"),
        (MARKED, "I look. <|call|>get_we", "I look."),
        (MARKED, "I look. <|call|>", "I look."),
        (MARKED, "so <|call|>xyz", "so <|call|>xyz"),
        (LLAMA, '{"name": "ad', '{"name": "ad'),
        (CODER, "I look. <tool_call>", "I look."),
        (CODER, "I look. <tool_call>\n<function=ad", "I look."),
        (CODER, "I look. <function=add>\n<par", "I look."),
        (CODER, "so <function=xyz", "so <function=xyz"),
        (CODER, "so <function=add> is", "so <function=add> is"),
        (MISTRAL, "I look. [TOOL_CALLS]", "I look."),
        (MISTRAL, "I look. [TOOL_CALLS] [", "I look."),
        (MISTRAL, 'I look. [TOOL_CALLS][{"name": "ad', "I look."),
        (MISTRAL, "so [TOOL_CALLS][1", "so [TOOL_CALLS][1"),
        (MISTRAL_NAMED, "I look. [TOOL_CALLS]add[AR", "I look."),
        (MISTRAL_NAMED, "so [TOOL_CALLS]xyz", "so [TOOL_CALLS]xyz"),
    ],
)
def test_the_beginning_of_a_call_that_was_cut_is_no_content(form: CallFormat, text: str, content: str) -> None:
    parser = CallParser(form, NAMES)
    got = parser.push(text)[0] + parser.finish(is_cut=True)[0]
    assert (got.rstrip(), parser.num_calls) == (content, 0)
    assert read(form, [text]) == (text, []), "the model's own end"


def test_no_depth_of_arguments_breaks_the_parser() -> None:
    for depth in range(900, 1000):
        text = '<tool_call>{"arguments": ' + "[" * depth + "]" * depth + ', "name": "add"}</tool_call>'
        content, calls = read(HERMES, [text])
        assert (content == "" and calls) or (content == text and not calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, hermes(("add", '{"a": 1}'), ("add", '{"a": 2}'))),
        (CODER, coder("add", ("a", "1")) + coder("add", ("text", "2"))),
        (MISTRAL, f"[TOOL_CALLS][{ONE}, {ONE}]"),
        (MISTRAL_NAMED, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}'),
    ],
)
def test_calls_behind_the_first_are_dropped_where_one_is_wanted(form: CallFormat, text: str) -> None:
    assert read(form, list(text), is_parallel=False) == ("", [("add", '{"a": 1}')])


def test_arguments_are_passed_on_as_they_come() -> None:
    parser, seen = CallParser(HERMES, NAMES), []
    for c in hermes(("add", '{"a": "xyz"}')):
        seen += [d.arguments for d in parser.push(c)[1] if d.arguments]
    assert len(seen) > 5 and json.loads("".join(seen)) == {"a": "xyz"}


def test_a_text_between_tags_is_passed_on_as_it_comes_and_other_values_when_they_are_whole() -> None:
    parser, seen = CallParser(CODER, NAMES), []
    for c in coder("add", ("text", 'x"yz\n<'), ("a", "123456")):
        seen += [d.name or d.arguments for d in parser.push(c)[1]]
    assert seen == ["add", '{"text": "', "x", '\\"', "y", "z", "\\n<", '"', ', "a": 123456', "}"]


@pytest.mark.parametrize(
    ("end", "arguments"),
    [
        ("<parameter=text>\nx\n</param", '{"text": "x'),
        ("<parameter=text>\nx\n</parameter>\n", '{"text": "x'),
        ("<parameter=a>\n1", ""),
    ],
)
def test_a_call_between_tags_that_was_cut_is_not_whole(end: str, arguments: str) -> None:
    parser = CallParser(CODER, NAMES)
    deltas = [*parser.push("<tool_call>\n<function=add>\n" + end)[1], *parser.finish(is_cut=True)[1]]
    assert (merged(deltas)[0].arguments, parser.has_whole_calls) == (arguments, False)
    whole = CallParser(CODER, NAMES)
    whole.push("<tool_call>\n<function=add>\n" + end)
    whole.finish()
    assert whole.has_whole_calls, "the model's own end stands for the closing tags"


PARTS = ["\n", "<", ">", "/", '"', "\\", "a", "é", "</parameter", "<parameter", "</function", "<tool_call", "{"]
VALUES = st.lists(st.sampled_from(PARTS), max_size=9).map("".join)


@given(values=st.lists(VALUES.filter(lambda v: "</parameter>" not in v and "</function>" not in v), max_size=4))
def test_any_text_between_tags_reaches_the_client_as_it_is(values: list[str]) -> None:
    given_values = {f"k{i}": value for i, value in enumerate(values)}
    schema = {"add": {"properties": {key: {"type": "string"} for key in given_values}}}
    text = coder("add", *given_values.items())
    for pieces in ([text], list(text)):
        parser = CallParser(CODER, schema)
        deltas = [d for piece in pieces for d in parser.push(piece)[1]]
        assert json.loads(merged(deltas)[0].arguments) == given_values and parser.has_whole_calls


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"$ref": "#/$defs/a~1b"}, {"integer"}),
        ({"anyOf": [{"$ref": "#/$defs/a~1b"}, {"oneOf": [{"const": None}, {"enum": ["x", 1.5]}]}]}, {"integer", "null", "string", "number"}),
        ({"allOf": [{"type": "boolean"}], "description": "d"}, {"boolean"}),
        ({"type": "string", "anyOf": [{"format": "date"}, {"format": "time"}]}, {"string"}),
        ({"allOf": [{"type": "string"}, {"type": "string"}]}, {"None"}),
        ({"$ref": "#/$defs/self"}, {"None"}),
        ({"$ref": "#/$defs/none"}, {"None"}),
        ({"$ref": "http://x/y"}, {"None"}),
        ({"$ref": 5, "type": []}, {"[]"}),
        ({"type": "string", "enum": [1]}, {"string"}),
        ({"anyOf": [], "enum": []}, {"None"}),
        (True, {"None"}),
        ({}, {"None"}),
    ],
)  # fmt: skip
def test_the_types_of_a_schema_are_found_behind_references_and_unions(schema, types) -> None:
    root = {
        "$defs": {"a/b": {"type": "integer"}, "self": {"anyOf": [{"$ref": "#/$defs/self"}, {"$ref": "#/$defs/self"}]}}
    }
    assert {str(branch.get("type")) for branch in branches(schema, root)} == types


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<|call|>", "<|python_tag|>", '{"name": "add", "arguments": ', '{"name": "add", "parameters": ',
     "add ", "{", "}", '"', "\\", "[", "]", ",", ";", "\n", " ", "<", "text", "}\n", '{"name": "rm"', "1", "\0", "𝄞",
     "<function=add>", "<parameter=a>\n", "<parameter=text>\n", "</parameter>", "</function>", "\n<parameter=",
     "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "add"]
)  # fmt: skip


@settings(max_examples=600)
@given(
    form=st.sampled_from([HERMES, LLAMA, MARKED, CODER, MISTRAL, MISTRAL_NAMED]),
    parts=st.lists(PIECES, max_size=25),
    cuts=st.randoms(),
)
def test_no_text_breaks_the_parser_and_no_cut_changes_what_is_read(form, parts, cuts) -> None:
    text = "".join(parts)
    whole = read(form, [text])
    assert read(form, list(text)) == whole
    at, pieces = 0, []
    while at < len(text):
        step = cuts.randint(1, 9)
        pieces.append(text[at : at + step])
        at += step
    assert read(form, pieces) == whole
    if not whole[1]:
        assert whole[0] == text, "text without calls is passed on whole"


@pytest.mark.parametrize("at_once", [1, 4000])
def test_a_model_that_repeats_a_closing_tag_is_read_in_no_time_and_as_a_value(at_once: int) -> None:
    """A looping model writes thousands of them; read again at each, they would take seconds of the event loop."""
    begin, tag = "<tool_call>\n<function=add>\n<parameter=text>\n", "</parameter>\n"
    parser, started = CallParser(CODER, NAMES), time.process_time()
    deltas = parser.push(begin)[1]
    for _ in range(4000 // at_once):
        deltas += parser.push(tag * at_once)[1]
    deltas += parser.push("x\n</parameter>\n</function>\n</tool_call>")[1] + parser.finish()[1]
    assert time.process_time() - started < 2.0
    assert json.loads(merged(deltas)[0].arguments) == {"text": tag * 4000 + "x"}


def test_a_schema_of_many_branches_with_much_around_them_is_of_anything() -> None:
    many = {f"x{i}": i for i in range(50_000)} | {"anyOf": [{"anyOf": [{"type": "string"}] * 64}] * 64}
    began = time.process_time()
    assert branches(many, many) == [many] and time.process_time() - began < 1.0
