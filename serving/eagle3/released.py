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
    Layout,
    ReleasedSettings,
    check_shared,
    fit_hidden_size,
    layer_output,
    projections,
    take_tensors,
    take_vocabulary,
)
from paceline.serving.eagle3.model import EagleConfig

_NESTED = "transformer_layer_config"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_LAYER = "layers.0."


def eagle3_tap_layers(values: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Target layers whose outputs are fused; None: the release does not say, it uses the usual three.

    `eagle_config` counts layer outputs from 0; `speculators` counts the token embedding as 0, the first layer as 1.
    """
    s = ReleasedSettings(values)
    if nested := ReleasedSettings(s.section("eagle_config")).layers(_TAPS):
        return nested
    return tuple(i - 1 for i in s.layers(_TAPS)) or None


def eagle3_layout(c: EagleConfig) -> Layout:
    """What the released tensors of this network are called and how they lie in ours."""
    h = c.hidden_size
    return {
        "fc.weight": (("fc.weight", (h, c.feature_size)),),
        "embed_norm": ((_LAYER + "input_layernorm.weight", (h,)),),
        "hidden_norm": ((_LAYER + "hidden_norm.weight", (h,)),),
        "qkv_proj.weight": projections(c, _LAYER, width=2 * h),
        **layer_output(c, "", _LAYER),
        "final_norm": (("norm.weight", (h,)),),
        "lm_head.weight": (("lm_head.weight", (c.num_draft_ids, h)),),
    }


def convert_eagle3(
    values: Mapping[str, Any], tensors: dict[str, torch.Tensor], target: TargetHandles
) -> tuple[EagleConfig, dict[str, torch.Tensor]]:
    """Settings and state dict of the EagleModel that computes what a release computes.

    Raises: DrafterMismatchError, naming what does not fit the target or cannot be expressed.
    """
    fused = tensors.get("fc.weight", torch.empty(0))
    c = _settings(values, target, feature_size=fused.shape[-1])
    check_shared(tensors, "embed_tokens.weight", target.embed_weight, "a token embedding of its own")
    state = take_tensors(tensors, eagle3_layout(c), (c.num_draft_ids, c.vocab_size))
    state["log_beta"] = torch.zeros(2, c.num_steps)
    return take_vocabulary(c, tensors, state), state


def _settings(values: Mapping[str, Any], target: TargetHandles, feature_size: int) -> EagleConfig:
    is_nested = _NESTED in values
    if is_nested and not isinstance(values.get("norm_before_residual"), bool):
        raise DrafterMismatchError(
            "norm_before_residual must be true or false in the config.json of a speculators release; its default changed "
            "between versions"
        )
    outer = ReleasedSettings(values)
    s = ReleasedSettings({**values, **outer.section(_NESTED)}) if is_nested else outer
    s.refuse_common()
    outer.refuse_unless("norm_before_fc", (False,), "norms before the fusion of features")
    outer.refuse_unless("fc_norm", (False,), "norms before the fusion of features")
    outer.refuse_unless("norm_output", (False,), "a norm on the hidden state that re-enters")
    s.refuse_unless("num_hidden_layers", (1,), "more than one layer")
    hidden = s.integer("hidden_size")
    # The query projection reads an embedding of the drafter's width: the target's only where both are equally wide.
    embed_size = fit_hidden_size(hidden, target, "hidden_size of an EAGLE-3 release without an embedding of its own")
    fit_hidden_size(outer.integer("target_hidden_size", hidden), target, "target_hidden_size")
    vocab_size = s.check_vocabulary(target)
    if feature_size == 0 or feature_size % embed_size:
        raise DrafterMismatchError(
            f"fc.weight must read whole hidden states of the target ({embed_size}), got {feature_size} columns"
        )
    return EagleConfig(
        **s.common(hidden, 1e-6),
        vocab_size=vocab_size,
        feature_size=feature_size,
        embed_size=embed_size,
        draft_vocab_size=outer.integer("draft_vocab_size", vocab_size),
        rope_scaling=s.rope_scaling(),
        norm_before_residual=bool(values.get("norm_before_residual", False)),
    )
