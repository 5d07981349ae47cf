"""Load cell: one load of `paceline bench serve`: who asks when, and what happens when the server is full.

Closed loop: `concurrency` clients, each sends its next request when its answer is complete. Open loop: requests arrive
at random (Poisson) at a given rate, whether or not the server keeps up; times then count from the arrival, so that a
client that is late itself hides nothing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from paceline.bench.serve.client import REFUSED, StreamClient, StreamRequest, StreamResult

MAX_IN_FLIGHT = 2048
"""Requests of an open loop that may be unfinished; further arrivals are not sent, and counted as a problem."""
_MIN_WAIT_S, _MAX_WAIT_S = 0.05, 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Exactly one of both is set."""

    concurrency: int | None = None
    rate_per_s: float | None = None

    @property
    def name(self) -> str:
        if self.concurrency is None:
            return f"{self.rate_per_s:g} requests/s"
        return "1 client" if self.concurrency == 1 else f"{self.concurrency} clients"


@dataclass(kw_only=True, slots=True)
class Answer:
    """What became of one request, refusals included."""

    result: StreamResult
    due_s: float
    """When it was first sent (closed loop) or arrived (open loop); times of the user count from here."""
    num_refused: int = 0
    waited_s: float = 0.0
    """Spent waiting as refusals asked."""

    @property
    def first_token_s(self) -> float | None:
        """When its first text or token came."""
        return None if self.result.ttft_s is None else self.result.began_s + self.result.ttft_s


@dataclass(kw_only=True, slots=True)
class CellRun:
    """One load as it went."""

    began_s: float
    answers: list[Answer] = field(default_factory=list)
    """In the order in which they were asked for."""
    supply_ended_s: float | None = None
    """When the last request had been sent: from then on the load drains."""
    num_late: int = 0
    """Arrivals of an open loop that this client sent more than 50 ms late."""
    max_in_flight: int = 0


class CellRunner:
    """Sends a list of requests under one load."""

    def __init__(
        self, client: StreamClient, load: Load, *, max_s: float, drain_s: float, num_tries: int, rng: random.Random,
        on_answer: Callable[[Answer], None], timer: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """max_s: no request is sent later than this; drain_s: answers still open that long after the last one was sent
        are given up; num_tries: how often a request is sent while the server answers 429."""
        self._client, self._load, self._rng, self._timer = client, load, rng, timer
        self._max_s, self._drain_s, self._num_tries = max_s, drain_s, num_tries
        self._on_answer = on_answer
        self._in_flight = 0

    async def run(self, requests: Sequence[StreamRequest]) -> CellRun:
        """Send all requests, or those that `max_s` allows; never raises for what the server does."""
        run = CellRun(began_s=self._timer())
        if self._load.concurrency is not None:
            waiting = iter(requests)
            workers = min(self._load.concurrency, len(requests))
            tasks = [asyncio.create_task(self._worker(run, waiting)) for _ in range(workers)]
            await asyncio.wait(tasks, timeout=self._max_s, return_when=asyncio.FIRST_COMPLETED)
        else:
            tasks = await self._arrive(run, requests)
        if run.supply_ended_s is None:
            run.supply_ended_s = self._timer()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._drain_s)
            for task in late:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception):
                    raise outcome
        for answer in run.answers:
            if answer.result.problem is None and not answer.result.ended_s:
                answer.result.problem = f"unfinished: still open {self._drain_s:g} s after the last request was sent"
        return run

    async def _worker(self, run: CellRun, waiting: Iterator[StreamRequest]) -> None:
        for request in waiting:
            if self._timer() - run.began_s >= self._max_s:
                break
            await self._ask(run, request, self._timer())
        if run.supply_ended_s is None:
            run.supply_ended_s = self._timer()

    async def _arrive(self, run: CellRun, requests: Sequence[StreamRequest]) -> list[asyncio.Task[None]]:
        assert self._load.rate_per_s is not None
        tasks: list[asyncio.Task[None]] = []
        due = run.began_s
        for request in requests:
            due += self._rng.expovariate(self._load.rate_per_s)
            if due - run.began_s >= self._max_s:
                break
            await asyncio.sleep(max(0.0, due - self._timer()))
            run.num_late += self._timer() - due > 0.05
            if self._in_flight >= MAX_IN_FLIGHT:
                result = StreamResult(request=request, began_s=due, ended_s=due, problem=f"not_sent: {MAX_IN_FLIGHT} requests were unfinished")  # fmt: skip
                run.answers.append(Answer(result=result, due_s=due))
                continue
            tasks.append(asyncio.create_task(self._ask(run, request, due)))
            await asyncio.sleep(0)  # it counts as in flight before the next one arrives
        return tasks

    async def _ask(self, run: CellRun, request: StreamRequest, due_s: float) -> None:
        """One request until it is answered; a refusal is waited out for as long as it asks, and sent again."""
        self._in_flight += 1
        run.max_in_flight = max(run.max_in_flight, self._in_flight)
        answer = Answer(result=StreamResult(request=request, began_s=due_s), due_s=due_s)
        run.answers.append(answer)
        try:
            while True:
                result = await self._client.stream(request, answer.result)
                is_refused = result.kind == REFUSED
                answer.num_refused += is_refused
                if not is_refused or answer.num_refused >= self._num_tries:
                    break
                wait = min(max(result.retry_after_s or 2.0 ** (answer.num_refused - 3), _MIN_WAIT_S), _MAX_WAIT_S)
                answer.waited_s += wait
                answer.result = StreamResult(request=request, began_s=due_s)  # its end is open again
                await asyncio.sleep(wait)
        finally:
            self._in_flight -= 1
        answer.result = result
        if result.problem is not None and not is_refused:
            await asyncio.sleep(_MIN_WAIT_S)  # a server that is gone is not asked in a tight loop
        self._on_answer(answer)
