"""A real vLLM as a replica of a service: it follows the desired state, and tells its rounds and features, through everything.

`make test-vllm` installs it and sets PACELINE_VLLM_PYTHON; without that these tests are skipped. One server for most of
them: what they check is how it goes on, and each begins with the first drafter.
"""

import contextlib
import hashlib
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.gate.shadow import fixed_rounds, replay_rounds
from paceline.adapt.online.trainer import ShadowConfig
from paceline.adapt.versions.export_drafter import ExportDrafterOptions, export_drafter
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bench.common.engine_run import encode, load_target
from paceline.bench.common.workloads import load_prompts
from paceline.config import PolicyConfig
from paceline.contracts import FeedbackBatch, decode
from paceline.infra.controller.host import ControllerHost
from paceline.infra.controller.store import HostConfig
from paceline.infra.engines.vllm_server import VllmServer
from paceline.infra.state.redis_clients import Keys, consumer_client
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.paths import REGISTRY, TRACES, bundled, service_home
from paceline.serving.loading.families import build_drafter, load_drafter, read_drafter_files
from tests.helpers.scripted import ProcessLauncher

PYTHON = os.environ.get("PACELINE_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON, reason="PACELINE_VLLM_PYTHON must name the Python of an environment with vLLM; make test-vllm"),
]  # fmt: skip
K, MAX_TOKENS, SERVICE = 5, 40, "live"
NEAR_TIE = 0.125
"""Nats between the two best tokens; as in test_vllm.py."""


class Service:
    """Redis, a controller that decides nothing by itself, and one vLLM."""

    def __init__(self, folder: Path) -> None:
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
        self.vllm = self.serve()

    def serve(self) -> VllmServer:
        settings = {
            "redis_url": self.redis.url, "service": SERVICE, "data_dir": str(self.folder / "data"), "trusts_groups": True,
            "adapts_length": False, "window_s": 5.0, "shard_rows": 16,
        }  # fmt: skip
        return VllmServer(
            PYTHON, target=bundled("target"), drafter=self.served, method="eagle3", num_draft_tokens=K, settings=settings,
            log=self.log,
            arguments=("--max-model-len", "512", "--max-num-seqs", "8"),
        )  # fmt: skip

    def close(self) -> None:
        self.vllm.stop()
        self.host.stop()
        self.redis.stop()

    # ---- what it says
    def state(self) -> dict:
        return httpx.get(f"{self.vllm.url}/paceline/state", timeout=60.0).json()

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
                "model": str(bundled("target")), "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "logprobs": 2,
                "return_token_ids": True, "vllm_xargs": labels, "cache_salt": request_id, **body,
            },
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        best = [sorted(step.values(), reverse=True) for step in choice["logprobs"]["top_logprobs"]]
        return {"ids": choice["token_ids"], "gaps": [b[0] - b[1] if len(b) > 1 else 9.0 for b in best]}

    def answers(self, tag: str, group: str = "", parallel: int = 4) -> list[dict]:
        """Answers to the same prompts, several at once."""
        with ThreadPoolExecutor(parallel) as pool:
            work = [pool.submit(self.send, f"{tag}-{i}", p, group) for i, p in enumerate(self.prompts())]
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
        self.cells = [cell for _, fields in entries for cell in decode(fields[b"v"], FeedbackBatch).cells]

    def settle(self) -> None:
        """Wait until every row that vLLM recorded was delivered."""
        self.wait_for(
            lambda: (f := self.state()["engine"]["feedback"])["delivered"] + f["dropped"] == f["produced"],
            "the last rows",
        )
        time.sleep(1.0)  # for the controller's pass


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # vLLM's own routes for weights
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # it would compile for minutes what counts logprobs
        service = Service(tmp_path_factory.mktemp("vllm"))
        try:
            service.vllm.wait(900.0)
            yield service
        finally:
            service.close()


@pytest.fixture(autouse=True)
def begins_with_the_first_drafter(service):
    service.pin(service.first)


