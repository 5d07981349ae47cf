"""Shared pytest set-up: the repository root is importable, Ray starts without telemetry or tokens, kernels interpreted.

Triton decides between compiler and interpreter when it is first imported, and transformers imports it: without an
accelerator the interpreter is chosen here, before any test module. TRITON_INTERPRET=0 or 1 overrides.
With several workers (`make test`), modules are spread over them whole, and everything that starts services, clusters or
browsers stays with one worker: it shares ports and session fixtures, and its clocks suffer from company of its own kind.
"""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    os.environ["OMP_NUM_THREADS"] = "1"  # processes of two threads each on two cores would stall each other
os.environ.setdefault("OMP_NUM_THREADS", "2")
_has_accelerator = any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))
os.environ.setdefault("TRITON_INTERPRET", "0" if _has_accelerator else "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say what must stay together on one worker."""
    for item in items:
        own = ROOT / "tests"
        folder = (
            item.path.relative_to(own).parts[0] if item.path.is_relative_to(own) else ""
        )  # "": a test from elsewhere
        has_services = folder in ("e2e", "infra") or any(item.get_closest_marker(m) for m in ("ray", "browser"))
        item.add_marker(pytest.mark.xdist_group("services" if has_services else str(item.path)))
