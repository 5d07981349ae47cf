"""Kernel tests run twice: in triton's interpreter on the CPU, and compiled on a CUDA device (marker gpu)."""

import pytest
import torch

from paceline.kernels.dispatch import select_kernels

INTERPRETER = "cpu"


@pytest.fixture(params=[INTERPRETER, pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The device whose triton kernels a test runs."""
    from paceline.kernels.gpu.launch import is_interpreted

    if request.param == INTERPRETER and not is_interpreted():
        pytest.skip("needs TRITON_INTERPRET=1")
    if request.param == "cuda" and (is_interpreted() or not torch.cuda.is_available()):
        pytest.skip("needs a CUDA device and TRITON_INTERPRET=0")
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device(request.param)


@pytest.fixture
def kernels(device):
    """The triton kernels of the device."""
    return select_kernels(device, "triton")


@pytest.fixture
def poisoned_memory():
    """Uninitialised memory holds NaN, or the largest integer, until a kernel writes it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)
