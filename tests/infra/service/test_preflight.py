"""Tests of the preflight: the same answers and refusals from a process of its own, and no torch in the one that serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import ray

from paceline.config import PolicyConfig, ServiceConfig
from paceline.errors import ConfigError, DrafterMismatchError
from paceline.infra.app import run_service
from paceline.infra.service.preflight import Preflight, check_early, cluster_address, preflight
from paceline.paths import BUNDLED_DRAFTER, bundled, service_home
from tests.helpers import refusing_store

ALONE = """
import json, sys
from paceline.config import ServiceConfig
from paceline.infra import app
from paceline.infra.service.preflight import preflight
for values in json.load(sys.stdin):
    try:
        print(preflight(ServiceConfig(device="auto", **values)))
    except Exception as e:
        print(type(e).__name__, e)
print("torch" in sys.modules, "transformers" in sys.modules)
"""


@dataclass(frozen=True)
class Alone:
    """What one process without torch got for answers, and whether it had torch and transformers afterwards."""

    folder: Path
    """Holds a drafter of another shape, `wrong`, and a target of a family that is not served, `gpt2`."""
    whole: str
    plain: str
    wrong_drafter: str
    wrong_model: str
    loaded: str


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Alone:
    folder = tmp_path_factory.mktemp("preflight")
    (folder / "wrong").mkdir()
    for file in bundled(BUNDLED_DRAFTER).iterdir():
        (folder / "wrong" / file.name).write_bytes(file.read_bytes())
    text = (folder / "wrong" / "config.json").read_text(encoding="utf-8")
    (folder / "wrong" / "config.json").write_text(text.replace('"hidden_size": ', '"hidden_size": 1'), encoding="utf-8")
    (folder / "gpt2").mkdir()
    (folder / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    asked = [
        {"data_dir": str(folder / "alone")},
        {"data_dir": str(folder / "plain"), "drafter": "none"},
        {"data_dir": str(folder / "refused"), "drafter": str(folder / "wrong")},
        {"data_dir": str(folder / "refused"), "drafter": "none", "model": str(folder / "gpt2")},
    ]
    done = subprocess.run(
        [sys.executable, "-c", ALONE], input=json.dumps(asked), capture_output=True, text=True, check=True, timeout=300
    )
    return Alone(folder, *done.stdout.splitlines())


@pytest.mark.slow
def test_the_process_that_serves_gets_the_answers_without_torch(alone):
    here = preflight(ServiceConfig(device="auto", data_dir=str(alone.folder / "here")))
    assert here.first_version and here.device in ("cpu", "cuda")
    assert (alone.whole, alone.loaded) == (repr(here), "False False")
    assert [p.name for p in (service_home(alone.folder / "alone", "paceline") / "registry").iterdir()] == [
        p.name for p in (service_home(alone.folder / "here", "paceline") / "registry").iterdir()
    ]
    assert alone.plain == repr(Preflight(device=here.device))
    assert not (alone.folder / "plain").exists()


def test_a_refusal_says_the_same_from_a_process_of_its_own(alone, tmp_path):
    with pytest.raises(DrafterMismatchError) as refused:
        preflight(ServiceConfig(drafter=str(alone.folder / "wrong"), data_dir=str(tmp_path / "here")))
    assert alone.wrong_drafter == f"DrafterMismatchError {refused.value}"
    with pytest.raises(ConfigError) as refused_model:
        preflight(ServiceConfig(model=str(alone.folder / "gpt2"), drafter="none"))
    assert alone.wrong_model == f"ConfigError {refused_model.value}"


def test_a_data_folder_that_cannot_be_made_is_refused_before_the_models_are_checked(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"data_dir must be a folder that can be written, got .*file"):
            check_early(ServiceConfig(port=0, data_dir=str(folder)))


def test_a_store_that_refuses_is_named_with_its_reason(tmp_path):
    config = ServiceConfig(device="cpu", data_dir=str(tmp_path / "data"), store_url=refusing_store.URL)
    said = rf"^store_url must .*'{refusing_store.URL}': the store failed: NoCredentials"
    with pytest.raises(ConfigError, match=said):
        preflight(config)


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


ENDED = """
import sys, time
from paceline.config import ServiceConfig
from paceline.infra.service.preflight import preflight
def check():
    raise KeyboardInterrupt
began = time.monotonic()
try:
    preflight(ServiceConfig(device="cpu", data_dir=sys.argv[1]), check)
except KeyboardInterrupt:
    print(time.monotonic() - began)
"""


def test_a_start_that_should_end_does_not_wait_for_the_models_to_be_checked(tmp_path):
    command = [sys.executable, "-c", ENDED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert float(done.stdout) < 2.0 and not done.stderr


@pytest.mark.parametrize(("given", "variable", "found"), [
    (None, None, None), (None, "", None), (None, "local", None), ("local", "10.0.0.1:6379", None), (None, "auto", "auto"),
    ("10.0.0.1:6379", "local", "10.0.0.1:6379"),
])  # fmt: skip
def test_a_ray_of_ones_own_is_no_cluster(given, variable, found, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    assert cluster_address(ServiceConfig(ray_address=given)) == found
