"""Triton's interpreter for a vLLM without a GPU, in every process with this folder on its PYTHONPATH.

Its V2 model runner is written in Triton. vLLM's build for CPUs uses Triton where it finds a backend named `cpu`.
"""

import os
import types

os.environ["TRITON_INTERPRET"] = "1"
from triton.backends import backends


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


backends["cpu"] = types.SimpleNamespace(driver=_Driver, compiler=None)
