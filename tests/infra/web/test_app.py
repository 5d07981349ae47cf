"""What a service refuses before it starts anything: ports, paths and GPUs that cannot be had."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from paceline.config import EngineConfig, ServiceConfig, TrainerResources
from paceline.errors import ConfigError, PacelineError
from paceline.infra.app import check_gpus, granted_cpus, run_service, with_threads
from paceline.infra.replica.exchange import ReplicaNumbers
from paceline.infra.web.metrics import render_metrics
from paceline.machine import free_port
from tests.helpers.service_load import tiny_config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServiceConfig:
    return tiny_config(tmp_path_factory.mktemp("service"), "tiny")


@pytest.mark.parametrize("change", [{"model": "/nowhere"}, {"drafter": "/nowhere"}])
def test_a_wrong_path_is_refused_before_anything_starts(config: ServiceConfig, change: dict) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        run_service(replace(config, **change))


def test_a_ray_cluster_that_is_not_there_is_refused_at_once(config: ServiceConfig) -> None:
    with pytest.raises(
        PacelineError, match=r"--ray-address.* must name a Ray cluster that runs.*; start one by `ray start"
    ):
        run_service(replace(config, ray_address=f"127.0.0.1:{free_port()}"))


def test_a_gpu_for_training_that_the_replicas_need_is_refused(config: ServiceConfig) -> None:
    trains_on_gpu = replace(config, trainer_resources=TrainerResources(num_gpus=1))
    check_gpus(trains_on_gpu, 1)
    check_gpus(replace(config, device="cuda"), 0)  # the replicas' own need is Ray Serve's to report
    for refused, num_gpus in ((trains_on_gpu, 0), (replace(trains_on_gpu, device="cuda"), 1)):
        with pytest.raises(ConfigError, match="use 0 to train on the CPU"):
            check_gpus(refused, num_gpus)


def test_metrics_without_feedback() -> None:
    body, content_type = render_metrics({"r1": ReplicaNumbers(model="m", counters={"engine": {"num_tokens": 7}})})
    assert b'paceline_emitted_tokens_total{model="m",replica="r1"} 7.0' in body
    assert content_type.startswith("text/plain")


def test_an_engine_has_the_cores_of_the_computer_unless_somebody_chose(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr("paceline.infra.app.granted_cpus", lambda: 99.0)
    config = ServiceConfig(device="cpu")
    assert with_threads(config).engine.num_threads == 6
    assert with_threads(replace(config, num_replicas=4)).engine.num_threads == 1
    assert with_threads(replace(config, num_replicas=9)).engine.num_threads == 1
    assert with_threads(replace(config, device="cuda")).engine.num_threads is None
    chosen = replace(config, engine=EngineConfig(num_threads=3))
    assert with_threads(chosen).engine.num_threads == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert with_threads(config).engine.num_threads is None, "the environment's choice stands"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("paceline.infra.app.granted_cpus", lambda: 2.5)
    assert with_threads(config).engine.num_threads == 2, "a container's share of a large computer"
    monkeypatch.setattr("paceline.infra.app.granted_cpus", lambda: 0.5)
    assert with_threads(config).engine.num_threads == 1


@pytest.mark.parametrize(
    ("own", "files", "cpus"),
    [
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "100000 50000\n"}, 2.0),
        ("5:cpuset:/\n3:cpu,cpuacct:/host/c\n", {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3.0),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ("0::/\n", {}, math.inf),
        (None, {}, math.inf),
    ],
)  # fmt: skip
def test_the_cpus_of_a_control_group_are_its_narrowest_quota(tmp_path, own, files, cpus):
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    if own is not None:
        (tmp_path / "own").write_text(own)
    assert granted_cpus(tmp_path / "fs", tmp_path / "own") == cpus