@pytest.fixture(scope="module")
def plain(service):
    """Answers without a drafter."""
    return service.answers("plain", group="plain")


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


def test_the_first_drafter_is_taken_over_at_the_start_and_reported(service):
    (report,) = service.wait_for(lambda: service.host.snapshot(1.0).replicas, "the report")
    assert report.version == service.first and report.failed_gen is None
    assert (report.engine.kind, report.engine.draft_shape, report.engine.max_draft_tokens) == ("vllm", "chain", K)
    assert report.engine.group_unit == "time"


def test_answers_are_the_plain_ones_before_during_and_after_swaps_and_none_is_lost(service, plain):
    with service.listening():
        before = service.answers("before")
        swaps, stop = [], threading.Event()

        def swap() -> None:
            while not stop.is_set():
                for version in (service.worse, service.first):
                    started = time.monotonic()
                    service.pin(version)
                    swaps.append(time.monotonic() - started)

        thread = threading.Thread(target=swap)
        thread.start()
        try:
            during = [service.answers(f"during{i}") for i in range(2)]
        finally:
            stop.set()
            thread.join()
        service.pin(service.worse)
        after = service.answers("after")
    for answers in (before, *during, after):
        assert_same(answers, plain)
    assert len(swaps) >= 2
    assert kept(service.rounds("before")) > 1.7, "the first drafter drafts well"
    assert kept(service.rounds("after")) < 1.3, "the worse one is what drafted after the swap"
    pauses = [ms for r in service.host.snapshot(1.0).replicas for ms in r.swap_pause_ms if ms > 0]
    print(f"\n{len(swaps)} swaps under load, pauses of {min(pauses):.0f} to {max(pauses):.0f} ms")
    assert service.state()["engine"]["num_mixed"] > 0, "requests lived through a swap"


def test_plain_requests_draft_nothing(service, plain):
    with service.listening():
        service.answers("alone", group="plain")
    assert {r[1] for r in service.rounds("alone").values()} == {0}
    assert {cell.group for cell in service.cells} == {"plain"}


def test_rows_reach_the_controller_once_each_and_rounds_are_the_shadow_walks(service):
    """The walk reads the features that were captured in the engine, so these are the target's own."""
    before = service.host.snapshot(1.0).feedback
    with service.listening():
        answers = service.answers("walk")
    after = service.host.snapshot(2.0).feedback
    told = service.rounds("walk")
    assert sum(r[0] for r in told.values()) == after.delivered - before.delivered
    assert (after.duplicates, after.missing_batches, after.lost_entries) == (0, 0, 0)

    store = TraceStore(service.home / TRACES)

    def traces():
        found = [t for s in store.list_shards() for t in store.read_shard(s.shard_id) if "cmpl-walk-" in t.request_id]
        return found if len(found) == len(answers) else None

    found = service.wait_for(traces, "the traces")
    by_id = {f"cmpl-walk-{i}": a for i, a in enumerate(answers)}
    for trace in found:
        name = trace.request_id.rsplit("-", 1)[0]
        answer = by_id.get(name) or by_id[name.rsplit("-", 1)[0]]
        assert trace.token_ids[trace.prompt_len :] == answer["ids"]
        assert (trace.topk_ids[:, 0] == torch.tensor(answer["ids"])).float().mean() > 0.95, (
            "greedy: the best is the answer"
        )
    drafter = load_drafter(bundled("eagle3"), service.target, num_candidates=1)
    tree = ShadowConfig(chain=K).tree
    walked = replay_rounds(drafter, found, fixed_rounds(*tree.values(), is_calibrated=False))
    real = [told[t.request_id][0] for t in found]
    same = sum(len(w) == r for w, r in zip(walked, real, strict=True))
    print(f"\nvLLM {sum(real)} rounds, the walk {sum(map(len, walked))}, {same} of {len(real)} requests alike")
    assert same >= 0.8 * len(real)
    assert sum(map(len, walked)) == pytest.approx(sum(real), rel=0.02)


