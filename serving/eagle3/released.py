"""Released EAGLE-3 drafters as config and weights of ours: SafeAILab's, SpecForge's and the `speculators` layouts.

Layout: `midlayer` (or `layers.0`) with two norms before attention, `fc` over three fused target layers, `norm`, a head
over a reduced vocabulary with `d2t` and `t2d`. `speculators` nests the layer's settings in `transformer_layer_config`.
Source: SafeAILab/EAGLE, sgl-project/SpecForge and vllm-project/speculators, which are only read for their names.
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
from paceline.serving.eagle3.model import EagleConfig

_NESTED = "transformer_layer_config"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_LAYER, _ATTENTION, _MLP = "layers.0.", "layers.0.self_attn.", "layers.0.mlp."
_QKV = tuple(f"{_ATTENTION}{n}_proj.weight" for n in "qkv")
_GATE_UP = (f"{_MLP}gate_proj.weight", f"{_MLP}up_proj.weight")


def eagle3_tap_layers(values: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Target layers whose outputs are fused; None: the release does not say, it uses the usual three.

    `eagle_config` counts layer outputs from 0; `speculators` counts the token embedding as 0, the first layer as 1.
    """
    nested = (values.get("eagle_config") or {}).get(_TAPS)
    if nested:
        return tuple(int(i) for i in nested)
    own = values.get(_TAPS)
    return tuple(int(i) - 1 for i in own) if own else None


def convert_eagle3(
    values: Mapping[str, Any], tensors: dict[str, torch.Tensor], target: TargetHandles
) -> tuple[EagleConfig, dict[str, torch.Tensor]]:
    """Settings and state dict of the EagleModel that computes what a release computes.

    Raises: DrafterMismatchError, naming what does not fit the target or cannot be expressed.
    """
    fused = tensors.get("fc.weight", torch.empty(0))
    config = _settings(values, target, feature_size=fused.shape[-1])
    c, h = config, config.hidden_size
    check_shared(tensors, "embed_tokens.weight", target.embed_weight, "a token embedding of its own")
    heads = {"q": c.num_heads, "k": c.num_kv_heads, "v": c.num_kv_heads}
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, c.feature_size),
        "norm.weight": (h,),
        "lm_head.weight": (c.num_draft_ids, h),
        "d2t": (c.num_draft_ids,),
        "t2d": (c.vocab_size,),
        **{_LAYER + n + ".weight": (h,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        **{f"{_ATTENTION}{n}_proj.weight": (k * c.head_dim, 2 * h) for n, k in heads.items()},
        _ATTENTION + "o_proj.weight": (h, c.num_heads * c.head_dim),
        **dict.fromkeys(_GATE_UP, (c.intermediate_size, h)),
        _MLP + "down_proj.weight": (h, c.intermediate_size),
    }
    check_tensors(tensors, shapes, optional=("d2t", "t2d"))
    ids = draft_token_ids(tensors, c.num_draft_ids, c.vocab_size)
    if ids is None:
        config = EagleConfig.from_dict({**c.to_dict(), "draft_vocab_size": None})
    state = {
        "fc.weight": tensors["fc.weight"].float(),
        "embed_norm": tensors[_LAYER + "input_layernorm.weight"].float(),
        "hidden_norm": tensors[_LAYER + "hidden_norm.weight"].float(),
        "qkv_proj.weight": stack_rows(tensors, _QKV),
        "o_proj.weight": tensors[_ATTENTION + "o_proj.weight"].float(),
        "post_norm": tensors[_LAYER + "post_attention_layernorm.weight"].float(),
        "gate_up_proj.weight": stack_rows(tensors, _GATE_UP),
        "down_proj.weight": tensors[_MLP + "down_proj.weight"].float(),
        "final_norm": tensors["norm.weight"].float(),
        "lm_head.weight": tensors["lm_head.weight"].float(),
        "log_beta": torch.zeros(2, config.num_steps),
    }
    if ids is not None:
        state |= {"draft_token_ids": ids, "log_coverage": torch.zeros(())}
    return config, state


def _settings(values: Mapping[str, Any], target: TargetHandles, feature_size: int) -> EagleConfig:
    is_nested = _NESTED in values
    if is_nested and not isinstance(values.get("norm_before_residual"), bool):
        raise DrafterMismatchError(
            "norm_before_residual must be true or false in the config.json of a speculators release; its default changed "
            "between versions"
        )
    outer = ReleasedSettings(values)
    s = ReleasedSettings({**values, **values[_NESTED]}) if is_nested else outer
    s.refuse_common()
    outer.refuse_unless("norm_before_fc", (False,), "norms before the fusion of features")
    outer.refuse_unless("fc_norm", (False,), "norms before the fusion of features")
    outer.refuse_unless("norm_output", (False,), "a norm on the hidden state that re-enters")
    s.refuse_unless("num_hidden_layers", (1,), "more than one layer")
    hidden = s.integer("hidden_size")
    # The query projection reads an embedding of the drafter's width: the target's only where both are equally wide.
    embed_size = fit_hidden_size(hidden, target, "hidden_size of an EAGLE-3 release without an embedding of its own")
    fit_hidden_size(outer.integer("target_hidden_size", hidden), target, "target_hidden_size")
    heads = s.integer("num_attention_heads")
    vocab_size = s.check_vocabulary(target)
    if feature_size == 0 or feature_size % embed_size:
        raise DrafterMismatchError(
            f"fc.weight must read whole hidden states of the target ({embed_size}), got {feature_size} columns"
        )
    return EagleConfig(
        hidden_size=hidden,
        intermediate_size=s.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=s.integer("num_key_value_heads", heads),
        head_dim=s.integer("head_dim", hidden // heads),
        vocab_size=vocab_size,
        feature_size=feature_size,
        embed_size=embed_size,
        draft_vocab_size=outer.integer("draft_vocab_size", vocab_size),
        rms_eps=s.number("rms_norm_eps", 1e-6),
        rope_theta=s.rope_theta(),
        rope_scaling=s.rope_scaling(),
        norm_before_residual=bool(values.get("norm_before_residual", False)),
    )
