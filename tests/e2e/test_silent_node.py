"""A service on computers of which one falls silent under load: its packets are lost, and no connection of it ends."""

from __future__ import annotations

import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.bench.chaos.load import Load, wait_for
from paceline.config import IngressConfig, to_dict
from paceline.infra.controller.actor import HEAD_ROLE, ROLE_LABEL
from paceline.infra.state.redis_server import find_redis_binary
from tests.helpers.namespaces import Computers, namespaces_problem
from tests.helpers.service_load import HTTP, NUM_PROMPTS, RESTART_S, ask, tiny_config

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]
NAME, WIDTH, NUM_TOKENS = "silent", 4, 48
PYTHON = (sys.executable, "-m")
ENGINE, INGRESS = f"ray::ServeReplica:{NAME}:engine", f"ray::ServeReplica:{NAME}:ingress"
NOTICES = {
    "RAY_health_check_failure_threshold": "3", "RAY_health_check_period_ms": "2000", "RAY_health_check_timeout_ms": "3000",
}  # fmt: skip
"""With these GCS gives a node up after 15 s, by itself after 65."""
CUT_S = 25.0


async def ask_one(client: Any, i: int) -> Any:
    return await ask(client, i % NUM_PROMPTS, stream=i % 2 == 0, num_tokens=NUM_TOKENS)


def test_a_node_that_falls_silent_takes_only_what_came_through_it(tmp_path: Path) -> None:
    if (problem := namespaces_problem()) is not None:
        pytest.skip(problem)
    token, password = secrets.token_hex(32), secrets.token_hex(8)
    env = {**os.environ, **NOTICES, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    with Computers(("head", "a", "b")) as computers, (tmp_path / "log").open("w") as log:
        at = computers.addresses
        redis_url = f"redis://:{password}@{at['head']}:7000/0"
        config = tiny_config(
            tmp_path, NAME, redis_url=redis_url, ray_address=f"{at['head']}:6390", resume=True, host=at["head"], port=8000,
            ingress=IngressConfig(num_replicas=2),
        )  # fmt: skip
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
        options: dict[str, Any] = {"stdout": log, "stderr": log, "cwd": tmp_path}

        def ray_start(name: str, *words: str) -> None:
            home = tmp_path / name
            home.mkdir()
            words = ("start", f"--node-ip-address={at[name]}", "--object-store-memory=80000000", *words)
            done = computers.start(
                name, [*PYTHON, "ray.scripts.scripts", *words], env={**env, "HOME": str(home)}, **options
            )
            assert done.wait(RESTART_S) == 0

        server = [find_redis_binary(), "--bind", at["head"], "--port", "7000", "--requirepass", password, "--save", ""]
        computers.start("head", server, env=env, **options)
        ray_start("head", "--head", "--port=6390", "--num-cpus=0", "--include-dashboard=false", f"--labels={ROLE_LABEL}={HEAD_ROLE}")  # fmt: skip
        for name in ("a", "b"):
            ray_start(name, f"--address={at['head']}:6390", "--num-cpus=2", f"--labels={ROLE_LABEL}=serve")
        command = [*PYTHON, "paceline.cli.main", "serve", "--config", str(tmp_path / "config.yaml")]
        computers.start("head", command, env={**env, "HOME": str(tmp_path / "head")}, **options)
        url = f"http://{at['head']}:8000"
        wait_for(lambda: HTTP.get(f"{url}/readyz").status_code == 200, "the service", RESTART_S)
        assert computers.where(ENGINE) == ["a", "b"] and "head" not in computers.where(INGRESS)
        with Load(url, ask_one, width=WIDTH, pause_s=0.2) as load:
            wait_for(lambda: len(load.answers) > 4 * WIDTH, "answers of both")
            with computers.cut("b"):
                num_before, until = len(load.answers), time.monotonic() + CUT_S
                wait_for(lambda: time.monotonic() > until and len(load.answers) > num_before + 4 * WIDTH, "answers")
            num_meanwhile = len(load.answers)
            wait_for(lambda: len(load.answers) > num_meanwhile + 4 * WIDTH, "answers afterwards")
        for answer in load.answers:
            answer.check_explicit()  # type: ignore[attr-defined]
        broken = [i for i, a in enumerate(load.answers) if not a.looks_complete]
        assert len(broken) <= WIDTH, [(i, load.answers[i].status, load.answers[i].error) for i in broken]
        assert not [i for i in broken if i > num_meanwhile]
