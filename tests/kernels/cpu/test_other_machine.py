"""The forward on ARM64: built by the compiler of the wheel `ziglang`, run under qemu, it computes what it computes here."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline.kernels.cpu.build import FLAGS, HERE, VARIANTS

HARNESS = Path(__file__).with_name("other_machine.cpp")
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
TARGETS = {"x86_64": "x86_64-linux-musl", "aarch64": "aarch64-linux-musl"}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    pytest.importorskip("ziglang", reason="needs `pip install ziglang`")
    if QEMU is None or platform.machine() != "x86_64":
        pytest.skip("needs an x86-64 machine with qemu-user")
    folder, found = tmp_path_factory.mktemp("programs"), {}
    for machine, isa in (("x86_64", "avx2"), ("aarch64", "baseline")):
        found[machine] = folder / machine
        names = (f"-DISA={isa}", f"-DFORWARD=forward_{isa}", f"-DSCRATCH=scratch_bytes_{isa}")
        sources = [HERE / "round.cpp", HERE / "threads.cpp", HARNESS]
        flags = [f for f in FLAGS if f != "-fno-exceptions"]
        command = [
            sys.executable,
            "-m",
            "ziglang",
            "c++",
            "-target",
            TARGETS[machine],
            "-static",
            *flags,
            *VARIANTS[machine][isa],
        ]
        subprocess.run([*command, *names, f"-I{HERE}", *sources, "-o", found[machine]], check=True)
    return found


@pytest.mark.parametrize("head_dim", [16, 48, 128])
@pytest.mark.parametrize("weights", [0, 1, 2], ids=["float32", "bfloat16", "int8"])
def test_arm64_computes_the_same_logits(programs, weights, head_dim):
    def logits(command, threads):
        arguments = [*command, str(weights), str(head_dim), str(threads)]
        return np.array(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.split(), float)

    here, there = logits([programs["x86_64"]], 1), logits([QEMU, programs["aarch64"]], 1)
    assert len(here) == (71 + 12) * 80 and np.ptp(here) > 0.5
    assert np.linalg.norm(there - here) <= 1e-5 * np.linalg.norm(here)
    assert np.array_equal(there, logits([QEMU, programs["aarch64"]], 2)), "whatever the threads"
