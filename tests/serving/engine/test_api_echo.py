"""`echo` over HTTP: the prompt before the answer, its log-probabilities, and scoring without generating."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from paceline.serving.engine.engine import Engine
from tests.helpers.api_server import TOKENIZER, serve_engine
from tests.helpers.fakes import plain_logits, tiny_target

PROMPT = "Größe 日, yes?"
IDS = TOKENIZER.encode(PROMPT, add_special_tokens=False)


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[openai.OpenAI, str, Engine]]:
    with serve_engine(tiny_target(vocab=300, layers=2)) as (base, engine):
        yield openai.OpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0), base, engine


def ask(**fields: Any) -> dict[str, Any]:
    extra = {"ignore_eos": True, **fields.pop("extra_body", {})}
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "extra_body": extra, **fields}


def test_echo_puts_the_prompt_before_the_answer(real: tuple) -> None:
    client, _, _ = real
    alone = client.completions.create(**ask()).choices[0].text
    answer = client.completions.create(**ask(echo=True))
    assert answer.choices[0].text == PROMPT + alone
    assert answer.choices[0].logprobs is None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(IDS), 6)
    assert client.completions.create(**ask(echo=True, prompt=IDS)).choices[0].text == PROMPT + alone
    assert client.completions.create(**ask(echo=False)).choices[0].text == alone


@pytest.mark.parametrize("num_top", [0, 2])
def test_echo_with_logprobs_scores_the_prompt(real: tuple, num_top: int) -> None:
    client, _, engine = real
    logprobs = client.completions.create(**ask(echo=True, logprobs=num_top)).choices[0].logprobs
    alone = client.completions.create(**ask(logprobs=num_top)).choices[0].logprobs
    num = len(IDS)
    assert len(logprobs.tokens) == num + 6
    assert logprobs.tokens[num:] == alone.tokens
    assert logprobs.token_logprobs[num:] == pytest.approx(alone.token_logprobs, abs=2e-4)
    assert logprobs.text_offset[num:] == [at + len(PROMPT) for at in alone.text_offset]
    assert logprobs.text_offset[:3] == [0, 1, 2]
    assert logprobs.token_logprobs[0] is None
    wanted = plain_logits(engine.target, IDS).log_softmax(-1)
    for i, token_id in enumerate(IDS[1:]):
        assert logprobs.token_logprobs[i + 1] == pytest.approx(float(wanted[i, token_id]), abs=2e-4)
    if num_top:
        assert logprobs.top_logprobs[0] is None
        assert all(len(top) in (num_top, num_top + 1) for top in logprobs.top_logprobs[1:])
    else:
        assert logprobs.top_logprobs is None


@pytest.mark.parametrize("n", [1, 2])
def test_echo_streams_the_same(real: tuple, n: int) -> None:
    client, _, _ = real
    request = ask(echo=True, logprobs=1, n=n)
    whole = client.completions.create(**request)
    chunks = list(client.completions.create(**request, stream=True))
    for choice in whole.choices:
        own = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert own[0].text.startswith(PROMPT)
        assert "".join(c.text for c in own) == choice.text
        scores = [t for c in own for t in c.logprobs.token_logprobs]
        assert scores[0] is None and choice.logprobs.token_logprobs[0] is None
        assert scores[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=2e-4)
        assert [t for c in own for t in c.logprobs.text_offset] == choice.logprobs.text_offset


@pytest.mark.parametrize("stream", [False, True])
def test_scoring_generates_nothing(real: tuple, stream: bool) -> None:
    client, _, _ = real
    answer = client.completions.create(**ask(echo=True, logprobs=0, max_tokens=0), stream=stream)
    (part,) = list(answer) if stream else [answer]
    assert part.choices[0].text == PROMPT
    assert part.choices[0].finish_reason == "length"
    assert len(part.choices[0].logprobs.tokens) == len(IDS)
    assert None not in part.choices[0].logprobs.token_logprobs[1:]
    if not stream:
        assert (part.usage.prompt_tokens, part.usage.completion_tokens) == (len(IDS), 0)


def test_a_prompt_of_one_token_has_no_score(real: tuple) -> None:
    client, _, _ = real
    choice = client.completions.create(**ask(echo=True, logprobs=1, max_tokens=0, prompt=[70])).choices[0]
    assert (choice.logprobs.token_logprobs, choice.logprobs.top_logprobs) == ([None], [None])


def test_stop_strings_do_not_look_at_the_prompt(real: tuple) -> None:
    client, _, _ = real
    alone = client.completions.create(**ask()).choices[0].text
    assert client.completions.create(**ask(echo=True, stop="yes")).choices[0].text == PROMPT + alone
    cut = client.completions.create(**ask(echo=True, stop=alone[2:4], logprobs=0)).choices[0]
    at = alone.index(alone[2:4])
    assert (cut.text, cut.finish_reason) == (PROMPT + alone[:at], "stop")
    assert "".join(cut.logprobs.tokens[len(IDS) :]) == alone[:at]


def test_a_prompt_that_ends_inside_a_character_is_echoed_with_a_mark(real: tuple) -> None:
    client, _, _ = real
    half = TOKENIZER.encode("ö", add_special_tokens=False)[:1]
    answer = client.completions.create(**ask(echo=True, logprobs=0, max_tokens=0, prompt=[70, *half]))
    assert answer.choices[0].text.endswith("�")
    assert len(answer.choices[0].logprobs.tokens) == 2


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": 0, "echo": False}, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": -1, "echo": True}, "max_tokens"),
        ("completions", {"prompt": "a", "echo": 1}, "echo"),
        ("completions", {"prompt": "a", "echo": "yes"}, "echo"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "echo": True}, "echo"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_cannot_be_echoed_is_refused(real: tuple, route: str, body: dict, param: str) -> None:
    _, base, _ = real
    refused = httpx.post(f"{base}/v1/{route}", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
