"""Released parallel heads, DFlash or JetSpec, as config and weights of ours.

Both have one layout: `fc` and `hidden_norm` fuse the target's layers, Qwen3 layers with norms per head, `norm`; the token
embedding and the output head are the target's, of a reduced vocabulary (`d2t`) the head's rows. `speculators` nests the
layers' settings in `transformer_layer_config`. `dflash_config.causal_head` tells JetSpec from DFlash. DSpark is a DFlash
head whose block rows predict the token after their own, with a low-rank bias by the previous token (`markov_head`), our
edge correction. Its confidence head says how many tokens to verify, which the tree policy decides here, so it is not kept.
Source: the z-lab, SpecForge, hao-ai-lab/JetSpec and vllm-project/speculators releases, which are only read for their
names; the learned mask vector is vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.errors import DrafterMismatchError
from paceline.serving.drafters.network import TargetHandles
from paceline.serving.drafters.released_fields import (
    MASK_ID_TENSOR,
    MASK_TENSOR,
    Layout,
    ReleasedSettings,
    check_shared,
    fit_hidden_size,
    layer_output,
    projections,
    take_tensors,
    take_vocabulary,
)
from paceline.serving.parallel_head.model import ParallelHeadConfig

_NESTED, _HEAD = "dflash_config", "lm_head.weight"
_SPECULATORS = "transformer_layer_config"


def _flat(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings as z-lab's releases write them; `speculators` counts the token embedding as layer 0, the first as 1."""
    if _SPECULATORS not in values:
        return values
    s = ReleasedSettings(values)
    own = {name: values.get(name) for name in ("mask_token_id", "target_hidden_size")}
    own["target_layer_ids"] = [i - 1 for i in s.layers("aux_hidden_state_layer_ids")]
    return {**values, **s.section(_SPECULATORS), _NESTED: own, "draft_vocab_size": values.get("draft_vocab_size")}


def parallel_head_tap_layers(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Target layers whose outputs are fused: those written down, else as many as the head has layers, evenly spread."""
    values = _flat(values)
    s = ReleasedSettings(values)
    if written := ReleasedSettings(s.section(_NESTED)).layers("target_layer_ids"):
        return written
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
    tensors = {
        n.removeprefix("logit_head."): t for n, t in tensors.items()
    }  # where early DSpark files have their heads
    c = _settings(_flat(values), target, tensors)
    check_shared(tensors, "embed_tokens.weight", target.embed_weight, "a token embedding of its own")
    head = {n: tensors.pop(n) for n in [_HEAD] if n in tensors}
    if c.is_shifted:
        tensors = {n: t for n, t in tensors.items() if not n.startswith("confidence_head.")}
    mask = {MASK_TENSOR: tensors.pop(MASK_TENSOR).float()} if c.mask_token_id is None else {}
    state = take_tensors(tensors, parallel_head_layout(c), (c.num_draft_ids, c.vocab_size)) | mask
    c = take_vocabulary(c, tensors, state)
    ids, rows = state.get("draft_token_ids"), target.head_weight
    check_shared(head, _HEAD, rows if ids is None else rows[ids.to(rows.device)], "an output head of its own")
    return c, state | {"is_causal": torch.tensor(c.is_causal), "log_beta": torch.zeros(2, c.num_slots)}


def parallel_head_layout(c: ParallelHeadConfig) -> Layout:
    """What the released tensors of this network are called and how they lie in ours; not those that others share."""
    h = c.hidden_size
    layout: Layout = {
        "cond_proj.weight": (("fc.weight", (h, c.feature_size)),),
        "cond_norm": (("hidden_norm.weight", (h,)),),
        "final_norm": (("norm.weight", (h,)),),
    }
    for i in range(c.num_layers):
        n = f"layers.{i}."
        layout |= layer_output(c, n, n)
        layout |= {
            n + "input_norm": ((n + "input_layernorm.weight", (h,)),),
            n + "q_proj.weight": projections(c, n, "q"),
            n + "kv_proj.weight": projections(c, n, "kv"),
            n + "q_norm": ((n + "self_attn.q_norm.weight", (c.head_dim,)),),
            n + "k_norm": ((n + "self_attn.k_norm.weight", (c.head_dim,)),),
        }
    if c.edge_rank:
        layout["edge_in"] = (("markov_head.markov_w1.weight", (c.vocab_size, c.edge_rank)),)
        layout["edge_out"] = (("markov_head.markov_w2.weight", (c.vocab_size, c.edge_rank)),)
    return layout


def _settings(values: Mapping[str, Any], target: TargetHandles, tensors: dict[str, torch.Tensor]) -> ParallelHeadConfig:
    """The settings of a release. tensors: loses the id of a learned mask vector, which is compared."""
    s = ReleasedSettings(values)
    own = s.section(_NESTED)
    head = ReleasedSettings(own)
    s.refuse_common()
    s.refuse_unless("sample_from_anchor", (False,), "an anchor's row that drafts")
    modes = own.get("attention_modes") or [own.get("attention_mode", "gqa")]
    if any(str(m).lower() not in ("gqa", "mha") for m in modes):
        raise DrafterMismatchError(f"attention modes {modes} in config.json cannot be served, only gqa and mha")
    head.refuse_unless("projector_type", ("dspark",), "a correction head that reads the whole path (Domino's GRU)")
    head.refuse_unless("markov_head_type", ("vanilla",), "a correction that reads more than the previous token")
    is_dspark = own.get("projector_type") == "dspark"
    rank = head.integer("markov_rank") if is_dspark and own.get("markov_rank") else 0
    head.refuse_unless("shift_label", (False,), "rows that predict the token after their own")
    head.refuse_unless("pure_draft_prefix_len", (0,), "a prefix of drafted rows")
    hidden = fit_hidden_size(s.integer("hidden_size"), target, "hidden_size")
    fit_hidden_size(head.integer("target_hidden_size", hidden), target, "target_hidden_size")
    vocab_size = s.check_vocabulary(target)
    mask = own.get("mask_token_id", values.get("mask_token_id"))
    if not isinstance(mask, int) or not 0 <= mask < vocab_size:
        raise DrafterMismatchError(
            f"{_NESTED}.mask_token_id in config.json must be an id in [0, {vocab_size}), got {mask!r}"
        )
    size = s.integer("draft_vocab_size", vocab_size)
    replaced = tensors.pop(MASK_ID_TENSOR, None)
    if replaced is not None and int(replaced) != mask:
        raise DrafterMismatchError(
            f"the learned mask vector must stand for mask_token_id {mask} of config.json, got one for {int(replaced)}"
        )
    block = s.integer("block_size") if values.get("block_size") is not None else head.integer("block_size")
    return ParallelHeadConfig(
        is_causal=bool(own.get("causal_head", False)),
        **s.common(hidden, 1e-6),
        vocab_size=vocab_size,
        feature_size=len(parallel_head_tap_layers(values)) * hidden,
        num_layers=s.integer("num_hidden_layers"),
        num_slots=block if is_dspark else block - 1,  # else the anchor's row drafts nothing
        is_shifted=is_dspark,
        corrects_first=rank > 0,
        edge_rank=rank,
        mask_token_id=None if MASK_TENSOR in tensors else mask,
        draft_vocab_size=size if size != vocab_size or "d2t" in tensors else None,
        rope_scaling=s.rope_scaling(),
    )
