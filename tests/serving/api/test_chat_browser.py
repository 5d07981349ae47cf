"""The chat page in a real browser, over the real app and the bundled model: turns, marks, drafter off, stop, token, HTML."""

from __future__ import annotations

import pytest

from paceline.bench.common.engine_run import build_engine, load_named_drafter, load_target
from paceline.config import EngineConfig, TreeConfig
from paceline.serving.api.app import build_api
from paceline.serving.api.client import LocalEngineClient
from paceline.serving.api.generation import ApiParts
from paceline.serving.engine.thread import EngineThread
from paceline.serving.wire.accounts import Clients
from paceline.serving.wire.credentials import Tokens
from tests.helpers.api_server import TOKENIZER, ScriptedEngine, serve_app
from tests.helpers.browser_page import open_browser, watched_page

pytestmark = [pytest.mark.browser, pytest.mark.slow]
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>&amp;<b>bold</b>"
LAST = "[...document.querySelectorAll('.assistant')].at(-1)"


@pytest.fixture(scope="module")
def browser():
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def service():
    target = load_target("bundled", drafters=["specblock"])
    engine = build_engine(
        target,
        load_named_drafter("specblock", target),
        EngineConfig(max_running=2, kv_bytes=2**26, tree=TreeConfig(policy="bastion")),
    )
    thread = EngineThread(engine)
    thread.start(is_warmed_up=True)
    parts = ApiParts(
        client=LocalEngineClient(engine, thread, model_name="toy"),
        tokenizer=target.tokenizer,
        clients=Clients(Tokens(api_token="key")),
    )
    with serve_app(build_api(parts)) as url:
        yield url
    assert thread.stop(timeout_s=10)


def ask(watch, text):
    """Send a message by the keyboard and wait for the end of its answer; returns (text, marked text, facts)."""
    before = watch.page.evaluate("document.querySelectorAll('.assistant').length")
    watch.page.fill("#prompt", text)
    watch.page.press("#prompt", "Enter")
    watch.wait(f"document.querySelectorAll('.assistant').length > {before} && {LAST}.dataset.done === 'true'")
    marked = watch.page.evaluate(f"[...{LAST}.querySelectorAll('mark')].map((m) => m.textContent).join('')")
    return (*watch.page.evaluate(f"[{LAST}.querySelector('p').textContent, {LAST}.textContent]"), marked)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_a_conversation_shows_what_was_drafted(browser, service, width, scheme):
    with watched_page(browser, width=width, height=740, scheme=scheme) as watch:
        watch.page.goto(f"{service}/chat")
        watch.wait("!document.querySelector('#token-form').classList.contains('hidden')")
        assert "token" in watch.page.inner_text("#model").lower()
        assert "token" in ask(watch, "One mocha")[1] and watch.page.input_value("#prompt") == "One mocha", (
            "to be sent again"
        )
        watch.page.fill("#token", "令牌")
        watch.page.press("#token", "Enter")
        assert not watch.page.evaluate("sessionStorage.length"), "no header can carry it, so no request would be sent"
        watch.page.fill("#token", "key")
        watch.page.press("#token", "Enter")
        watch.wait("document.querySelector('#model').textContent.startsWith('toy, context 512')")
        watch.errors.clear()  # the browser logs the 401
        watch.page.fill("#tokens", "48")
        text, facts, marked = ask(watch, "Two large lattes for Dana")
        assert 0 < len(marked) < len(text), "some tokens were drafted, and some are the target's"
        assert "tokens/s" in facts and "acceptance length" in facts and "drafted tokens accepted" in facts
        watch.page.click("#clear")
        watch.page.uncheck("#drafter")
        plain, facts, marked = ask(watch, "Two large lattes for Dana")
        assert (plain, marked) == (text, "") and "nothing drafted" in facts
        ask(watch, "And a tea for Jun")
        assert watch.page.evaluate("messages.map((m) => m.role).join()") == "user,assistant,user,assistant"
        watch.page.fill("#tokens", "400")
        watch.page.fill("#prompt", "Two large lattes for Dana")
        watch.page.press("#prompt", "Enter")
        watch.wait(f"{LAST} && {LAST}.querySelector('p').textContent.length > 5")
        watch.page.click("#clear")
        watch.wait("running === null")
        assert watch.page.evaluate("messages.length") == 0, "an answer that was cut off is no part of the new chat"
        watch.page.fill("#tokens", "")
        watch.page.fill("#prompt", "again")
        watch.page.press("#prompt", "Enter")
        assert watch.page.evaluate("running") is None and not watch.page.evaluate("at('tokens').checkValidity()")
        watch.check_clean(service)
        assert watch.check_contrast() > 5
        assert watch.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing sticks out"


def test_an_answer_is_text_whatever_it_says_and_can_be_stopped(browser):
    engine = ScriptedEngine(HOSTILE)
    with (
        serve_app(build_api(ApiParts(client=engine, tokenizer=TOKENIZER))) as url,
        watched_page(browser) as watch,
    ):
        watch.page.goto(f"{url}/chat")
        text, _, _ = ask(watch, HOSTILE)
        assert text == HOSTILE and watch.page.inner_text(".user p") == HOSTILE
        assert watch.page.evaluate("document.querySelectorAll('#talk img, #talk script, #talk b').length") == 0
        engine.go.clear()
        watch.page.fill("#prompt", "again")
        watch.page.press("#prompt", "Enter")
        watch.wait("!document.querySelector('#stop').disabled")
        watch.page.keyboard.press("Escape")
        watch.wait(f"{LAST}.dataset.done === 'true' && {LAST}.textContent.includes('stopped')")
        engine.go.set()
        assert watch.page.evaluate("messages.length") == 2, "a question without an answer is not part of the talk"
        watch.check_clean(url)
