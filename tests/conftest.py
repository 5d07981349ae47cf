"""Shared pytest set-up: the repository root is importable, Ray starts without telemetry and with a token, kernels interpreted.

Triton decides between compiler and interpreter when it is first imported, and transformers imports it: without an
accelerator the interpreter is chosen here, before any test module. TRITON_INTERPRET=0 or 1 overrides.
With several workers (`make test`), modules are spread over them whole. Two begin with those that start clusters, services or
browsers, whose time passes in waiting; the last with those that compute, the long ones first; where there are more, the others
with what else waits, for processes and clocks. So a core has something to compute until the end.
"""

import functools
import importlib.util
import logging
import os
import re
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # at 15 they would wait for every other test
# clusters that tests start themselves look as often as the product's own, whose reasons stand in infra/app.py
os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.5")
os.environ.setdefault("RAY_SERVE_METRICS_EXPORT_INTERVAL_MS", "10000")
os.environ.setdefault("RAY_AUTH_MODE", "token")
if "RAY_AUTH_TOKEN_PATH" not in os.environ:  # else Ray would write ~/.ray/auth_token
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    os.environ["OMP_NUM_THREADS"] = "1"  # processes of two threads each on two cores would stall each other
os.environ.setdefault("OMP_NUM_THREADS", "2")
_has_accelerator = any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))
os.environ.setdefault("TRITON_INTERPRET", "0" if _has_accelerator else "1")

if importlib.util.find_spec("hypothesis") is not None:  # a machine that runs the gpu tests alone may lack it
    import hypothesis

    # a first example that took long says that the machine was busy, or that a module was imported, and nothing of the code
    hypothesis.settings.register_profile("paceline", deadline=None)
    hypothesis.settings.load_profile("paceline")


_ORDERS = (
    ("services", "waiting", "computing"),
    ("services", "computing", "waiting"),
    ("waiting", "computing", "services"),
    ("computing", "waiting", "services"),
)
"""Kinds of modules in the order in which workers take them: the first, the second, those between, the last."""


@functools.cache  # asked once a test
def has_services(module: Path) -> bool:
    """Whether a test module starts clusters, services or browsers."""
    return any(mark in module.read_text("utf-8") for mark in ("mark.ray", "mark.browser"))


@functools.cache
def is_slow(module: Path) -> bool:
    """Whether a test module has tests of more than about ten seconds: begun last, one of them would hold up the end."""
    return module.is_file() and "mark.slow" in module.read_text("utf-8")


@functools.cache
def kind_of(module: Path) -> str:
    """What a test module's time passes in: services, waiting for processes or clocks, or computing."""
    if not module.is_file():
        return "computing"
    if has_services(module):
        return "services"
    is_waiting = re.search(r"subprocess|wait_until|wait_for|sleep\(", module.read_text("utf-8"))
    return "waiting" if is_waiting else "computing"


@pytest.hookimpl(optionalhook=True)  # unknown without pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Modules go whole to one process, each kind first to a process of its own."""
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.split("::", 1)[0]

        def _assign_work_unit(self, node: Any) -> None:
            kinds: dict[str, list[str]] = {"services": [], "waiting": [], "computing": []}
            for name in self.workqueue:
                kinds[kind_of(config.rootpath / name)].append(name)
            kinds["services"].sort(key=lambda n: "/e2e/" not in n)  # the longest first
            for kind in ("waiting", "computing"):
                kinds[kind].sort(key=lambda n: not is_slow(config.rootpath / n))
            workers = list(self.assigned_work)
            number = -1 if node is workers[-1] else min(workers.index(node), 2)
            order = _ORDERS[number]
            if order[-1] == "services":
                kinds["services"].reverse()  # a long one begun last would hold up the end
            self.workqueue.move_to_end(next(n for kind in order for n in kinds[kind]), last=False)
            super()._assign_work_unit(node)

    return ByModule(config, log)


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """The level and handlers of Paceline's loggers as they were: commands set them for the process that they run in."""
    loggers = [logging.getLogger(name) for name in ("paceline", "paceline.access")]
    before = [(found.level, found.propagate, list(found.handlers)) for found in loggers]
    yield
    for found, (level, propagate, handlers) in zip(loggers, before, strict=True):
        found.setLevel(level)
        found.propagate, found.handlers = propagate, handlers


@pytest.fixture(params=["native", "torch"])
def draft_forward(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes a drafter's layers on the CPU: compiled code where its shapes fit, or torch."""
    from paceline.kernels.cpu.library import ISA_VARIABLE, choose_isa

    if request.param == "torch":
        monkeypatch.setenv(ISA_VARIABLE, "none")
    elif choose_isa() is None:
        pytest.skip("needs the compiled library")
    return str(request.param)
