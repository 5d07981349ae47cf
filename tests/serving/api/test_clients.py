"""Client libraries against a real engine: what their users call first. A library that is not installed is skipped.

`make test-clients` has all of them, in an environment of its own: they pin older versions than the other tests use.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.helpers.api_server import serve_engine
from tests.helpers.fakes import CHAT_TEMPLATE, tiny_target

pytestmark = pytest.mark.slow
ASK = [{"role": "user", "content": "hi"}]
LONG = "x" * 4000


class Trip(BaseModel):
    """Book a trip."""

    model_config = ConfigDict(extra="forbid")  # or a schema allows more keys, and a toy writes them without end
    city: Literal["Rom", "Zürich"]
    is_direct: bool


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    target = tiny_target(vocab=300, layers=2, context=3072)
    target.tokenizer = copy.copy(target.tokenizer)
    target.tokenizer.chat_template = CHAT_TEMPLATE
    with serve_engine(target) as (base, _):
        yield f"{base}/v1"


def test_openai(url: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="x", max_retries=0)
    parsed = client.chat.completions.parse(model="tiny", messages=ASK, response_format=Trip, max_tokens=800)
    assert isinstance(parsed.choices[0].message.parsed, Trip)
    tool = openai.pydantic_function_tool(Trip)
    called = client.chat.completions.parse(
        model="tiny", messages=ASK, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=800
    )
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Trip)
    named = {"type": "function", "function": {"name": "Trip"}}
    with client.chat.completions.stream(
        model="tiny", messages=ASK, tools=[tool], tool_choice=named, max_tokens=800
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.tool_calls[0].function.parsed_arguments, Trip)
    assert "tool_calls.function.arguments.delta" in kinds
    back = [*ASK, final.choices[0].message, {"role": "tool", "tool_call_id": "c", "content": "booked"}]
    assert client.chat.completions.create(model="tiny", messages=back, tools=[tool], max_tokens=4).choices
    hints = {"store": True, "metadata": {"a": "b"}, "user": "u", "reasoning_effort": "low", "prompt_cache_key": "k"}
    assert client.chat.completions.create(model="tiny", messages=ASK, max_tokens=2, **hints).choices
    assert len(client.completions.create(model="tiny", prompt=["a", "b", "c"], max_tokens=2).choices) == 3


TRIP = {
    "type": "function",
    "name": "Trip",
    "description": "Book a trip.",
    "parameters": openai.pydantic_function_tool(Trip)["function"]["parameters"],
    "strict": True,
}


def test_openai_responses(url: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="x", max_retries=0)
    ask = {
        "model": "tiny",
        "instructions": "Be kind.",
        "extra_body": {"seed": 4, "ignore_eos": True, "bad_words": ["the"]},
    }
    whole = client.responses.create(**ask, input="hi", max_output_tokens=8)
    assert whole.status == "incomplete" and whole.usage.output_tokens == 8
    talk = [{"role": "user", "content": "hi"}, *whole.output, {"role": "user", "content": "go on"}]
    assert client.responses.create(**ask, input=talk, max_output_tokens=4).usage.output_tokens == 4
    parts = [*client.responses.create(**ask, input="hi", max_output_tokens=8, stream=True)]
    assert "".join(e.delta for e in parts if e.type == "response.output_text.delta") == whole.output_text
    assert parts[-1].type == "response.incomplete" and parts[-1].response.usage.output_tokens == 8

    parsed = client.responses.parse(model="tiny", input="hi", text_format=Trip, max_output_tokens=800)
    assert isinstance(parsed.output_parsed, Trip) and parsed.status == "completed"
    with client.responses.stream(model="tiny", input="hi", text_format=Trip, max_output_tokens=800) as stream:
        kinds = [event.type for event in stream]
        assert isinstance(stream.get_final_response().output_parsed, Trip)
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"

    for choice in ("required", {"type": "function", "name": "Trip"}):
        tools = {"tools": [TRIP], "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 800}
        called = client.responses.create(model="tiny", input="hi", **tools)
        (call,) = called.output
        assert Trip.model_validate_json(call.arguments) and call.name == "Trip"
        with client.responses.stream(model="tiny", input="hi", **tools) as stream:
            assert "response.function_call_arguments.delta" in {event.type for event in stream}
            (final,) = stream.get_final_response().output
        assert Trip(**final.parsed_arguments) and final.call_id
        result = {"type": "function_call_output", "call_id": final.call_id, "output": "booked"}
        back = [{"role": "user", "content": "hi"}, final, result]
        assert client.responses.create(model="tiny", input=back, tools=[TRIP], max_output_tokens=4).output
    with pytest.raises(openai.BadRequestError, match="not stored"):
        client.responses.create(model="tiny", input="hi", previous_response_id=whole.id)
    assert client.responses.create(model="tiny", input="hi", store=True, max_output_tokens=4).store is False


def test_openai_responses_async(url: str) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            body = {"model": "tiny", "input": "hi", "extra_body": {"seed": 4, "ignore_eos": True}}
            many = await asyncio.gather(*(client.responses.create(**body, max_output_tokens=n) for n in (2, 4, 8)))
            assert [answer.usage.output_tokens for answer in many] == [2, 4, 8]
            stream = await client.responses.create(**body, max_output_tokens=8, stream=True)
            deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
            assert "".join(deltas) == many[-1].output_text
            parsed = await client.responses.parse(model="tiny", input="hi", text_format=Trip, max_output_tokens=800)
            assert isinstance(parsed.output_parsed, Trip)
            async with client.responses.stream(
                model="tiny",
                input="hi",
                tools=[TRIP],
                tool_choice="required",
                parallel_tool_calls=False,
                max_output_tokens=800,
            ) as events:
                final = await events.get_final_response()
            assert Trip(**final.output[0].parsed_arguments)

    asyncio.run(ask())


def test_langchain(url: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    os.environ.setdefault("LANGSMITH_TRACING", "false")
    chat = langchain.ChatOpenAI(base_url=url, api_key="x", model="tiny", max_tokens=800, max_retries=0)
    short = chat.bind(max_tokens=4)
    assert short.invoke("hi").content is not None and len(short.batch(["a", "b"])) == 2
    assert "".join(part.content for part in short.stream("hi")) is not None
    bound = chat.bind_tools([Trip], tool_choice="Trip", parallel_tool_calls=False)
    answer = bound.invoke("hi")
    assert [c["name"] for c in answer.tool_calls] == ["Trip"] and Trip(**answer.tool_calls[0]["args"])
    for method in ("function_calling", "json_schema"):
        assert isinstance(chat.with_structured_output(Trip, method=method).invoke("hi"), Trip)
    assert short.bind_tools([Trip]).invoke("hi").content is not None
    texts = langchain.OpenAI(base_url=url, api_key="x", model="tiny", max_tokens=2, max_retries=0).generate(["a", "b"])
    assert len(texts.generations) == 2


def test_litellm(url: str) -> None:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices
    litellm = pytest.importorskip("litellm")
    pytest.importorskip("mcp", reason="litellm imports it where a request has tools")
    for model in ("openai/tiny", "hosted_vllm/tiny"):
        ask = {"model": model, "api_base": url, "api_key": "x", "messages": ASK, "num_retries": 0}
        assert litellm.completion(**ask, max_tokens=4).choices[0].message.content is not None
        assert [*litellm.completion(**ask, max_tokens=4, stream=True)]
        tools = [openai.pydantic_function_tool(Trip)]
        forced = litellm.completion(**ask, tools=tools, tool_choice="required", max_tokens=800)
        assert forced.choices[0].message.tool_calls[0].function.name == "Trip"
        again = [*ASK, forced.choices[0].message.model_dump(), {"role": "tool", "tool_call_id": "c", "content": "ok"}]
        assert litellm.completion(**{**ask, "messages": again}, tools=tools, max_tokens=4).choices
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(**{**ask, "messages": [{"role": "user", "content": LONG}]})


def test_instructor(url: str) -> None:
    instructor = pytest.importorskip("instructor")
    client = openai.OpenAI(base_url=url, api_key="x", max_retries=0)
    ask = {"model": "tiny", "messages": ASK, "response_model": Trip, "max_retries": 1, "max_tokens": 800}
    assert isinstance(instructor.from_openai(client).chat.completions.create(**ask), Trip)
    by_schema = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    assert isinstance(by_schema.chat.completions.create(**ask), Trip)


def test_lm_eval(url: str) -> None:
    """Both kinds of its requests, with the service's own tokenizer: what `lm_eval --model local-completions` does."""
    models = pytest.importorskip("lm_eval.models.openai_completions")
    from lm_eval.api.instance import Instance

    def asked(kind: str, arguments: tuple) -> Instance:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=("a task", 0, 1))

    lm = models.LocalCompletionsAPI(base_url=f"{url}/completions", model="tiny", max_retries=1, batch_size=2)
    assert lm.tokenizer_backend == "remote"
    scored = lm.loglikelihood([asked("loglikelihood", ("a b", end)) for end in (" c", " de", " f")])
    client = openai.OpenAI(base_url=url, api_key="x", max_retries=0)
    for (score, is_greedy), text in zip(scored, ("a b c", "a b de", "a b f"), strict=True):
        answer = client.completions.create(model="tiny", prompt=text, max_tokens=1, echo=True, logprobs=1)
        own, behind = answer.choices[0].logprobs, range(len("a b"), len(text))
        assert score == pytest.approx(sum(own.token_logprobs[i] for i in behind), abs=1e-3)
        assert is_greedy == all(own.tokens[i] == max(own.top_logprobs[i], key=own.top_logprobs[i].get) for i in behind)
    until = {"until": ["x"], "max_gen_toks": 8, "temperature": 0.0}
    (text,) = lm.generate_until([asked("generate_until", ("hi", until))])
    whole = client.completions.create(model="tiny", prompt="hi", max_tokens=8, temperature=0, stop=["x"])
    assert text == whole.choices[0].text != ""


