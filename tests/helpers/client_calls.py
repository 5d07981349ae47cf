"""Calls of clients: some hundred requests as clients send them, what each must come to, and the page that says so.

`python tests/helpers/client_calls.py` asks a tiny engine all of them and writes docs/api/clients.md.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

PAGE = Path(__file__).parents[2] / "docs" / "api" / "clients.md"
SCHEMA = {
    "type": "object", "properties": {"city": {"enum": ["Rom", "Zug"]}}, "required": ["city"], "additionalProperties": False
}  # fmt: skip
FUNCTION = {"name": "book", "description": "Book a trip.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
TALK = [{"role": "user", "content": "hi"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "book", "arguments": '{"city": "Rom"}'}}
NAMED = {"type": "function", "function": {"name": "book"}}
MADE = {"max_tokens": 400, "seed": 1}
"""For answers that must come to their end."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request, and the status and words that its client can use."""

    client: str
    what: str
    path: str
    body: dict[str, Any] | None = None
    """None: GET."""
    status: int = 200
    word: str = ""
    """What the answer must hold."""

    def result(self, http: httpx.Client) -> str:
        """'' as it should be, else what came."""
        response = http.get(self.path) if self.body is None else http.post(self.path, json=self.body)
        text = response.text
        if response.status_code != self.status:
            return f"{response.status_code}: {_reason(text)}"
        return "" if self.word in text else f"without {self.word!r}"


def _reason(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])[:120]
    except (ValueError, KeyError, TypeError):
        return text[:80]


def _chat(client: str, what: str, word: str = "", status: int = 200, **fields: Any) -> Call:
    body = {"model": "tiny", "messages": TALK, "max_tokens": 4, **fields}
    return Call(client=client, what=what, path="/v1/chat/completions", body=body, word=word, status=status)


def _text(client: str, what: str, word: str = "", status: int = 200, **fields: Any) -> Call:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 4, **fields}
    return Call(client=client, what=what, path="/v1/completions", body=body, word=word, status=status)


