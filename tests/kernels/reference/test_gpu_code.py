"""The kernels compile for a GPU, and the code has the properties that the interpreter cannot show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.kernels.reference.tree_build import MAX_CANDIDATES, MAX_NODES

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SHARED_BYTES = 99 * 1024
"""Shared memory of one program on the GPUs that have least of it (sm_86, sm_89, sm_120)."""
KERNELS = {
    "dense_layer": {"_add_norm_kernel", "_silu_mul_kernel"},
    "draft_ingest": {"_write_kernel"},
    "kv_rows": {"_copy_kernel", "_scatter_kernel"},
    "rope_scatter": {"_rope_kernel"},
    "slot_attention": {"_partial_kernel", "_merge_kernel"},
    "topk_lse": {"_block_kernel", "_merge_kernel"},
    "tree_accept": {"_accept_rows_kernel"},
    "tree_attention": {"_context_kernel", "_own_kernel", "_pack_kernel", "_tile_kernel"},
    "tree_build": {"_build_kernel"},
}


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    """One report per kernel and signature; Triton keeps what it compiled until the source or Triton changes."""
    if not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").is_file():
        pytest.skip("this triton has no assembler for NVIDIA GPUs")
    script = Path(__file__).resolve().parents[2] / "helpers" / "gpu_code.py"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}

    def compile_part(part: str) -> list[dict]:
        command = [sys.executable, str(script), "90", part]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    with ThreadPoolExecutor() as pool:
        return [report for part in pool.map(compile_part, ("largest tree", "rest")) for report in part]


def test_every_kernel_compiles(compiled):
    found: dict[str, set[str]] = {}
    for report in compiled:
        found.setdefault(report["module"], set()).add(report["kernel"])
    assert found == KERNELS


def test_no_kernel_outgrows_shared_memory_or_spills_many_registers(compiled):
    for report in compiled:
        assert report["shared_bytes"] <= SHARED_BYTES, report
        # The widest heads leave no register free while parts are merged, which happens once per part; nor does the tree
        # kernel at its bounds (1,096 bytes by Triton 3.7.1, less by 3.6 and 3.9). 3.6 leaves 8 of narrow trees' acceptance.
        is_wide = report["constants"].get("BLOCK_D") == "256"
        is_largest_tree = report["kernel"] == "_build_kernel" and report["constants"]["C"] == str(MAX_CANDIDATES)
        limit = 256 if is_wide else 1152 if is_largest_tree else 8 if report["kernel"] == "_accept_rows_kernel" else 0
        assert report["stack_bytes"] <= limit, report


def test_the_tree_kernel_compiles_for_the_largest_trees_that_it_takes(compiled):
    sizes = {(r["constants"]["C"], r["constants"]["W"]) for r in compiled if r["kernel"] == "_build_kernel"}
    assert sizes >= {("512", "128"), ("4096", "512"), (str(MAX_CANDIDATES), str(MAX_NODES + 1))}


def test_attention_is_compiled_once_for_any_number_of_splits(compiled):
    reports = [r for r in compiled if r["module"] == "slot_attention"]
    assert reports and not any("SPLITS" in name.upper() for r in reports for name in r["constants"])


def test_16_bit_attention_runs_on_tensor_cores_and_float32_does_not_round_to_them(compiled):
    for report in compiled:
        if report["kernel"] in ("_context_kernel", "_own_kernel", "_partial_kernel"):
            is_half = "bf" in report["constants"]["DTYPE"]
            assert report["uses_tensor_cores"] == is_half, report


def test_a_commit_waits_between_its_last_read_and_its_first_write(compiled):
    reports = [r for r in compiled if r["kernel"] == "_copy_kernel"]
    assert len(reports) == 2
    for report in reports:
        memory = report["memory"]
        first_write = memory.index("st.global")
        last_read = len(memory) - 1 - memory[::-1].index("ld.global")
        assert last_read < first_write
        assert "bar.sync" in memory[last_read:first_write]
