"""Peer arms: servers that take turns, and what each saw of a group of requests; token counts by usage and by one tokenizer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from paceline.bench.peers.process import PeerProcess
from paceline.bench.serve.cell import Answer, CellRunner, Load
from paceline.bench.serve.client import ServerFeatures, StreamClient, StreamRequest, StreamResult, find_features
from paceline.bench.serve.server_metrics import acceptance_between, read_page
from paceline.errors import PacelineError

_WAKE_TOKENS = 4
"""Of the request, not counted, that a woken server answers before its turn: its memory and its clocks come back with it."""
_BREATH_S = 0.5
_NUM_TRIES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One group of requests through one server."""

    answers: tuple[Answer, ...]
    """In the order of the requests; empty where the server was gone before."""
    seconds: float
    """From the first request to the end of the last answer."""
    num_rounds: int = 0
    num_accepted_tokens: int = 0
    """Of drafts, as answers or the server's metrics account for them; 0 rounds where nothing does."""

    @property
    def whole(self) -> list[StreamResult]:
        """Answers without a problem."""
        return [a.result for a in self.whole_answers]

    @property
    def whole_answers(self) -> list[Answer]:
        """The same with when they were asked for, and what was refused before."""
        return [a for a in self.answers if a.result.problem is None]


class TokenCounter:
    """The shared tokenizer: what the servers' own counts are held against."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        ends = getattr(tokenizer, "eos_token_id", None)
        self._ends = {ends} if isinstance(ends, int) else set(ends or ())

    def ids(self, text: str) -> list[int]:
        """Token ids of a text without the tokens that a tokenizer puts around it."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def output_ids(self, result: StreamResult, *, as_text: bool) -> list[int]:
        """Ids of an answer without its end token; as_text: of its text, also where the server names ids."""
        ids = self.ids(result.text) if as_text or not result.token_ids else list(result.token_ids)
        while ids and ids[-1] in self._ends:
            ids.pop()
        return ids

    def count(self, result: StreamResult) -> int:
        """Tokens of an answer: the server's usage, else the tokenizer's count of its text."""
        return len(self.ids(result.text)) if result.usage_tokens is None else result.usage_tokens

    def is_confirmed(self, result: StreamResult) -> bool:
        """Whether the usage is the tokenizer's count of the text, give or take the end token, which has no text."""
        return result.usage_tokens is not None and 0 <= result.usage_tokens - len(self.ids(result.text)) <= 1

    def is_same_prompt(self, result: StreamResult) -> bool:
        """Whether the server says that it read as many tokens of the prompt as the tokenizer makes of it."""
        return result.usage_prompt_tokens == len(self.ids(result.request.prompt))


def breathe(arms: Sequence[PeerArm]) -> None:
    """Let every living server run for a moment, then stop all in their tracks.

    Clusters count their parts as lost that stand still for minutes (Ray's do from about three on).
    """
    living = [arm for arm in arms if arm.problem is None]
    for arm in living:
        arm.server.resume()
    time.sleep(_BREATH_S)
    for arm in living:
        arm.server.pause()


@dataclass(kw_only=True, slots=True)
class PeerArm:
    """A started server, stopped in its tracks between its turns."""

    server: PeerProcess
    timeout_s: float
    """Of silence."""
    features: ServerFeatures | None = None
    problem: str | None = None
    """Why it takes no more turns."""
    turns: dict[tuple[int, int], Turn] = field(default_factory=dict)
    """By (cell, group)."""

    @property
    def name(self) -> str:
        return self.server.peer.name

    def start(self, timeout_s: float) -> None:
        """Start the server, which runs until `breathe` or `take`, and find out what it can. Says in `problem` what goes wrong."""
        try:
            self.server.start(timeout_s)
            self.features = asyncio.run(self._find_features())
        except PacelineError as e:
            self.problem = self.server.end_words() or str(e)
        if self.problem is not None:
            self.server.stop()

    def take(self, place: tuple[int, int], requests: Sequence[StreamRequest], concurrency: int, max_s: float) -> None:
        """Wake the server, put the group on it and keep the turn; `problem` says it when no answer was whole, and the server ends."""
        assert self.features is not None and self.problem is None
        self.server.resume()
        try:
            turn = self.turns[place] = asyncio.run(self._turn(requests, Load(concurrency=concurrency), max_s))
        except PacelineError as e:
            turn, self.problem = Turn(answers=(), seconds=0.0), str(e)
        if not turn.whole:
            first = next((a.result.problem for a in turn.answers), None)
            self.problem = self.server.end_words() or self.problem or f"no answer of a group was whole: {first}"
            self.server.stop()
        else:
            self.server.pause()

    def _http(self) -> httpx.AsyncClient:
        """A client without old connections: a server that slept closes those that waited for it."""
        return httpx.AsyncClient(
            base_url=self.server.url, timeout=httpx.Timeout(self.timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )  # fmt: skip

    async def _find_features(self) -> ServerFeatures:
        async with self._http() as http:
            return await find_features(
                http, self.server.url, is_chat=False, model=self.server.served_name, extra=self.server.peer.kind.body
            )

    async def _turn(self, requests: Sequence[StreamRequest], load: Load, max_s: float) -> Turn:
        assert self.features is not None
        async with self._http() as http:
            client = StreamClient(
                http, is_chat=False, features=self.features, extra={"top_p": 1.0, **self.server.peer.kind.body}
            )
            wake = StreamRequest(prompt="Hello", bucket="default", max_tokens=_WAKE_TOKENS, temperature=0.0, seed=0)
            woken = await client.stream(wake)
            if woken.is_lost:
                raise PacelineError(f"it does not answer any more: {woken.problem}")
            before = await read_page(http)
            runner = CellRunner(
                client, load, max_s=max_s, drain_s=max(max_s, self.timeout_s), num_tries=_NUM_TRIES, rng=random.Random(0),
                on_answer=lambda _: None,
            )  # fmt: skip
            run = await runner.run(requests)
            after = await read_page(http)
        ended = max((a.result.ended_s for a in run.answers), default=run.began_s)
        stats = [a.result.server_stats or {} for a in run.answers]
        if not any(s.get("num_rounds") for s in stats):
            stats = [acceptance_between(before, after)]
        return Turn(
            answers=tuple(run.answers), seconds=ended - run.began_s,
            num_rounds=sum(int(s.get("num_rounds", 0)) for s in stats),
            num_accepted_tokens=sum(int(s.get("num_accepted_tokens", 0)) for s in stats),
        )  # fmt: skip
