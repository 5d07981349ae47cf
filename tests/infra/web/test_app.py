"""The service as `paceline serve` runs it: Ray, Redis, controller, replica and the openai client, on one computer."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import ray
import torch
from ray._private import ray_constants

from paceline.adapt.versions.registry import DrafterRegistry
from paceline.config import EngineConfig, PolicyConfig, ServiceConfig, TraceConfig, TrainerResources, to_dict
from paceline.errors import ConfigError
from paceline.infra.app import Service, check_gpus, claim_port, run_service, stop_service
from paceline.infra.web.engine_metrics import render_metrics
from paceline.serving.loading.families import read_drafter_files, save_drafter
from paceline.serving.specblock.model import SpecBlockConfig, SpecBlockModel
from paceline.serving.target_model.model import TargetModel
from tests.helpers.fakes import greedy_continuation, tiny_model, tiny_tokenizer

VOCAB, WIDTH = 300, 32


def write_model(folder: Path) -> None:
    tiny_model(vocab=VOCAB, layers=6, width=WIDTH).save_pretrained(folder)
    tiny_tokenizer(VOCAB).save_pretrained(folder)


def write_drafter(folder: Path, target: TargetModel, seed: int = 0) -> None:
    torch.manual_seed(seed)
    model = SpecBlockModel(
        SpecBlockConfig(
            hidden_size=16, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=VOCAB,
            feature_size=target.feature_size, embed_size=WIDTH, rank_hidden=8,
        )
    )  # fmt: skip
    save_drafter(folder, model, target.version)


def wait_for(read: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := read()):
        assert time.monotonic() < deadline, "condition did not come true in time"
        time.sleep(0.1)
    return value


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


def run_as_client(address: str, **environment: str) -> subprocess.Popen[str]:
    """A driver in a process of its own that tries to run code in the Ray at `address`."""
    code = (
        "import sys, ray\n"
        "ray.init(address=sys.argv[1], log_to_driver=False)\n"
        "print('ran', ray.get(ray.remote(lambda: 6 * 7).options(num_cpus=0).remote()))\n"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    # without this variable a client looks for a Ray on 127.0.0.1 at the computer's outer address
    environment = {**kept, ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", code, address], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServiceConfig:
    root = tmp_path_factory.mktemp("service")
    write_model(root / "model")
    write_drafter(root / "drafter", TargetModel.load(root / "model"))
    return ServiceConfig(
        model=str(root / "model"),
        drafter=str(root / "drafter"),
        model_name="tiny",
        device="cpu",
        data_dir=str(root / "data"),
        port=0,
        engine=EngineConfig(max_running=4, kv_bytes=4 * 2**20, num_threads=1),
        policy=PolicyConfig(policy="never", holdback_percent=0),
        trace=TraceConfig(flush_interval_s=0.2),
    )


@pytest.fixture(scope="module")
def service(config: ServiceConfig) -> Iterator[Service]:
    service = run_service(config)
    yield service
    stop_service(service)


@pytest.fixture(scope="module")
def client(service: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="unused", max_retries=0)


@pytest.mark.ray
@pytest.mark.slow
def test_greedy_answers_over_http_are_the_targets_own(service: Service, client: openai.OpenAI) -> None:
    target = TargetModel.load(service.config.model)
    for group in ("adaptive", "static", "plain"):
        answer = client.completions.create(
            model="tiny", prompt=[5, 9, 33], max_tokens=24, temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
            extra_headers={"x-paceline-group": group, "x-paceline-bucket": "b"},
        )  # fmt: skip
        choice = answer.choices[0].model_dump()
        assert choice["token_ids"] == greedy_continuation(target, [5, 9, 33], 24)
        assert answer.usage is not None and answer.usage.completion_tokens == 24
        has_drafter = answer.paceline["drafter_version"] != ""  # type: ignore[attr-defined]
        assert has_drafter == (group != "plain")


@pytest.mark.ray
@pytest.mark.slow
def test_streams_and_errors_pass_through_serve(service: Service, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    ask: Any = {"model": "tiny", "messages": messages, "max_tokens": 12, "seed": 1, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
    assert "," not in (whole._request_id or ",")
    with pytest.raises(openai.BadRequestError, match="suffix is not supported") as refused:
        client.completions.create(model="tiny", prompt="a", suffix="b")
    assert "," not in (refused.value.request_id or ",")
    assert len(client.completions.create(model="tiny", prompt="a", n=3).choices) == 3
    raw = httpx.post(f"{service.url}/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 3})
    assert raw.text.endswith("data: [DONE]\n\n")


@pytest.mark.ray
@pytest.mark.slow
def test_requests_are_in_the_access_log_under_the_id_that_the_client_saw(
    service: Service, client: openai.OpenAI
) -> None:
    answer = client.completions.create(model="tiny", prompt="a secret", max_tokens=5, extra_body={"ignore_eos": True})
    (log,) = Path(service.config.data_dir).glob("access-*.log")
    text = wait_for(lambda: answer._request_id in (text := log.read_text()) and text)  # type: ignore[operator]
    (line,) = [e for e in map(json.loads, text.splitlines()) if e.get("request_id") == answer._request_id]
    assert (line["status"], line["route"], line["completion_tokens"]) == (200, "/v1/completions", 5)
    assert "secret" not in text


@pytest.mark.ray
@pytest.mark.slow
def test_a_hang_up_ends_the_request_in_the_replica(service: Service) -> None:
    body = {"prompt": "a", "stream": True, "max_tokens": 400, "ignore_eos": True}
    with httpx.Client() as c, c.stream("POST", f"{service.url}/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    wait_for(lambda: httpx.get(f"{service.url}/paceline/state").json()["replica"]["engine"]["num_running"] == 0)
    assert httpx.get(f"{service.url}/paceline/state").json()["replica"]["engine"]["num_aborted"] >= 1


@pytest.mark.ray
@pytest.mark.slow
def test_feedback_reaches_the_controller_and_traces_the_store(service: Service, client: openai.OpenAI) -> None:
    for _ in range(3):
        client.completions.create(model="tiny", prompt="abc", max_tokens=8, extra_body={"ignore_eos": True})

    def folded() -> dict | None:
        state = httpx.get(f"{service.url}/paceline/state").json()
        return state if state["has_controller"] and state["feedback"]["delivered"] > 0 else None

    state = wait_for(folded)
    assert state["version"] == state["first_version"] != ""
    assert state["policy"] == "never"
    wait_for(lambda: list(Path(service.config.data_dir, "traces").rglob("*.safetensors")))


@pytest.mark.ray
@pytest.mark.slow
def test_pin_and_rollback_swap_the_drafter_while_requests_run(
    service: Service, client: openai.OpenAI, tmp_path: Path
) -> None:
    wait_for(lambda: httpx.get(f"{service.url}/paceline/state").json()["has_controller"])
    first = httpx.get(f"{service.url}/paceline/versions").json()["version"]
    target = TargetModel.load(service.config.model)
    write_drafter(tmp_path, target, seed=7)
    settings, state = read_drafter_files(tmp_path)
    registry = DrafterRegistry(Path(service.config.data_dir) / "registry")
    other = registry.put(
        state, drafter_type="specblock", config=settings, target_version=target.version, parent=first
    ).version
    refused = httpx.post(f"{service.url}/paceline/pin", json={"version": "nothing"}, timeout=30)
    assert refused.status_code == 400
    pinned = httpx.post(f"{service.url}/paceline/pin", json={"version": other}, timeout=30)
    assert pinned.status_code == 200, pinned.text
    wait_for(lambda: httpx.get(f"{service.url}/paceline/swap").json()["version"] == other)
    ask: Any = {"model": "tiny", "prompt": "abc", "max_tokens": 4, "extra_headers": {"x-paceline-group": "adaptive"}}
    assert client.completions.create(**ask).paceline["drafter_version"] == other  # type: ignore[attr-defined]
    ask["extra_headers"] = {"x-paceline-group": "static"}
    assert client.completions.create(**ask).paceline["drafter_version"] == first  # type: ignore[attr-defined]
    httpx.post(f"{service.url}/paceline/rollback", json={}, timeout=30).raise_for_status()
    wait_for(lambda: httpx.get(f"{service.url}/paceline/swap").json()["version"] == first)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("path", ["/paceline/state", "/paceline/swap", "/metrics"])
def test_without_tokens_what_the_service_tells_about_itself_stays_on_this_computer(service: Service, path: str) -> None:
    assert httpx.get(f"{service.url}{path}").status_code == 200
    assert httpx.get(f"{service.url}{path}", headers={"host": "rebound.example"}).status_code == 403
    assert httpx.get(f"{service.url}{path}", headers={"x-forwarded-for": "10.0.0.7"}).status_code == 403


@pytest.mark.ray
@pytest.mark.slow
def test_nothing_of_the_service_listens_beyond_loopback(service: Service, client: openai.OpenAI) -> None:
    client.completions.create(model="tiny", prompt="abc", max_tokens=2)
    names, outer = outer_listeners()
    parts = ("gcs_server", "raylet", "Agent", "Proxy", "Replica", "ServeController", "redis")
    assert [p for p in parts if not any(p in name for name in names)] == [], names
    assert outer == []


@pytest.mark.ray
@pytest.mark.slow
def test_ray_runs_nothing_for_a_client_without_its_token(service: Service, tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    assert address.startswith("127.0.0.1:")
    clients = [
        run_as_client(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=os.environ["RAY_AUTH_TOKEN"]),
        run_as_client(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="guess"),
        run_as_client(address, RAY_AUTH_MODE="disabled"),
        run_as_client(address, HOME=str(tmp_path)),
    ]
    invited, *others = [c.communicate(timeout=120)[0] for c in clients]
    assert "ran 42" in invited, invited[-2000:]
    for process, output in zip(clients[1:], others, strict=True):
        assert process.returncode != 0 and "ran" not in output.split()
        assert "Unauthenticated" in output or "AuthenticationError" in output, output[-2000:]


@pytest.mark.ray
@pytest.mark.slow
def test_host_opens_the_http_port_and_no_other(config: ServiceConfig, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from paceline.config import ServiceConfig, build\n"
        "from paceline.infra.app import run_service, stop_service\n"
        "from tests.infra.web.test_app import outer_listeners\n"
        "if __name__ == '__main__':\n"
        "    service = run_service(build(ServiceConfig, __import__('json').loads(sys.argv[1])))\n"
        "    opened = {(ip, port) for ip, port, _ in outer_listeners()[1]}\n"
        "    print('opened', sorted(opened), 'port', service.config.port)\n"
        "    stop_service(service)\n"
    )
    open_to_all = replace(config, host="0.0.0.0", data_dir=str(tmp_path / "data"), model_name="open", api_token="t")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_A")}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(to_dict(open_to_all))],
        env={**environment, "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    (line,) = [e for e in done.stdout.splitlines() if e.startswith("opened")] or [done.stderr[-2000:]]
    port = line.rpartition(" ")[2]
    assert line == f"opened [('0.0.0.0', {port})] port {port}"
    assert not (tmp_path / ".ray").exists()  # the token that Ray would have written is as readable as any other file
    assert "Token authentication" not in done.stderr


@pytest.mark.ray
@pytest.mark.slow
def test_metrics_and_health(service: Service) -> None:
    text = httpx.get(f"{service.url}/metrics").text
    assert "paceline_emitted_tokens_total" in text and "paceline_redis_up 1.0" in text
    assert httpx.get(f"{service.url}/healthz").json()["status"] == "ok"


def test_a_taken_port_is_refused_with_the_fix() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        with pytest.raises(ConfigError, match="choose another"):
            claim_port("127.0.0.1", port)
    assert claim_port("127.0.0.1", 0) > 0


@pytest.mark.parametrize("change", [{"model": "/nowhere"}, {"drafter": "/nowhere"}])
def test_a_wrong_path_is_refused_before_anything_starts(config: ServiceConfig, change: dict) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        run_service(replace(config, **change))


def test_a_gpu_for_training_that_the_replicas_need_is_refused(config: ServiceConfig) -> None:
    trains_on_gpu = replace(config, trainer_resources=TrainerResources(num_gpus=1))
    check_gpus(trains_on_gpu, 1)
    check_gpus(replace(config, device="cuda"), 0)  # the replicas' own need is Ray Serve's to report
    for refused, num_gpus in ((trains_on_gpu, 0), (replace(trains_on_gpu, device="cuda"), 1)):
        with pytest.raises(ConfigError, match="use 0 to train on the CPU"):
            check_gpus(refused, num_gpus)


def test_metrics_without_feedback() -> None:
    body, content_type = render_metrics({"engine": {"num_tokens": 7}})
    assert b"paceline_emitted_tokens_total 7.0" in body
    assert content_type.startswith("text/plain")
