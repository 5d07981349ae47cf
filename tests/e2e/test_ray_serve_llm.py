"""vLLM under Ray Serve LLM as a replica of a service: its server starts the agent, and what a `vllm serve` does, it does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from paceline.adapt.data.trace_store import TraceStore
from paceline.machine import free_port
from paceline.paths import TRACES, bundled
from tests.helpers.vllm_python import PYTHON, vllm_marks
from tests.helpers.vllm_service import K, Service, assert_same, kept, running

pytestmark = vllm_marks(1800)
VARIABLES = {
    "VLLM_PLUGINS": "paceline", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}  # fmt: skip


class RayServeLlm:
    """A Ray cluster with one replica of Ray Serve LLM, on the configuration that docs/api/vllm.md shows."""

    model = "target"

    def __init__(self, service: Service) -> None:
        port = free_port()
        self.url, self._log = f"http://127.0.0.1:{port}", service.log
        llm = {
            "model_loading_config": {"model_id": self.model, "model_source": str(bundled("target"))},
            "server_cls": "paceline_vllm.ray_llm:PacelineServer",
            "accelerator_config": {"kind": "cpu"}, "placement_group_config": {"bundles": [{"CPU": 1}]},
            "runtime_env": {"env_vars": VARIABLES}, "experimental_configs": {"num_ingress_replicas": 1},
            "deployment_config": {"num_replicas": 1, "health_check_period_s": 2},
            "engine_kwargs": {
                "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8,
                "speculative_config": {"method": "eagle3", "model": str(service.served), "num_speculative_tokens": K},
                "weight_transfer_config": {"backend": "paceline"},
                "scheduler_cls": "paceline_vllm.scheduler.PacelineScheduler",
                "additional_config": {"paceline": service.settings},
            },
        }  # fmt: skip
        file = service.folder / "serve.yaml"
        application = {
            "name": "llm",
            "route_prefix": "/",
            "import_path": "ray.serve.llm:build_openai_app",
            "args": {"llm_configs": [llm]},
        }
        document = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
        file.write_text(yaml.safe_dump(document))
        around = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "RAY_"))}
        main = Path(__file__).parents[1] / "helpers" / "ray_llm.py"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [PYTHON, str(main), str(file)], stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
                env={**around, "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}, cwd=service.folder,
            )  # fmt: skip

    def wait(self, timeout_s: float) -> RayServeLlm:
        deadline = time.monotonic() + timeout_s
        while "it serves" not in self._log.read_text(errors="replace"):
            assert self._process.poll() is None and time.monotonic() < deadline, self._log.read_text()[-3000:]
            time.sleep(0.5)
        return self

    def processes(self, word: str) -> list[psutil.Process]:
        """Those of this cluster whose command has a word."""
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if word in " ".join([process.name(), *process.cmdline()]):
                    found.append(process)
        return found

    def say(self, service: Service) -> dict[str, Any]:
        """What a `vllm serve` says, from the replica's latest report: the ingress has no route to a replica's own."""
        time.sleep(2.0)  # counters are told every second
        (report,) = service.host.snapshot(1.0).replicas
        return {
            "engine": {
                "version": report.slots.get("draft"),
                "feedback": {"produced": 0, "delivered": 0, "dropped": 0, **report.counters},
            }
        }

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("ray_llm"), RayServeLlm) as service:
        yield service


def test_a_replica_follows_the_service_and_tells_it_all(service: Service) -> None:
    (report,) = service.wait_for(lambda: service.host.snapshot(1.0).replicas, "the report")
    assert (report.engine.kind, report.engine.max_draft_tokens, report.version) == ("vllm", K, service.first)
    plain = service.answers("plain", group="plain")
    with service.listening():
        before = service.host.snapshot(1.0).feedback
        answers = service.answers("first")
        service.pin(service.worse)
        after_swap = service.answers("worse")
    assert_same(answers, plain)
    assert_same(after_swap, plain)
    first, worse = service.rounds("first"), service.rounds("worse")
    assert len(first) == len(worse) == len(plain)
    assert kept(first) > 1.7 and kept(worse) < 1.3, "the drafter that the service wanted is what drafted"
    after = service.host.snapshot(2.0).feedback
    assert sum(r[0] for r in [*first.values(), *worse.values()]) == after.delivered - before.delivered
    assert (after.missing_batches, after.lost_entries) == (0, 0)
    store = TraceStore(service.home / TRACES)
    service.wait_for(lambda: any(s.num_rows for s in store.list_shards("tools")), "training text of its worker")


def test_a_replica_that_serve_brings_back_takes_up_the_services_drafter(service: Service) -> None:
    service.pin(service.worse)
    (old,) = service.host.snapshot(1.0).replicas
    service.vllm.processes("EngineCore")[0].kill()

    def is_back() -> bool:
        reports = service.host.snapshot(1.0).replicas
        return [r.version for r in reports if r.replica_id != old.replica_id] == [service.worse]

    service.wait_for(is_back, "another replica", 400.0)
    with service.listening():
        service.answers("back")
    assert kept(service.rounds("back")) < 1.3
