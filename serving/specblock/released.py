"""Released SpecBlock drafters as config and weights of ours.

Its weights expect that block 2 repeats block 1's rotary positions (`compat_rope`); its serving rule for candidates per
rank class is our default. Layout: `input_layer` fuses three paths, Llama layers with `shift_proj` between them, `norm`, a
head over a reduced vocabulary with `d2t` and `t2d`, and a `rank_head`.
Source: the SpecBlock repository, which is only read for its names; specblock.md 1 and 2.7.
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
    draft_token_ids,
    fit_hidden_size,
    stack_rows,
)
from paceline.serving.specblock.model import NUM_RANK_CLASSES, NUM_RANK_FEATURES, SpecBlockConfig

_INPUT = "input_layer."
_RANK_IN, _RANK_OUT = "rank_head.0.weight", "rank_head.2.weight"
_NUM_TAPS = 3


def convert_specblock(
    values: Mapping[str, Any], tensors: dict[str, torch.Tensor], target: TargetHandles
) -> tuple[SpecBlockConfig, dict[str, torch.Tensor]]:
    """Settings and state dict of the SpecBlockModel that computes what a release computes.

    Raises: DrafterMismatchError, naming what does not fit the target or cannot be expressed.
    """
    if _RANK_IN not in tensors or tensors[_RANK_IN].dim() != 2:
        raise DrafterMismatchError(f"released drafter must hold {_RANK_IN} with 2 dimensions; it may be incomplete")
    config = _settings(values, target, rank_hidden=tensors[_RANK_IN].shape[0])
    c = config
    check_shared(tensors, _INPUT + "embed_tokens.weight", target.embed_weight, "a token embedding of its own")
    check_tensors(tensors, _shapes(c), optional=("d2t", "t2d"))
    ids = draft_token_ids(tensors, c.num_draft_ids, c.vocab_size)
    if ids is None:
        config = SpecBlockConfig.from_dict({**c.to_dict(), "draft_vocab_size": None})
    state = {
        "cond_proj.weight": tensors[_INPUT + "condition_proj.weight"].float(),
        "cond_norm": tensors[_INPUT + "condition_norm.weight"].float(),
        "token_norm": tensors[_INPUT + "token_norm.weight"].float(),
        "query_norm": tensors[_INPUT + "query_norm.weight"].float(),
        "queries": tensors[_INPUT + "position_queries.weight"].float(),
        "fuse_proj.weight": tensors[_INPUT + "fuse.weight"].float(),
        "final_norm": tensors["norm.weight"].float(),
        "lm_head.weight": tensors["lm_head.weight"].float(),
        "rank_in.weight": tensors[_RANK_IN].float(),
        "rank_out.weight": tensors[_RANK_OUT].float(),
        "log_beta": torch.zeros(2, c.num_blocks, c.num_slots),
    }
    for i in range(c.num_layers):
        n = f"layers.{i}."
        state |= {
            n + "input_norm": tensors[n + "input_layernorm.weight"].float(),
            n + "qkv_proj.weight": stack_rows(tensors, [f"{n}self_attn.{x}_proj.weight" for x in "qkv"]),
            n + "o_proj.weight": tensors[n + "self_attn.o_proj.weight"].float(),
            n + "post_norm": tensors[n + "post_attention_layernorm.weight"].float(),
            n + "gate_up_proj.weight": stack_rows(tensors, [f"{n}mlp.{x}_proj.weight" for x in ("gate", "up")]),
            n + "down_proj.weight": tensors[n + "mlp.down_proj.weight"].float(),
        }
        if i:
            state[f"shifts.{i - 1}.weight"] = tensors[f"shift_proj.{i - 1}.weight"].float()
    if ids is not None:
        state |= {"draft_token_ids": ids, "log_coverage": torch.zeros(())}
    return config, state


def _settings(values: Mapping[str, Any], target: TargetHandles, rank_hidden: int) -> SpecBlockConfig:
    s = ReleasedSettings(values)
    s.refuse_common()
    s.rope_scaling(can_scale=False)
    s.refuse_unless("rank_classes", (NUM_RANK_CLASSES,), "another number of rank classes than 4")
    hidden = fit_hidden_size(s.integer("hidden_size"), target, "hidden_size")
    fit_hidden_size(s.integer("target_hidden_size", hidden), target, "target_hidden_size")
    heads = s.integer("num_attention_heads")
    if hidden % heads:
        raise DrafterMismatchError(f"hidden_size must be a multiple of num_attention_heads {heads}, got {hidden}")
    return SpecBlockConfig(
        hidden_size=hidden,
        intermediate_size=s.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=s.integer("num_key_value_heads", heads),
        head_dim=hidden // heads,  # the release does not read head_dim
        vocab_size=s.check_vocabulary(target),
        feature_size=_NUM_TAPS * hidden,
        embed_size=hidden,
        num_layers=s.integer("num_hidden_layers"),
        num_slots=s.integer("diffspec_draft_token_num"),
        num_blocks=3,  # as many as the release unrolls in training
        draft_vocab_size=s.integer("draft_vocab_size"),
        rms_eps=s.number("rms_norm_eps", 1e-5),
        rope_theta=s.rope_theta(),
        rank_hidden=rank_hidden,
        compat_rope=True,
    )


def _shapes(c: SpecBlockConfig) -> dict[str, tuple[int, ...]]:
    h = c.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        _INPUT + "condition_proj.weight": (h, c.feature_size),
        _INPUT + "position_queries.weight": (c.num_slots, h),
        _INPUT + "fuse.weight": (h, 3 * h),
        **{f"{_INPUT}{n}_norm.weight": (h,) for n in ("condition", "token", "query")},
        "norm.weight": (h,),
        "lm_head.weight": (c.num_draft_ids, h),
        _RANK_IN: (c.rank_hidden, h + NUM_RANK_FEATURES),
        _RANK_OUT: (NUM_RANK_CLASSES, c.rank_hidden),
        "d2t": (c.num_draft_ids,),
        "t2d": (c.vocab_size,),
    }
    for i in range(c.num_layers):
        n = f"layers.{i}."
        shapes |= {
            n + "input_layernorm.weight": (h,),
            n + "self_attn.q_proj.weight": (c.num_heads * c.head_dim, h),
            n + "self_attn.k_proj.weight": (c.num_kv_heads * c.head_dim, h),
            n + "self_attn.v_proj.weight": (c.num_kv_heads * c.head_dim, h),
            n + "self_attn.o_proj.weight": (h, c.num_heads * c.head_dim),
            n + "post_attention_layernorm.weight": (h,),
            n + "mlp.gate_proj.weight": (c.intermediate_size, h),
            n + "mlp.up_proj.weight": (c.intermediate_size, h),
            n + "mlp.down_proj.weight": (h, c.intermediate_size),
        }
        if i:
            shapes[f"shift_proj.{i - 1}.weight"] = (h, 2 * h)
    return shapes
