"""Shared pytest set-up: the repository root is importable, Ray starts without telemetry and with a token, kernels interpreted.

Triton decides between compiler and interpreter when it is first imported, and transformers imports it: without an
accelerator the interpreter is chosen here, before any test module. TRITON_INTERPRET=0 or 1 overrides.
With several workers (`make test`), modules are spread over them whole, and everything that starts services, clusters or
browsers stays with one worker: it shares ports and session fixtures, and its clocks suffer from company of its own kind.
"""

import functools
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "token")
if "RAY_AUTH_TOKEN_PATH" not in os.environ:  # else Ray would write ~/.ray/auth_token
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    os.environ["OMP_NUM_THREADS"] = "1"  # processes of two threads each on two cores would stall each other
os.environ.setdefault("OMP_NUM_THREADS", "2")
_has_accelerator = any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))
os.environ.setdefault("TRITON_INTERPRET", "0" if _has_accelerator else "1")


@functools.cache  # asked once a test
def has_services(module: Path) -> bool:
    """Whether a test module starts services, clusters or browsers."""
    return not {"e2e", "infra"}.isdisjoint(module.parts) or any(
        m in module.read_text("utf-8") for m in ("mark.ray", "mark.browser")
    )


@pytest.hookimpl(optionalhook=True)  # unknown without pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Modules go whole to one process, those that start services all to the same one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = nodeid.split("::", 1)[0]
            module = config.rootpath / name
            return "services" if module.is_file() and has_services(module) else name

    return ByModule(config, log)
