"""Dispatch table: the implementation of every kernel on a device, chosen once, when the target is loaded."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.kernels.reference.tree_accept import RowPaths
from paceline.kernels.reference.tree_build import BuiltTrees

log = logging.getLogger(__name__)

# cuDNN's attention, torch's first choice on Hopper, builds a plan for each new shape (some 0.4 s), and contexts grow by the round.
torch.backends.cuda.enable_cudnn_sdp(False)

BACKENDS = ("reference", "triton")
BACKEND_VARIABLE = "PACELINE_KERNELS"
"""Environment variable that names the backend where the program does not: auto | reference | triton."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """One implementation of every kernel; all implementations share the references' signatures."""

    backend: str
    is_capturable: bool
    """Planning and kernels read nothing on the host, and all shapes follow from the inputs' shapes (CUDA graphs).

    A call must have run once before it is captured: the first one of its shapes compiles."""
    plan_attention: Callable[..., Any]
    """Its result is understood by the same backend's tree_attention only."""
    tree_attention: Callable[[torch.Tensor, torch.Tensor, Any, float], torch.Tensor]
    scatter_rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    commit_rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    rope_scatter: Callable[..., torch.Tensor]
    topk_lse: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    accept_rows: Callable[..., RowPaths]
    build_trees: Callable[..., BuiltTrees]
    slot_attention: Callable[..., torch.Tensor]
    draft_ingest: Callable[..., None]
    add_norm: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, float], torch.Tensor]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]

    @property
    def is_reference(self) -> bool:
        """Whether these are the references, which specify: where serving has torch operators of its own for the same
        work (the CPU's), those are the faster ones."""
        return self.backend == "reference"


def select_kernels(device: torch.device | str, backend: str = "auto") -> Kernels:
    """Return the kernels for a device.

    Args:
        device: that the tensors lie on.
        backend: reference (torch, every device) | triton (CUDA; the CPU in triton's interpreter, for tests) | auto:
            PACELINE_KERNELS if set, else triton on CUDA when it is installed and compiles, else reference.
    Raises: ConfigError for a backend that does not exist or cannot run on the device.
    """
    source = "kernel backend"
    if backend == "auto" and BACKEND_VARIABLE in os.environ:
        source, backend = BACKEND_VARIABLE, os.environ[BACKEND_VARIABLE] or "auto"
    if backend not in ("auto", *BACKENDS):
        raise ConfigError(f"{source} must be one of auto, {', '.join(BACKENDS)}, got {backend!r}")
    return _select(torch.device(device).type, backend)


@lru_cache
def _select(device_type: str, backend: str) -> Kernels:
    if backend == "auto":
        # Triton is imported for CUDA only: a CPU host may lack it, and its import takes time.
        is_usable = device_type == "cuda" and _has_triton() and not _is_interpreted() and _compiles()
        backend = "triton" if is_usable else "reference"
    kernels = _load("reference", "reference", is_capturable=False) if backend == "reference" else _triton(device_type)
    log.info("kernels selected backend=%s device=%s", kernels.backend, device_type)
    return kernels


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _is_interpreted() -> bool:
    from paceline.kernels.gpu.launch import is_interpreted

    return is_interpreted()


def _compiles() -> bool:
    """Whether Triton compiles and launches here: it wants a C compiler and Python's headers, which bare containers lack."""
    from paceline.kernels.gpu.dense_layer import silu_mul

    try:
        silu_mul(torch.zeros(1, 2, device="cuda"))
    except Exception:  # of the compiler, of the driver
        log.exception("Triton compiles no kernel here; plain torch runs in their place, without graphs")
        return False
    return True


def _triton(device_type: str) -> Kernels:
    if not _has_triton():
        raise ConfigError("kernel backend triton needs the package triton: install it, or use the reference backend")
    if device_type != "cuda" and not (device_type == "cpu" and _is_interpreted()):
        raise ConfigError(
            "kernel backend triton must run on a CUDA device, or on the CPU in triton's interpreter with "
            f"TRITON_INTERPRET=1 set before triton is first imported (for tests), got device {device_type}"
        )
    return _load("triton", "gpu", is_capturable=not _is_interpreted())


_MODULE_OF = {
    "plan_attention": "tree_attention",
    "tree_attention": "tree_attention",
    "scatter_rows": "kv_rows",
    "commit_rows": "kv_rows",
    "rope_scatter": "rope_scatter",
    "topk_lse": "topk_lse",
    "accept_rows": "tree_accept",
    "build_trees": "tree_build",
    "slot_attention": "slot_attention",
    "draft_ingest": "draft_ingest",
    "add_norm": "dense_layer",
    "silu_mul": "dense_layer",
}
"""Kernel -> module of each backend's folder that holds it under the same name."""


def _load(backend: str, folder: str, *, is_capturable: bool) -> Kernels:
    kernels: dict[str, Any] = {
        name: getattr(importlib.import_module(f"paceline.kernels.{folder}.{module}"), name)
        for name, module in _MODULE_OF.items()
    }
    return Kernels(backend=backend, is_capturable=is_capturable, **kernels)
