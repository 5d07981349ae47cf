"""SpecBlock forward: both blocks around their attention, from inputs of slots to output and rank head.

Eager drafting and captured graphs run the same two blocks over another `SlotAttention`.
Shape legend: B requests, R new rows, K draft slots, T = rows * K drafter tokens, F leaves, H drafter hidden size, E target
embedding size, V target vocabulary, Vd draft vocabulary, Hq/Hkv query/KV heads, Dh head dim, N nodes of a proposal, P positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from paceline.serving.drafters.forward import DrafterForward, Own, Ranking
from paceline.serving.drafters.interface import DraftInputs, Frontier, Proposal
from paceline.serving.drafters.network import pair_angles, rms_norm
from paceline.serving.specblock.model import SpecBlockConfig


class SlotAttention(Protocol):
    """Rotation, K/V and attention of both blocks over the drafter's pool; `qkv` is (T, (Hq + 2 Hkv) * Dh), not rotated."""

    def open_rows(self, inputs: DraftInputs, *, wants_block: bool) -> None:
        """Begin block 1 of the new rows; wants_block False: only their K/V are wanted."""

    def write(self, i: int, qkv: torch.Tensor) -> None:
        """Write the K/V of the new rows in layer i."""

    def rows(self, i: int, qkv: torch.Tensor) -> torch.Tensor:
        """Write them, and attend from every new row: (T, Hq * Dh)."""

    def newest_rows(self, i: int, qkv: torch.Tensor) -> torch.Tensor:
        """Write them, and attend from the newest row of each request: (B * K, Hq * Dh)."""

    def newest(self, x: torch.Tensor) -> torch.Tensor:
        """Those rows of x: (T, H) -> (B * K, H)."""

    def open_leaves(self, inputs: DraftInputs, frontier: Frontier) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Begin block 2: each leaf's row (F,) of the proposal's (B * K) slots, and its request; None = there is one only."""

    def leaves(self, i: int, qkv: torch.Tensor) -> torch.Tensor:
        """Attend from the slots of the leaves, whose K/V go nowhere: (F * K, Hq * Dh)."""


class SlotForward(DrafterForward):
    """The fused weights of one drafter and its two blocks."""

    float32_weights = ("rank_in", "rank_out", "beta", "log_coverage")
    config: SpecBlockConfig

    def __init__(self, config: SpecBlockConfig, *tables: torch.Tensor, **options: Any) -> None:
        super().__init__(config, *tables, **options)
        k, count, device = config.num_slots, self.num_candidates, self.device
        self.slot_ids = torch.arange(k, device=device)
        self._before = torch.tensor([0, *range(k - 1)], device=device)
        # The first slot is conditioned on nothing drafted: path scores alone decide.
        num_classes = len(config.branching)
        widths = [[count] * num_classes, *([[min(b, count) for b in config.branching]] * (k - 1))]
        self._widths = torch.tensor(widths, device=device).view(-1)
        self._width_offsets = torch.arange(k, device=device) * num_classes

    def _fused(self, own: Own) -> Iterator[tuple[str, torch.Tensor]]:
        c, h = self.config, self.config.hidden_size
        fuse = own("fuse_proj.weight")
        embedded = rms_norm(self.embed_weight.to(self.device).float(), own("token_norm"), c.rms_eps)
        query = rms_norm(own("queries"), own("query_norm"), c.rms_eps)
        yield "cond", own("cond_proj.weight").T
        yield "fuse_cond", (fuse[:, :h] * own("cond_norm")).T
        yield "token_table", embedded @ fuse[:, h : h + c.embed_size].T  # (V, H)
        yield "slot_bias", query @ fuse[:, h + c.embed_size :].T  # (K, H)
        for i in range(c.num_layers):
            name = f"layers.{i}."
            yield f"qkv{i}", self._paired_heads(own(name + "qkv_proj.weight") * own(name + "input_norm")).T
            yield from self._fused_output(own, i, name)
            if i > 0 and c.has_shift:
                shift = own(f"shifts.{i - 1}.weight")
                yield f"shift_own{i}", shift[:, :h].T
                yield f"shift_before{i}", shift[:, h:].T
        yield "lm_head", self._fused_head(own, is_shared=c.shares_head)
        yield from self._fused_ids(own)
        # Inputs of the rank head as `_heads` builds them: z, all log-probs, the top probability, sum of p log p.
        # The three gaps are differences of log-probs, so they fold into the columns of the first ones.
        rank = own("rank_in.weight")
        folded = rank.new_zeros(rank.shape[0], c.rank_topk)
        folded[:, :10] = rank[:, h : h + 10]
        for column, other in enumerate((1, 2, 4)):
            folded[:, 0] += rank[:, h + 10 + column]
            folded[:, other] -= rank[:, h + 10 + column]
        parts = (rank[:, :h] * own("final_norm"), folded, rank[:, h + 13 : h + 14], -rank[:, h + 14 :])
        yield "rank_in", torch.cat(parts, dim=1).T
        yield "rank_out", own("rank_out.weight").T
        yield "beta", own("log_beta").exp()

    # ---- the blocks

    def ingest(self, attention: SlotAttention, inputs: DraftInputs) -> None:
        """Write the K/V of the new rows."""
        attention.open_rows(inputs, wants_block=False)
        _, qkv = self._to_last_layer(attention, inputs, self.conditions(inputs))
        attention.write(self.config.num_layers - 1, qkv)

    def block1(
        self, attention: SlotAttention, inputs: DraftInputs, scales: torch.Tensor, rank: Ranking | None = None
    ) -> Proposal:
        """Write the K/V of the new rows and propose K slots at each anchor. scales: (2, B, K)."""
        attention.open_rows(inputs, wants_block=True)
        cond, last = self.conditions(inputs), self.config.num_layers - 1
        x, qkv = self._to_last_layer(attention, inputs, cond)
        attended = attention.newest_rows(last, qkv)  # only the newest row of each request drafts
        others = self.choose_deltas(inputs.deltas, self.config.num_slots)
        proposal = self.heads(self.finish(attention.newest(x), attended, last, others), scales[0], rank)
        if not self.config.inherits_hidden:  # the next block starts from the anchor rows' features
            proposal.hidden = self.anchor_hidden(cond, inputs)
        return proposal

    def block2(
        self,
        attention: SlotAttention,
        inputs: DraftInputs,
        hidden: torch.Tensor,
        frontier: Frontier,
        scales: torch.Tensor,
        rank: Ranking | None = None,
    ) -> Proposal:
        """Propose K slots at the leaves. hidden: (B, K, H) of block 1. scales: (2, B, K)."""
        # The hidden state is that of the leaf's slot; which token the leaf holds enters by its embedding.
        cells, owner = attention.open_leaves(inputs, frontier)
        x = self.fuse(hidden.flatten(0, 1).index_select(0, cells), frontier.token_ids)
        deltas = inputs.deltas
        if deltas is not None:
            deltas = deltas.expand(cells.numel()) if owner is None else deltas.index_select(0, owner)
        others = self.choose_deltas(deltas, self.config.num_slots)
        for i in range(self.config.num_layers):
            x, qkv = self.project(i, x)
            x = self.finish(x, attention.leaves(i, qkv), i, others)
        scale = scales[1].expand(cells.numel(), -1) if owner is None else scales[1].index_select(0, owner)
        return self.heads(x, scale, rank)

    def scales(self, temperatures: torch.Tensor) -> torch.Tensor:
        """(2, B, K) factors on the logits of the two blocks, as DrafterForward.scales."""
        return super().scales(temperatures)[:, :2].transpose(0, 1)

    # ---- pieces

    def conditions(self, inputs: DraftInputs) -> torch.Tensor:
        """Projected features (R, H) of the new rows."""
        assert inputs.new_features is not None
        return torch.mm(inputs.new_features.to(self.dtype), self.weights["cond"])

    def anchor_hidden(self, cond: torch.Tensor, inputs: DraftInputs) -> torch.Tensor:
        """(B, K, H) projected features of the anchors' rows, where block 2 begins from those."""
        anchors = cond.index_select(0, (inputs.cu_new[1:] - 1).clamp(min=0))
        return anchors[:, None].expand(-1, self.config.num_slots, -1).contiguous()

    def _to_last_layer(
        self, attention: SlotAttention, inputs: DraftInputs, cond: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All layers of the new rows but the attention and MLP of the last one: x (R * K, H), qkv (R * K, ..)."""
        x, last = self.fuse(cond, inputs.new_token_ids), self.config.num_layers - 1
        for i in range(last):
            x, qkv = self.project(i, x)
            x = self.finish(x, attention.rows(i, qkv), i)
        return self.project(last, x)

    def fuse(self, cond: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Inputs of the K slots of n rows or leaves: condition (n, H) and tokens (n,) -> (n * K, H)."""
        w = self.weights
        x = torch.addmm(w["token_table"].index_select(0, token_ids), self.norm(cond), w["fuse_cond"])
        return (x[:, None] + w["slot_bias"]).flatten(0, 1)

    def _angle_table(self, num_positions: int) -> torch.Tensor:
        """Rotations of the K slots of rows at positions 0..P-1, (P, K, 1, Dh / 2): complex64, or (P, K, 2, 1, Dh / 2)."""
        positions = torch.arange(num_positions, device=self.device)[:, None] + 1 + self.slot_ids
        return pair_angles(*self._cos_sin(positions), self.dtype)

    def pair_tables(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of RoPE positions 0..P-1, (P, Dh) float32 each: slot s of the row at position p is at p + 1 + s.
        Both elements of a rotary pair, which are neighbours, have their column."""
        cos, sin = self._cos_sin(torch.arange(num_positions, device=self.device))
        return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)

    def project(self, i: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Shift (from the second layer on), norm, fused projection: x (T, H) -> x, qkv (T, ..) before the rotation."""
        c, w = self.config, self.weights
        if i > 0 and c.has_shift:
            before = x.view(-1, c.num_slots, x.shape[1]).index_select(1, self._before).view(x.shape)
            x = torch.addmm(torch.mm(x, w[f"shift_own{i}"]), before, w[f"shift_before{i}"])
        return x, torch.mm(self.norm(x), w[f"qkv{i}"])

    def heads(
        self, x: torch.Tensor, scale: torch.Tensor, rank: Ranking | None = None, logits: torch.Tensor | None = None
    ) -> Proposal:
        """Output and rank head at x (N * K, H) with factors (N, K): a proposal of N nodes.

        rank: None = the device's. logits: (N * K, Vd) of x, which are overwritten; None = they are computed.
        """
        c, w, count, k = self.config, self.weights, self.num_candidates, self.config.num_slots
        z, factor = self.norm(x), scale.reshape(-1, 1)
        if logits is None:
            logits = self.logits(z)
        top, ids = (rank or self.rank)(logits, factor, c.rank_topk)
        lp = top.div(factor).log_softmax(-1)  # the rank head reads the logits without calibration and temperature
        prob = lp.exp()
        features = torch.cat((z.float(), lp, prob[:, :1], (prob * lp).sum(-1, keepdim=True)), dim=-1)
        classes = torch.mm(F.silu(torch.mm(features, w["rank_in"])), w["rank_out"]).argmax(-1).view(-1, k)
        top, ids = self.in_target_vocab(top, ids)
        shape = (-1, k, c.rank_topk)
        return Proposal(
            token_ids=ids.view(shape)[..., :count],
            logprobs=top.view(shape)[..., :count],
            widths=self._widths.take(classes + self._width_offsets) if c.has_rank_head else classes.fill_(count),
            hidden=x.view(-1, k, c.hidden_size),
        )
