"""A tiny two-replica service, and a client that notes exactly how every answer ended."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bench.chaos import load
from paceline.bench.chaos.checks import Questions, answer_problems
from paceline.bench.chaos.load import wait_for
from paceline.bench.engine.versions import random_factors
from paceline.config import EngineConfig, PolicyConfig, ServiceConfig
from paceline.infra.app import Service, run_service, stop_service
from paceline.serving.loading.families import build_model, read_drafter_files, save_drafter
from paceline.serving.loading.target import read_target
from paceline.serving.target_model.model import TargetModel
from tests.helpers.drafters import specblock_for
from tests.helpers.fakes import plain_logits, tiny_model, tiny_target, tiny_tokenizer

VOCAB, WIDTH, NUM_PROMPTS, MAX_TOKENS = 300, 32, 16, 240  # long: a busy replica is still busy when it is killed
PROMPTS = [[3 + (17 * i + 5 * k) % (VOCAB - 3) for k in range(2 + i)] for i in range(NUM_PROMPTS)]
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


def put_delta(registry: DrafterRegistry, base: str, seed: int, rank: int = 4) -> str:
    """A version that adds random factors to the weights of another one."""
    manifest = registry.get_manifest(base)
    model = build_model({**manifest.config, "drafter_type": manifest.drafter_type}, registry.load_state(base))
    factors = random_factors(model, rank, seed, 1.0)
    fields = {
        "drafter_type": manifest.drafter_type,
        "config": manifest.config,
        "target_version": manifest.target_version,
    }
    return registry.put(factors, **fields, parent=base, arm="lora", delta_of=base).version


def tiny_config(root: Path, name: str, **changes: Any) -> ServiceConfig:
    """Write the model and its first drafter below `root`; a service of two replicas that never trains."""
    write_model(root / "model")
    write_drafter(root / "drafter", read_target(root / "model"), seed=0)
    values: dict[str, Any] = {
        "model": str(root / "model"), "drafter": str(root / "drafter"), "model_name": name, "device": "cpu",
        "data_dir": str(root / "data"), "port": 0, "num_replicas": NUM_REPLICAS,
        "engine": EngineConfig(
            max_running=8, max_waiting=16, kv_bytes=8 * 2**20, num_threads=1, max_class_deltas=2, delta_rank=4
        ),
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


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """(certificate, key) of localhost by openssl."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*words, *names], check=True, capture_output=True)
    return cert, key


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

    wait_for(look, "an answer of every replica", RESTART_S)
    return seen


def wait_busy(url: str, replica_id: str, num_running: int = 1) -> None:
    """Wait until a replica works on at least so many requests."""

    def is_busy() -> bool:
        replica = replica_of(url)
        return replica.get("replica_id") == replica_id and replica["engine"]["num_running"] >= num_running

    wait_for(is_busy, "a busy replica", every_s=0.001)


@functools.cache
def reference() -> Questions:
    """The target's own greedy tokens behind every prompt, all in one batch of the transformers model."""
    target = tiny_target(vocab=VOCAB, width=WIDTH)

    def gap(prompt: Sequence[int], output: Sequence[int]) -> float:
        logits = plain_logits(target, [*prompt, *output[:-1]])[len(prompt) - 1 :]
        return float((logits.amax(1) - logits.gather(1, torch.tensor(output)[:, None])[:, 0]).max())

    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    want = target.model.generate(
        ids, attention_mask=(ids != 0).long(), do_sample=False, min_new_tokens=MAX_TOKENS, max_new_tokens=MAX_TOKENS,
        pad_token_id=0, eos_token_id=None,
    )[:, longest:]  # fmt: skip
    return Questions(prompts=PROMPTS, want=want.tolist(), gap=gap)


@dataclass(kw_only=True)
class Answer(load.Answer):
    """How one request ended, as its client saw it, and what it must be."""

    def check_complete(self) -> None:
        assert self.looks_complete, (self.status, self.error, self.finish_reason, self.is_done)
        self.check_explicit()
        assert len({s["drafter_version"] for s in self.stats}) == 1

    def check_explicit(self) -> None:
        """Complete and right, or visibly broken off: never a part that looks like the whole."""
        assert answer_problems(self, reference(), may_break=True) == []


async def ask(
    client: httpx.AsyncClient, prompt: int, *, stream: bool, num_tokens: int = 24, bucket: str = "load", retry: bool = True
) -> Answer:  # fmt: skip
    """Send one greedy request; after a 429 wait as told and send it again."""
    answer = Answer(question=prompt, num_wanted=num_tokens, is_stream=stream)
    await load.send(client, answer, PROMPTS[prompt], bucket=bucket, retries=retry)
    return answer


def under_load(
    url: str, fault: Callable[[], Any], *, width: int = 6, num_tokens: int = 24, only_streams: bool = False,
    pause_s: float = 0.0,
) -> list[Answer]:  # fmt: skip
    """Keep `width` requests in flight while `fault` runs in a thread; every answer, also those that outlive it.

    Buckets change from request to request: drafters stay on trial in a new one, so that rounds do speculate.
    """

    async def ask_one(client: httpx.AsyncClient, i: int) -> Answer:
        stream = only_streams or i % 2 == 0
        return await ask(client, i % NUM_PROMPTS, stream=stream, num_tokens=num_tokens, bucket=f"b{i % 48}")

    with load.Load(url, ask_one, width=width, pause_s=pause_s) as running_load:
        fault()
    return running_load.answers  # type: ignore[return-value]


def fresh_state(url: str) -> dict[str, Any]:
    """A snapshot of the controller that is younger than this call; replicas may show one from their short cache."""
    asked = time.time()

    def read() -> dict[str, Any] | None:
        response = HTTP.get(f"{url}/paceline/state", timeout=30)
        state = response.json() if response.status_code == 200 else {}
        return state if state.get("has_controller") and state["ts"] > asked else None

    return wait_for(read, "a fresh snapshot of the controller")
