"""Parallel-head forward: the fused weights of one drafter and the operations around its attention.

Shape legend: B requests, R new rows, S draft slots, N = 1 + S block rows, Lt layers, T = B * N packed block rows, Hq/Hkv
query/KV heads, Dh head dim, F fused target feature size, V/Vd target/draft vocabulary, H hidden size, K candidates per slot,
r edge rank, P positions.
The same candidates stand below every parent; with the edge correction their scores depend on the parent's token.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
import torch.nn.functional as F

from paceline.serving.drafters.forward import DrafterForward, Own
from paceline.serving.drafters.interface import Proposal
from paceline.serving.parallel_head.model import ParallelHeadConfig

_MIN_REST = 1e-9
"""Least probability that the edge correction grants to tokens that are no candidates."""


class HeadForward(DrafterForward):
    """The fused weights of one drafter and the operations around its attention."""

    config: ParallelHeadConfig

    @cached_property
    def _anchors(self) -> torch.Tensor:
        """(V, H) token embedding on the drafter's device, where it can be the target's tensor."""
        return self.embed_weight.to(self.device)

    @cached_property
    def _ones(self) -> torch.Tensor:
        return torch.ones(self.config.hidden_size, dtype=self.dtype, device=self.device)

    def _fused(self, own: Own) -> Iterator[tuple[str, torch.Tensor]]:
        c = self.config
        layers = [f"layers.{i}." for i in range(c.num_layers)]
        mask = own("mask_embedding") if c.mask_token_id is None else self._anchors[c.mask_token_id].to(self.dtype)
        yield "mask", mask.float()
        yield "beta", own("log_beta").exp()
        yield from self._fused_ids(own)
        if c.edge_rank:
            yield "edge_in", own("edge_in")
            yield "edge_out", own("edge_out")
        if self.is_native:
            return
        yield "cond", own("cond_proj.weight").T
        yield "context_kv", torch.cat([own(n + "kv_proj.weight") * own("cond_norm") for n in layers]).T
        yield "context_k_norm", torch.stack([own(n + "k_norm") for n in layers])[:, None, :]  # (Lt, 1, Dh)
        yield "lm_head", self._fused_head(own, is_shared=True)
        for i, n in enumerate(layers):
            qkv = torch.cat((own(n + "q_proj.weight"), own(n + "kv_proj.weight")))
            yield f"qkv{i}", (qkv * own(n + "input_norm")).T
            q_norm = (own(n + "q_norm") * c.head_dim**-0.5).expand(c.num_heads, -1)
            yield f"qk_norm{i}", torch.cat((q_norm, own(n + "k_norm").expand(c.num_kv_heads, -1)))  # (Hq + Hkv, Dh)
            yield from self._fused_output(own, i, n)

    def _angle_table(self, num_positions: int) -> torch.Tensor:
        """Rotations of positions 0..P-1, (P, 2, Dh) float32: [cos, cos] and [-sin, sin]; the ingest kernel's beside it."""
        cos, sin = self._cos_sin(torch.arange(num_positions, device=self.device))
        self._kernel_tables = cos.contiguous(), sin.contiguous()  # (P, Dh / 2) each
        return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)

    def _rotate(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Rotate x (rows, ..., Dh) by half-split pairs; angles (rows, 2, Dh)."""
        shape = (x.shape[0], *[1] * (x.dim() - 2), x.shape[-1])
        cos, sin = (a.view(shape) for a in angles.unbind(1))
        half = x.shape[-1] // 2
        return torch.addcmul(x * cos, x.roll(half, -1), sin).to(x.dtype)

    def context_rows(self, features: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Keys and values of all layers for new rows: features (R, F), angles (R, 2, Dh) -> (Lt, R, 2, Hkv, Dh)."""
        c, p = self.config, self.weights
        g = self.norm(torch.mm(features.to(self.dtype), p["cond"]))
        kv = torch.mm(g, p["context_kv"]).view(-1, c.num_layers, 2, c.num_kv_heads, c.head_dim)
        kv[:, :, 0] = self._rotate(self.norm(kv[:, :, 0]) * p["context_k_norm"], angles)
        return kv.transpose(0, 1)

    def ingest(
        self, pool: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, length: int
    ) -> None:
        """Write keys and values of all layers for new rows to the pool (Lt, rows, 2, Hkv, Dh).

        features: (R, F). positions, slots: (R,) int64, positions below `length`.
        """
        angles = self.angles(length)
        if self.kernels.is_reference:
            pool.index_copy_(1, slots, self.context_rows(features, angles.index_select(0, positions)))
            return
        p = self.weights
        self.kernels.draft_ingest(
            features=features.to(self.dtype),
            fc=p["cond"],
            norm_weight=self._ones,  # the norm's weight is folded into the projection behind it
            kv_weight=p["context_kv"],
            k_norm_weight=p["context_k_norm"][:, 0],
            cos=self._kernel_tables[0],
            sin=self._kernel_tables[1],
            positions=positions,
            pool_rows=slots,
            pool=pool,
            eps=self.config.rms_eps,
        )

    def block_rows(self, anchor_token_ids: torch.Tensor) -> torch.Tensor:
        """Inputs of the blocks of B requests, (T, H)."""
        c = self.config
        x = self.weights["mask"].expand(anchor_token_ids.numel(), c.num_rows, -1).clone()
        x[:, 0] = self._anchors.index_select(0, anchor_token_ids)
        return x.flatten(0, 1)

    def enter(self, i: int, x: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Norm and fused projection of layer i: x (T, H) -> queries (T, Hq, Dh), keys and values (T, Hkv, Dh)."""
        c, p = self.config, self.weights
        qkv = torch.mm(self.norm(x), p[f"qkv{i}"]).view(x.shape[0], -1, c.head_dim)
        rotated = c.num_heads + c.num_kv_heads
        qk = self._rotate(self.norm(qkv[:, :rotated]) * p[f"qk_norm{i}"], angles)
        return qk[:, : c.num_heads], qk[:, c.num_heads :], qkv[:, rotated:]

    def block_logits(self, x: torch.Tensor) -> torch.Tensor:
        """Output head at the last S rows of each block: x (T, H) -> (B * S, Vd)."""
        c = self.config
        return self.logits(self.norm(x.view(-1, c.num_rows, c.hidden_size)[:, -c.num_slots :].flatten(0, 1)))

    def heads(self, logits: torch.Tensor, scale: torch.Tensor, anchor_token_ids: torch.Tensor) -> Proposal:
        """A proposal of B nodes: logits (B * S, Vd), which may be overwritten, scale (B, S), anchors (B,)."""
        c, count = self.config, self.num_candidates
        if c.corrects_first:
            bias = F.linear(F.embedding(anchor_token_ids, self.weights["edge_in"]), self.weights["edge_out"])
            logits.view(-1, c.num_slots, logits.shape[1])[:, 0].add_(bias.to(logits.dtype))
        top, ids = self.rank(logits, scale.reshape(-1, 1), count)
        token_ids, logprobs = ids.view(-1, c.num_slots, count), top.view(-1, c.num_slots, count)
        edges = self.edge_logprobs(token_ids, logprobs, scale) if c.edge_rank and c.num_slots > 1 else None
        if c.draft_vocab_size is not None:
            logprobs, token_ids = self.in_target_vocab(logprobs, token_ids)
            edges = None if edges is None else edges + self.weights["log_coverage"]
        return Proposal(token_ids=token_ids, logprobs=logprobs, widths=None, edge_logprobs=edges)

    def edge_logprobs(self, token_ids: torch.Tensor, logprobs: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Scores of each slot's candidates below each candidate of the slot before: (B, S - 1, K, K) float32.

        The bias is computed for the K candidates only, in O(S K^2 r); tokens that are no candidates keep their mass in
        the normaliser, so that the scores are exact when K = Vd and otherwise as good as that one assumption.
        The first slot is not in it: its parent is the anchor, which the block reads or `heads` corrects by.

        Args:
            token_ids, logprobs: (B, S, K), of and over the whole draft vocabulary, without correction.
            scale: (B, S) factors on the logits.
        """
        p = self.weights
        before = F.embedding(token_ids[:, :-1], p["edge_in"])  # (B, S - 1, K, r)
        bias = torch.matmul(before, F.embedding(token_ids[:, 1:], p["edge_out"]).transpose(2, 3)).float()
        own = logprobs[:, 1:]
        scores = torch.addcmul(own[:, :, None], bias, scale[:, 1:, None, None])
        rest = (1.0 - own.exp().sum(-1)).clamp_min(_MIN_REST).log()
        return scores - torch.logaddexp(scores.logsumexp(-1), rest[..., None])[..., None]
