"""Attached engines: the control plane of replicas that others run begins with their first report, and ends without them."""

import ssl
import threading
import time

import httpx
import pytest
import ray

from paceline.config import AttachOptions, PolicyConfig, ServeOptions, ServiceConfig
from paceline.contracts import EngineFacts, ReplicaReport
from paceline.errors import ConfigError
from paceline.infra.app import attach_forever, http_options, service_url, start_ray
from paceline.infra.service.attached import Attached, put_first_drafter, wait_for_engine
from paceline.infra.service.stores import StorePaths
from paceline.infra.state.desired import read_desired, write_report
from paceline.infra.state.redis_clients import Keys, patient_client
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.machine import free_port
from tests.helpers.service_load import make_certificate

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
    cert, key = map(str, make_certificate(tmp_path))
    config = config_of(redis, tmp_path, route_prefix="/other", tls_cert=cert, tls_key=key)
    keys, stop = Keys("other"), threading.Event()
    first = put_first_drafter(config)

    def keep_reporting() -> None:
        with patient_client(redis.url) as client:
            while not stop.wait(0.5):
                write_report(client, keys, report(FACTS))

    assert start_ray(config)
    thread = threading.Thread(target=keep_reporting)
    thread.start()
    attached = Attached(config, first, FACTS, http_options(config))
    http = httpx.Client(verify=ssl.create_default_context(cafile=cert), timeout=10.0)
    try:
        assert attached.config.gate_chain == 5, "the gate replays chains as long as the engine's"
        url, state = service_url(config), {}
        assert url == f"https://127.0.0.1:{config.port}/other"
        deadline = time.monotonic() + 120.0
        while not state.get("replicas") and time.monotonic() < deadline:
            try:
                state = http.get(f"{url}/paceline/state").json()
            except httpx.HTTPError:
                time.sleep(0.5)
        assert state["first_version"] == state["version"] == first.version
        assert [r["replica_id"] for r in state["replicas"]] == ["v"]
        assert http.get(f"{url}/dashboard").status_code == 200
        found = http.get(f"{url}/metrics")
        assert found.status_code == 200 and 'paceline_controller_redis_up{model="other"} 1.0' in found.text
        refused = http.post(f"{url}/paceline/pin", json={"version": 5})
        assert refused.status_code == 400 and "version" in refused.json()["error"]["message"]
        assert http.get(url.removesuffix("/other") + "/dashboard").status_code == 404, "another service's address"
        with pytest.raises(httpx.HTTPError):  # tokens never travel in the clear
            httpx.get(url.replace("https", "http") + "/paceline/state", timeout=10.0)
        with patient_client(redis.url) as client:
            assert read_desired(client, keys).first_version == first.version
    finally:
        stop.set()
        thread.join()
        attached.close()
        ray.shutdown()
    with pytest.raises(httpx.HTTPError):
        http.get(f"{url}/paceline/state")
    http.close()


@pytest.mark.parametrize(
    ("host", "there"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("fd00::2", "[fd00::2]")],
)
def test_a_service_says_where_it_is_reached(host, there):
    url = service_url(ServiceConfig(host=host, port=8000, route_prefix="/"))
    assert url == f"http://{there}:8000" and str(httpx.URL(f"{url}/v1")) == f"{url}/v1"


@pytest.mark.parametrize(
    "setting", [{"num_replicas": 2}, {"autoscaling.max_replicas": 2}, {"engine.tree.mix": "suffix"}]
)
def test_options_of_an_engine_that_others_run_are_refused(setting):
    with pytest.raises(ConfigError, match="Paceline's own engine"):
        AttachOptions(serve=ServeOptions(changes={"redis_url": "redis://x", **setting}))
    assert (
        AttachOptions(serve=ServeOptions(changes={"policy.policy": "never"})).serve.service().policy.policy == "never"
    )


def test_what_cannot_be_used_is_refused_before_anything_starts(redis, tmp_path, caplog):
    over = config_of(
        redis, tmp_path, token_file=str(tmp_path / "none"), policy=PolicyConfig(ends_at="2020-01-01T00:00Z")
    )
    with pytest.raises(ConfigError, match="token_file"):
        attach_forever(over, None)
    assert "policy.ends_at=2020-01-01T00:00Z is over" in caplog.text
    config = config_of(redis, tmp_path, token_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="token_file"):
        attach_forever(config, None)
    with pytest.raises(ConfigError, match="tls_cert and tls_key"):
        attach_forever(config_of(redis, tmp_path, tls_cert="none.pem", tls_key="none.pem"), None)
    for store, match in (
        ("memory://x", "vllm: its plugin reads"),
        ("there", "has no ://"),
        ("gs9://x", "store_url must be"),
    ):
        with pytest.raises(ConfigError, match=match):
            attach_forever(config_of(redis, tmp_path, store_url=store), None)
    assert not StorePaths.of(config).home.exists()
