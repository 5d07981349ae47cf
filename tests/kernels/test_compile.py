"""The kernels compile to machine code for Hopper, within the shared memory that smaller GPUs have, too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_kernels.py")
SMALL_GPU_SHARED_BYTES = 99 * 1024
NAMES = {"_build_kernel", "_budget_kernel", "_accept_kernel", "_write_kernel", "_partial_kernel", "_merge_kernel"}

pytest.importorskip("triton.backends.nvidia")


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu_that_is_not_there(tmp_path):
    root = SCRIPT.parents[2]
    # The interpreter, once chosen, stays for a process: compile in another one.
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, str(SCRIPT), "90"], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["kernel"] for line in lines} == NAMES
    for line in lines:
        assert line["has_machine_code"], line
        assert line["shared_bytes"] <= SMALL_GPU_SHARED_BYTES, line
        if line["kernel"] == "_partial_kernel":  # float32 is computed as such
            assert line["uses_tensor_cores"] == (line["dtype"] == "*bf16"), line
