"""Grammars compile in threads of their own: whatever they take, the event loop's threads stay free for the rest."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from paceline.errors import RequestError
from paceline.serving.api import build_api
from paceline.serving.api_generation import ApiParts
from paceline.serving.engine_stream import decode_item, encode, stream_events
from paceline.serving.grammar_threads import NUM_THREADS, submit_in_thread
from paceline.serving.request import GenerationRequest, GrammarSpec, SamplingParams
from tests.serving.api_server import TOKENIZER, ScriptedEngine


class Compiling(ScriptedEngine):
    """Takes no request before `compiled` is set."""

    def __init__(self) -> None:
        super().__init__("ok")
        self.begun, self.compiled = threading.Event(), threading.Event()

    def submit(self, request: GenerationRequest, on_event: Any) -> None:
        self.begun.set()
        assert self.compiled.wait(10)
        super().submit(request, on_event)

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
        items = stream_events(engine, encode(request))
        first = asyncio.ensure_future(anext(items))
        try:
            await engine.compiles()
            await asyncio.wait_for(asyncio.to_thread(lambda: None), 2)
        finally:
            engine.compiled.set()
        assert decode_item(await first).refusal is None
        await items.aclose()

    run_with_one_thread(main())


def test_what_submitting_raises_reaches_the_caller_and_nothing_is_undone() -> None:
    def submit() -> None:
        raise RequestError("no such rule")

    undone: list[str] = []
    with pytest.raises(RequestError, match="no such rule"):
        asyncio.run(submit_in_thread(submit, lambda: undone.append("r")))
    assert undone == []


def test_a_request_that_still_waits_for_a_thread_is_never_begun_once_its_client_is_gone() -> None:
    go, done = threading.Event(), []

    async def main() -> None:
        busy = [
            asyncio.ensure_future(submit_in_thread(lambda: go.wait(10) and None, lambda: None))
            for _ in range(NUM_THREADS)
        ]
        waiting = asyncio.ensure_future(submit_in_thread(lambda: done.append("r"), lambda: done.append("undone")))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go.set()
        await asyncio.gather(*busy)
        await submit_in_thread(lambda: None, lambda: None)

    asyncio.run(asyncio.wait_for(main(), 10))
    assert done == []
