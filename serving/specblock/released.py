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
    Layout,
    ReleasedSettings,
    check_shared,
    fit_hidden_size,
    layer_output,
    projections,
    take_tensors,
    take_vocabulary,
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
    c = _settings(values, target, rank_hidden=tensors[_RANK_IN].shape[0])
    check_shared(tensors, _INPUT + "embed_tokens.weight", target.embed_weight, "a token embedding of its own")
    h = c.hidden_size
    layout: Layout = {
        "cond_proj.weight": ((_INPUT + "condition_proj.weight", (h, c.feature_size)),),
        "cond_norm": ((_INPUT + "condition_norm.weight", (h,)),),
        "token_norm": ((_INPUT + "token_norm.weight", (h,)),),
        "query_norm": ((_INPUT + "query_norm.weight", (h,)),),
        "queries": ((_INPUT + "position_queries.weight", (c.num_slots, h)),),
        "fuse_proj.weight": ((_INPUT + "fuse.weight", (h, 3 * h)),),
        "final_norm": (("norm.weight", (h,)),),
        "lm_head.weight": (("lm_head.weight", (c.num_draft_ids, h)),),
        "rank_in.weight": ((_RANK_IN, (c.rank_hidden, h + NUM_RANK_FEATURES)),),
        "rank_out.weight": ((_RANK_OUT, (NUM_RANK_CLASSES, c.rank_hidden)),),
    }
    for i in range(c.num_layers):
        n = f"layers.{i}."
        layout |= layer_output(c, n, n)
        layout[n + "input_norm"] = ((n + "input_layernorm.weight", (h,)),)
        layout[n + "qkv_proj.weight"] = projections(c, n)
        if i:
            layout[f"shifts.{i - 1}.weight"] = ((f"shift_proj.{i - 1}.weight", (h, 2 * h)),)
    state = take_tensors(tensors, layout, (c.num_draft_ids, c.vocab_size))
    state["log_beta"] = torch.zeros(2, c.num_blocks, c.num_slots)
    return take_vocabulary(c, tensors, state), state


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
    fields = s.common(hidden, 1e-5) | {"head_dim": hidden // heads}  # the release does not read head_dim
    return SpecBlockConfig(
        **fields,
        vocab_size=s.check_vocabulary(target),
        feature_size=_NUM_TAPS * hidden,
        embed_size=hidden,
        num_layers=s.integer("num_hidden_layers"),
        num_slots=s.integer("diffspec_draft_token_num"),
        num_blocks=3,  # as many as the release unrolls in training
        draft_vocab_size=s.integer("draft_vocab_size"),
        rank_hidden=rank_hidden,
        compat_rope=True,
    )
