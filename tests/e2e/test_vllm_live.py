"""A real vLLM as a replica of a service: it follows the desired state, and tells its rounds and features, through everything.

`make test-vllm` installs it and sets PACELINE_VLLM_PYTHON; without that these tests are skipped. One server for most of
them: what they check is how it goes on, and each begins with the first drafter.
"""

import hashlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.gate.shadow import fixed_rounds, replay_rounds
from paceline.adapt.online.trainer import ShadowConfig
from paceline.contracts import ASKED_GROUP, Group
from paceline.infra.engines.vllm_server import VllmServer
from paceline.paths import TRACES, bundled
from paceline.serving.loading.families import build_drafter, load_drafter, read_drafter_files
from tests.helpers.vllm_python import PYTHON, vllm_marks
from tests.helpers.vllm_service import K, Service, assert_same, kept, running

pytestmark = vllm_marks(1800)


class Alone(VllmServer):
    """`vllm serve`."""

    model = str(bundled("target"))

    def __init__(self, service: Service) -> None:
        super().__init__(
            PYTHON, target=bundled("target"), drafter=service.served, method="eagle3", num_draft_tokens=K,
            settings=service.settings, log=service.log, arguments=("--max-model-len", "512", "--max-num-seqs", "8"),
        )  # fmt: skip

    def say(self, service: Service) -> dict:
        return httpx.get(f"{self.url}/paceline/state", timeout=60.0).json()


@pytest.fixture(scope="module", params=["v1", "v2"])
def service(request, tmp_path_factory):
    """With either of vLLM's model runners; the second one's Triton is interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "v2":
            patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
            patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "helpers" / "triton_cpu"))
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # vLLM's own routes for weights
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # it would compile for minutes what counts logprobs
        with running(tmp_path_factory.mktemp("vllm"), Alone) as service:
            yield service


@pytest.fixture(autouse=True)
def begins_with_the_first_drafter(service):
    service.pin(service.first)


@pytest.fixture(scope="module")
def plain(service):
    """Answers without a drafter."""
    return service.answers("plain", group="plain")


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
    with service.listening():
        before = service.host.snapshot(1.0).feedback
        answers = service.answers("walk")
    after = service.host.snapshot(2.0).feedback
    told = service.rounds("walk")
    assert sum(r[0] for r in told.values()) == after.delivered - before.delivered
    assert (after.missing_batches, after.lost_entries) == (0, 0)  # one sent twice is counted once

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


def test_prefixes_that_another_drafter_cached_are_evidence_of_nothing_and_change_no_answer(service):
    """A drafter's own K/V of a cached prefix are those of the drafter before it."""
    prompts = [(p * 24)[:400] for p in service.prompts()]  # three blocks, of which two are taken
    plain = service.answers("long", group="plain", prompts=prompts)
    own, state = read_drafter_files(bundled("eagle3"), service.target)
    rows = state["qkv_proj.weight"]
    cached = own["num_heads"] * own["head_dim"]  # rows of K and V begin there
    other = service.registry.put(
        {**state, "qkv_proj.weight": torch.cat([rows[:cached], torch.roll(rows[cached:], 7, 0)])},
        drafter_type=own["drafter_type"], config=own, target_version=service.target.version, parent=service.first,
    ).version  # fmt: skip
    service.pin(other)
    service.answers("fill", prompts=prompts, cache_salt="stale")
    service.pin(service.first)
    before = service.state()["engine"]["num_stale"]
    with service.listening():
        stale = service.answers("stale", prompts=prompts, cache_salt="stale")
        num_stale = service.state()["engine"]["num_stale"] - before
        service.answers("other", prompts=prompts, cache_salt="fresh")
    assert num_stale == len(prompts)
    assert_same(stale, plain)
    groups = {i.split("-")[1]: cell.group for cell in service.cells for i in cell.requests}
    assert groups == {"stale": ASKED_GROUP, "other": Group.ADAPTIVE}
    stale_kept, fresh_kept = kept(service.rounds("stale")), kept(service.rounds("other"))
    print(f"\nacceptance length behind a stale prefix {stale_kept:.3f}, behind none {fresh_kept:.3f}")


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
