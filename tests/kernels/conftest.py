"""Without a GPU the Triton kernels run through Triton's interpreter, which must be chosen before triton is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def count_launches(monkeypatch):
    """count_launches(module, kernel name) -> a function that says how often the kernel has been launched since."""

    def watch(module, name):
        kernel, launches = getattr(module, name), []

        class Watched(type(kernel)):
            def __init__(self):
                self.__dict__.update(kernel.__dict__)

            def __getitem__(self, grid):
                launches.append(grid)
                return kernel[grid]

        monkeypatch.setattr(module, name, Watched())
        return lambda: len(launches)

    return watch