def _openai() -> Iterator[Call]:
    name = "openai"
    yield Call(client=name, what="`models.list`", path="/v1/models", word='"tiny"')
    yield Call(client=name, what="`models.retrieve`", path="/v1/models/tiny", word='"tiny"')
    yield _chat(name, "chat")
    yield _chat(name, "chat, stream", "[DONE]", stream=True)
    yield _chat(name, "stream with usage", '"usage"', stream=True, stream_options={"include_usage": True})
    yield _text(name, "completions")
    yield _text(name, "completions, stream", "[DONE]", stream=True)
    yield _text(name, "several prompts", '"index":1', prompt=["a", "b"])
    yield _text(name, "a prompt of token ids", prompt=[5, 9, 33])
    yield _text(name, "several prompts of token ids", '"index":1', prompt=[[5, 9], [33, 41]])
    yield _chat(name, "`logprobs`, `top_logprobs`", '"top_logprobs"', logprobs=True, top_logprobs=2)
    yield _text(name, "`echo` with `logprobs`", '"token_logprobs"', echo=True, logprobs=1)
    yield _chat(name, "`n` and `seed`", '"index":2', n=3, seed=7)
    yield _chat(name, "`stop`", stop=["x", "y"])
    yield _chat(name, "`logit_bias`", logit_bias={"7": 10})
    yield _chat(name, "penalties", presence_penalty=0.5, frequency_penalty=0.5)
    yield _chat(name, "`max_completion_tokens`", max_tokens=None, max_completion_tokens=4)
    yield _chat(name, "`json_object`", response_format={"type": "json_object"})
    strict = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    yield _chat(name, "`json_schema`, `parse`", "city", response_format=strict, **MADE)
    yield _chat(name, "`tools`", tools=TOOLS)
    yield _chat(name, "`tool_choice: none`", tools=TOOLS, tool_choice="none")
    yield _chat(name, "`tool_choice: required`", '"tool_calls"', tools=TOOLS, tool_choice="required", **MADE)
    yield _chat(name, "a named tool", '"tool_calls"', tools=TOOLS, tool_choice=NAMED, **MADE)
    yield _chat(name, "a named tool, stream", '"arguments"', tools=TOOLS, tool_choice=NAMED, stream=True, **MADE)
    yield _chat(name, "`parallel_tool_calls`", tools=TOOLS, parallel_tool_calls=False)
    back = [*TALK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c1", "content": "ok"}]  # fmt: skip
    yield _chat(name, "results of calls sent back", tools=TOOLS, messages=back)
    yield _chat(name, "`functions` (before tools)", functions=[FUNCTION])
    for field, value in (("content", None), ("refusal", "No."), ("reasoning_content", "Hm.")):
        said = {"role": "assistant", "content": None, field: value}
        yield _chat(name, f"an answer with `{field}: {json.dumps(value)}` sent back", messages=[*TALK, said, *TALK])
    mixed = {"stop": [], "logprobs": False, "top_logprobs": 0, "stream_options": None}
    yield _chat(name, "values that ask for nothing", **mixed)
    yield _chat(name, "message `name`", messages=[{"role": "user", "content": "hi", "name": "ann"}])
    yield _chat(name, "role `developer`", messages=[{"role": "developer", "content": "Be kind."}, *TALK])
    yield _chat(name, "content of text parts", messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}])
    image = [
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    ]
    yield _chat(name, "an image, refused with the reason", "image", 400, messages=[{"role": "user", "content": image}])
    for field, value in (
        ("metadata", {"a": "b"}), ("store", True), ("prompt_cache_key", "k"), ("safety_identifier", "s"),
        ("reasoning_effort", "low"), ("verbosity", "low"), ("user", "u"), ("service_tier", "auto"),
    ):  # fmt: skip
        yield _chat(name, f"`{field}`", **{field: value})
    long = [{"role": "user", "content": "x" * 9000}]
    yield _chat(name, "context overflow by its code", "context_length_exceeded", 400, messages=long)
    yield _chat(name, "an alias of the model", model="gpt-4o-mini")
    yield _chat(name, "an unknown model, refused", "model_not_found", 404, model="other")
    ask = {"model": "tiny", "input": "hi", "max_output_tokens": 4}
    for what, word, more in (
        ("`responses.create`", '"output"', {}), ("`responses`, stream", "response.output_text.delta", {"stream": True}),
        ("`responses`, `store`, `truncation: auto`", '"output"', {"store": True, "truncation": "auto"}),
        ("`responses`, `reasoning` items sent back", '"output"', {"input": [{"type": "reasoning", "id": "r", "summary": []}, *TALK]}),
        ("`responses`, `instructions`", '"output"', {"instructions": "Be kind."}),
        ("`responses.parse`", "city", {"text": {"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA, "strict": True}}, "max_output_tokens": 400}),
        ("`responses`, tools", "function_call", {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required", "max_output_tokens": 400}),
    ):  # fmt: skip
        yield Call(client=name, what=what, path="/v1/responses", body={**ask, **more}, word=word)
    yield Call(client=name, what="`embeddings`", path="/v1/embeddings", body={"model": "tiny", "input": "hi"})


def _others() -> Iterator[Call]:
    yield _chat("LangChain", "`ChatOpenAI.invoke`", n=1, temperature=0.7, stream=False)
    yield _chat(
        "LangChain", "`bind_tools`", '"tool_calls"', tools=TOOLS, tool_choice=NAMED, parallel_tool_calls=False, **MADE
    )
    yield _chat("LangChain", "`stream`", "[DONE]", stream=True, stream_options={"include_usage": True})
    yield _text("LangChain", "`OpenAI.generate` of a list", '"index":1', prompt=["a", "b"], n=1, top_p=1)
    yield _chat("LiteLLM", "`hosted_vllm/` with `top_k`", top_k=20, stream=False)
    mark = {"cache_control": {"type": "ephemeral"}}
    marked = [{"role": "user", "content": [{"type": "text", "text": "hi", **mark}]}]
    yield _chat("LiteLLM", "`cache_control`", messages=marked, tools=[{**TOOLS[0], **mark}])
    yield _chat("LiteLLM", "tools and a user", tools=TOOLS, tool_choice="auto", user="u")
    yield _chat("instructor", "default mode", '"tool_calls"', tools=TOOLS, tool_choice=NAMED, **MADE)
    object_ = {"type": "json_object", "schema": SCHEMA}
    yield _chat("instructor", "`JSON_SCHEMA`", "city", response_format=object_, **MADE)
    scored = {
        "prompt": [[5, 9, 33], [41, 7, 9]],
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
        "temperature": 0,
        "seed": 1234,
    }
    yield _text("lm-eval", "log likelihoods, `batch_size` 2", '"token_logprobs"', **scored)
    yield _text("lm-eval", "`generate_until`", prompt=["a"], temperature=0, stop=["\n", "x"], seed=1234)
    agent = [{"role": "system", "content": "Be kind."}, *TALK]
    yield _chat(
        "OpenAI agents", "a turn with tools", messages=agent, tools=TOOLS, store=False, parallel_tool_calls=True
    )
    yield _chat(
        "promptfoo", "a row of a table", messages=agent, temperature=0, max_tokens=8, top_p=1, presence_penalty=0
    )
    name = "vLLM"
    for field, value in (
        ("top_k", 20), ("min_p", 0.1), ("repetition_penalty", 1.1), ("stop_token_ids", [7]), ("ignore_eos", True),
        ("skip_special_tokens", False), ("guided_regex", "[ab]{2}"), ("guided_grammar", 'start: "a" | "b"'),
        ("guided_json", SCHEMA), ("guided_choice", ["Rom", "Zug"]), ("structured_outputs", {"choice": ["Rom", "Zug"]}),
        ("min_tokens", 2), ("bad_words", ["the"]), ("allowed_token_ids", [5, 9, 33]), ("truncate_prompt_tokens", 4),
        ("prompt_logprobs", 1), ("include_stop_str_in_output", True), ("return_tokens_as_token_ids", True),
        ("priority", 3), ("chat_template_kwargs", {"a": 1}), ("return_token_ids", True), ("cache_salt", "s"),
    ):  # fmt: skip
        yield _chat(name, f"`{field}`", **{field: value})
    mixed = {"top_k": -1, "kv_transfer_params": None, "echo": False, "spaces_between_special_tokens": True}
    mixed |= {"structured_outputs": {"choice": ["Rom"], "whitespace_pattern": None, "disable_any_whitespace": False}}
    yield _chat(name, "values that ask for nothing", add_special_tokens=False, **mixed)
    yield _chat(name, "`min_tokens` with `stop`", min_tokens=2, stop=["x"])
    yield Call(
        client=name, what="`/tokenize`", path="/tokenize", body={"model": "tiny", "prompt": "hi"}, word='"tokens"'
    )
    yield Call(client=name, what="`/detokenize`", path="/detokenize", body={"model": "tiny", "tokens": [5, 9]}, word='"prompt"')  # fmt: skip
    for path in ("/health", "/ping", "/version", "/tokenizer_info", "/openapi.json", "/docs"):
        yield Call(client=f"{name}, probes", what=f"`{path}`", path=path)
    for field, value in (("regex", "[ab]{2}"), ("ebnf", 'root ::= "a" | "b"'), ("json_schema", json.dumps(SCHEMA))):
        yield _text("SGLang", f"`{field}`", **{field: value})


CALLS = (*_openai(), *_others())


def page(results: list[str]) -> str:
    """The page for what every call came to."""
    assert len(results) == len(CALLS)
    passed = Counter(call.client for call, result in zip(CALLS, results, strict=True) if not result)
    clients = list(dict.fromkeys(call.client for call in CALLS))
    rows = [
        f"| {client} | {passed[client]} of {sum(c.client == client for c in CALLS)} | "
        + ", ".join(c.what for c, result in zip(CALLS, results, strict=True) if c.client == client and not result) + " |"
        for client in clients
    ]  # fmt: skip
    failed = [f"| {c.client} | {c.what} | {r} |" for c, r in zip(CALLS, results, strict=True) if r]
    return f"""# Calls of clients

{sum(passed.values())} of {len(CALLS)} calls pass: requests as clients send them, each with the answer that its client can use (a refusal is
one where no other is right). `tests/helpers/client_calls.py` has them all, `python tests/helpers/client_calls.py` writes this page, and
a test asks a real engine every time. The libraries themselves: [routes.md](routes.md#clients).

| client | pass | calls |
|---|---|---|
{chr(10).join(rows)}

What does not pass:

| client | call | answer |
|---|---|---|
{chr(10).join(failed)}
"""


def ask_all() -> list[str]:
    """What every call came to, of an engine with a tiny model."""
    import copy

    from tests.helpers.api_server import serve_engine
    from tests.helpers.fakes import CHAT_TEMPLATE, tiny_target

    target = tiny_target(vocab=300, layers=2, context=3072)
    target.tokenizer = copy.copy(target.tokenizer)
    target.tokenizer.chat_template = CHAT_TEMPLATE
    with serve_engine(target, aliases=("gpt-4o-mini",)) as (base, _), httpx.Client(base_url=base, timeout=60) as http:
        return [call.result(http) for call in CALLS]


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(PAGE.parents[2]))
    PAGE.write_text(page(ask_all()), encoding="utf-8")
    print(f"{PAGE}: {len(CALLS)} calls")