@pytest.mark.skipif(shutil.which("promptfoo") is None, reason="promptfoo is not on PATH")
def test_promptfoo(url: str, tmp_path: Path) -> None:
    settings = {"apiBaseUrl": url, "apiKey": "x", "temperature": 0, "max_tokens": 8, "max_output_tokens": 8}
    kinds = ("chat", "completion", "responses")
    config = {
        "prompts": ["hi {{name}}"],
        "providers": [{"id": f"openai:{kind}:tiny", "config": settings} for kind in kinds],
        "tests": [{"vars": {"name": name}, "assert": [{"type": "javascript", "value": "output.length > 0"}]} for name in "ab"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    off = ("PROMPTFOO_DISABLE_TELEMETRY", "PROMPTFOO_DISABLE_UPDATE", "PROMPTFOO_DISABLE_REMOTE_GENERATION")
    done = subprocess.run(
        ["promptfoo", "eval", "-c", "config.json", "--no-cache", "--no-table", "-o", "out.json"], cwd=tmp_path,
        env={**os.environ, **dict.fromkeys(off, "1"), "PROMPTFOO_CONFIG_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["results"]["results"]
    assert sorted(r["provider"]["id"] for r in rows) == sorted(f"openai:{kind}:tiny" for kind in kinds for _ in "ab")
    assert all(r["success"] for r in rows), rows


@pytest.mark.parametrize("model_of", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(url: str, model_of: str) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    booked: list[str] = []

    @agents.function_tool
    def book(city: Literal["Rom", "Zürich"]) -> str:
        """Book a trip."""
        booked.append(city)
        return f"booked {city}"

    async def talk() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            ask = {
                "name": "travel",
                "model": getattr(agents, model_of)(model="tiny", openai_client=client),
                "instructions": "Be kind.",
            }
            forced = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=800)
            agent = agents.Agent(tools=[book], model_settings=forced, tool_use_behavior="stop_on_first_tool", **ask)
            found = await agents.Runner.run(agent, "hi", max_turns=2)
            assert found.final_output == f"booked {booked[0]}"
            after = agents.ModelSettings(extra_body={"structured_outputs": {"choice": ["fine"]}})
            agent = agents.Agent(model_settings=after, **ask)
            again = await agents.Runner.run(agent, [*found.to_input_list(), *ASK], max_turns=1)
            assert again.final_output == "fine"
            stream = agents.Runner.run_streamed(agent, "hi", max_turns=1)
            assert "raw_response_event" in {event.type async for event in stream.stream_events()}
            assert stream.final_output == "fine"
            typed = agents.Agent(output_type=Trip, model_settings=agents.ModelSettings(max_tokens=800), **ask)
            assert isinstance((await agents.Runner.run(typed, "hi", max_turns=1)).final_output, Trip)

    asyncio.run(talk())
