"""Tools over HTTP: shown to the model, called when a call is asked for, read out of answers and streams, sent back in."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator

import httpx
import jsonschema
import openai
import pytest
from tokenizers import AddedToken

from paceline.serving.api.app import build_api
from paceline.serving.api.generation import ApiParts
from paceline.serving.api.prompts import Prompts
from paceline.serving.target_model.model import TargetModel
from paceline.serving.wire.calls import CODER, HERMES, LLAMA, MARKED, MISTRAL, MISTRAL_NAMED
from paceline.serving.wire.tools import style_of
from tests.helpers.api_server import TOKENIZER, ScriptedEngine, serve_app, serve_engine
from tests.helpers.fakes import CHAT_TEMPLATE, tiny_model, tiny_target, tiny_tokenizer

TIGHT = {"x-guidance": {"whitespace_flexible": False}}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rom", "Zürich"]}, "days": {"$ref": "#/$defs/n"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {**WEATHER, **TIGHT}}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False, **TIGHT}}},
]  # fmt: skip
USER = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom", "days": 3}}\n</tool_call>'
TEMPLATES = {
    "hermes": "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}",
    "llama": "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}{% for m in messages %}{{ m['content'] }}"
    '{% for c in m["tool_calls"] or [] %}{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% endfor %}\n{% endfor %}",
    "plain": CHAT_TEMPLATE,
    "coder": "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments|items %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}\n{% endfor %}",
    "mistral": "{% macro nine(id) %}{% if id|length != 9 %}{{ raise_exception('no nine letters') }}{% endif %}{{ id }}{% endmacro %}"
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS][{% for c in "
    'm.tool_calls %}{{ (c.function | tojson)[:-1] }}, "id": "{{ nine(c.id) }}"}{{ \', \' if not loop.last }}{% endfor %}]'
    "{% else %}{{ m.content }}{{ nine(m.tool_call_id) if m.role == 'tool' }}{% endif %}\n{% endfor %}",
    "mistral_named": "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
    "\n{% endfor %}",
}


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def real(request) -> Iterator[tuple[openai.OpenAI, str]]:
    target = tiny_target(vocab=300, layers=2, context=2048)
    target.tokenizer = copy.copy(target.tokenizer)
    target.tokenizer.chat_template = TEMPLATES[request.param]
    with serve_engine(target) as (base, _):
        yield openai.OpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0), base


def check(call, names=("weather", "now")) -> None:
    assert call.type == "function" and call.id.startswith("call_") and call.function.name in names
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(
        arguments, WEATHER if call.function.name == "weather" else {"type": "object", "maxProperties": 0}
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_asked_for_is_made_and_keeps_to_its_schema(real: tuple, choice) -> None:
    client, _ = real
    names = ("weather",) if isinstance(choice, dict) else ("weather", "now")
    for seed in range(3):
        ask = {
            "model": "tiny",
            "messages": USER,
            "tools": TOOLS,
            "tool_choice": choice,
            "seed": seed,
            "max_tokens": 400,
        }
        answer = client.chat.completions.create(**ask, parallel_tool_calls=False)
        (found,) = answer.choices
        assert (found.finish_reason, found.message.content, len(found.message.tool_calls)) == ("tool_calls", None, 1)
        check(found.message.tool_calls[0], names)
        parts = list(client.chat.completions.create(**ask, parallel_tool_calls=False, stream=True))
        deltas = [d for p in parts for d in p.choices[0].delta.tool_calls or ()]
        assert [d.function.name for d in deltas if d.function.name] == [found.message.tool_calls[0].function.name]
        assert "".join(d.function.arguments for d in deltas) == found.message.tool_calls[0].function.arguments
        assert parts[-1].choices[0].finish_reason == "tool_calls" and len({d.id for d in deltas if d.id}) == 1
        assert not "".join(p.choices[0].delta.content or "" for p in parts)


def test_a_json_answer_and_tools_go_together(real: tuple) -> None:
    client, base = real
    schema = {
        "type": "object",
        "properties": {"x": {"enum": [1, 2]}},
        "required": ["x"],
        "additionalProperties": False,
        **TIGHT,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    kinds = set()
    for seed in range(12):
        answer = client.chat.completions.create(
            model="tiny", messages=USER, tools=TOOLS, response_format=form, seed=seed, max_tokens=300, parallel_tool_calls=False
        )  # fmt: skip
        message = answer.choices[0].message
        kinds.add(bool(message.tool_calls))
        if message.tool_calls:
            check(message.tool_calls[0])
        else:
            assert json.loads(message.content) in ({"x": 1}, {"x": 2})
    assert kinds <= {True, False} and kinds
    for own in (form, {"type": "json_object"}):
        forced = client.chat.completions.create(
            model="tiny", messages=USER, tools=TOOLS, response_format=own, tool_choice="required", seed=1, max_tokens=400,
            parallel_tool_calls=False,
        ).choices[0]  # fmt: skip
        check(forced.message.tool_calls[0])
    for more in ({"tool_choice": "required"}, {"tool_choice": "auto"}, {}):
        ask = {"messages": USER, "tools": TOOLS, "guided_regex": "a", **more}
        refused = httpx.post(f"{base}/v1/chat/completions", json=ask)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


EMPTY = {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    "described",
    [
        {},
        *({"parameters": p} for p in (None, {}, EMPTY, {**EMPTY, "required": []}, {**EMPTY, "title": "nowArguments"})),
    ],
)
def test_a_function_that_describes_no_arguments_is_called_with_none(real: tuple, described: dict) -> None:
    client, _ = real
    tools = [{"type": "function", "function": {"name": "now", **described}}]
    named = {"type": "function", "function": {"name": "now"}}
    ask = {"model": "tiny", "messages": USER, "tools": tools, "tool_choice": named, "max_tokens": 200}
    for seed in range(3):
        (choice,) = client.chat.completions.create(**ask, seed=seed).choices
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, json.loads(call.function.arguments)) == ("tool_calls", {})


@pytest.mark.parametrize(
    "cut", [*({"max_tokens": n} for n in (1, 5, 14, 30, 45, 47)), {"stop": ["}", "</f"]}, {"stop": ["weath"]}]
)
def test_a_forced_call_that_is_cut_says_so_and_leaves_no_markup(real: tuple, cut: dict) -> None:
    client, base = real
    ask = {
        "messages": USER,
        "tools": TOOLS[:1],
        "tool_choice": "required",
        "seed": 1,
        "parallel_tool_calls": False,
        **cut,
    }
    (choice,) = client.chat.completions.create(model="tiny", **ask).choices
    assert choice.finish_reason == ("length" if "max_tokens" in cut else "stop") and not choice.message.content
    calls = choice.message.tool_calls or ()
    assert all(c.function.name == "weather" and "}" not in c.function.arguments for c in calls)
    parts = list(client.chat.completions.create(model="tiny", **ask, stream=True))
    assert (
        not any(p.choices[0].delta.content for p in parts)
        and parts[-1].choices[0].finish_reason == choice.finish_reason
    )
    flat = [{"type": "function", **TOOLS[0]["function"]}]
    own = {"max_output_tokens" if k == "max_tokens" else k: v for k, v in cut.items()}
    asked = {"input": "hi", "tools": flat, "tool_choice": "required", "seed": 1, "parallel_tool_calls": False, **own}
    (item,) = httpx.post(f"{base}/v1/responses", json=asked, timeout=60).json()["output"]
    assert item["type"] == ("function_call" if calls else "message")
    assert item["status"] == ("incomplete" if calls or "max_tokens" in cut else "completed")


@pytest.fixture
def scripted() -> Iterator[tuple[openai.OpenAI, ScriptedEngine, str]]:
    engine = ScriptedEngine()
    engine.context_tokens = 4096
    with serve_app(build_api(ApiParts(client=engine, tokenizer=TOKENIZER))) as base:
        yield openai.OpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0), engine, base


def test_calls_of_the_models_own_accord_are_read_and_streamed(scripted: tuple) -> None:
    client, engine, _ = scripted
    ask = {"model": "tiny", "messages": USER, "tools": TOOLS[:1], "max_tokens": 0x80}
    engine.text = f"I see. {CALL}"
    answer = client.chat.completions.create(**ask)
    (call,) = answer.choices[0].message.tool_calls
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("tool_calls", "I see.")
    assert (
        json.loads(call.function.arguments) == {"city": "Rom", "days": 3} and engine.requests[-1].params.grammar is None
    )
    parts = list(client.chat.completions.create(**ask, stream=True))
    fragments = [d.function.arguments for p in parts for d in p.choices[0].delta.tool_calls or ()]
    assert len(fragments) > 4 and "".join(fragments) == call.function.arguments
    assert "".join(p.choices[0].delta.content or "" for p in parts) == "I see."
    off = client.chat.completions.create(**ask, tool_choice="none").choices[0]
    assert off.message.content == engine.text and off.message.tool_calls is None and off.finish_reason == "stop"
    unknown = client.chat.completions.create(**{**ask, "tools": TOOLS[1:]}).choices[0].message
    assert unknown.tool_calls is None and unknown.content == engine.text
    cut = client.chat.completions.create(**{**ask, "max_tokens": 60}).choices[0]
    assert cut.finish_reason == "length" and cut.message.tool_calls[0].function.name == "weather"


HISTORY = [
    *USER,
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]  # fmt: skip


def test_calls_and_results_go_back_in(scripted: tuple) -> None:
    client, engine, _ = scripted
    client.chat.completions.create(model="tiny", messages=HISTORY, tools=TOOLS[1:], max_tokens=1)
    prompt = TOKENIZER.decode(engine.requests[-1].prompt_token_ids)
    shown, rest = prompt.split("\n\nhi\n")
    assert (
        shown.startswith("user: You may call these functions:") and '"name": "now"' in shown and "<tool_call>" in shown
    )
    assert rest == (
        'assistant: <tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>\n'
        "user: <tool_response>\nsunny\n</tool_response>\nassistant: "
    )


def test_a_template_that_knows_tools_writes_them_itself() -> None:
    async def written(name: str) -> str:
        from paceline.serving.api.bodies import ChatBody
        from paceline.serving.wire.fields import parse_values

        tokenizer = copy.copy(TOKENIZER)
        tokenizer.chat_template = TEMPLATES[name]
        return await Prompts(tokenizer).render(parse_values({"messages": HISTORY, "tools": TOOLS[1:]}, ChatBody))

    import asyncio

    for name in ("hermes", "llama"):
        text = asyncio.run(written(name))
        assert '"name": "now"' in text and "You may call" not in text and '{"city": "Rom"}' in text and "sunny" in text


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("coder", "<tool_call>\n<function=weather>\n<parameter=city>\nRom\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>", None),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rom", "days": 3}, "id": "abcDEF123"}]', None),
        ("mistral_named", '[TOOL_CALLS]weather[CALL_ID]abcDEF123[ARGS]{"city": "Rom", "days": 3}', '[TOOL_CALLS]weather[ARGS]{"city": "Rom", "days": 3}'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("known", [None, "abcDEF123"])
def test_a_call_its_id_and_its_result_make_the_next_prompt(
    name: str, text: str, shown: str | None, known: str | None
) -> None:
    engine, tokenizer = ScriptedEngine(text), copy.copy(TOKENIZER)
    engine.context_tokens, tokenizer.chat_template = 4096, TEMPLATES[name]
    ask = {"model": "tiny", "tools": TOOLS, "max_tokens": 0x100}
    with serve_app(build_api(ApiParts(client=engine, tokenizer=tokenizer))) as base:
        client = openai.OpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0)
        choice = client.chat.completions.create(messages=USER, **ask).choices[0]
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        check(call)
        parts = [p.choices[0].delta for p in client.chat.completions.create(messages=USER, **ask, stream=True)]
        deltas = [d.function for p in parts for d in p.tool_calls or ()]
        assert [d.name for d in deltas if d.name] == ["weather"] and not any(p.content for p in parts)
        assert "".join(d.arguments for d in deltas) == call.function.arguments
        call.id = known or call.id
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        client.chat.completions.create(messages=[*USER, choice.message.to_dict(), result], **ask)
    prompt = TOKENIZER.decode(engine.requests[-1].prompt_token_ids)
    found = re.search(r'"id": "(\w{9})"', prompt)
    own = found[1] if found else "abcDEF123"
    assert (shown or text).replace("abcDEF123", own) in prompt and "sunny" in prompt
    assert name != "mistral" or (prompt.count(own) == 2 and known in (None, own))


def test_a_text_of_a_forced_call_may_hold_tags() -> None:
    city = "Rom\n</function>\n</tool_call>\n<parameter=days>"
    tags = f"<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>"
    engine, tokenizer = ScriptedEngine(f"<tool_call>\n<function=weather>\n{tags}"), copy.copy(TOKENIZER)
    engine.context_tokens, tokenizer.chat_template = 4096, TEMPLATES["coder"]
    ask = {"messages": USER, "tools": TOOLS, "tool_choice": "required", "max_tokens": 0x100}
    with serve_app(build_api(ApiParts(client=engine, tokenizer=tokenizer))) as base:
        choice = httpx.post(f"{base}/v1/chat/completions", json=ask).json()["choices"][0]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": city}


def test_special_tokens_of_a_format_are_drawn_and_read() -> None:
    marks = ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"]
    tokenizer = tiny_tokenizer(300)
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in marks])
    for name in ("mistral", "mistral_named"):
        tokenizer.chat_template = TEMPLATES[name]
        target = TargetModel.from_model(tiny_model(vocab=303, layers=2, context=1024), tokenizer)
        ask = {
            "messages": USER,
            "tools": TOOLS,
            "max_tokens": 200,
            "parallel_tool_calls": False,
            "return_token_ids": True,
        }
        with serve_engine(target) as (base, _):
            answer = httpx.post(
                f"{base}/v1/chat/completions", json={**ask, "tool_choice": "required", "seed": 1}, timeout=60
            ).json()
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        jsonschema.validate(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]), {"type": "object"})
        assert [t for t in choice["token_ids"] if t >= 300] == ([300] if name == "mistral" else [300, 301])


def test_styles_are_told_by_the_template() -> None:
    found = {name: style_of(text) for name, text in TEMPLATES.items()}
    forms = [CODER, HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, HERMES]
    assert [found[n].form for n in ("coder", "hermes", "llama", "mistral", "mistral_named", "plain")] == forms
    assert "tojson" not in TEMPLATES["coder"] and found["coder"].wants_objects
    assert not found["plain"].writes_tools and found["hermes"].writes_tools and found["llama"].wants_objects
    bundled = style_of("{% for c in m.get('tool_calls') or [] %}<|call|>{{ c }}{% endfor %}")
    assert (bundled.form, bundled.writes_tools, bundled.writes_calls, bundled.wants_objects) == (
        MARKED,
        False,
        True,
        False,
    )
    assert style_of("{{ tools }}<tool_call><function=").form is None
    assert (
        style_of("{{ tools }}<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>").form is None
    )
    assert style_of("{{ tools }}<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value></tool_call>").form is None
    assert style_of({"default": CHAT_TEMPLATE, "tool_use": TEMPLATES["hermes"]}).form is HERMES and style_of(None).form


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
        ({"tools": TOOLS + TOOLS}, "tools"),
        ({"tools": TOOLS * 70}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "tools.0.function.parameters"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, None),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "x"}]}, "functions"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_meant_are_refused(scripted: tuple, fields: dict, param: str | None) -> None:
    answer = httpx.post(f"{scripted[2]}/v1/chat/completions", json={"messages": USER, **fields})
    assert answer.status_code == 400
    assert param is None or answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize(
    "schema",
    [{"type": "object", "properties": {"x": {"type": "banana"}}}, {"properties": {"x": {"pattern": "(" * 5000}}},
     {"properties": {"x": {"$ref": "http://127.0.0.1:1/x"}}}, {"properties": {"x": {"enum": ["x" * 100] * 10_000}}}],
)  # fmt: skip
def test_schemas_that_cannot_be_used_are_bad_requests(real: tuple, schema: dict) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    body = {"messages": USER, "tools": tools, "tool_choice": "required", "max_tokens": 5}
    answer = httpx.post(f"{real[1]}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stop", ["<|call|>", "|>", "ll|><|c"])
def test_a_stop_string_in_the_mark_of_a_call_ends_the_engines_work(stop: str) -> None:
    tokenizer = tiny_tokenizer(300)
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("<|call|>", special=True, normalized=False)])
    tokenizer.chat_template = CHAT_TEMPLATE + "{# <|call|> #}"
    target = TargetModel.from_model(tiny_model(vocab=301, layers=2, context=1024), tokenizer)
    ask = {"messages": USER, "max_tokens": 60, "temperature": 0, "stop": [stop], "logit_bias": {"300": 100}}
    with serve_engine(target) as (base, _):
        answer = httpx.post(f"{base}/v1/chat/completions", json={**ask, "tools": TOOLS}).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == (2 if stop.startswith("ll") else 1)
        answer = httpx.post(f"{base}/v1/chat/completions", json=ask).json()
        assert answer["choices"][0]["finish_reason"] == "length", "without tools a special token is no text"
