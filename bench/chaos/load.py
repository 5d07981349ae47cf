"""Load: requests that are kept in flight while something happens to a service, and exactly how every answer ended."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import httpx

from paceline.bench.common.event_lines import event_lines
from paceline.errors import PacelineError

T = TypeVar("T")
MAX_TRIES = 60
"""Times that a request is sent which the service refuses with 429."""
PAUSE_S = 0.1
"""What a client waits after an answer that failed before it sends its next request."""


@dataclass(kw_only=True)
class Answer:
    """How one greedy request ended, as its client saw it."""

    question: int
    """Index of its prompt."""
    num_wanted: int
    is_stream: bool
    began_s: float = 0.0
    """time.monotonic() when it was sent, and when its answer ended."""
    ended_s: float = 0.0
    status: int = 0
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    is_done: bool = False
    """A stream's [DONE] arrived, or a whole body."""
    num_late: int = 0
    """Events after [DONE]."""
    error: str | None = None
    """An explicit error: status, error event or broken connection."""
    is_malformed: bool = False
    """What came is no answer of the API."""
    num_usage: int | None = None
    """Tokens that the service says it sent."""
    stats: list[dict] = field(default_factory=list)
    """Every `paceline` object of the answer."""
    num_refusals: int = 0
    """429 answers before this one."""

    @property
    def looks_complete(self) -> bool:
        return self.error is None and self.status == 200 and self.is_done and self.finish_reason is not None

    @property
    def version(self) -> str:
        return self.stats[-1]["drafter_version"]


async def send(
    http: httpx.AsyncClient, answer: Answer, prompt: Sequence[int], *, bucket: str = "load", retries: bool = True
) -> None:
    """Ask for the answer's tokens behind a prompt and note in it what comes; after a 429 wait as told and ask again."""
    stream = answer.is_stream
    body = {
        "prompt": list(prompt), "max_tokens": answer.num_wanted, "temperature": 0, "stream": stream, "ignore_eos": True,
        "return_token_ids": True, **({"stream_options": {"include_usage": True}} if stream else {}),
    }  # fmt: skip
    answer.began_s = time.monotonic()
    try:
        for _ in range(MAX_TRIES):
            async with http.stream(
                "POST", "/v1/completions", json=body, headers={"x-paceline-bucket": bucket}
            ) as response:
                answer.status = response.status_code
                answer.error = None
                if response.status_code == 200:
                    await (_read_stream if stream else _read_whole)(response, answer)
                    return
                answer.error = f"{response.status_code}: {(await response.aread()).decode(errors='replace')[:300]}"
                pause_s = float(response.headers.get("retry-after", 1.0))
            if answer.status != 429 or not retries:
                return
            answer.num_refusals += 1
            await asyncio.sleep(pause_s)
    except httpx.TransportError as e:
        answer.error = repr(e)
    except (ValueError, LookupError, TypeError) as e:
        answer.error, answer.is_malformed = f"malformed: {e!r}", True
    finally:
        answer.ended_s = time.monotonic()


async def _read_whole(response: httpx.Response, answer: Answer) -> None:
    body = json.loads(await response.aread())
    choice = body["choices"][0]
    answer.token_ids, answer.finish_reason = choice["token_ids"], choice["finish_reason"]
    answer.num_usage = body["usage"]["completion_tokens"]
    answer.stats, answer.is_done = [body["paceline"]], True


async def _read_stream(response: httpx.Response, answer: Answer) -> None:
    async for line in event_lines(response):
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            answer.is_done = True
            continue
        answer.num_late += answer.is_done
        event: dict[str, Any] = json.loads(line[6:])
        if "error" in event:
            answer.error = str(event["error"]["message"])
        if "paceline" in event:
            answer.stats.append(event["paceline"])
        if event.get("usage"):
            answer.num_usage = event["usage"]["completion_tokens"]
        for choice in event.get("choices", ()):
            answer.token_ids += choice["token_ids"]
            answer.finish_reason = choice["finish_reason"] or answer.finish_reason


def new_client(url: str, timeout_s: float = 120.0) -> httpx.AsyncClient:
    """A client with as many connections as are asked for."""
    return httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=httpx.Limits(max_connections=None))


class Load:
    """A thread that keeps `width` requests in flight until its `with` block ends, and waits for those that outlive it."""

    def __init__(
        self, url: str, ask: Callable[[httpx.AsyncClient, int], Awaitable[Answer]], *, width: int, timeout_s: float = 120.0,
        pause_s: float = 0.0,
    ) -> None:  # fmt: skip
        """ask: sends the request of a number, 0, 1, ..., to its end. pause_s: behind each answer, to leave a computer room."""
        self._url, self._ask, self._width, self._timeout_s, self._pause_s = url, ask, width, timeout_s, pause_s
        self._is_over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self.answers: list[Answer] = []
        self.num_in_flight = 0

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        if kind is None or not issubclass(kind, KeyboardInterrupt):  # who stops a run waits for no answer
            self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as e:
            self._error = e

    async def _main(self) -> None:
        async with new_client(self._url, self._timeout_s) as http:

            async def work(i: int) -> None:
                while not self._is_over:
                    self.num_in_flight += 1
                    try:
                        answer = await self._ask(http, i)
                    finally:
                        self.num_in_flight -= 1
                    self.answers.append(answer)
                    await asyncio.sleep(self._pause_s if answer.error is None else PAUSE_S)
                    i += self._width

            await asyncio.gather(*(work(k) for k in range(self._width)))


def wait_for(
    read: Callable[[], T], what: str, timeout_s: float = 120.0, every_s: float = 0.1, check: Callable[[], None] | None = None
) -> T:  # fmt: skip
    """The first true value of `read`; errors of the connection count as false.

    check: called between two looks; may raise. Raises: PacelineError when there is none in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            value = read()
        except httpx.TransportError:
            value = None  # type: ignore[assignment]
        if value:
            return value
        if time.monotonic() > deadline:
            raise PacelineError(f"{what} did not come true within {timeout_s:g} s")
        if check is not None:
            check()
        time.sleep(every_s)


def long_body() -> dict[str, Any]:
    """A request that takes long enough to be left."""
    return {"prompt": [5, 9, 33, 41], "max_tokens": 480, "temperature": 0, "ignore_eos": True}


def leave_streams(url: str, num: int) -> None:
    """Hang up on streams, one after the other, after the first event of each."""

    async def main() -> None:
        async with new_client(url) as client:
            for _ in range(num):
                async with client.stream("POST", "/v1/completions", json={**long_body(), "stream": True}) as response:
                    await anext(event_lines(response))

    asyncio.run(main())
