"""Released parallel heads, DFlash or JetSpec, as config and weights of ours.

Both have one layout: `fc` and `hidden_norm` fuse the target's layers, Qwen3 layers with norms per head, `norm`; the token
embedding and the output head are the target's. `dflash_config.causal_head` tells JetSpec from DFlash.
Source: the z-lab, SpecForge and hao-ai-lab/JetSpec releases, which are only read for their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.errors import DrafterMismatchError
from paceline.serving.drafters.network import TargetHandles
from paceline.serving.drafters.released_fields import (
    ReleasedSettings,
    check_shared,
    check_tensors,
    fit_hidden_size,
    stack_rows,
)
from paceline.serving.parallel_head.model import ParallelHeadConfig

_NESTED = "dflash_config"


def parallel_head_tap_layers(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Target layers whose outputs are fused: those written down, else as many as the head has layers, evenly spread."""
    written = (values.get(_NESTED) or {}).get("target_layer_ids")
    if written:
        return tuple(int(i) for i in written)
    s = ReleasedSettings(values)
    count, depth = s.integer("num_hidden_layers"), s.integer("num_target_layers")
    if count == 1:
        return (depth // 2,)
    return tuple(round(1 + i * (depth - 4) / (count - 1)) for i in range(count))


def convert_parallel_head(
    values: Mapping[str, Any], tensors: dict[str, torch.Tensor], target: TargetHandles
) -> tuple[ParallelHeadConfig, dict[str, torch.Tensor]]:
    """Settings and state dict of the ParallelHeadModel that computes what a release computes.

    Raises: DrafterMismatchError, naming what does not fit the target or cannot be expressed.
    """
    config = _settings(values, target)
    c, h = config, config.hidden_size
    check_shared(tensors, "embed_tokens.weight", target.embed_weight, "a token embedding of its own")
    check_shared(tensors, "lm_head.weight", target.head_weight, "an output head of its own")
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, c.feature_size),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for i in range(c.num_layers):
        n = f"layers.{i}."
        shapes |= {
            n + "input_layernorm.weight": (h,),
            n + "self_attn.q_proj.weight": (c.num_heads * c.head_dim, h),
            n + "self_attn.k_proj.weight": (c.num_kv_heads * c.head_dim, h),
            n + "self_attn.v_proj.weight": (c.num_kv_heads * c.head_dim, h),
            n + "self_attn.q_norm.weight": (c.head_dim,),
            n + "self_attn.k_norm.weight": (c.head_dim,),
            n + "self_attn.o_proj.weight": (h, c.num_heads * c.head_dim),
            n + "post_attention_layernorm.weight": (h,),
            n + "mlp.gate_proj.weight": (c.intermediate_size, h),
            n + "mlp.up_proj.weight": (c.intermediate_size, h),
            n + "mlp.down_proj.weight": (h, c.intermediate_size),
        }
    check_tensors(tensors, shapes)
    state = {
        "is_causal": torch.tensor(c.is_causal),
        "cond_proj.weight": tensors["fc.weight"].float(),
        "cond_norm": tensors["hidden_norm.weight"].float(),
        "final_norm": tensors["norm.weight"].float(),
        "log_beta": torch.zeros(2, c.num_slots),
    }
    for i in range(c.num_layers):
        n = f"layers.{i}."
        state |= {
            n + "input_norm": tensors[n + "input_layernorm.weight"].float(),
            n + "q_proj.weight": tensors[n + "self_attn.q_proj.weight"].float(),
            n + "kv_proj.weight": stack_rows(tensors, [f"{n}self_attn.{x}_proj.weight" for x in "kv"]),
            n + "q_norm": tensors[n + "self_attn.q_norm.weight"].float(),
            n + "k_norm": tensors[n + "self_attn.k_norm.weight"].float(),
            n + "o_proj.weight": tensors[n + "self_attn.o_proj.weight"].float(),
            n + "post_norm": tensors[n + "post_attention_layernorm.weight"].float(),
            n + "gate_up_proj.weight": stack_rows(tensors, [f"{n}mlp.{x}_proj.weight" for x in ("gate", "up")]),
            n + "down_proj.weight": tensors[n + "mlp.down_proj.weight"].float(),
        }
    return config, state


def _settings(values: Mapping[str, Any], target: TargetHandles) -> ParallelHeadConfig:
    own = values.get(_NESTED) or {}
    s, head = ReleasedSettings(values), ReleasedSettings(own)
    s.refuse_common()
    if "transformer_layer_config" in values:
        raise DrafterMismatchError(
            "transformer_layer_config in config.json means a parallel head in the layout of speculators, which Paceline "
            "does not read; use the release of DFlash or SpecForge"
        )
    kinds = sorted(set(values.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        raise DrafterMismatchError(
            f"layer_types {kinds} in config.json mean layers with a sliding window, which Paceline cannot serve"
        )
    modes = own.get("attention_modes") or [own.get("attention_mode", "gqa")]
    if any(str(m).lower() not in ("gqa", "mha") for m in modes):
        raise DrafterMismatchError(f"attention modes {modes} in config.json cannot be served, only gqa and mha")
    head.refuse_unless("projector_type", (), "a correction head on the logits")
    head.refuse_unless("shift_label", (False,), "rows that predict the token after their own")
    head.refuse_unless("pure_draft_prefix_len", (0,), "a prefix of drafted rows")
    hidden = fit_hidden_size(s.integer("hidden_size"), target, "hidden_size")
    fit_hidden_size(head.integer("target_hidden_size", hidden), target, "target_hidden_size")
    vocab_size = s.check_vocabulary(target)
    s.refuse_unless("draft_vocab_size", (vocab_size,), "a reduced draft vocabulary")
    mask = own.get("mask_token_id", values.get("mask_token_id"))
    if not isinstance(mask, int) or not 0 <= mask < vocab_size:
        raise DrafterMismatchError(
            f"{_NESTED}.mask_token_id in config.json must be an id in [0, {vocab_size}), got {mask!r}"
        )
    block = s.integer("block_size") if values.get("block_size") is not None else head.integer("block_size")
    heads = s.integer("num_attention_heads")
    return ParallelHeadConfig(
        is_causal=bool(own.get("causal_head", False)),
        hidden_size=hidden,
        intermediate_size=s.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=s.integer("num_key_value_heads", heads),
        head_dim=s.integer("head_dim", hidden // heads),
        vocab_size=vocab_size,
        feature_size=len(parallel_head_tap_layers(values)) * hidden,
        num_layers=s.integer("num_hidden_layers"),
        num_slots=block - 1,  # the anchor's row drafts nothing
        mask_token_id=mask,
        rms_eps=s.number("rms_norm_eps", 1e-6),
        rope_theta=s.rope_theta(),
        rope_scaling=s.rope_scaling(),
    )
