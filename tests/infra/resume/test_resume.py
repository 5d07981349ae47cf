"""Clients of an ingress see one answer, whatever happens to the engines behind it; real engines, no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest

from paceline.config import EngineConfig, IngressConfig, TreeConfig
from paceline.errors import CapacityError, EngineStoppedError
from paceline.infra.resume.client import ResumingClient
from paceline.infra.resume.stream import EngineFacts, StreamItem, decode_item, encode, encode_request, stream_events
from paceline.machine import SystemClock
from paceline.serving.api.app import build_api
from paceline.serving.api.client import LocalEngineClient
from paceline.serving.api.generation import ApiParts, EngineClient
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.engine.thread import EngineThread
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from tests.helpers.api_server import ScriptedEngine
from tests.helpers.fakes import tiny_target
from tests.helpers.scripted_drafters import RepeatDrafter

PROMPT = [10, 11, 12, 13, 10, 11]
BODY = {
    "prompt": PROMPT,
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
    "logprobs": 1,
}


@functools.cache
def target():
    return tiny_target(vocab=300, layers=3, context=128)


class Way:
    """The way to the engines: breaks as told, and remembers what was let go."""

    def __init__(self, engines: list[EngineClient]) -> None:
        self.engines = engines
        self.num_opened = self.num_cancelled = 0
        self.fail_after: list[int | None] = []
        """For each stream in turn, the items (one that takes the request, one a round) after which it breaks; None = never, as for those beyond the list."""
        self.is_quiet = False
        """A broken stream hangs instead of raising."""
        self.is_clean = False
        """A broken stream ends without a last event instead of raising."""

    def open(self, raw: bytes) -> Stream:
        nth, self.num_opened = self.num_opened, self.num_opened + 1
        limit = self.fail_after[nth] if nth < len(self.fail_after) else None
        return Stream(self, stream_events(self.engines[nth % len(self.engines)], raw, sign_of_life_s=0.05), limit)


class Stream:
    def __init__(self, way: Way, items: Any, limit: int | None) -> None:
        self.way, self.items, self.limit = way, items, limit
        self.waiting: list[bytes] = []
        self.is_begun = False

    async def __anext__(self) -> bytes:
        if self.limit == 0:
            if self.way.is_quiet:
                await asyncio.get_running_loop().create_future()
            if self.way.is_clean:
                raise StopAsyncIteration
            raise ConnectionError("the replica died")
        if not self.waiting:
            item = decode_item(await anext(self.items))
            if self.is_begun and not item.events:
                return encode(item)  # a sign of life
            self.is_begun = True
            # how many rounds come in one item is a matter of timing; here each comes by itself
            self.waiting = [encode(StreamItem((event,))) for event in item.events] or [encode(item)]
        if self.limit is not None:
            self.limit -= 1
        return self.waiting.pop(0)

    def cancel(self) -> None:
        self.way.num_cancelled += 1
        asyncio.get_running_loop().create_task(self._close())

    async def _close(self) -> None:
        with contextlib.suppress(RuntimeError):  # it runs: its own end closes it
            await self.items.aclose()


class Place:
    def __init__(self, engines: list[Engine], threads: list[EngineThread]) -> None:
        self.engines = engines
        self.way = Way([LocalEngineClient(e, t, model_name="tiny") for e, t in zip(engines, threads, strict=True)])
        self.client: ResumingClient

    @contextlib.asynccontextmanager
    async def http(self, max_silence_s: float = 20.0, **config: Any) -> AsyncIterator[httpx.AsyncClient]:
        facts = EngineFacts(info=self.way.engines[0].info(), holdback_percent=0)
        self.client = ResumingClient(self.way.open, facts, IngressConfig(**config), max_silence_s=max_silence_s)
        parts = ApiParts(client=self.client, admitted=self.client.admitted, tokenizer=target().tokenizer)
        transport = httpx.ASGITransport(app=build_api(parts))
        async with httpx.AsyncClient(transport=transport, base_url="http://ingress") as client:
            yield client


@pytest.fixture
def place():
    slots = [DrafterSlots(RepeatDrafter(num_slots=3), "v1"), DrafterSlots()]
    tree = TreeConfig(max_draft_tokens=4, policy="fixed")
    engines = [
        Engine(target(), s, EngineConfig(max_running=4, max_waiting=4, kv_bytes=4 * 2**20, tree=tree)) for s in slots
    ]
    threads = [EngineThread(e) for e in engines]
    for thread in threads:
        thread.start(is_warmed_up=True)
    yield Place(engines, threads)
    for thread in threads:
        assert thread.stop(drain=True, timeout_s=10.0)
        assert thread.error is None


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


async def stream(client: httpx.AsyncClient, **body: Any) -> tuple[list[int], str, list[float], list[dict], bool]:
    """Token ids, text, log-probabilities, all events, whether [DONE] came."""
    response = await client.post(
        "/v1/completions", json={**BODY, **body, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert response.status_code == 200, response.text
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [c for e in events for c in e.get("choices", ())]
    logprobs = [lp for c in choices if c["logprobs"] for lp in c["logprobs"]["token_logprobs"]]
    return [t for c in choices for t in c["token_ids"]], "".join(c["text"] for c in choices), logprobs, events, lines[-1] == "[DONE]"  # fmt: skip


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3, "presence_penalty": 1.0}])
@pytest.mark.parametrize("is_clean", [False, True])
def test_streams_and_whole_answers_go_on_behind_every_break(place: Place, params: dict, is_clean: bool) -> None:
    async def main() -> None:
        async with place.http(max_resumes=9) as http:
            ids, text, logprobs, events, is_done = await stream(http, **params)
            assert is_done and len(ids) == len(logprobs) == 24
            place.way.is_clean = is_clean
            for fail_after in ([1], [2], [4, 3], [0, 1, 2, 3, 4]):
                place.way.num_opened, place.way.fail_after = 0, fail_after
                got = await stream(http, **params)
                assert place.way.num_opened == len(fail_after) + 1
                assert (got[0], got[1], got[4]) == (ids, text, True)
                assert got[2] == pytest.approx(logprobs, abs=1e-4)
                assert got[3][-1]["usage"] == events[-1]["usage"]
                stats = got[3][-1]["paceline"]
                assert 1 + stats["num_rounds"] + stats["num_accepted_tokens"] - stats["num_truncated_tokens"] == 24
                place.way.num_opened = 0
                body = (await http.post("/v1/completions", json={**BODY, **params})).json()
                assert body["choices"][0]["token_ids"] == ids and body["choices"][0]["text"] == text
                assert body["usage"] == events[-1]["usage"]

    run(main)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0, "seed": 3}])
def test_responses_and_banned_words_go_on_behind_every_break(place: Place, params: dict) -> None:
    words = ["a", "b", "ab", "1"]

    async def ask(http: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
        body = {"input": "hi", "max_output_tokens": 24, "ignore_eos": True, "bad_words": words, **params, **more}
        response = await http.post("/v1/responses", json=body)
        assert response.status_code == 200, response.text
        if not more.get("stream"):
            return response.json()
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        last = events[-1]["response"]
        assert "".join(e.get("delta", "") for e in events) == last["output"][0]["content"][0]["text"]
        return last

    async def main() -> None:
        async with place.http(max_resumes=9) as http:
            want = await ask(http)
            text = want["output"][0]["content"][0]["text"]
            assert want["status"] == "incomplete" and text and not any(word in text for word in words)
            for fail_after in ([1], [2], [4, 3], [0, 1, 2, 3, 4]):
                for stream in (True, False):
                    place.way.num_opened, place.way.fail_after = 0, fail_after
                    got = await ask(http, stream=stream)
                    assert place.way.num_opened == len(fail_after) + 1
                    assert (
                        got["output"][0]["content"] == want["output"][0]["content"] and got["status"] == want["status"]
                    )
                    assert got["usage"]["output_tokens"] == 24
            place.way.num_opened, place.way.fail_after = 0, [2] * 99
            body = {"input": "hi", "max_output_tokens": 24, "ignore_eos": True, "stream": True}
            broken = (await http.post("/v1/responses", json=body)).text.split("\n\n")[-2]
            assert broken.startswith("event: response.failed") and "did not finish" in broken

    run(main)


@pytest.mark.parametrize("num_items", [0, 3], ids=["before it takes the request", "in the middle"])
def test_a_silent_engine_is_left_for_another(place: Place, num_items: int) -> None:
    async def main() -> None:
        async with place.http(max_silence_s=0.3) as http:
            ids = (await stream(http))[0]
            place.way.num_opened, place.way.fail_after, place.way.is_quiet = 0, [num_items], True
            got = await stream(http)
            assert (got[0], got[4], place.way.num_opened) == (ids, True, 2)
            assert place.client.counters.num_resumed == (num_items > 0) and place.way.num_cancelled == 1

    run(main)


class Other:
    """An engine of another target."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def info(self) -> Any:
        return dataclasses.replace(self._engine.info(), target_version="f" * 16)


