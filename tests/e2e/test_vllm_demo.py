"""The whole loop on a real vLLM: traffic shifts, the controller decides, trains, gates, swaps and judges by windows of time.

`make test-vllm` installs it and sets PACELINE_VLLM_PYTHON; without that this test is skipped.
"""

import json
import os
import subprocess
import sys

import pytest

PYTHON = os.environ.get("PACELINE_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(2400),
    pytest.mark.skipif(not PYTHON, reason="PACELINE_VLLM_PYTHON must name the Python of an environment with vLLM; make test-vllm"),
]  # fmt: skip


def test_a_new_class_gets_a_drafter_of_its_own_on_an_engine_that_is_not_ours(tmp_path):
    out = tmp_path / "demo.json"
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli", "demo", "--engine", "vllm", "--vllm-python", PYTHON, "--json", str(out)],
        capture_output=True, text=True, timeout=2300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["engine"]["kind"] == "vllm" and result["engine"]["group_unit"] == "time"
    assert {d["action"] for d in result["decisions"]} >= {"train"}
    assert [d for d in result["decisions"] if d["action"] == "train" and d["outcome"] == "accepted"]
    made = result["drafter"]["class_versions"]["math"]
    assert made != result["drafter"]["first_version"]
    assert result["ledger"]["by_kind"]["training"] > 0
    assert result["traffic"]["math"]["static"]["rounds"] > 0, "windows of the hold-back"
    assert result["swaps"]["count"] >= 2 and result["swaps"]["requests_dropped"] == 0
    phases = {p["name"]: p for p in result["phases"]}
    assert phases["B again"]["end"] > phases["B"]["begin"], "the class's drafter keeps more tokens a round"
    assert result["lossless"]["checked"] > 500 and result["lossless"]["mismatches"] == 0
    assert result["feedback"]["dropped"] == 0
