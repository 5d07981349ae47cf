"""How do the parameters of a SpecBlock model become the fused tensors that drafting reads, and which are refused?

Shape legend: H drafter hidden size, E target embedding size, V target vocabulary, Vd draft vocabulary, K draft slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from paceline.errors import DrafterMismatchError
from paceline.serving.specblock_model import SpecBlockConfig

FLOAT32_WEIGHTS = ("rank_in", "rank_out", "beta")
"""Fused tensors that stay float32 whatever the drafter's dtype."""


_MIN_HEAD_WEIGHTS = 2**18


class TargetHandles(Protocol):
    """What a drafter needs to know of its target."""

    @property
    def version(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def feature_size(self) -> int: ...

    @property
    def device(self) -> torch.device | str: ...

    @property
    def embed_weight(self) -> torch.Tensor: ...


def fuse_weights(
    config: SpecBlockConfig, state: Mapping[str, torch.Tensor], embed: torch.Tensor, device: torch.device
) -> dict[str, torch.Tensor]:
    """Exact identities only: norm weights and the softmax scale fold into projections, (in, out) layout; what the fusion
    adds per token and per slot becomes tables; rotary pairs become adjacent.

    Args:
        state: SpecBlockModel.state_dict().
        embed: (V, E), the target's token embedding.
    Returns: float32 tensors by name.
    """
    c, h = config, config.hidden_size
    s = {k: v.detach().to(device, torch.float32 if v.is_floating_point() else v.dtype) for k, v in state.items()}
    fuse = s["fuse_proj.weight"]
    embedded = F.rms_norm(embed.float(), (c.embed_size,), s["token_norm"], c.rms_eps)
    query = F.rms_norm(s["queries"], (h,), s["query_norm"], c.rms_eps)
    new = {  # projections are stored (in, out); norm weights are folded in
        "cond": s["cond_proj.weight"].T,
        "fuse_cond": (fuse[:, :h] * s["cond_norm"]).T,
        "token_table": embedded @ fuse[:, h : h + c.embed_size].T,  # (V, H)
        "slot_bias": query @ fuse[:, h + c.embed_size :].T,  # (K, H)
        "lm_head": (s["lm_head.weight"] * s["final_norm"]).T,
    }
    heads = c.num_heads + c.num_kv_heads
    order = torch.arange(c.head_dim, device=device).view(2, -1).T.reshape(-1)  # half-split -> adjacent pairs
    for i in range(c.num_layers):
        name = f"layers.{i}."
        qkv = (s[name + "qkv_proj.weight"] * s[name + "input_norm"]).view(-1, c.head_dim, h).clone()
        qkv[:heads] = qkv[:heads][:, order]
        qkv[: c.num_heads] *= c.head_dim**-0.5
        new[f"qkv{i}"] = qkv.view(-1, h).T
        new[f"o{i}"] = s[name + "o_proj.weight"].T
        new[f"gate_up{i}"] = (s[name + "gate_up_proj.weight"] * s[name + "post_norm"]).T
        new[f"down{i}"] = s[name + "down_proj.weight"].T
        if i > 0 and c.has_shift:
            new[f"shift_own{i}"] = s[f"shifts.{i - 1}.weight"][:, :h].T
            new[f"shift_before{i}"] = s[f"shifts.{i - 1}.weight"][:, h:].T
    # Inputs of the rank head as this class builds them: z, all log-probs, the top probability, sum of p log p.
    # The three gaps are differences of log-probs, so they fold into the columns of the first ones.
    rank = s["rank_in.weight"]
    folded = rank.new_zeros(rank.shape[0], c.rank_topk)
    folded[:, :10] = rank[:, h : h + 10]
    for column, other in enumerate((1, 2, 4)):
        folded[:, 0] += rank[:, h + 10 + column]
        folded[:, other] -= rank[:, h + 10 + column]
    parts = (rank[:, :h] * s["final_norm"], folded, rank[:, h + 13 : h + 14], -rank[:, h + 14 :])
    new["rank_in"] = torch.cat(parts, dim=1).T
    new["rank_out"] = s["rank_out.weight"].T
    new["beta"] = s["log_beta"].exp()
    return new


def pack_head(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(H, Vd) -> the layout that oneDNN reads fastest."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.T.contiguous().to(dtype), None)


def head_logits(z: torch.Tensor, head: torch.Tensor, head_dtype: torch.dtype) -> torch.Tensor:
    """Logits (T, Vd) float32 of normed hidden states z (T, H); a head of another dtype than z is a packed one."""
    if head_dtype == z.dtype:
        return torch.mm(z, head).float()
    return torch.ops.mkldnn._linear_pointwise(z.to(head_dtype), head, None, "none", [], "").float()


def choose_head_dtype(dtype: torch.dtype, device: torch.device, num_weights: int) -> torch.dtype:
    """The output head's dtype: bfloat16 for large heads where the CPU computes it natively, else the drafter's.

    The head is half of the weights that a round reads; rounding its logits moves no calibration noticeably.
    """
    is_native = torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()
    if dtype == torch.float32 and device.type == "cpu" and num_weights >= _MIN_HEAD_WEIGHTS and is_native:
        return torch.bfloat16
    return dtype


def check_state(state: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise DrafterMismatchError unless `state` has exactly these tensors, all finite."""
    missing, surplus = sorted(set(shapes) - set(state)), sorted(set(state) - set(shapes))
    if missing or surplus:
        raise DrafterMismatchError(f"drafter weights must match their config: missing {missing}, surplus {surplus}")
    for name, tensor in state.items():
        if tuple(tensor.shape) != tuple(shapes[name]):
            raise DrafterMismatchError(f"drafter tensor {name} must be {shapes[name]}, got {tuple(tensor.shape)}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise DrafterMismatchError(f"drafter tensor {name} must be finite")