def test_no_engine_of_another_target_goes_on_with_an_answer(place: Place) -> None:
    async def main() -> None:
        mine, other = place.way.engines[0], Other(place.way.engines[1])
        async with place.http(max_resumes=9, max_wait_s=1.0) as http:
            place.way.engines = [mine]
            ids = (await stream(http))[0]
            place.way.engines, place.way.num_opened, place.way.fail_after = [mine, other], 0, [3]
            got = await stream(http)
            assert (got[0], got[4], place.way.num_opened) == (ids, True, 3), (
                "the other one was asked and did not take it"
            )
            place.way.engines, place.way.num_opened = [mine, *[other] * 99], 0
            *_, events, is_done = await stream(http)
            assert not is_done and "the model was replaced by another one" in events[-1]["error"]["message"]
            assert sum(len(c["token_ids"]) for e in events[:-1] for c in e["choices"]) < 24
            place.way.engines, place.way.num_opened = [other], 0
            assert (await stream(http))[4], "an answer that begins there ends there"

    run(main)


def test_no_engine_of_another_model_takes_a_request(place: Place) -> None:
    async def main() -> None:
        params = SamplingParams(max_tokens=2)
        for sent, own, takes in (("a", "b", False), ("a", "a", True), ("", "b", True), ("a", "", True)):
            request = GenerationRequest(request_id=f"{sent}-{own}", prompt_token_ids=(5, 6), params=params)
            items = stream_events(place.way.engines[0], encode_request(request, 0.0, model=sent), model=own)
            first = decode_item(await anext(items))
            assert (first.refusal is None) == takes and (first.target_version != "") == takes
            await items.aclose()

    run(main)


