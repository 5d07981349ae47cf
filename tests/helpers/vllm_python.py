"""The Python of an environment with vLLM, which `make test-vllm` installs, and the marks of tests that need it."""

import os

import pytest

PYTHON = os.environ.get("PACELINE_VLLM_PYTHON", "")
_REASON = "PACELINE_VLLM_PYTHON must name the Python of an environment with vLLM; make test-vllm"


def vllm_marks(timeout_s: float) -> list[pytest.MarkDecorator]:
    return [
        pytest.mark.vllm,
        pytest.mark.slow,
        pytest.mark.timeout(timeout_s),
        pytest.mark.skipif(not PYTHON, reason=_REASON),
    ]
