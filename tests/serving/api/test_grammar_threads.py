"""Grammars compile in threads of their own: the event loop's stay free, and a client that leaves meanwhile leaves nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from paceline.config import EngineConfig
from paceline.errors import RequestError
from paceline.infra.resume.stream import decode_item, encode_request, stream_events
from paceline.serving.api.app import build_api
from paceline.serving.api.client import LocalEngineClient
from paceline.serving.api.generation import NUM_THREADS, ApiParts, compile_in_thread
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.engine.thread import EngineThread
from paceline.serving.sampling.grammar import compile_grammar
from paceline.serving.sampling.request import GenerationRequest, GrammarSpec, SamplingParams
from tests.helpers.api_server import TOKENIZER, ScriptedEngine
from tests.helpers.constrained import target


class Compiling(ScriptedEngine):
    """Its grammars are ready when `compiled` is set."""

    def __init__(self) -> None:
        super().__init__("ok")
        self.begun, self.compiled = threading.Event(), threading.Event()

    def prepare(self, request: GenerationRequest) -> None:
        assert request.params.grammar is not None
        self.begun.set()
        assert self.compiled.wait(10)

    async def compiles(self) -> None:
        while not self.begun.is_set():
            await asyncio.sleep(0)


def run_with_one_thread(main: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        await asyncio.wait_for(main, 10)

    asyncio.run(limited())


def test_metrics_are_answered_while_grammars_compile() -> None:
    engine = Compiling()

    async def main() -> None:
        app = build_api(ApiParts(client=engine, tokenizer=TOKENIZER))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            body = {"prompt": "a", "guided_regex": "[a-z]+"}
            posts = [asyncio.ensure_future(http.post("/v1/completions", json=body)) for _ in range(NUM_THREADS + 1)]
            try:
                await engine.compiles()
                assert (await asyncio.wait_for(http.get("/metrics"), 2)).status_code == 200
            finally:
                engine.compiled.set()
            assert {p.status_code for p in await asyncio.gather(*posts)} == {200}

    run_with_one_thread(main())


def test_an_engine_behind_an_ingress_compiles_there_too() -> None:
    engine = Compiling()
    params = SamplingParams(grammar=GrammarSpec(kind="regex", text="[a-z]+"))
    request = GenerationRequest(request_id="r", prompt_token_ids=(5,), params=params)

    async def main() -> None:
        items = stream_events(engine, encode_request(request, 0.0))
        first = asyncio.ensure_future(anext(items))
        try:
            await engine.compiles()
            await asyncio.wait_for(asyncio.to_thread(lambda: None), 2)
        finally:
            engine.compiled.set()
        assert decode_item(await first).refusal is None
        await items.aclose()

    run_with_one_thread(main())


def test_what_compiling_raises_reaches_the_caller() -> None:
    def fail() -> None:
        raise RequestError("no such rule")

    with pytest.raises(RequestError, match="no such rule"):
        asyncio.run(compile_in_thread(fail))


def test_a_grammar_that_still_waits_for_a_thread_is_never_compiled_once_its_client_is_gone() -> None:
    go, done = threading.Event(), []

    async def main() -> None:
        busy = [asyncio.ensure_future(compile_in_thread(lambda: go.wait(10) and None)) for _ in range(NUM_THREADS)]
        waiting = asyncio.ensure_future(compile_in_thread(lambda: done.append("r")))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go.set()
        await asyncio.gather(*busy)
        await compile_in_thread(lambda: None)

    asyncio.run(asyncio.wait_for(main(), 10))
    assert done == []


# ---- a client that goes away while its grammar compiles, and comes back under the same request id ----------------------
class Gate:
    """Compilations one after the other: each waits until it is let through."""

    def __init__(self) -> None:
        self.num_begun, self.num_done = 0, 0
        self._may_end = threading.Semaphore(0)

    def __call__(self, *args: Any) -> Any:
        self.num_begun += 1
        assert self._may_end.acquire(timeout=10)
        try:
            return compile_grammar(*args)
        finally:
            self.num_done += 1

    async def begun(self, num: int) -> None:
        while self.num_begun < num:
            await asyncio.sleep(0)

    async def let_through(self, num: int) -> None:
        """Let the compilations end, until `num` have."""
        self._may_end.release(num - self.num_done)
        while self.num_done < num:
            await asyncio.sleep(0)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()
    monkeypatch.setattr("paceline.serving.sampling.grammar.compile_grammar", made)
    return made


@pytest.fixture
def client() -> Iterator[LocalEngineClient]:
    engine = Engine(target(), DrafterSlots(), EngineConfig(max_running=4, kv_bytes=4 * 2**20))
    thread = EngineThread(engine)
    thread.start(is_warmed_up=True)
    yield LocalEngineClient(engine, thread, model_name="tiny")
    assert thread.stop(timeout_s=10)


def test_grammars_of_others_in_between_do_not_make_the_event_loop_compile(
    monkeypatch: pytest.MonkeyPatch, client: LocalEngineClient
) -> None:
    """As many others finish between a request's compilation and its submission as a factory keeps."""
    compiled: list[GrammarSpec] = []

    def traced(tokenizer: Any, spec: GrammarSpec) -> Any:
        compiled.append(spec)
        return compile_grammar(tokenizer, spec)

    monkeypatch.setattr("paceline.serving.sampling.grammar.compile_grammar", traced)
    submit_all = client.submit_all

    def after_others(requests: Any, on_event: Any) -> None:
        for i in range(20):
            grammar = GrammarSpec(kind="regex", text=f"[a-z]{{{i + 5}}}")
            client.prepare(
                GenerationRequest(request_id="o", prompt_token_ids=(5,), params=SamplingParams(grammar=grammar))
            )
        gc.collect()  # what nobody holds is gone
        before = len(compiled)
        submit_all(requests, on_event)
        assert len(compiled) == before == 21

    monkeypatch.setattr(client, "submit_all", after_others)
    params = SamplingParams(max_tokens=4, grammar=GrammarSpec(kind="regex", text="[a-z]{4}"))
    raw = encode_request(GenerationRequest(request_id="r", prompt_token_ids=(5,), params=params), 0.0)

    async def main() -> None:
        async for item in stream_events(client, raw):
            assert decode_item(item).refusal is None
        app = build_api(ApiParts(client=client, tokenizer=target().tokenizer))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            compiled.clear()
            body = {"prompt": [5], "max_tokens": 4, "guided_regex": "[a-y]{4}"}
            assert (await http.post("/v1/completions", json=body)).status_code == 200

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_retry_under_the_same_request_id_gets_its_answer(gate: Gate, client: LocalEngineClient) -> None:
    async def main() -> None:
        app = build_api(ApiParts(client=client, tokenizer=target().tokenizer))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:

            def post() -> asyncio.Task[httpx.Response]:
                body = {"prompt": [5], "max_tokens": 4, "guided_regex": "[a-z]{4}"}
                headers = {"x-request-id": "again"}
                return asyncio.ensure_future(http.post("/v1/completions", json=body, headers=headers))

            first = post()
            await gate.begun(1)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            retry = post()
            await gate.begun(2)
            await gate.let_through(1)  # the grammar of the client that left
            await gate.let_through(2)
            answer = await retry
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_retry_on_the_engine_of_the_first_try_gets_its_answer(gate: Gate, client: LocalEngineClient) -> None:
    """Behind an ingress the first try may end at the engine after its retry has come there."""
    params = SamplingParams(max_tokens=4, grammar=GrammarSpec(kind="regex", text="[a-z]{4}"))
    raw = encode_request(GenerationRequest(request_id="again", prompt_token_ids=(5,), params=params), 0.0)

    async def main() -> None:
        first = asyncio.ensure_future(anext(stream_events(client, raw)))
        await gate.begun(1)
        items = stream_events(client, raw)
        retry = asyncio.ensure_future(anext(items))
        await gate.begun(2)
        first.cancel()
        await gate.let_through(2)
        assert decode_item(await retry).refusal is None
        ends = [event.finish_reason async for item in items for event in decode_item(item).events]
        assert ends[-1] in ("stop", "length")

    asyncio.run(asyncio.wait_for(main(), 20))