def test_a_request_that_takes_every_engine_down_is_given_up(place: Place) -> None:
    async def main() -> None:
        async with place.http(max_resumes=2) as http:
            place.way.fail_after = [2] * 9
            *_, events, is_done = await stream(http)
            assert not is_done and place.way.num_opened == 3
            assert "3 replicas in a row did not finish" in events[-1]["error"]["message"]
            place.way.num_opened = 0
            whole = await http.post("/v1/completions", json=BODY)
            assert (whole.status_code, whole.json()["error"]["code"]) == (503, "incomplete")
            counters = place.client.counters
            assert (counters.num_given_up, counters.num_broken, counters.num_resumed) == (2, 6, 4)

    run(main)


@pytest.mark.parametrize("is_stream", [False, True])
def test_without_any_engine_the_client_hears_503_in_bounded_time(place: Place, is_stream: bool) -> None:
    async def main() -> None:
        async with place.http(max_wait_s=0.3) as http:
            place.way.fail_after = [0] * 99
            response = await http.post("/v1/completions", json={**BODY, "stream": is_stream})
            assert response.status_code == 503 and response.headers["retry-after"]
            assert "no replica took this request within 0.3 s" in response.json()["error"]["message"]
            assert 2 < place.way.num_opened < 20  # it tried again, but not in a busy loop

    run(main)


def test_a_full_queue_is_429_only_when_every_engine_asked_is_full(place: Place) -> None:
    full = ScriptedEngine()
    full.submit_error = CapacityError("the queue is full")

    async def main() -> None:
        async with place.http() as http:
            place.way.engines[0] = full
            assert (await stream(http))[4]  # the second engine took it
            place.way.engines = [full, full]
            response = await http.post("/v1/completions", json={**BODY, "stream": True})
            assert response.status_code == 429 and response.json()["error"]["code"] == "queue_full"

    run(main)


@pytest.mark.parametrize("is_stream", [True, False])
def test_one_refused_choice_refuses_the_answer(place: Place, is_stream: bool) -> None:
    full = ScriptedEngine()
    full.submit_error = CapacityError("the queue is full")

    async def main() -> None:
        async with place.http() as http:
            place.way.engines = [place.way.engines[0], full, full, full]
            body = {**BODY, "n": 2, "stream": is_stream}
            response = await asyncio.wait_for(http.post("/v1/completions", json=body), 20)
            assert response.status_code in (200, 429)  # whichever choice met the engine with room
            place.way.engines = [full, full]
            response = await asyncio.wait_for(http.post("/v1/completions", json=body), 20)
            assert response.status_code == 429 and response.json()["error"]["code"] == "queue_full"
            assert place.client.num_waiting() == 0

    run(main)


