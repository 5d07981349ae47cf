"""Conversations over HTTP: several turns, what clients may tell the chat template, and templates that refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from paceline.serving.api.app import build_api
from paceline.serving.api.generation import ApiParts
from paceline.serving.engine.engine import Engine
from tests.helpers.api_server import TOKENIZER, ScriptedEngine, serve_app, serve_engine
from tests.helpers.fakes import tiny_target, tiny_tokenizer

STRICT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{% if enable_thinking %}<think>{% endif %}"
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def url(engine: ScriptedEngine) -> Iterator[str]:
    tokenizer = tiny_tokenizer(300)
    tokenizer.chat_template = STRICT_TEMPLATE
    with serve_app(build_api(ApiParts(client=engine, tokenizer=tokenizer))) as base:
        yield base


def post(url: str, messages: list[Any], **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json={"messages": messages, "max_tokens": 2, **fields})


def prompt_of(url: str, engine: ScriptedEngine, messages: list[Any], **fields: Any) -> str:
    answer = post(url, messages, **fields)
    assert answer.status_code == 200, answer.text
    return TOKENIZER.decode(engine.requests[-1].prompt_token_ids)


@pytest.mark.parametrize(
    ("messages", "fields", "prompt"),
    [
        ([user("a")], {}, "[user]a[assistant]"),
        ([user("a"), assistant("b"), user("c")], {}, "[user]a[assistant]b[user]c[assistant]"),
        ([user("a")], {"add_generation_prompt": False}, "[user]a"),
        ([user("a"), assistant("b")], {"continue_final_message": True}, "[user]a[assistant]b"),
        ([user("a")], {"chat_template_kwargs": {"enable_thinking": True}}, "[user]a[assistant]<think>"),
        ([user("a")], {"chat_template_kwargs": {"unused": [1, {"b": None}]}}, "[user]a[assistant]"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], {}, "[user]a\nb[assistant]"),
    ],
)  # fmt: skip
def test_the_template_writes_the_conversation(
    url: str, engine: ScriptedEngine, messages: list, fields: dict, prompt: str
) -> None:
    assert prompt_of(url, engine, messages, **fields) == prompt


def test_a_long_conversation_is_written_too(url: str, engine: ScriptedEngine) -> None:
    refused = post(url, [user("ab" * 20_000)])
    assert refused.status_code == 400
    assert "maximum context length is 256 tokens, but the prompt has 40017" in refused.json()["error"]["message"]


def test_a_template_that_refuses_says_why(url: str) -> None:
    answer = post(url, [user("a"), user("b")])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "roles must alternate" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": "yes"}, "add_generation_prompt"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
    ],
)
def test_what_the_template_may_not_be_told_is_refused(url: str, fields: dict, param: str) -> None:
    answer = post(url, [user("a")], **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


# ---- with the real engine ---------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def real() -> Iterator[tuple[openai.OpenAI, Engine]]:
    with serve_engine(tiny_target(vocab=300, layers=2)) as (base, engine):
        yield openai.OpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0), engine


def test_an_answer_can_be_continued_where_it_was_cut(real: tuple) -> None:
    client, _ = real
    written = "user: hi\nassistant: abcd"  # the template's line break after the last message is cut off
    extra = {"ignore_eos": True, "return_token_ids": True}
    ask: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    wanted = client.completions.create(**ask, prompt=TOKENIZER.encode(written), extra_body=extra).choices[0]
    answer = client.chat.completions.create(
        **ask, messages=[user("hi"), assistant("abcd")], extra_body={**extra, "continue_final_message": True}
    ).choices[0]
    assert TOKENIZER.decode(answer.model_dump()["prompt_token_ids"]) == written
    assert answer.model_dump()["token_ids"] == wanted.model_dump()["token_ids"]


def test_a_chat_has_its_prompts_tokens_beside_the_choices_too(real: tuple) -> None:
    client, _ = real
    ask: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "messages": [user("hi")], "n": 2}
    whole = client.chat.completions.create(**ask, extra_body={"return_token_ids": True})
    chunks = list(client.chat.completions.create(**ask, stream=True, extra_body={"return_token_ids": True}))
    assert whole.prompt_token_ids == whole.choices[1].prompt_token_ids == chunks[0].prompt_token_ids
    assert TOKENIZER.decode(whole.prompt_token_ids).startswith("user: hi")
    assert not any(hasattr(c, "prompt_token_ids") for c in chunks[1:])
    assert not hasattr(client.chat.completions.create(**ask), "prompt_token_ids")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_length_limit_hold(real: tuple, name: str) -> None:
    client, _ = real
    answer = client.chat.completions.create(
        model="tiny", messages=[user("hi")], **{name: 3}, extra_body={"ignore_eos": True}
    )
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")


def test_turns_go_back_and_forth(real: tuple) -> None:
    client, _ = real
    messages: list[Any] = [{"role": "system", "content": "be brief"}]
    sizes = []
    for turn in range(3):
        messages.append(user(f"turn {turn}"))
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, temperature=0)
        messages.append(assistant(answer.choices[0].message.content))
        sizes.append(answer.usage.prompt_tokens)
    assert sizes == sorted(set(sizes))
