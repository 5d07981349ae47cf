"""Which implementation of the kernels runs on a device? Chosen once, when the target is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from paceline.errors import ConfigError
from paceline.kernels.kv_commit_ref import commit_rows
from paceline.kernels.kv_scatter_ref import scatter_rows
from paceline.kernels.tree_attention_ref import AttentionPlan, plan_attention, tree_attention

log = logging.getLogger(__name__)

BACKENDS = ("reference",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """One implementation of every kernel; all implementations share the references' signatures."""

    backend: str
    is_capturable: bool
    """Planning and kernels read nothing on the host, and all shapes follow from the inputs' shapes (CUDA graphs)."""
    plan_attention: Callable[..., AttentionPlan]
    tree_attention: Callable[[torch.Tensor, torch.Tensor, AttentionPlan, float], torch.Tensor]
    scatter_rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    commit_rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@lru_cache
def select_kernels(device: torch.device | str, backend: str = "auto") -> Kernels:
    """Return the kernels for a device; raises ConfigError for a backend that is not available.

    The torch references run on every device and are the only backend at present.
    """
    if backend not in ("auto", *BACKENDS):
        raise ConfigError(f"kernel backend must be one of auto, {', '.join(BACKENDS)}, got {backend!r}")
    log.info("kernels selected backend=reference device=%s", device)
    return Kernels(
        backend="reference",
        is_capturable=False,
        plan_attention=plan_attention,
        tree_attention=tree_attention,
        scatter_rows=scatter_rows,
        commit_rows=commit_rows,
    )
