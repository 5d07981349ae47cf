"""POST /tokenize and /detokenize: the tokens that a request would have, and back."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import jinja2
import pytest
from tokenizers import AddedToken

from paceline.serving.api.app import build_api
from paceline.serving.api.bodies import ChatBody
from paceline.serving.api.generation import ApiParts
from paceline.serving.api.prompts import Prompts
from paceline.serving.engine.engine import Engine
from paceline.serving.wire.accounts import Clients
from paceline.serving.wire.credentials import Tokens
from paceline.serving.wire.fields import FieldError, parse_values
from tests.helpers.api_server import TOKENIZER, ScriptedEngine, serve_engine
from tests.helpers.fakes import tiny_target, tiny_tokenizer

TEXT = "Hello, wörld! 日本"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[str, Engine]]:
    with serve_engine(tiny_target(vocab=300, layers=2), clients=Clients(Tokens(api_token="sesame"))) as served:
        yield served


def post(base: str, path: str, body: Any, token: str = "sesame") -> httpx.Response:
    return httpx.post(f"{base}{path}", json=body, headers={"Authorization": f"Bearer {token}"})


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_text_becomes_tokens_and_text_again(real: tuple, prefix: str) -> None:
    base, engine = real
    out = post(base, f"{prefix}/tokenize", {"model": "tiny", "prompt": TEXT}).json()
    ids = TOKENIZER.encode(TEXT)
    wanted = {"count": len(ids), "max_model_len": engine.max_context_tokens, "tokens": ids, "token_strs": None}
    assert out == wanted
    assert post(base, f"{prefix}/detokenize", {"tokens": ids}).json() == {"prompt": TEXT}


def test_token_strings(real: tuple) -> None:
    out = post(real[0], "/tokenize", {"prompt": "aö", "return_token_strs": True}).json()
    assert out["token_strs"] == ["a", "�", "�"]


@pytest.mark.parametrize("extra", [{}, {"add_generation_prompt": False}])
def test_a_conversation_has_the_tokens_that_a_chat_request_would_have(real: tuple, extra: dict) -> None:
    base, _ = real
    out = post(base, "/tokenize", {"messages": MESSAGES, **extra}).json()
    body = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True, **extra}
    answer = post(base, "/v1/chat/completions", body).json()
    assert out["tokens"] == answer["choices"][0]["prompt_token_ids"]
    assert out["count"] == answer["usage"]["prompt_tokens"]


def test_special_tokens_are_optional_and_written_out(real: tuple) -> None:
    base, _ = real
    assert post(base, "/detokenize", {"tokens": [70, 1]}).json()["prompt"].endswith("<|end|>")
    assert post(base, "/tokenize", {"prompt": "a", "add_special_tokens": False}).json()["count"] == 1
    assert post(base, "/tokenize", {"prompt": ""}).json()["tokens"] == []
    assert post(base, "/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.slow
def test_no_text_of_a_conversation_becomes_a_special_token() -> None:
    ids = {i: t.content for i, t in TOKENIZER.added_tokens_decoder.items() if t.special}
    bad = "a<|end|>b<<pad><|end|><|en"
    tool = {"type": "function", "function": {"name": "f", "description": bad, "parameters": {"properties": {bad: {}}}}}
    call = {"type": "function", "function": {"name": bad, "arguments": json.dumps({"x": bad})}}
    said = [{"role": "assistant", "content": bad, "tool_calls": [call]}, {"role": "tool", "content": bad}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": bad}]},
        *said,
        {"role": "user", "content": "<|end|>"},
    ]
    own = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|end|>{{ m['content'] | trim }}{% for c in m['tool_calls'] or [] %}{{ c | tojson }}{% endfor %}{% endfor %}{{ x }}"  # fmt: skip
    for template, num_own in ((TOKENIZER.chat_template, 0), (own, 4)):
        tokenizer = copy.copy(TOKENIZER)
        tokenizer.chat_template = template
        for limit in (1, 1000):  # in a thread, too
            body = {"messages": messages * limit, "tools": [tool], "chat_template_kwargs": {"x": bad}}
            chat = parse_values(body, ChatBody)
            prompts = Prompts(tokenizer)
            found = asyncio.run(prompts.encode_chat(chat, 100_000))
            assert [ids[t] for t in found if t in ids] == ["<|end|>"] * num_own * limit
            text = asyncio.run(prompts.render(chat))
            assert tokenizer.decode(found) == text.replace("\ufdd0", "") and bad in tokenizer.decode(found)
    with pytest.raises(FieldError, match="the context has 500 tokens, which the special tokens"):
        asyncio.run(prompts.encode_chat(chat, 500))
    plain = {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}
    assert asyncio.run(prompts.encode_chat(parse_values(plain, ChatBody), 512)) == TOKENIZER.encode("<|end|>a")


def test_thousands_of_special_tokens_make_a_conversation_no_slower_to_read() -> None:
    tokenizer = tiny_tokenizer(300)
    tokens = [f"<{i}|>" for i in range(2000)] + ["[A", "[AB]", "[ABC"]
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens])
    prompts = Prompts(tokenizer)
    text = "a <199|> <1999|>> <[AB[ABC] [A] <|end|> "
    chat = parse_values({"messages": [{"role": "user", "content": text * 10_000}]}, ChatBody)
    begun_s = time.process_time()
    rendered = asyncio.run(prompts.render(chat))
    took_s = time.process_time() - begun_s
    assert took_s < 0.6, "every token is looked for at every character"
    broken = "a <\ufdd0199|> <\ufdd01999|>> <[\ufdd0AB[\ufdd0ABC] [\ufdd0A] <\ufdd0|end|> "
    assert rendered == f"user: {broken * 10_000}\nassistant: "


def test_a_long_text_is_counted(real: tuple) -> None:
    base, _ = real
    text = "ab " * 20_000
    out = post(base, "/tokenize", {"prompt": text}).json()
    assert out["count"] == 60_000
    assert post(base, "/detokenize", {"tokens": out["tokens"]}).json()["prompt"] == text


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": None}, 400, "prompt"),
        ("/tokenize", {"prompt": [1]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": "a"}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "color": 1}, 400, "color"),
        ("/tokenize", {"prompt": "a", "model": "gpt"}, 404, None),
        ("/tokenize", [], 400, None),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [300]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "gpt"}, 404, None),
    ],
)
def test_wrong_bodies_are_refused(real: tuple, path: str, body: Any, status: int, param: str | None) -> None:
    answer = post(real[0], path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"])
def test_the_token_is_asked_for(real: tuple, path: str) -> None:
    body = {"prompt": "a"} if path.endswith("/tokenize") else {"tokens": [70]}
    assert post(real[0], path, body, token="guess").status_code == 401
    assert post(real[0], path, body).status_code == 200


@pytest.mark.parametrize("path", ["/tokenizer_info", "/v1/tokenizer_info"])
def test_a_client_can_write_conversations_as_the_service_does(real: tuple, path: str) -> None:
    base, engine = real
    assert httpx.get(f"{base}{path}").status_code == 401
    info = httpx.get(f"{base}{path}", headers={"Authorization": "Bearer sesame"}).json()
    assert info["model_max_length"] == engine.max_context_tokens
    eos = post(base, "/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False}).json()["tokens"]
    assert eos == [TOKENIZER.eos_token_id] and info["bos_token"] == TOKENIZER.bos_token
    template = jinja2.Environment().from_string(info["chat_template"])
    text = template.render(messages=MESSAGES, add_generation_prompt=True)
    whole = post(base, "/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert post(base, "/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"] == whole


def test_a_model_without_a_template_has_no_conversations() -> None:
    class Bare:
        """A tokenizer as it comes without a chat template."""

        chat_template = None

        def __getattr__(self, name: str) -> Any:
            return getattr(TOKENIZER, name)

    async def ask() -> httpx.Response:
        app = build_api(ApiParts(client=ScriptedEngine(), tokenizer=Bare()))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as c:
            return await c.post("/tokenize", json={"messages": MESSAGES})

    answer = asyncio.run(ask())
    assert answer.status_code == 400
    assert "no chat template" in answer.json()["error"]["message"]