@pytest.mark.parametrize("fault", ["other bytes", "another shape", "not a number"])
def test_a_file_that_is_refused_leaves_the_drafter_as_it_was(service, plain, tmp_path, fault):
    """Through vLLM's own routes, which know nothing of the registry's checks."""
    tensors = load_file(service.served / "model.safetensors")
    name, value = "norm.weight", tensors["norm.weight"]
    changed = {"other bytes": value, "another shape": torch.cat([value, value]), "not a number": value * float("nan")}[
        fault
    ]
    bad = tmp_path / "bad.safetensors"
    save_file({**tensors, name: changed}, bad, metadata={"format": "pt"})
    sha256 = "0" * 64 if fault == "other bytes" else hashlib.sha256(bad.read_bytes()).hexdigest()
    with service.listening():
        assert httpx.post(f"{service.vllm.url}/start_draft_weight_update", timeout=60.0).status_code == 200
        info = {"update_info": {"path": str(bad), "sha256": sha256}}
        refused = httpx.post(f"{service.vllm.url}/update_weights", json=info, timeout=60.0)
        assert refused.status_code >= 400
        answers = service.answers(f"refused{len(fault)}")
    assert_same(answers, plain)
    assert kept(service.rounds(f"refused{len(fault)}")) > 1.7, "the first drafter goes on"


def test_a_version_of_another_shape_is_reported_as_refused_and_the_old_one_serves_on(service, plain):
    own, state = read_drafter_files(bundled("eagle3"), service.target)
    ids = torch.arange(0, own["vocab_size"], 2)
    config = {**own, "draft_vocab_size": len(ids)}
    fewer = {
        **state,
        "lm_head.weight": state["lm_head.weight"][ids],
        "draft_token_ids": ids,
        "log_coverage": torch.zeros(()),
    }
    build_drafter(config, fewer, service.target)  # it is a sound one, of another shape
    other = service.registry.put(
        fewer,
        drafter_type=own["drafter_type"],
        config=config,
        target_version=service.target.version,
        parent=service.first,
    ).version
    service.host.call(lambda: service.host.session.orders.pin(other)).result(30.0)
    report = service.wait_for(
        lambda: next((r for r in service.host.snapshot(1.0).replicas if "must be" in r.failed_reason), None),
        "the refusal",
    )
    assert "tensor" in report.failed_reason and report.version == service.first
    assert_same(service.answers("shape"), plain)
    service.wait_for(lambda: service.host.snapshot(1.0).version == service.first, "the roll-back")


def test_redis_away_stops_nothing_and_no_row_is_lost(service, plain):
    with service.listening():
        os.kill(service.redis.pid, signal.SIGKILL)
        answers = service.answers("away")
        service.wait_for(lambda: service.redis.pid is not None, "Redis")
    assert_same(answers, plain)
    assert sum(r[0] for r in service.rounds("away").values()) > 0
    assert service.state()["engine"]["feedback"]["dropped"] == 0
    service.pin(service.worse)  # the agent follows again


def test_an_engine_that_is_killed_takes_up_the_services_drafter_when_it_is_back(service, plain):
    """vLLM ends with its engine, whatever the plugin does; what is started in its place needs nobody's word."""
    service.pin(service.worse)
    children = psutil.Process(service.vllm.pid).children(recursive=True)
    engine = next(p for p in children if "EngineCore" in " ".join(p.cmdline()) or "EngineCore" in p.name())
    engine.send_signal(signal.SIGKILL)
    service.wait_for(lambda: not service.vllm.is_alive(), "the end of vLLM", 90.0)
    service.vllm.stop()
    service.vllm = service.serve().wait(900.0)
    assert service.state()["engine"]["version"] == service.worse, "before its first request"
    with service.listening():
        assert_same(service.answers("back"), plain)
    assert kept(service.rounds("back")) < 1.3
    assert json.loads(json.dumps(service.state()))["report"]["failed_gen"] is None
