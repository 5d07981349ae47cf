"""How do the parameters of a SpecBlock model become the fused tensors that drafting reads?

Shape legend: H drafter hidden size, E target embedding size, V target vocabulary, Vd draft vocabulary, K draft slots.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from paceline.serving.row_ops import adjacent_pairs
from paceline.serving.specblock_model import SpecBlockConfig

FLOAT32_WEIGHTS = ("rank_in", "rank_out", "beta")
"""Fused tensors that stay float32 whatever the drafter's dtype."""


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
    order = adjacent_pairs(c.head_dim, device)
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
