"""Attached engines: the control plane of replicas that others run begins with their first report, and ends without them."""

import threading
import time

import httpx
import pytest
import ray

from paceline.config import ServiceConfig
from paceline.contracts import EngineFacts, ReplicaReport
from paceline.errors import ConfigError
from paceline.infra.app import attach_forever, start_ray
from paceline.infra.service.attached import Attached, put_first_drafter, wait_for_engine
from paceline.infra.service.stores import StorePaths
from paceline.infra.state.desired import read_desired, write_report
from paceline.infra.state.redis_clients import Keys, patient_client
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.machine import free_port

FACTS = EngineFacts(
    kind="vllm", draft_shape="chain", max_draft_tokens=5, group_unit="time", window_s=30.0, timing="round", has_features=True
)  # fmt: skip


@pytest.fixture
def redis(tmp_path):
    server = EmbeddedRedis(tmp_path).start()
    yield server
    server.stop()


def config_of(redis, tmp_path, **values):
    return ServiceConfig(
        redis_url=redis.url, data_dir=str(tmp_path), drafter="eagle3", model_name="other", port=free_port(), **values
    )


def report(facts):
    return ReplicaReport(
        replica_id="v", gen=0, version="", slots={}, failed_gen=None, failed_reason="", swap_pause_ms=[], ts=time.time(), engine=facts
    )  # fmt: skip


def test_the_first_engine_is_waited_for_and_those_that_tell_nothing_are_not_it(redis, tmp_path):
    config, keys = config_of(redis, tmp_path), Keys("other")
    assert wait_for_engine(config, lambda s: True) is None
    with patient_client(redis.url) as client:
        write_report(client, keys, report(None))
        assert wait_for_engine(config, lambda s: True) is None
        write_report(client, keys, report(FACTS))
    assert wait_for_engine(config, lambda s: True) == FACTS


def test_the_first_drafter_is_put_into_the_registry_once(redis, tmp_path):
    config = config_of(redis, tmp_path)
    first = put_first_drafter(config)
    assert put_first_drafter(config) == first
    manifests = list((StorePaths.of(config).home / "registry" / "manifests").iterdir())
    assert [m.stem for m in manifests] == [first.version]
    with pytest.raises(ConfigError, match="drafter must have weights"):
        put_first_drafter(ServiceConfig(drafter="lookup", data_dir=str(tmp_path)))


def test_without_a_redis_there_is_nothing_to_attach_to(monkeypatch):
    monkeypatch.delenv("PACELINE_REDIS_URL", raising=False)
    with pytest.raises(ConfigError, match="redis_url"):
        attach_forever(ServiceConfig(), None)


@pytest.mark.ray
@pytest.mark.slow
def test_a_controller_decides_for_engines_that_report(redis, tmp_path):
    config, keys, stop = config_of(redis, tmp_path), Keys("other"), threading.Event()
    first = put_first_drafter(config)

    def keep_reporting() -> None:
        with patient_client(redis.url) as client:
            while not stop.wait(0.5):
                write_report(client, keys, report(FACTS))

    assert start_ray(config)
    thread = threading.Thread(target=keep_reporting)
    thread.start()
    attached = Attached(config, first, FACTS)
    try:
        assert attached.config.gate_chain == 5, "the gate replays chains as long as the engine's"
        url, state = f"http://127.0.0.1:{config.port}", {}
        deadline = time.monotonic() + 120.0
        while not state.get("replicas") and time.monotonic() < deadline:
            try:
                state = httpx.get(f"{url}/paceline/state", timeout=10.0).json()
            except httpx.HTTPError:
                time.sleep(0.5)
        assert state["first_version"] == state["version"] == first.version
        assert [r["replica_id"] for r in state["replicas"]] == ["v"]
        assert httpx.get(f"{url}/dashboard", timeout=10.0).status_code == 200
        with patient_client(redis.url) as client:
            assert read_desired(client, keys).first_version == first.version
    finally:
        stop.set()
        thread.join()
        attached.close()
        ray.shutdown()
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{url}/paceline/state", timeout=2.0)
