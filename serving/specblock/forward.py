"""How do the parameters of a SpecBlock model become the fused tensors that drafting reads?

Shape legend: H drafter hidden size, E target embedding size, V target vocabulary, Vd draft vocabulary, K draft slots.

What does one SpecBlock forward compute around its attention: inputs of slots, projections, MLP, heads?

Nothing here reads the host or has a shape that depends on data, so both the eager drafter and captured graphs use it.

Shape legend: K draft slots, T = rows * K drafter tokens, H drafter hidden size, E target embedding size, V target
vocabulary, Hq/Hkv query/KV heads, Dh head dim, N nodes of a proposal, B requests, P positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from paceline.kernels.dispatch import Kernels, select_kernels
from paceline.serving.drafters.interface import Proposal
from paceline.serving.drafters.ops import (
    Ranking,
    adjacent_pairs,
    choose_ranking,
    head_logits,
    norm,
    pack_head,
    pair_angles,
    rotate_pairs,
)
from paceline.serving.specblock.model import SpecBlockConfig, rope_cos_sin

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


_MIN_TEMPERATURE = 0.05


class SlotForward:
    """The fused weights of one drafter and the operations between its attention calls."""

    def __init__(
        self,
        config: SpecBlockConfig,
        embed: torch.Tensor,
        *,
        dtype: torch.dtype,
        head_dtype: torch.dtype,
        device: torch.device,
        num_candidates: int,
        kernels: Kernels | None = None,
    ) -> None:
        """embed: (V, E), the target's token embedding. kernels: None = those of the device."""
        c = self.config = config
        self.dtype, self.head_dtype, self.device = dtype, head_dtype, device
        self.num_candidates = num_candidates
        self.weights: dict[str, torch.Tensor] = {}
        self._embed = embed
        self._rank = choose_ranking(kernels or select_kernels(device))
        k = c.num_slots
        self.slot_ids = torch.arange(k, device=device)
        self._before = torch.tensor([0, *range(k - 1)], device=device)
        self._d2t: torch.Tensor | None = None
        self._log_coverage: torch.Tensor | None = None
        # The first slot is conditioned on nothing drafted: path scores alone decide.
        count = num_candidates
        widths = [[count] * len(c.branching), *([[min(b, count) for b in c.branching]] * (k - 1))]
        self._widths = torch.tensor(widths, device=device).view(-1)
        self._width_offsets = torch.arange(k, device=device) * len(c.branching)

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights; every tensor keeps its storage, so that captured graphs stay valid.

        state: SpecBlockModel.state_dict(), checked by the caller.
        """
        new = fuse_weights(self.config, state, self._embed.to(self.device), self.device)
        for key, value in new.items():
            value = value.to(torch.float32 if key in FLOAT32_WEIGHTS else self.dtype).contiguous()
            if key == "lm_head" and self.head_dtype != self.dtype:
                value = pack_head(value, self.head_dtype)
            if key in self.weights:
                self.weights[key].copy_(value)
            else:
                self.weights[key] = value
        if self.config.draft_vocab_size is not None:
            token_ids = state["draft_token_ids"].to(self.device)
            coverage = state["log_coverage"].to(self.device, torch.float32)
            if self._d2t is None or self._log_coverage is None:
                self._d2t, self._log_coverage = token_ids.clone(), coverage.clone()
            else:
                self._d2t.copy_(token_ids)
                self._log_coverage.copy_(coverage)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        """RMS norm of the residual stream (T, H) -> (T, H); its weight is folded into the projection behind it."""
        return norm(x, self.config.rms_eps)

    def fuse(self, cond: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Inputs of the K slots of n rows or leaves: condition (n, H) and tokens (n,) -> (n * K, H)."""
        p = self.weights
        x = torch.addmm(p["token_table"].index_select(0, token_ids), self.norm(cond), p["fuse_cond"])
        return (x[:, None] + p["slot_bias"]).flatten(0, 1)

    def angle_table(self, num_positions: int) -> torch.Tensor:
        """Rotations of the K slots of rows at positions 0..P-1, (P, K, 1, Dh / 2): complex64, or (P, K, 2, 1, Dh / 2)."""
        c = self.config
        positions = torch.arange(num_positions, device=self.device)[:, None] + 1 + self.slot_ids
        cos, sin = rope_cos_sin(positions, c.head_dim, c.rope_theta)
        return pair_angles(cos, sin, self.dtype)

    def pair_tables(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of RoPE positions 0..P-1, (P, Dh) float32 each: slot s of the row at position p is at p + 1 + s.
        Both elements of a rotary pair, which are neighbours, have their column."""
        c = self.config
        tables = rope_cos_sin(torch.arange(num_positions, device=self.device), c.head_dim, c.rope_theta)
        cos, sin = (t.repeat_interleave(2, -1) for t in tables)
        return cos, sin

    def enter(self, i: int, x: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`project`, and rotation: x (T, H) -> x, qkv (T, ..)."""
        c = self.config
        x, qkv = self.project(i, x)
        rotate_pairs(qkv, angles, c.num_heads + c.num_kv_heads, c.head_dim)
        return x, qkv

    def project(self, i: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Shift (from the second layer on), norm, fused projection: x (T, H) -> x, qkv (T, ..) before the rotation."""
        c, p = self.config, self.weights
        if i > 0 and c.has_shift:
            before = x.view(-1, c.num_slots, x.shape[1]).index_select(1, self._before).view(x.shape)
            x = torch.addmm(torch.mm(x, p[f"shift_own{i}"]), before, p[f"shift_before{i}"])
        return x, torch.mm(self.norm(x), p[f"qkv{i}"])

    def finish(self, i: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection and MLP: x (T, H), attended (T, Hq * Dh) -> (T, H)."""
        p = self.weights
        x = torch.addmm(x, attended, p[f"o{i}"])
        gate, up = torch.mm(self.norm(x), p[f"gate_up{i}"]).chunk(2, dim=-1)
        return torch.addmm(x, F.silu(gate).mul_(up), p[f"down{i}"])

    def scales(self, temperatures: torch.Tensor) -> torch.Tensor:
        """(2, B, K) factors on the logits: exp(log_beta[class, block, slot]) / T, with T = 1 for greedy requests."""
        t = temperatures.to(self.device, torch.float32)
        is_sampled = t > 0
        factors = self.weights["beta"][:, :2].index_select(0, is_sampled.long()).transpose(0, 1)
        return factors / torch.where(is_sampled, t.clamp_min(_MIN_TEMPERATURE), 1.0)[:, None]

    def heads(
        self, x: torch.Tensor, scale: torch.Tensor, cond: torch.Tensor | None = None, rank: Ranking | None = None
    ) -> Proposal:
        """Output and rank head at x (N * K, H) with factors (N, K): a proposal of N nodes.

        cond: (N, H) projected features of the anchor rows, for drafters whose next block does not inherit hidden states.
        rank: None = that of the device.
        """
        c, p, count, k = self.config, self.weights, self.num_candidates, self.config.num_slots
        z = self.norm(x)
        factor = scale.reshape(-1, 1)
        logits = head_logits(z, p["lm_head"], self.head_dtype)
        top, ids = (rank or self._rank)(logits, factor, c.rank_topk)
        lp = top.div(factor).log_softmax(-1)  # the rank head reads the logits without calibration and temperature
        prob = lp.exp()
        features = torch.cat((z.float(), lp, prob[:, :1], (prob * lp).sum(-1, keepdim=True)), dim=-1)
        classes = torch.mm(F.silu(torch.mm(features, p["rank_in"])), p["rank_out"]).argmax(-1).view(-1, k)
        if self._d2t is not None and self._log_coverage is not None:
            ids, top = self._d2t[ids], top + self._log_coverage
        shape = (-1, k, c.rank_topk)
        hidden = x.view(-1, k, c.hidden_size)
        if cond is not None and not c.inherits_hidden:
            hidden = cond[:, None].expand(-1, k, -1).contiguous()
        return Proposal(
            token_ids=ids.view(shape)[..., :count],
            logprobs=top.view(shape)[..., :count],
            widths=self._widths.take(classes + self._width_offsets) if c.has_rank_head else classes.fill_(count),
            hidden=hidden,
        )
