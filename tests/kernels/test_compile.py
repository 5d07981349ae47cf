"""The kernels compile to machine code for Hopper, within the shared memory that smaller GPUs have, too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_kernels.py")
SMALL_GPU_SHARED_BYTES = 99 * 1024

pytest.importorskip("triton.backends.nvidia")


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu_that_is_not_there(tmp_path):
    root = SCRIPT.parents[2]
    # The interpreter, once chosen, stays for a process: compile in another one.
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, str(SCRIPT), "90"], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {line["kernel"]: line for line in map(json.loads, done.stdout.splitlines())}
    names = {"tree_build", "tree_budget", "tree_accept", "draft_ingest", "slot_attention merge"}
    assert set(found) == names | {"slot_attention bf16", "slot_attention fp32"}
    for line in found.values():
        assert line["has_machine_code"]
        assert line["shared_bytes"] <= SMALL_GPU_SHARED_BYTES
    assert found["slot_attention bf16"]["uses_tensor_cores"]
