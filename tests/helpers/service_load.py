"""A tiny two-replica service, and a client that notes exactly how every answer ended."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from paceline.adapt.versions.registry import DrafterRegistry
from paceline.config import EngineConfig, PolicyConfig, ServiceConfig
from paceline.infra.app import Service, run_service, stop_service
from paceline.serving.loading.families import read_drafter_files, save_drafter
from paceline.serving.loading.target import read_target
from paceline.serving.target_model.model import TargetModel
from tests.helpers.drafters import specblock_for
from tests.helpers.fakes import plain_logits, tiny_model, tiny_target, tiny_tokenizer

VOCAB, WIDTH, NUM_PROMPTS = 300, 32, 16
PROMPTS = [[3 + (17 * i + 5 * k) % (VOCAB - 3) for k in range(2 + i)] for i in range(NUM_PROMPTS)]
MAX_TRIES = 60
NUM_REPLICAS = 2
HTTP = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
"""Every request has a connection of its own, as one of `httpx.get`, which also reads all certificates each time."""
RESTART_S = 200.0
"""A process that imports torch and Ray starts in about 10 s; much later where everything else runs too."""


def write_model(folder: Path) -> None:
    tiny_model(vocab=VOCAB, width=WIDTH).save_pretrained(folder)
    tiny_tokenizer(VOCAB).save_pretrained(folder)


def write_drafter(folder: Path, target: TargetModel, seed: int, hidden_size: int = 16) -> None:
    """A drafter with random weights: of the right shape, never trained."""
    save_drafter(folder, specblock_for(target, seed, hidden_size=hidden_size), target.version)


def put_drafter(registry: DrafterRegistry, target: TargetModel, folder: Path, seed: int, **shape: int) -> str:
    write_drafter(folder, target, seed, **shape)
    settings, state = read_drafter_files(folder)
    return registry.put(state, drafter_type="specblock", config=settings, target_version=target.version).version


def tiny_config(root: Path, name: str, **changes: Any) -> ServiceConfig:
    """Write the model and its first drafter below `root`; a service of two replicas that never trains."""
    write_model(root / "model")
    write_drafter(root / "drafter", read_target(root / "model"), seed=0)
    values: dict[str, Any] = {
        "model": str(root / "model"), "drafter": str(root / "drafter"), "model_name": name, "device": "cpu",
        "data_dir": str(root / "data"), "port": 0, "num_replicas": NUM_REPLICAS,
        "engine": EngineConfig(max_running=8, max_waiting=16, kv_bytes=8 * 2**20, num_threads=1),
        "policy": PolicyConfig(policy="never", holdback_percent=0),
    }  # fmt: skip
    return ServiceConfig(**{**values, **changes})


@contextlib.contextmanager
def running(config: ServiceConfig) -> Iterator[Service]:
    service = run_service(config)
    try:
        yield service
    finally:
        stop_service(service)


def outer_listeners() -> tuple[set[str], list[tuple[str, int, str]]]:
    """Names of this process and all below it that listen on TCP; address, port and name of what listens beyond loopback."""
    names, outer = set(), []
    for process in (here := psutil.Process(), *here.children(recursive=True)):
        try:
            name, connections = " ".join(process.cmdline()) or process.name(), process.net_connections("tcp")
        except psutil.NoSuchProcess:  # ended meanwhile
            continue
        for ip, port in (c.laddr for c in connections if c.status == psutil.CONN_LISTEN):
            names.add(name)
            if not ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback:
                outer.append((ip, port, name))
    return names, outer


def replica_of(url: str) -> dict[str, Any]:
    """The part of the state of the replica that answers, {} when none does."""
    response = HTTP.get(f"{url}/paceline/state", timeout=30)
    return (response.json().get("replica") if response.status_code == 200 else None) or {}


def replicas_of(url: str) -> dict[str, dict[str, Any]]:
    """Replica id -> its own part of the state; requests are spread, so ask until every one has answered."""
    seen: dict[str, dict[str, Any]] = {}

    def look() -> bool:
        if replica := replica_of(url):
            seen[replica["replica_id"]] = replica
        return len(seen) == NUM_REPLICAS

    wait_for(look, "an answer of every replica", RESTART_S, every_s=0.01)
    return seen


def wait_busy(url: str, replica_id: str, num_running: int = 1) -> None:
    """Wait until a replica works on at least so many requests."""

    def is_busy() -> bool:
        replica = replica_of(url)
        return replica.get("replica_id") == replica_id and replica["engine"]["num_running"] >= num_running

    wait_for(is_busy, "a busy replica", every_s=0.001)


def long_body() -> dict[str, Any]:
    """A request that takes long enough to be left."""
    return {"prompt": PROMPTS[3], "max_tokens": 480, "temperature": 0, "ignore_eos": True}


def leave_streams(url: str, num: int) -> None:
    """Hang up on streams, one after the other, after the first event of each."""

    async def main() -> None:
        async with new_client(url) as client:
            for _ in range(num):
                async with client.stream("POST", "/v1/completions", json={**long_body(), "stream": True}) as response:
                    await anext(response.aiter_lines())

    asyncio.run(main())


@functools.cache
def greedy_gaps(prompt: int, token_ids: tuple[int, ...]) -> list[float]:
    """How far each token's logit lies below the highest one in a plain forward of the transformers model; 0: its choice."""
    text = [*PROMPTS[prompt], *token_ids]
    logits = plain_logits(_target(), text)[len(PROMPTS[prompt]) - 1 : -1]
    return (logits.max(-1).values - logits.gather(1, torch.tensor(token_ids).long()[:, None])[:, 0]).tolist()


@functools.cache
def _target() -> TargetModel:
    return tiny_target(vocab=VOCAB, width=WIDTH)


