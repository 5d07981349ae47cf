"""Tests of the preflight: the same answers and refusals from a process of its own, and no torch in the one that serves."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from paceline.config import PolicyConfig, ServiceConfig
from paceline.errors import ConfigError, DrafterMismatchError
from paceline.infra.app import run_service
from paceline.infra.service.preflight import Preflight, preflight
from paceline.paths import BUNDLED_DRAFTER, bundled, service_home

ALONE = """
import sys
from paceline.config import PolicyConfig, ServiceConfig
from paceline.infra import app
from paceline.infra.service.preflight import preflight
try:
    print(preflight(ServiceConfig(device="auto", data_dir=sys.argv[1], **dict(a.split("=") for a in sys.argv[2:]))))
except Exception as e:
    print(type(e).__name__, e)
print("torch" in sys.modules, "transformers" in sys.modules)
"""


def alone(data_dir: Path, *values: str) -> list[str]:
    """What a process without torch gets for an answer, and whether it has torch and transformers afterwards."""
    command = [sys.executable, "-c", ALONE, str(data_dir), *values]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.splitlines()


def test_the_process_that_serves_gets_the_answers_without_torch(tmp_path):
    here = preflight(ServiceConfig(device="auto", data_dir=str(tmp_path / "here")))
    assert here.first_version and here.device in ("cpu", "cuda")
    assert alone(tmp_path / "alone") == [repr(here), "False False"]
    assert [p.name for p in (service_home(tmp_path / "alone", "paceline") / "registry").iterdir()] == [
        p.name for p in (service_home(tmp_path / "here", "paceline") / "registry").iterdir()
    ]
    assert alone(tmp_path / "plain", "drafter=none")[0] == repr(Preflight(device=here.device))
    assert not (tmp_path / "plain").exists()


def test_a_refusal_says_the_same_from_a_process_of_its_own(tmp_path):
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for file in bundled(BUNDLED_DRAFTER).iterdir():
        (wrong / file.name).write_bytes(file.read_bytes())
    text = (wrong / "config.json").read_text(encoding="utf-8")
    (wrong / "config.json").write_text(text.replace('"hidden_size": ', '"hidden_size": 1'), encoding="utf-8")
    with pytest.raises(DrafterMismatchError) as refused:
        preflight(ServiceConfig(drafter=str(wrong), data_dir=str(tmp_path / "here")))
    assert alone(tmp_path / "alone", f"drafter={wrong}")[0] == f"DrafterMismatchError {refused.value}"

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    with pytest.raises(ConfigError) as refused_model:
        preflight(ServiceConfig(model=str(tmp_path / "model"), drafter="none"))
    found = alone(tmp_path / "alone", f"model={tmp_path / 'model'}", "drafter=none")
    assert found[0] == f"ConfigError {refused_model.value}"


def test_a_gpu_that_is_not_there_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("paceline.infra.service.preflight.has_gpu_driver", lambda: True)
    config = ServiceConfig(device="cuda", port=0, data_dir=str(tmp_path / "data"))
    with pytest.raises(ConfigError, match=r"device must be cpu or auto where torch .* finds no GPU"):
        run_service(config)
    assert not (tmp_path / "data").exists() and not ray.is_initialized()
    monkeypatch.setenv("RAY_ADDRESS", "ray.internal:6379")  # there the nodes of the cluster have the GPUs
    assert preflight(replace(config, drafter="none")).device == "cuda"


OWN_POLICY = """
import sys
from paceline.config import PolicyConfig, ServiceConfig
from paceline.infra.service.preflight import preflight
policy = PolicyConfig(policy="talkative:Cheapest")
print(bool(preflight(ServiceConfig(device="cpu", data_dir=sys.argv[1], policy=policy)).first_version))
"""


def test_a_policy_that_cannot_be_made_is_refused_before_the_service_starts(tmp_path, monkeypatch):
    lost = PolicyConfig(policy="no_such_module:Rule")
    with pytest.raises(ConfigError, match="no_such_module:Rule' must be importable"):
        preflight(ServiceConfig(device="cpu", data_dir=str(tmp_path / "data"), policy=lost))
    assert not (tmp_path / "data").exists()
    plain = preflight(ServiceConfig(device="cpu", drafter="none", policy=lost))
    assert plain.first_version == "", "nothing is decided there"

    (tmp_path / "talkative.py").write_text("print('hello')\nfrom tests.helpers.own_policy import Cheapest\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-c", OWN_POLICY, str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == "True\n", done.stderr[-2000:]
