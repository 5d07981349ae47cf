"""The pages of docs/api tell every route and field, and their examples run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.serving.api.access_log import AccessRecord
from paceline.serving.api.app import make_router
from paceline.serving.api.bodies import (
    ChatBody,
    CommonBody,
    CompletionBody,
    GenerateBody,
    Metadata,
    ResponsesBody,
    StreamOptions,
)
from paceline.serving.api.generation import ApiParts
from paceline.serving.api.prompts import DetokenizeBody, TokenizeChat, TokenizePrompt
from paceline.serving.wire.fields import IGNORED, REFUSED, RESPONSES_IGNORED, RESPONSES_REFUSED
from tests.helpers.api_server import TOKENIZER, ScriptedEngine, serve_engine
from tests.helpers.fakes import tiny_target

DOCS = Path(__file__).resolve().parents[3] / "docs" / "api"
PAGE = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("routes.md", "fields.md"))
DOCUMENTED_URL = "http://127.0.0.1:8000"


def section(title: str) -> str:
    """The text under one heading, up to the next one."""
    _, _, rest = PAGE.partition(f"# {title}\n")
    assert rest, f"docs/api has no section {title!r}"
    return re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def names(text: str) -> set[str]:
    """What the first columns of the tables in `text` name."""
    rows = re.findall(r"^\| (.*?) \|", text, flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_every_field_is_documented() -> None:
    both = names(section("Fields of both generation routes"))
    completions, chat = both | names(section("Completions only")), both | names(section("Chat only"))
    assert completions == set(CompletionBody.model_fields)
    assert chat == set(ChatBody.model_fields)
    assert names(section("Responses only")) == set(ResponsesBody.model_fields) - set(CommonBody.model_fields)
    left_out = set(re.findall(r"`(\w+)`", section("Fields of /v1/responses")))
    assert left_out == set(GenerateBody.model_fields) - set(CommonBody.model_fields)
    for model in (StreamOptions, Metadata):
        hidden = {"include_obfuscation"}  # OpenAI's switch for padding; only its neutral value is known
        assert all(f"`{name}`" in PAGE for name in set(model.model_fields) - hidden)
    tokens = section("Tokens")
    for model in (TokenizePrompt, TokenizeChat, DetokenizeBody):
        assert all(f"`{name}`" in tokens for name in model.model_fields)


@pytest.mark.parametrize(
    ("title", "table"),
    [
        ("Fields that are refused", REFUSED),
        ("Fields that are ignored", IGNORED),
        ("Fields of responses that are refused", RESPONSES_REFUSED),
        ("Fields of responses that are ignored", RESPONSES_IGNORED),
    ],
)
def test_every_refused_or_ignored_field_is_documented_with_its_reason(title: str, table: dict) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", section(title), flags=re.MULTILINE)
    written = {name: (let_through, reason) for name, let_through, reason in rows}
    wanted = {
        name: (", ".join(f"`{json.dumps(v)}`" for v in neutral if v is not None), reason)
        for name, (neutral, reason) in table.items()
    }
    assert {name: (let.strip(), reason) for name, (let, reason) in written.items()} == wanted


def test_every_route_is_documented() -> None:
    routes = make_router(ApiParts(client=ScriptedEngine(), tokenizer=TOKENIZER)).routes
    paths = {path.replace("{name:path}", "{name}") for path in _paths(routes)}
    assert paths >= {"/v1/completions", "/v1/responses", "/tokenize", "/v1/detokenize", "/readyz", "/metrics"}
    table = section("Routes")
    assert all(f"{path}`" in table for path in paths)


def _paths(routes: list[Any]) -> set[str]:
    """Paths of routes and of the routers among them."""
    found: set[str] = set()
    for route in routes:
        inner = getattr(route, "original_router", None)
        found |= _paths(inner.routes) if inner is not None else {route.path}
    return found


def test_every_field_of_the_access_log_is_documented() -> None:
    record = AccessRecord("POST", "/v1/completions", 0.0, first_s=1.0, request_id="r", error="e", is_disconnected=True)
    record.prompt_tokens = record.completion_tokens = 1
    assert set(record.fields()) <= names(section("Access log"))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve_engine(tiny_target(vocab=300, layers=2), model_name="paceline") as (base, _):
        yield base


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", blocks("bash"))
def test_curl_examples_run(url: str, block: str) -> None:
    words = shlex.split(block.replace(DOCUMENTED_URL, url))
    assert words[:2] == ["curl", "-s"] and words[3] == "-H" and words[5] == "-d" and len(words) == 7
    name, _, value = words[4].partition(": ")
    answer = httpx.post(words[2], content=words[6], headers={name: value})
    assert answer.status_code == 200, answer.text
    assert {"choices", "tokens", "prompt"} & set(answer.json())


def test_python_examples_run(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = "\n".join(blocks("python")).replace(DOCUMENTED_URL, url)
    exec(compile(code, "docs/api", "exec"), {})
    lines = capsys.readouterr().out
    assert len(blocks("python")) == 4 and len(lines.splitlines()) >= 2