def test_an_answer_that_was_begun_waits_for_room_and_goes_on(place: Place) -> None:
    full = ScriptedEngine()
    full.submit_error = CapacityError("the queue is full")

    async def main() -> None:
        async with place.http() as http:
            ids = (await stream(http))[0]
            first, second = place.way.engines
            place.way.engines = [first, full, full, full, full, second]
            place.way.num_opened, place.way.fail_after = 0, [3]
            got = await stream(http)
            assert (got[0], got[4], place.way.num_opened) == (ids, True, 6)

    run(main)


def test_the_requests_own_fault_is_400_and_is_not_tried_twice(place: Place) -> None:
    async def main() -> None:
        async with place.http() as http:
            facts = EngineFacts(info=place.way.engines[0].info(), holdback_percent=0)
            wrong = facts.info.__class__(model_name="tiny", target_version="t", context_tokens=10**6, vocab_size=300, created=0)  # fmt: skip
            place.client.heard(EngineFacts(info=wrong, holdback_percent=0))
            response = await http.post("/v1/completions", json={**BODY, "prompt": [5] * 500, "stream": True})
            assert response.status_code == 400 and "shorter than the context" in response.json()["error"]["message"]
            assert place.way.num_opened == 1

    run(main)


def test_a_client_that_leaves_frees_the_engine(place: Place) -> None:
    async def main() -> None:
        async with place.http():
            events: list = []
            params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
            request = GenerationRequest(request_id="r", prompt_token_ids=tuple(PROMPT), params=params)
            place.client.submit_all([request], events.append)
            await place.client.admitted("r")
            place.client.abort("r")
            num_seen = len(events)
            while not place.engines[0].is_idle:
                await asyncio.sleep(0.01)
            assert place.engines[0].stats()["num_aborted"] == 1 and place.way.num_cancelled == 1
            assert len(events) == num_seen  # nothing comes after
            place.client.submit_all([request], events.append)  # the id is free again
            while not (events and events[-1].finish_reason):
                await asyncio.sleep(0.01)

    run(main)