@dataclass(kw_only=True)
class Answer:
    """How one request ended, as its client saw it."""

    prompt: int
    num_wanted: int
    is_stream: bool
    status: int = 0
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    is_done: bool = False
    """A stream's [DONE] arrived, or a whole body."""
    error: str | None = None
    """An explicit error: status, error event or broken connection."""
    stats: list[dict] = field(default_factory=list)
    """Every `paceline` object of the answer."""
    num_refusals: int = 0
    """429 answers before this one."""

    @property
    def looks_complete(self) -> bool:
        return self.error is None and self.status == 200 and self.is_done and self.finish_reason is not None

    def check_complete(self) -> None:
        assert self.looks_complete, (self.status, self.error, self.finish_reason, self.is_done)
        assert self.finish_reason == "length"
        assert len(self.token_ids) == self.num_wanted
        self.check_tokens()
        assert len({s["drafter_version"] for s in self.stats}) == 1

    def check_tokens(self) -> None:
        """The tokens are the target's own; behind a near tie of two logits fp32 rounding may choose."""
        gaps = greedy_gaps(self.prompt, tuple(self.token_ids))
        worst = max(range(len(gaps)), key=gaps.__getitem__, default=0)
        assert not gaps or gaps[worst] < 1e-4, f"prompt {self.prompt} differs at token {worst}, logit gap {gaps[worst]}"

    def check_explicit(self) -> None:
        """Complete and right, or visibly broken off: never a part that looks like the whole."""
        if self.looks_complete:
            self.check_complete()
            return
        assert not self.is_done and self.finish_reason is None
        assert self.is_stream or self.error is not None
        self.check_tokens()

    @property
    def version(self) -> str:
        return self.stats[-1]["drafter_version"]


async def ask(
    client: httpx.AsyncClient, prompt: int, *, stream: bool, num_tokens: int = 24, bucket: str = "load", retry: bool = True
) -> Answer:  # fmt: skip
    """Send one greedy request; after a 429 wait as told and send it again."""
    answer = Answer(prompt=prompt, num_wanted=num_tokens, is_stream=stream)
    body = {
        "prompt": PROMPTS[prompt], "max_tokens": num_tokens, "temperature": 0, "stream": stream, "ignore_eos": True,
        "return_token_ids": True, **({"stream_options": {"include_usage": True}} if stream else {}),
    }  # fmt: skip
    headers = {"x-paceline-bucket": bucket}
    for _ in range(MAX_TRIES):
        try:
            async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                answer.status = response.status_code
                if response.status_code == 200:
                    await (_read_stream if stream else _read_whole)(response, answer)
                else:
                    answer.error = (await response.aread()).decode()
        except httpx.TransportError as e:
            answer.error = repr(e)
            return answer
        if answer.status != 429 or not retry:
            return answer
        await asyncio.sleep(float(response.headers["retry-after"]))
        answer.num_refusals += 1
        answer.error = None
    raise AssertionError(f"refused {MAX_TRIES} times")


async def _read_whole(response: httpx.Response, answer: Answer) -> None:
    body = json.loads(await response.aread())
    choice = body["choices"][0]
    answer.token_ids, answer.finish_reason = choice["token_ids"], choice["finish_reason"]
    answer.stats, answer.is_done = [body["paceline"]], True


async def _read_stream(response: httpx.Response, answer: Answer) -> None:
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        assert not answer.is_done, "an event after [DONE]"
        if line == "data: [DONE]":
            answer.is_done = True
            continue
        event: dict[str, Any] = json.loads(line[6:])
        if "error" in event:
            answer.error = event["error"]["message"]
        if "paceline" in event:
            answer.stats.append(event["paceline"])
        for choice in event.get("choices", ()):
            answer.token_ids += choice["token_ids"]
            answer.finish_reason = choice["finish_reason"] or answer.finish_reason


def new_client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None))


def under_load(
    url: str, fault: Callable[[], Any], *, width: int = 6, num_tokens: int = 24, only_streams: bool = False
) -> list[Answer]:
    """Keep `width` requests in flight while `fault` runs in a thread; every answer, also those that outlive it.

    Buckets change from request to request: drafters stay on trial in a new one, so that rounds do speculate.
    """
    answers: list[Answer] = []

    async def main() -> None:
        is_over = False
        async with new_client(url) as client:

            async def work(k: int) -> None:
                i = k
                while not is_over:
                    stream = only_streams or i % 2 == 0
                    bucket = f"b{i % 48}"
                    answers.append(
                        await ask(client, i % NUM_PROMPTS, stream=stream, num_tokens=num_tokens, bucket=bucket)
                    )
                    i += width

            workers = [asyncio.ensure_future(work(k)) for k in range(width)]
            try:
                await asyncio.to_thread(fault)
            finally:
                is_over = True
                await asyncio.gather(*workers)

    asyncio.run(main())
    return answers


def fresh_state(url: str) -> dict[str, Any]:
    """A snapshot of the controller that is younger than this call; replicas may show one from their short cache."""
    asked = time.time()

    def read() -> dict[str, Any] | None:
        response = HTTP.get(f"{url}/paceline/state", timeout=30)
        state = response.json() if response.status_code == 200 else {}
        return state if state.get("has_controller") and state["ts"] > asked else None

    return wait_for(read, "a fresh snapshot of the controller")


def wait_for(read: Callable[[], Any], what: str, timeout_s: float = 120.0, every_s: float = 0.1) -> Any:
    """The first true value of `read`; errors of the connection count as false."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            value = read()
        except httpx.TransportError:
            value = None
        if value:
            return value
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s:g} s"
        time.sleep(every_s)
