"""A service whose engine is a real vLLM: Redis, a controller that decides nothing by itself, and what its answers must be."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch

from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.versions.export_drafter import ExportDrafterOptions, export_drafter
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bench.common.engine_run import encode, load_target
from paceline.bench.common.workloads import load_prompts
from paceline.config import PolicyConfig
from paceline.contracts import FeedbackBatch, decode
from paceline.infra.controller.host import ControllerHost
from paceline.infra.controller.store import HostConfig
from paceline.infra.state.redis_clients import Keys, consumer_client
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.paths import REGISTRY, TRACES, bundled, service_home
from paceline.serving.loading.families import read_drafter_files
from tests.helpers.scripted import ProcessLauncher

K, MAX_TOKENS, SERVICE = 5, 40, "live"
NEAR_TIE = 0.125
"""Nats between the two best tokens; as in test_vllm.py."""


class Service:
    """Redis, a controller that decides nothing by itself, and one vLLM."""

    def __init__(self, folder: Path, serve: Callable[[Service], Any]) -> None:
        """serve: starts the vLLM, which has url, wait, stop and say (what `GET /paceline/state` answers)."""
        self.folder, self.home = folder, service_home(folder / "data", SERVICE)
        self.redis, self.keys = EmbeddedRedis(folder).start(), Keys(SERVICE)
        target = self.target = load_target("bundled", "bfloat16")
        registry = self.registry = DrafterRegistry(self.home / REGISTRY)
        settings, state = read_drafter_files(bundled("eagle3"), target)
        about = {"drafter_type": settings["drafter_type"], "config": settings, "target_version": target.version}
        self.first = registry.put(state, **about).version
        rows = torch.roll(state["lm_head.weight"], 7, 0)
        self.worse = registry.put({**state, "lm_head.weight": rows}, **about, parent=self.first).version
        self.served = folder / "drafter"
        export_drafter(ExportDrafterOptions(version="eagle3", format="vllm", out=self.served))
        config = HostConfig(
            redis_url=self.redis.url, model=SERVICE, data_dir=self.home, policy=PolicyConfig(policy="never", holdback_percent=0),
            target_version=target.version, first_version=self.first, context_every_s=0.5, keep_rows=True,
        )  # fmt: skip
        self.host = ControllerHost(
            config, store=TraceStore(self.home / TRACES), registry=registry,
            launcher=ProcessLauncher(self.redis.url, str(folder / "journal")),
        ).start()  # fmt: skip
        self.log = folder / "vllm.log"
        self._serve = serve
        self.vllm = self.serve()

    def serve(self) -> Any:
        return self._serve(self)

    @property
    def settings(self) -> dict[str, Any]:
        """Of the plugin."""
        return {
            "redis_url": self.redis.url, "service": SERVICE, "data_dir": str(self.folder / "data"), "trusts_groups": True,
            "adapts_length": False, "window_s": 5.0, "shard_rows": 16,
        }  # fmt: skip

    def close(self) -> None:
        self.vllm.stop()
        self.host.stop()
        self.redis.stop()

    # ---- what it says
    def state(self) -> dict:
        return self.vllm.say(self)

    def wait_for(self, is_so, what: str, timeout_s: float = 60.0):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if found := is_so():
                    return found
            time.sleep(0.2)
        raise AssertionError(
            f"{what} did not come within {timeout_s} s: {self.log.read_text(errors='replace')[-3000:]}"
        )

    def pin(self, version: str) -> None:
        """Have the service want a version, and wait until vLLM serves it."""
        self.host.call(lambda: self.host.session.orders.pin(version)).result(30.0)
        self.wait_for(lambda: self.state()["engine"]["version"] == version, f"drafter {version}")

    # ---- requests
    def prompts(self, n: int = 8) -> list[list[int]]:
        return [encode(self.target, p.text) for b in ("tools", "code") for p in load_prompts(b, None, n // 2, 0)]

    def send(self, request_id: str, prompt: list[int], group: str = "", **body) -> dict:
        """{"ids", "gaps"} of an answer; gaps: nats between the two best tokens of each step."""
        labels = {"bucket": "tools"} | ({"group": group} if group else {})
        answer = httpx.post(
            f"{self.vllm.url}/v1/completions", timeout=120.0, headers={"x-request-id": request_id},
            json={
                "model": self.vllm.model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "logprobs": 2,
                "return_token_ids": True, "vllm_xargs": labels, "cache_salt": request_id, **body,
            },
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        best = [sorted(step.values(), reverse=True) for step in choice["logprobs"]["top_logprobs"]]
        return {"ids": choice["token_ids"], "gaps": [b[0] - b[1] if len(b) > 1 else 9.0 for b in best]}

    def answers(
        self, tag: str, group: str = "", parallel: int = 4, prompts: list[list[int]] | None = None, **body: Any
    ) -> list[dict]:
        """Answers to the same prompts, several at once; body: further fields of the requests."""
        with ThreadPoolExecutor(parallel) as pool:
            work = [
                pool.submit(self.send, f"{tag}-{i}", p, group, **body) for i, p in enumerate(prompts or self.prompts())
            ]
            return [w.result() for w in work]

    def rounds(self, tag: str) -> dict[str, tuple[int, int, int]]:
        """Request of `answers` -> rounds, drafted rounds, tokens kept in those, as the controller was told."""
        out: dict[str, tuple[int, int, int]] = {}
        for cell in self.cells:
            for request_id, sums in cell.requests.items():
                if request_id.startswith(f"cmpl-{tag}-"):
                    had = out.get(request_id, (0, 0, 0))
                    new = (sums.num_rounds, sums.drafted_rounds, int(sums.kept))
                    out[request_id] = tuple(a + b for a, b in zip(had, new, strict=True))
        return out

    @contextlib.contextmanager
    def listening(self):
        """Keep what came into the stream meanwhile: everything that vLLM told."""
        self.settle()
        with contextlib.closing(consumer_client(self.redis.url)) as client:
            last = client.xrevrange(self.keys.feedback, count=1)
            yield
            self.settle()
            after = f"({last[0][0].decode()}" if last else "-"
            entries = client.xrange(self.keys.feedback, min=after)
        batches = [decode(fields[b"v"], FeedbackBatch) for _, fields in entries]
        once = {(b.replica_id, b.boot_epoch, b.seq): b for b in batches}  # what Redis acknowledged late is sent again
        self.cells = [cell for b in once.values() for cell in b.cells]

    def settle(self) -> None:
        """Wait until every row that vLLM recorded was delivered."""
        self.wait_for(
            lambda: (f := self.state()["engine"]["feedback"])["delivered"] + f["dropped"] == f["produced"],
            "the last rows",
        )
        time.sleep(1.0)  # for the controller's pass


@contextlib.contextmanager
def running(folder: Path, serve: Callable[[Service], Any]) -> Iterator[Service]:
    """A service once its vLLM answers."""
    service = Service(folder, serve)
    try:
        service.vllm.wait(900.0)
        yield service
    finally:
        service.close()


def assert_same(answers, plain):
    """Equal token for token, up to a place where the plain engine itself was near a tie."""
    equal = 0
    for one, other in zip(plain, answers, strict=True):
        at = next((i for i, (x, y) in enumerate(zip(one["ids"], other["ids"], strict=False)) if x != y), None)
        at = at if at is not None or len(one["ids"]) == len(other["ids"]) else min(len(one["ids"]), len(other["ids"]))
        equal += at is None
        assert at is None or one["gaps"][at] < NEAR_TIE, (at, one["gaps"][at])
    assert equal >= 0.7 * len(answers)


def kept(rounds) -> float:
    """Acceptance length of drafted rounds."""
    return sum(r[2] for r in rounds.values()) / sum(r[1] for r in rounds.values())
