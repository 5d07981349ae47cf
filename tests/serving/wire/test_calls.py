"""Tool calls are read out of an answer whatever the pieces it comes in, and what is no call stays text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.serving.wire.calls import HERMES, LLAMA, MARKED, CallFormat, CallParser, merged

NAMES = {"get_weather", "add"}
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
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), ANSWERS)
def test_calls_and_content_are_told_apart_however_the_text_is_cut(form, text, content, calls) -> None:
    for pieces in ([text], list(text), [text[i : i + 3] for i in range(0, len(text), 3)], [text[:7], text[7:]]):
        got, found = read(form, pieces)
        assert (got.strip() if calls else got, found) == (content.strip() if calls else content, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [(HERMES, hermes(("add", '{"a": 1}'))), (LLAMA, '{"name": "add", "parameters": {"a": 1}}'), (MARKED, '<|call|>add {"a": 1}\n')],
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


def test_calls_behind_the_first_are_dropped_where_one_is_wanted() -> None:
    text = hermes(("add", '{"a": 1}'), ("add", '{"a": 2}'))
    assert read(HERMES, list(text), is_parallel=False) == ("", [("add", '{"a": 1}')])


def test_arguments_are_passed_on_as_they_come() -> None:
    parser, seen = CallParser(HERMES, NAMES), []
    for c in hermes(("add", '{"a": "xyz"}')):
        seen += [d.arguments for d in parser.push(c)[1] if d.arguments]
    assert len(seen) > 5 and json.loads("".join(seen)) == {"a": "xyz"}


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<|call|>", "<|python_tag|>", '{"name": "add", "arguments": ', '{"name": "add", "parameters": ',
     "add ", "{", "}", '"', "\\", "[", "]", ",", ";", "\n", " ", "<", "text", "}\n", '{"name": "rm"', "1", "\0", "𝄞"]
)  # fmt: skip


@settings(max_examples=300)
@given(form=st.sampled_from([HERMES, LLAMA, MARKED]), parts=st.lists(PIECES, max_size=25), cuts=st.randoms())
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
