"""KV size: the bytes that the operator says, or a share of the memory that is free at start."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

import torch

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.serving.target_model.device import available_ram_bytes

if TYPE_CHECKING:
    from paceline.serving.drafters.slots import DrafterSlots
    from paceline.serving.target_model.model import TargetModel

logger = logging.getLogger(__name__)

MIN_KV_BYTES = 64 * 2**20
"""Least that is chosen, whatever is free."""
CUDA_SHARE = 0.6
"""Of the device memory that is free once the target and the drafters are loaded: activations, traces of running requests
and training jobs on the same device need the rest."""
RAM_SHARE = 0.25
"""Of the available RAM, divided among the replicas of a machine: the system, the trainer and Redis live there too."""


def pool_row_bytes(target: TargetModel, slots: DrafterSlots, *, has_traces: bool) -> tuple[int, bool]:
    """(bytes of one token in all pools, whether tapped hidden states are kept): target KV, drafter KV and features.

    Features are kept for drafters and traces; a target without taps has none.
    """
    keeps_features = bool(target.tap_layers) and (slots.needs_features or has_traces)
    num_bytes = target.kv_row_bytes + slots.kv_row_bytes
    return num_bytes + (target.feature_row_bytes if keeps_features else 0), keeps_features


def settle_kv_bytes(
    config: EngineConfig, *, row_bytes: int, context_tokens: int, device: torch.device, num_sharing: int = 1
) -> EngineConfig:
    """The configuration with `kv_bytes` as a number; logs what was chosen in one line.

    Args:
        row_bytes: KV bytes of one token, target and drafters.
        context_tokens: the target's own limit.
        num_sharing: replicas that choose from the same RAM at the same time.
    Raises: ConfigError when the budget holds less than two pages, or less than one request of `max_context_tokens`.
    """
    wanted = min(config.max_context_tokens or context_tokens, context_tokens)
    page_bytes = config.page_tokens * row_bytes
    one = -(-wanted // config.page_tokens) * page_bytes
    if config.kv_bytes is None:
        is_cuda = device.type == "cuda"
        free = free_device_bytes(device) if is_cuda else available_ram_bytes()
        share = CUDA_SHARE if is_cuda else RAM_SHARE / num_sharing
        num_bytes = auto_kv_bytes(free, share=share, useful_bytes=config.max_running * one)
        source = f"chosen: at most {share:.0%} of {free / 2**30:.1f} GiB free {device.type} memory"
    else:
        num_bytes, source = config.kv_bytes, "as configured"
    if num_bytes < 2 * page_bytes:
        raise ConfigError(
            f"engine.kv_bytes must hold at least 2 pages of {page_bytes} bytes, got {num_bytes} ({source})"
        )
    held = num_bytes // page_bytes * config.page_tokens
    if held < wanted and config.max_context_tokens is not None:
        raise ConfigError(
            f"engine.kv_bytes must be at least {one} for one request of engine.max_context_tokens={wanted}, got "
            f"{num_bytes} ({source}); give more bytes or set engine.max_context_tokens to at most {held}"
        )
    context = min(wanted, held)
    logger.info(
        "kv pool mb=%d tokens=%d full_requests=%.1f context_tokens=%d (%s%s)",
        num_bytes >> 20, held, held / context, context, source,
        "" if context == wanted else f"; too small for the model's context of {wanted} tokens",
    )  # fmt: skip
    return dataclasses.replace(config, kv_bytes=num_bytes)


def auto_kv_bytes(free_bytes: int, *, share: float, useful_bytes: int) -> int:
    """A share of what is free, not more than all running requests can fill, at least MIN_KV_BYTES."""
    return max(MIN_KV_BYTES, min(int(free_bytes * share), useful_bytes))


def free_device_bytes(device: torch.device) -> int:
    """Free memory of a CUDA device, including what torch's allocator holds without using it."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
