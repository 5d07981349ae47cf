"""Paged attention inside the modules of transformers: it reads and writes paged KV.

Two ways, chosen when a target is loaded. Any family: transformers normalises and rotates queries and keys with operators of
its own, then calls the attention function registered here, which writes K/V rows and attends. Families whose attention
module is known: the module's forward is replaced by one that leaves head norm, RoPE and the K/V write to one kernel.

Shape legend: N packed rows, H/Hkv query/KV heads, Dh head dim, Dm hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from paceline.errors import ConfigError
from paceline.kernels.dispatch import Kernels
from paceline.serving.target_model.kv_cache import KVPool

ATTENTION = "paceline_paged"
_ROPE_FAMILIES = ("llama", "qwen3")
"""Model types whose attention is: projections, RMS norm over each head or none, RoPE by halves over the whole head, softmax."""


@dataclass(slots=True)
class PagedPass:
    """State of one forward, handed to the attention modules through the model's keyword argument `paceline_pass`."""

    kv: KVPool
    plan: Any  # of `kernels`
    out_rows: torch.Tensor  # (N,) int64
    kernels: Kernels
    order: torch.Tensor  # (N,) int64, 0..N-1: the row of the rotary tables that belongs to each row


def register_attention() -> None:
    """Make the attention function known to transformers under the name `ATTENTION`."""
    AttentionInterface.register(ATTENTION, _paged_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def supports_rope_kernel(model: Any) -> bool:
    """Whether `use_rope_kernel` knows the model's attention modules."""
    return model.config.model_type in _ROPE_FAMILIES


def use_rope_kernel(model: Any) -> Callable[[], None]:
    """Let forwards with a pass do head norm, RoPE and the K/V write of a layer in one kernel; others stay as they are.

    Returns: a function that undoes it.
    """
    modules = [layer.self_attn for layer in model.get_decoder().layers]
    for module in modules:
        module.forward = functools.partial(_rope_forward, module, module.forward)

    def undo() -> None:
        for module in modules:
            del module.forward

    return undo


def _rope_forward(
    module: Any,
    plain: Callable[..., Any],
    hidden_states: torch.Tensor,  # (1, N, Dm)
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,  # cos and sin of each row, (1, N, Dh)
    attention_mask: torch.Tensor | None = None,
    paceline_pass: PagedPass | None = None,
    **kwargs: Any,
) -> Any:
    """The forward of an attention module; without a pass its own."""
    if paceline_pass is None:
        return plain(hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, **kwargs)
    assert position_embeddings is not None
    state, x = paceline_pass, hidden_states[0]
    kernels, pool = state.kernels, state.kv.layers[module.layer_idx]
    query, key, value = (
        p(x).unflatten(-1, (-1, module.head_dim)) for p in (module.q_proj, module.k_proj, module.v_proj)
    )
    cos, sin = (t[0].contiguous() for t in position_embeddings)
    norms: dict[str, Any] = {}
    if hasattr(module, "q_norm"):
        norms = {
            "q_norm": module.q_norm.weight, "k_norm": module.k_norm.weight, "eps": module.q_norm.variance_epsilon
        }  # fmt: skip
    query = kernels.rope_scatter(query, key, value, pool, state.out_rows, state.order, cos, sin, **norms)
    out = kernels.tree_attention(query, pool, state.plan, module.scaling)
    return module.o_proj(out.reshape(x.shape[0], -1))[None], None


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
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ConfigError("the target must use plain softmax attention, got logit soft-capping or attention sinks")
    state = paceline_pass
    pool = state.kv.layers[module.layer_idx]  # type: ignore[index]
    state.kernels.scatter_rows(pool, state.out_rows, key[0].transpose(0, 1), value[0].transpose(0, 1))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = state.kernels.tree_attention(query[0].transpose(0, 1), pool, state.plan, scale)
    return out[None], None
