"""Claims of the chat page: one file that needs nothing but the service, shut to everything else by its policy."""

import base64
import hashlib
import re

import httpx
import pytest

from paceline.serving.api.app import build_api
from paceline.serving.api.generation import ApiParts
from paceline.serving.wire.accounts import Clients
from paceline.serving.wire.credentials import Tokens
from tests.helpers.api_server import TOKENIZER, ScriptedEngine, serve_app
from tests.helpers.fakes import tiny_tokenizer


@pytest.fixture(scope="module")
def base():
    with serve_app(
        build_api(ApiParts(client=ScriptedEngine(), tokenizer=TOKENIZER, clients=Clients(Tokens(api_token="secret"))))
    ) as url:
        yield url


def test_the_page_needs_no_token_and_its_policy_allows_its_own_script_only(base):
    response = httpx.get(f"{base}/chat")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    policy = dict(p.strip().split(" ", 1) for p in response.headers["content-security-policy"].split(";"))
    script = re.findall(r"<script>(.*?)</script>", response.text, re.DOTALL)
    assert len(script) == 1 == response.text.count("<script")
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert policy["script-src"] == f"'sha256-{digest}'" and policy["connect-src"] == "'self'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert "unsafe" not in response.headers["content-security-policy"]
    again = httpx.get(f"{base}/chat", headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_page_names_no_other_place_has_no_inline_handlers_and_writes_no_html(base):
    page = httpx.get(f"{base}/chat").text
    assert not re.search(r"https?://|//[a-z]", page.replace("// a question", ""))
    assert not re.search(r"<[^>]*\son\w+\s*=", page) and not re.search(r"<[^>]*\sstyle\s*=", page)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|srcdoc", page)


def test_a_chat_without_a_template_is_refused_in_a_sentence_that_the_page_knows():
    bare = tiny_tokenizer(300)
    bare.chat_template = None
    with serve_app(build_api(ApiParts(client=ScriptedEngine(), tokenizer=bare))) as url:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        response = httpx.post(f"{url}/v1/chat/completions", json=body)
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == "messages" and "no chat template" in error["message"]
        assert "This model has no chat template" in httpx.get(f"{url}/chat").text
