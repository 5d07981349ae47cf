"""Tests of the preflight: the same answers and refusals from a process of its own, and no torch in the one that serves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config import ServiceConfig
from paceline.errors import ConfigError, DrafterMismatchError
from paceline.infra.service.preflight import Preflight, preflight
from paceline.paths import BUNDLED_DRAFTER, bundled

ALONE = """
import sys
from paceline.config import ServiceConfig
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
    assert [p.name for p in (tmp_path / "alone" / "registry").iterdir()] == [
        p.name for p in (tmp_path / "here" / "registry").iterdir()
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