class FedStream:
    """Hands on what it is fed."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[bytes] = asyncio.Queue()
        self.num_asked = self.num_cancelled = 0

    async def __anext__(self) -> bytes:
        self.num_asked += 1
        return await self.items.get()

    def cancel(self) -> None:
        self.num_cancelled += 1


@pytest.mark.parametrize("turns", range(5))
def test_a_client_that_leaves_beside_an_arrival_is_heard(place: Place, turns: int) -> None:
    """Some turns of the event loop after an item has arrived, before or after its reader has gone on."""

    async def main() -> None:
        fed, info = FedStream(), place.way.engines[0].info()
        client = ResumingClient(lambda raw: fed, EngineFacts(info=info, holdback_percent=0), IngressConfig())
        client.submit_all(
            [GenerationRequest(request_id="r", prompt_token_ids=(5,), params=SamplingParams())], lambda _: None
        )
        fed.items.put_nowait(encode(StreamItem(target_version=info.target_version)))
        await client.admitted("r")
        while fed.num_asked < 2:
            await asyncio.sleep(0)
        fed.items.put_nowait(encode(StreamItem()))
        for _ in range(turns):
            await asyncio.sleep(0)
        client.abort("r")
        await asyncio.sleep(0.01)
        num_asked = fed.num_asked
        for _ in range(3):
            fed.items.put_nowait(encode(StreamItem()))
            await asyncio.sleep(0.01)
        assert fed.num_asked == num_asked and fed.num_cancelled == 1

    run(main)


def test_a_stream_that_breaks_because_its_client_leaves_is_not_resumed(place: Place) -> None:
    place.way.fail_after = [3]

    async def main() -> None:
        async with place.http():
            params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
            request = GenerationRequest(request_id="r", prompt_token_ids=tuple(PROMPT), params=params)
            place.client.submit_all([request], lambda _: None)
            while not place.client.counters.num_broken:
                await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            place.client.abort("r")  # the word of the client's leaving comes behind Serve's end of its calls
            await asyncio.sleep(0.2)
            assert place.way.num_opened == 1 and place.client.counters.num_resumed == 0

    run(main)


def test_a_deadline_that_passes_while_no_engine_is_there_ends_the_request(place: Place) -> None:
    async def main() -> None:
        async with place.http() as _:
            place.way.fail_after = [0] * 99
            events: list = []
            request = GenerationRequest(
                request_id="r", prompt_token_ids=tuple(PROMPT), params=SamplingParams(), deadline_s=time.time() + 0.2
            )
            place.client.submit_all([request], events.append)
            await place.client.admitted("r")
            while not events:
                await asyncio.sleep(0.01)
            assert [e.finish_reason for e in events] == ["deadline"] and events[0].stats.num_emitted_tokens == 0

    run(main)


@pytest.mark.parametrize("ahead_s", [-3660.0, 3660.0])
def test_a_deadline_is_the_same_to_an_engine_whose_clock_is_another(ahead_s: float) -> None:
    engine = ScriptedEngine()
    engine.clock_s += ahead_s
    request = GenerationRequest(request_id="r", prompt_token_ids=(5,), params=SamplingParams(), deadline_s=1030.0)

    async def main() -> None:
        async for _ in stream_events(engine, encode_request(request, 1000.0)):
            pass

    run(main)
    (taken,) = engine.requests
    assert taken.deadline_s == engine.clock_s + 30.0
    assert (
        msgspec.msgpack.decode(encode_request(request, 1000.0), type=GenerationRequest) == request
    )  # to older engines
    others = [f.name for f in dataclasses.fields(request) if f.name != "deadline_s"]
    assert [getattr(taken, name) for name in others] == [getattr(request, name) for name in others]


def test_an_older_ingress_sends_the_deadline_alone() -> None:
    engine = ScriptedEngine()
    request = GenerationRequest(request_id="r", prompt_token_ids=(5,), params=SamplingParams(), deadline_s=1030.0)

    async def main() -> None:
        async for _ in stream_events(engine, encode(request)):
            pass

    run(main)
    assert engine.requests[0].deadline_s == 1030.0


def test_a_request_that_came_late_to_an_engine_ends_at_its_own_deadline(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way to an engine may take long; the engine grants what was left when the request was sent."""
    monkeypatch.setattr("paceline.infra.resume.client.DEADLINE_GRACE_S", 0.0)
    engine = ScriptedEngine()
    engine.go.clear()  # takes the request and says nothing

    async def slow(raw: bytes) -> AsyncIterator[bytes]:
        await asyncio.sleep(0.3)
        async for item in stream_events(engine, raw, sign_of_life_s=0.05):
            yield item

    async def main() -> None:
        async with place.http() as _:
            events: list = []
            client = ResumingClient(
                lambda raw: Stream(place.way, slow(raw), None), EngineFacts(info=engine.info(), holdback_percent=0),
                IngressConfig(),
            )  # fmt: skip
            began, now = time.monotonic(), SystemClock().now()
            request = GenerationRequest(
                request_id="r", prompt_token_ids=(5,), params=SamplingParams(), deadline_s=now + 0.5
            )
            client.submit_all([request], events.append)
            while not events:
                await asyncio.sleep(0.01)
            assert [e.finish_reason for e in events] == ["deadline"] and 0.4 < time.monotonic() - began < 10.0
            engine.go.set()

    run(main)


def test_heartbeat_and_holdback_follow_what_engines_say(place: Place) -> None:
    async def main() -> None:
        now = 100.0
        info = place.way.engines[0].info()
        client = ResumingClient(
            place.way.open, EngineFacts(info=info, holdback_percent=5), IngressConfig(), timer=lambda: now
        )
        assert (client.heartbeat_age_s(), client.holdback_percent(), client.info()) == (0.0, 5, info)
        now = 130.0
        assert client.heartbeat_age_s() == 30.0
        client.heard(EngineFacts(info=info, holdback_percent=7))
        assert (client.heartbeat_age_s(), client.holdback_percent()) == (0.0, 7)

    run(main)


def test_an_engine_whose_thread_is_silent_gives_no_sign_of_life() -> None:
    engine = ScriptedEngine()
    engine.go.clear()  # takes the request and says nothing
    request = GenerationRequest(request_id="r", prompt_token_ids=(5,), params=SamplingParams())

    async def main() -> None:
        items = stream_events(engine, encode_request(request, 0.0), max_silence_s=1.0, sign_of_life_s=0.02)
        assert decode_item(await anext(items)).refusal is None
        assert decode_item(await anext(items)).events == ()  # alive
        engine.heartbeat_s = 2.0
        with pytest.raises(EngineStoppedError, match="silent for 2 s"):
            await anext(items)
        assert engine.aborted == {"r"}
        engine.go.set()

    run(main)
