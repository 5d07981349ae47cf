"""`paceline attach --engine sglang`: two SGLangs, as tests/helpers/sglang_server.py has them, are driven by one control plane."""

import json
import os
import subprocess
import sys
import time

import httpx
import pytest

from paceline.config import AttachOptions, ServiceConfig
from paceline.errors import ConfigError
from paceline.infra.engines.sglang_rows import label_of
from paceline.infra.service.attached import FirstDrafter, SglangReplicas
from paceline.infra.state.desired import read_reports
from paceline.infra.state.redis_clients import Keys, patient_client
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.machine import free_port
from tests.helpers.exported import make_drafters
from tests.helpers.sglang_server import SglangDouble

SERVICE = "driven"


@pytest.mark.ray
@pytest.mark.slow
def test_rows_of_both_reach_the_controller_and_a_pinned_version_reaches_both(tmp_path):
    drafters, port, log = make_drafters(tmp_path, SERVICE), free_port(), tmp_path / "log"
    redis = EmbeddedRedis(tmp_path / "redis").start()
    doubles = [SglangDouble(drafters.served, drafters.target, tmp_path / name) for name in ("records-a", "records-b")]
    command = [
        sys.executable, "-m", "paceline.cli", "attach", "--engine", "sglang", "--url", doubles[0].url, "--url", doubles[1].url,
        "--redis-url", redis.url, "--data-dir", str(tmp_path), "--drafter", "eagle3", "--model-name", SERVICE,
        "--port", str(port), "--window-s", "5", "--admin-token", "operator-token", "--policy", "never", "-v",
    ]  # fmt: skip
    url, state, sent = f"http://127.0.0.1:{port}", {}, 0
    with doubles[0] as a, doubles[1] as b, log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=dict(os.environ))

        def wait_for(is_so, what, timeout_s=120.0):
            nonlocal state, sent
            deadline = time.monotonic() + timeout_s
            while not is_so(state):
                assert process.poll() is None and time.monotonic() < deadline, (
                    f"{what}: {json.dumps(state)[:3000]} {log.read_text()[-3000:]}"
                )
                for double in (a, b):
                    if label_of(double.weight_version) != ("", ""):
                        double.finish(f"{double.records.name}-{sent}", [2, 1, 0], bucket="code")
                sent += 1
                time.sleep(0.3)
                try:
                    state = httpx.get(f"{url}/paceline/state", timeout=10.0).json()
                except httpx.HTTPError:
                    continue

        def rounds(seen):
            return sum(g["rounds"] for g in seen.get("buckets", {}).get("code", {}).get("recent", {}).values())

        def versions():
            return {label_of(double.weight_version)[1] for double in (a, b)}

        try:
            wait_for(lambda s: len(s.get("replicas", ())) == 2, "the reports of both")
            assert {r["engine"]["kind"] for r in state["replicas"]} == {"sglang"}
            wait_for(lambda s: "" not in versions(), "what the requests of both count as")  # reports may come before it
            assert versions() == {drafters.first} == {state["first_version"]}
            wait_for(lambda s: rounds(s) > 50, "the rows of both")
            groups = [g for g in (state["buckets"]["code"].get(name) for name in ("adaptive", "static")) if g]
            assert all(g["acceptance_length"] == 2.0 for g in groups), groups
            assert all(r["counters"]["delivered"] > 0 for r in state["replicas"])
            answer = httpx.post(
                f"{url}/paceline/pin", json={"version": drafters.other}, headers={"authorization": "Bearer operator-token"}, timeout=30.0
            )  # fmt: skip
            assert answer.status_code == 200, answer.text
            wait_for(lambda s: versions() == {drafters.other}, "the pinned version")
        finally:
            process.terminate()
            process.wait(60)
            redis.stop()
    assert not a.is_paused and not b.is_paused


@pytest.fixture
def redis(tmp_path):
    server = EmbeddedRedis(tmp_path / "redis").start()
    yield server
    server.stop()


def replicas_of(redis, tmp_path, drafters, *urls):
    config = ServiceConfig(redis_url=redis.url, data_dir=str(tmp_path), model_name=SERVICE, drafter="eagle3")
    first = FirstDrafter(version=drafters.first, target_version=drafters.target_version)
    return SglangReplicas(config, AttachOptions(engine="sglang", url=urls, window_s=5.0), first)


def test_two_that_write_into_one_folder_are_refused(redis, tmp_path):
    drafters = make_drafters(tmp_path, SERVICE)
    with (
        SglangDouble(drafters.served, drafters.target, tmp_path / "records") as a,
        SglangDouble(drafters.served, drafters.target, tmp_path / "records") as b,
        pytest.raises(ConfigError, match="--export-metrics-to-file-dir of its own"),
        replicas_of(redis, tmp_path, drafters, a.url, b.url) as driven,
    ):
        driven.wait(lambda s: False)


def test_one_that_comes_later_is_not_waited_for_and_gets_its_agent(redis, tmp_path):
    drafters, port = make_drafters(tmp_path, SERVICE), free_port()
    with SglangDouble(drafters.served, drafters.target, tmp_path / "a") as a, patient_client(redis.url) as client:
        with replicas_of(redis, tmp_path, drafters, f"http://127.0.0.1:{port}", a.url) as driven:
            driven.wait(lambda s: pytest.fail("one answers"))
            assert len(read_reports(client, Keys(SERVICE))) == 1
            with SglangDouble(drafters.served, drafters.target, tmp_path / "b", port=port):
                deadline = time.monotonic() + 30.0
                while len(read_reports(client, Keys(SERVICE))) < 2 and time.monotonic() < deadline:
                    time.sleep(0.1)
                assert {r.replica_id for r in read_reports(client, Keys(SERVICE))} >= {f"sglang-127.0.0.1-{port}"}
        assert read_reports(client, Keys(SERVICE)) == []


def test_nothing_is_waited_for_once_it_is_stopped_or_with_another_engine(redis, tmp_path):
    drafters = make_drafters(tmp_path, SERVICE)
    with replicas_of(redis, tmp_path, drafters, f"http://127.0.0.1:{free_port()}") as driven:
        driven.wait(lambda s: True)
    config = ServiceConfig(redis_url=redis.url)
    with SglangReplicas(config, AttachOptions(), FirstDrafter(version="v", target_version="t")) as driven:
        driven.wait(lambda s: pytest.fail("there is nothing to wait for"))


@pytest.mark.parametrize(("values", "rule"), [
    ({"engine": "sglang"}, "url must be given with engine sglang"),
    ({"url": ("http://a:1",)}, "url must be given with engine sglang"),
    ({"engine": "sglang", "url": ("a:1",)}, "url must be one such as"),
    ({"engine": "sglang", "url": ("http://a:1", "http://a:1")}, "url must name each SGLang once"),
    ({"window_s": 7.0}, "window-s must be a multiple of 5"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(values, rule):
    with pytest.raises(ConfigError, match=rule):
        AttachOptions(**values)
