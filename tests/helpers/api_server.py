"""Helpers of the HTTP tests: an engine that speaks a script, real engines, and servers on a free loopback port."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI

from paceline.config import EngineConfig
from paceline.errors import CapacityError, PacelineError
from paceline.infra.service.connections import Connection
from paceline.machine import free_port
from paceline.serving.api.app import build_api
from paceline.serving.api.client import LocalEngineClient
from paceline.serving.api.generation import ApiParts, EngineInfo
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.engine.running import StopStringChecker
from paceline.serving.engine.thread import EngineThread
from paceline.serving.sampling.request import GenerationRequest, RequestStats, RoundEvent, TokenLogprob
from paceline.serving.sampling.text_stream import TokenText
from paceline.serving.target_model.model import TargetModel
from tests.helpers.fakes import tiny_tokenizer
from tests.helpers.scripted_drafters import RepeatDrafter

TOKENIZER = tiny_tokenizer(300)


def wait_until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true in time"
        time.sleep(0.005)


class ScriptedEngine:
    """An EngineClient that answers every request with the same text, three tokens a round, in a thread of its own."""

    def __init__(self, text: str = "Hello, wörld! 日本") -> None:
        self.text = text
        self.context_tokens = 256
        self.requests: list[GenerationRequest] = []
        self.aborted: set[str] = set()
        self.max_requests = 10**6
        self.fail_after: int | None = None
        self.submit_error: PacelineError | None = None
        self.heartbeat_s = 0.0
        self.clock_s = 1000.0
        self.num_queued = 0
        self.drains = False
        self.end: str | None = None
        """Finish reason that ends a request after `fail_after` rounds instead of 'error'."""
        self.num_cached = 0
        self.go = threading.Event()
        self.go.set()

    def info(self) -> EngineInfo:
        return EngineInfo(
            model_name="tiny", target_version="t0", context_tokens=self.context_tokens, vocab_size=300, created=1
        )

    def heartbeat_age_s(self) -> float:
        return self.heartbeat_s

    def now(self) -> float:
        return self.clock_s

    def num_waiting(self) -> int:
        return self.num_queued

    def is_draining(self) -> bool:
        return self.drains

    def prepare(self, request: GenerationRequest) -> None:
        """Scripts need no grammar."""

    def submit_all(self, requests: Sequence[GenerationRequest], on_event: Callable[[RoundEvent], None]) -> None:
        if self.submit_error is not None:
            raise self.submit_error
        for request in requests:
            if len(self.requests) >= self.max_requests:
                raise CapacityError("the queue is full")
            self.requests.append(request)
            threading.Thread(target=self._speak, args=(request, on_event), daemon=True).start()

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)

    def _speak(self, request: GenerationRequest, on_event: Callable[[RoundEvent], None]) -> None:
        params = request.params
        ids = [*TOKENIZER.encode(self.text, add_special_tokens=False), 1]
        finish, match = "stop", None
        if params.stop:
            hit = StopStringChecker(
                TokenText(TOKENIZER), params.stop, request.prompt_token_ids, min_tokens=params.min_tokens
            ).first_match(ids)
            if hit is not None:
                ids, match = ids[: hit[0]], hit[1]
        if len(ids) > params.max_tokens:
            ids, finish, match = ids[: params.max_tokens], "length", None
        rounds = [ids[i : i + 3] for i in range(0, len(ids), 3)]
        for n, tokens in enumerate(rounds, 1):
            self.go.wait(10)
            if request.request_id in self.aborted:
                return
            is_broken = self.fail_after is not None and n > self.fail_after
            is_last = n == len(rounds)
            top = params.logprobs or 0
            on_event(
                RoundEvent(
                    request_id=request.request_id,
                    token_ids=() if is_broken else tuple(tokens),
                    num_accepted_tokens=len(tokens) - 1,
                    logprobs=None
                    if params.logprobs is None
                    else tuple(TokenLogprob(token_id=t, logprob=-0.5, top=tuple((t + k, -0.5 - k) for k in range(top))) for t in tokens),
                    finish_reason=(self.end or "error") if is_broken else finish if is_last else None,
                    stop_match=match if is_last else None,
                    stats=RequestStats(
                        drafter_version="v7", num_rounds=n, num_draft_tokens=4 * n, num_accepted_tokens=2 * n,
                        num_emitted_tokens=sum(map(len, rounds[:n])), draft_ms=1.0 * n, verify_ms=2.0 * n, total_ms=3.5 * n,
                        num_cached_tokens=self.num_cached,
                    ),
                    error="the drafting table caught fire" if is_broken and self.end is None else None,
                )
            )  # fmt: skip
            if is_broken:
                return


def below(prefix: str, app: FastAPI) -> Any:
    """The application as Serve's proxy calls it below a route prefix; '' = none."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "root_path": prefix} if scope["type"] == "http" else scope, receive, send)

    return call


@contextlib.contextmanager
def serve_app(app: Any, http: Any = Connection, **tls: Any) -> Iterator[str]:
    """Serve `app` with uvicorn on a free loopback port; gives the base URL. http: uvicorn's protocol; tls: its ssl_*."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, http=http, host="127.0.0.1", port=port, log_level="error", **tls))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


@contextlib.contextmanager
def serve_engine(target: TargetModel, config: EngineConfig | None = None, **parts: Any) -> Iterator[tuple[str, Engine]]:
    """Serve a real engine over `target` with a drafter that repeats the newest token; gives the base URL and the engine."""
    engine = Engine(
        target,
        DrafterSlots(RepeatDrafter(), "repeat-1"),
        config or EngineConfig(max_running=8, kv_bytes=4 * 2**20),
        rng=np.random.default_rng(0),
        ends=parts.pop("ends", None),
    )
    thread = EngineThread(engine)
    thread.start(is_warmed_up=True)
    names = {"model_name": parts.pop("model_name", "tiny"), "aliases": parts.pop("aliases", ())}
    client = LocalEngineClient(engine, thread, **names)
    try:
        with serve_app(build_api(ApiParts(client=client, tokenizer=target.tokenizer, **parts))) as base:
            yield base, engine
    finally:
        assert thread.stop(timeout_s=10)
