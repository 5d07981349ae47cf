"""General plugin: what every process of vLLM gets at its start, the engine's calls, the transfer of weights, the capture."""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.v1.engine.core import EngineCore

from paceline_vllm import capture, cpu_kernels
from paceline_vllm.scheduler import log_of

BACKEND = "paceline"
"""As `--weight-transfer-config` names it."""


def install() -> None:
    """Called once a process, by vLLM."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "paceline_vllm.transfer", "FileTransferEngine")
    cpu_kernels.install()
    capture.install()
    EngineCore.paceline_publish = publish  # type: ignore[attr-defined]
    EngineCore.paceline_state = state  # type: ignore[attr-defined]
    EngineCore.paceline_control = control  # type: ignore[attr-defined]


def publish(core: Any, path: str, sha256: str, version: str, group: str) -> float:
    """Load a drafter, if `path` names one, and count later requests as those of `group` and `version`; ms without a step.

    One call of the engine runs between two steps, so weights and labels change together.
    Raises: what FileTransferEngine.receive_weights raises; nothing has changed then.
    """
    started = time.perf_counter()
    log = log_of(core.scheduler)
    if path:
        rpc = core.model_executor.collective_rpc
        rpc("start_draft_weight_update")
        rpc("update_weights", kwargs={"update_info": {"path": path, "sha256": sha256}})
        rpc("finish_weight_update")
        core.set_weight_version(version)
    log.switch(version, group)
    if path:
        is_reset = log.settings.stale_prefix == "reset" and core.scheduler.reset_prefix_cache()
        log.has_stale_blocks = not is_reset  # vLLM refuses while a request has blocks
    return 1e3 * (time.perf_counter() - started)


def state(core: Any) -> dict[str, Any]:
    """Counters, what is served, and rows of the latest seconds by class."""
    return log_of(core.scheduler).state()


def control(core: Any, is_training: bool) -> None:
    """What the service tells: whether it trains beside this engine."""
    log_of(core.scheduler).control(is_training)
