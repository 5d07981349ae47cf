"""Paged attention inside the modules of transformers, of any family: it writes K/V rows and attends to paged KV.

Shape legend: N packed rows, H/Hkv query/KV heads, Dh head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.kernels.dispatch import Kernels
from paceline.serving.target_model.kv_cache import KVPool

ATTENTION = "paceline_paged"


@dataclass(slots=True)
class PagedPass:
    """State of one forward, handed to the attention modules through the model's keyword argument `paceline_pass`."""

    kv: KVPool
    plan: Any  # of `kernels`
    out_rows: torch.Tensor  # (N,) int64
    kernels: Kernels


def register_attention() -> None:
    """Make the attention function known to transformers under the name `ATTENTION`."""
    # seconds of imports, which a process that loads no such model (a trainer) does without
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(ATTENTION, _paged_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (1, H, N, Dh)
    key: torch.Tensor,  # (1, Hkv, N, Dh)
    value: torch.Tensor,  # (1, Hkv, N, Dh)
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    paceline_pass: PagedPass | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function registered with transformers; without a pass it is plain SDPA (generate() keeps working)."""
    if paceline_pass is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ConfigError("the target must use plain softmax attention, got logit soft-capping or attention sinks")
    state = paceline_pass
    pool = state.kv.layers[module.layer_idx]  # type: ignore[index]
    state.kernels.scatter_rows(pool, state.out_rows, key[0].transpose(0, 1), value[0].transpose(0, 1))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = state.kernels.tree_attention(query[0].transpose(0, 1), pool, state.plan, scale)
    return out[None], None
