"""The loop on a real vLLM: traffic shifts, the controller decides to train, and the hold-back has windows of time.

`make test-vllm` installs it and sets PACELINE_VLLM_PYTHON; without that this test is skipped.
"""

import json
import subprocess
import sys

import pytest

from tests.helpers.vllm_python import PYTHON, vllm_marks

pytestmark = [pytest.mark.ray, *vllm_marks(2400)]


def test_a_class_that_is_new_is_learned_on_an_engine_that_is_not_ours_and_no_answer_is_lost_or_changed(tmp_path):
    out = tmp_path / "demo.json"
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli", "demo", "--engine", "vllm", "--vllm-python", PYTHON, "--json", str(out)],
        capture_output=True, text=True, timeout=2300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["engine"]["kind"] == "vllm" and result["engine"]["group_unit"] == "time"
    assert {d["action"] for d in result["decisions"]} >= {"train"}
    assert result["traffic"]["math"]["static"]["rounds"] > 0, "windows of the hold-back"
    assert result["swaps"]["requests_dropped"] == 0
    assert result["lossless"]["checked"] > 500 and result["lossless"]["mismatches"] == 0
    assert result["feedback"]["dropped"] == 0
