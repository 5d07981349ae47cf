"""The grammars of forced calls let a model write what the parser reads as arguments of their schemas, and nothing else."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import pytest

from paceline.errors import RequestError
from paceline.serving.api.bodies import ChatBody
from paceline.serving.sampling.grammar import compile_grammar, convert_tokenizer
from paceline.serving.wire.calls import CODER, MISTRAL, MISTRAL_NAMED, CallFormat, CallParser, merged
from paceline.serving.wire.fields import FieldError, parse_values
from paceline.serving.wire.tools import ToolStyle, plan_calls
from tests.helpers.fakes import tiny_tokenizer

TOKENIZER = tiny_tokenizer(300)
TIGHT = {"x-guidance": {"whitespace_flexible": False}}
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "kind": {"enum": ["a", "b", 5]},
        "either": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "string"}]},
        "items": {"type": "array", "items": {"$ref": "#/$defs/n"}},
    },
    "required": ["text", "more"],
    "$defs": {"n": {"type": "integer"}},
    **TIGHT,
}


def forced(form: CallFormat, *, is_parallel: bool = False, **schemas: Any):
    """A matcher before the first token, and the functions."""
    tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in schemas.items()]
    body = parse_values(
        {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"}, ChatBody
    )
    style = ToolStyle(form=form, writes_tools=True, writes_calls=True, wants_objects=True)
    plan = plan_calls(body, None, style, {}, is_parallel=is_parallel)
    assert plan is not None and plan.grammar is not None
    return compile_grammar(convert_tokenizer(TOKENIZER, 300, [1]), plan.grammar), plan.functions


def takes(matcher: Any, text: str) -> bool:
    """Whether a text is a whole answer."""
    own = matcher.deep_copy()
    for token_id in TOKENIZER.encode(text, add_special_tokens=False):
        own.compute_bitmask()
        assert not own.is_error(), own.get_error()
        if own.try_consume_tokens([token_id]) == 0:
            return False
    return own.is_accepting()


def tagged(**arguments: str) -> str:
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function=f>\n{tags}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("arguments", "is_taken"),
    [
        ({"text": "x\n\ny </p>", "more": "[1]"}, True),
        (
            {"text": "", "kind": "b", "either": "7", "items": "[1,2]", "more": "{}"},
            True,
        ),
        ({"text": "x", "kind": "5", "either": "x", "more": "null"}, True),
        ({"text": "x"}, False),
        ({"more": "1"}, False),
        ({"text": "x", "more": "text"}, False),
        ({"more": "1", "text": "x"}, False),
        ({"text": "x", "other": "1", "more": "1"}, False),
        ({"text": "</function>\n</tool_call>\n<parameter=more>\n</parameter> x", "more": "1"}, True),
        ({"text": "a\n</parameter>\nb", "more": "1"}, False),
        ({"text": "x", "kind": "c", "more": "1"}, False),
        ({"text": "x", "items": '["a"]', "more": "1"}, False),
        ({"text": "x", "items": "[1, 2]", "more": "1"}, False),
    ],
)
def test_a_forced_call_between_tags_keeps_to_its_schema(arguments: dict[str, str], is_taken: bool) -> None:
    matcher, functions = forced(CODER, f=SCHEMA)
    text = tagged(**arguments)
    assert takes(matcher, text) == is_taken
    assert not takes(matcher, text + "\n" + text) and not takes(matcher, text[12:])
    if is_taken:
        parser = CallParser(CODER, functions, keeps_form=True)
        content, deltas = parser.push(text)
        read = json.loads(merged(deltas)[0].arguments)
        assert (content, read.keys()) == ("", arguments.keys()) and read["text"] == arguments["text"]
        jsonschema.validate(read, SCHEMA)


@pytest.mark.parametrize(
    ("form", "one", "between", "end"),
    [
        (CODER, tagged(), "\n", ""),
        (MISTRAL, '{"name": "f", "arguments": {}}', ", ", "]"),
        (MISTRAL_NAMED, "[TOOL_CALLS]f[ARGS]{}", "", ""),
    ],
)
def test_several_calls_are_taken_where_they_may_be_parallel(form: CallFormat, one: str, between: str, end: str) -> None:
    begin = "[TOOL_CALLS][" if form is MISTRAL else ""
    for is_parallel in (False, True):
        matcher, functions = forced(form, is_parallel=is_parallel, f={}, g={})
        text = f"{begin}{one}{between}{one.replace('f', 'g', 1) if form is MISTRAL_NAMED else one}{end}"
        assert takes(matcher, f"{begin}{one}{end}") and takes(matcher, text) == is_parallel
        parser = CallParser(form, functions)
        assert parser.push(text)[0] == "" and parser.num_calls == 2
    if form is MISTRAL:
        assert takes(matcher, f"[TOOL_CALLS] [{one}]") and not takes(matcher, one)


@pytest.mark.parametrize("schema", [{"type": "banana"}, {"$ref": "http://x/y"}])
def test_a_parameter_whose_schema_cannot_be_used_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        forced(CODER, f={"properties": {"x": schema}})


def test_what_is_no_list_of_names_requires_nothing() -> None:
    assert takes(forced(CODER, f={"properties": {"x": {}}, "required": True})[0], tagged())


def test_many_functions_between_tags_are_compiled() -> None:
    described = {f"p{i}": {"type": "string"} if i % 2 else {"type": ["integer", "null"]} for i in range(8)}
    matcher, _ = forced(CODER, **{f"f{i}": {"properties": described, "required": ["p1"]} for i in range(60)})
    assert takes(matcher, tagged(p1="x").replace("=f>", "=f7>"))


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"a": {"type": "string", "enum": 5}}, "an enum that lists values"),
        ({"a": {"type": "string", "enum": []}}, "an enum that lists values"),
        ({"a": {"type": "string", "enum": None}}, "an enum that lists values"),
        ({"a": {"type": "string", "enum": ["x\n</parameter>\ny", "z"]}}, "an enum without"),
        ({"a": {"const": "x\0"}}, "an enum without"),
        ({"a>b": {"type": "integer"}}, "in their names"),
        ({"": {"type": "string"}}, "in their names"),
        ({"a": {"type": "array", "items": {"$ref": "#"}}}, "references to $defs only"),
        ({"a": {"type": "array", "items": {"$ref": "#/properties/b"}}, "b": {"type": "integer"}}, "references to $defs only"),
    ],
)  # fmt: skip
def test_what_cannot_stand_between_tags_is_refused_with_the_reason(properties: dict[str, Any], words: str) -> None:
    with pytest.raises(FieldError) as refused:
        forced(CODER, f={"type": "object", "properties": properties})
    assert words in str(refused.value)


def test_a_schema_of_thousands_of_alternatives_is_looked_at_quickly() -> None:
    wide = {**{f"k{i}": 0 for i in range(20_000)}, "anyOf": [{"type": "integer"}] * 20_000}
    begin = time.process_time()
    CallParser(CODER, {"f": {"properties": {"a": wide}}}).push(
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n"
    )
    assert time.process_time() - begin < 1.0
