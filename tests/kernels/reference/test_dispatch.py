"""The backend is chosen by device; the CPU runs the references unless it is told otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from paceline.errors import ConfigError
from paceline.kernels.dispatch import BACKEND_VARIABLE, select_kernels
from paceline.kernels.reference import kv_rows as kv_commit_ref
from paceline.kernels.reference import kv_rows as kv_scatter_ref
from paceline.kernels.reference import rope_scatter as rope_scatter_ref
from paceline.kernels.reference import topk_lse as topk_lse_ref
from paceline.kernels.reference import tree_attention as tree_attention_ref


def test_the_cpu_runs_the_references():
    kernels = select_kernels("cpu")
    assert kernels.backend == "reference" and not kernels.is_capturable
    assert kernels.plan_attention is tree_attention_ref.plan_attention
    assert kernels.tree_attention is tree_attention_ref.tree_attention
    assert kernels.scatter_rows is kv_scatter_ref.scatter_rows
    assert kernels.commit_rows is kv_commit_ref.commit_rows
    assert kernels.rope_scatter is rope_scatter_ref.rope_scatter
    assert kernels.topk_lse is topk_lse_ref.topk_lse
    assert kernels.is_reference


def test_no_attention_of_torch_builds_plans_by_the_shape():
    """Of drafters, references and training, which all import the dispatch table."""
    code = "import torch, paceline.adapt.families.training; assert not torch.backends.cuda.cudnn_sdp_enabled()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_triton_runs_on_the_device_when_asked(device):
    kernels = select_kernels(device, "triton")
    assert kernels.backend == "triton" and not kernels.is_reference
    assert kernels.is_capturable == (device.type == "cuda"), "the interpreter works on the host"
    assert kernels.plan_attention is not tree_attention_ref.plan_attention


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_cuda_runs_triton_by_itself(device):
    assert select_kernels(device).backend == "triton"


def test_the_environment_decides_where_the_program_does_not(monkeypatch, device):
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    assert select_kernels(device).backend == "triton"
    assert select_kernels(device, "reference").backend == "reference"
    monkeypatch.setenv(BACKEND_VARIABLE, "reference")
    assert select_kernels(device).backend == "reference"
    monkeypatch.setenv(BACKEND_VARIABLE, "cuda-magic")
    with pytest.raises(ConfigError, match=BACKEND_VARIABLE):
        select_kernels(device)


def test_triton_on_a_device_that_it_cannot_run_on_is_refused():
    with pytest.raises(ConfigError, match="CUDA"):
        select_kernels(torch.device("meta"), "triton")


NO_TRITON = """
import sys
sys.modules["triton"] = None  # as if it were not installed
from paceline.errors import ConfigError
from paceline.kernels.dispatch import select_kernels
import paceline.serving.target_model.kv_cache
assert select_kernels("cpu").backend == "reference"
assert select_kernels("cuda").backend == "reference"
try:
    select_kernels("cuda", "triton")
except ConfigError as e:
    assert "install" in str(e), e
else:
    raise AssertionError("no error")
"""

NO_INTERPRETER = """
from paceline.errors import ConfigError
from paceline.kernels import dispatch
from paceline.kernels.dispatch import select_kernels
assert select_kernels("cuda").backend == "reference"  # what it compiles cannot be launched here
dispatch._select.cache_clear()
dispatch._compiles = lambda: True
assert select_kernels("cuda").backend == "triton"
try:
    select_kernels("cpu", "triton")
except ConfigError as e:
    assert "TRITON_INTERPRET=1" in str(e), e
else:
    raise AssertionError("no error")
"""


@pytest.mark.parametrize("code", [NO_TRITON, NO_INTERPRETER], ids=["without triton", "without its interpreter"])
def test_a_host_that_lacks_something_is_told_what(code):
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
