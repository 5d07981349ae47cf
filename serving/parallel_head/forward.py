"""What does one parallel-head call compute for packed rows: context keys and values, block rows, slot logits?

Weights are fused by exact identities only: norm weights and the softmax scale fold into projections, the context K/V of
all layers is one projection. Nothing here reads the host or has a shape that depends on data.

Shape legend: B requests, R new rows, S draft slots, N = 1 + S block rows, T = B * N packed block rows, Lt layers, H
hidden size, Hq/Hkv query/KV heads, G = Hq / Hkv, Dh head dim, V target vocabulary, K candidates per slot, r edge rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from paceline.kernels.dispatch import Kernels, select_kernels
from paceline.serving.drafters.interface import Proposal
from paceline.serving.drafters.ops import choose_ranking, head_logits, pack_head
from paceline.serving.parallel_head.model import ParallelHeadConfig
from paceline.serving.specblock.model import rope_cos_sin

_MIN_TEMPERATURE = 0.05
_MIN_REST = 1e-9
"""Least probability that the edge correction grants to tokens that are no candidates."""


class HeadForward:
    """The fused weights of one drafter and the operations around its attention."""

    def __init__(
        self,
        config: ParallelHeadConfig,
        embed: torch.Tensor,
        head: torch.Tensor,
        *,
        dtype: torch.dtype,
        head_dtype: torch.dtype,
        device: torch.device,
        num_candidates: int,
        kernels: Kernels | None = None,
    ) -> None:
        """embed, head: (V, H), the target's token embedding and output head. kernels: None = those of the device."""
        self.config = config
        self.dtype, self.head_dtype, self.device = dtype, head_dtype, device
        self.num_candidates = num_candidates
        self.weights: dict[str, torch.Tensor] = {}
        self._embed = embed.detach().to(device, dtype)
        self._head = head.detach().to(device)
        self._kernels = kernels or select_kernels(device)
        self._rank = choose_ranking(self._kernels)
        self._ones = torch.ones(config.hidden_size, dtype=dtype, device=device)

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights in place, one after the other: serving goes on, so no second set of them may be in memory.

        state: ParallelHeadModel.state_dict(), checked by the caller.
        """
        for key, value in self._fused(state):
            dtype = torch.float32 if key == "beta" else self.dtype
            if key == "lm_head" and self.head_dtype != self.dtype:
                value = pack_head(value.to(self.dtype), self.head_dtype)
            elif key not in self.weights:  # a copy of its own also where the state's tensor would do as it is
                value = value.to(dtype, copy=True, memory_format=torch.contiguous_format)
            if key in self.weights:
                self.weights[key].copy_(value)
            else:
                self.weights[key] = value

    def _fused(self, state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and float32 values of the weights, each made when it is asked for; projections are stored (in, out)."""
        c = self.config
        layers = [f"layers.{i}." for i in range(c.num_layers)]

        def own(name: str) -> torch.Tensor:
            return state[name].detach().to(self.device, torch.float32)

        yield "cond", own("cond_proj.weight").T
        yield "context_kv", torch.cat([own(n + "kv_proj.weight") * own("cond_norm") for n in layers]).T
        yield "context_k_norm", torch.stack([own(n + "k_norm") for n in layers])[:, None, :]  # (Lt, 1, Dh)
        yield "mask", own("mask_embedding") if c.mask_token_id is None else self._embed[c.mask_token_id].float()
        yield "lm_head", (self._head * own("final_norm")).T
        yield "beta", own("log_beta").exp()
        for i, n in enumerate(layers):
            qkv = torch.cat((own(n + "q_proj.weight"), own(n + "kv_proj.weight")))
            yield f"qkv{i}", (qkv * own(n + "input_norm")).T
            q_norm = (own(n + "q_norm") * c.head_dim**-0.5).expand(c.num_heads, -1)
            yield f"qk_norm{i}", torch.cat((q_norm, own(n + "k_norm").expand(c.num_kv_heads, -1)))  # (Hq + Hkv, Dh)
            yield f"o{i}", own(n + "o_proj.weight").T
            yield f"gate_up{i}", (own(n + "gate_up_proj.weight") * own(n + "post_norm")).T
            yield f"down{i}", own(n + "down_proj.weight").T
        if c.edge_rank:
            yield "edge_in", own("edge_in")
            yield "edge_out", own("edge_out")

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last dimension; its weight is folded into what reads it."""
        width, eps = x.shape[-1], self.config.rms_eps
        if self.device.type == "cpu":  # [x, -x] has mean 0, so its LayerNorm, one operator, is the RMSNorm of x
            return F.layer_norm(torch.cat((x, -x), dim=-1), (2 * width,), None, None, eps)[..., :width]
        return F.rms_norm(x, (width,), None, eps)

    def angle_table(self, num_positions: int) -> torch.Tensor:
        """Rotations of positions 0..P-1, (P, 2, Dh) float32: [cos, cos] and [-sin, sin]."""
        c = self.config
        positions = torch.arange(num_positions, device=self.device)
        cos, sin = rope_cos_sin(positions, c.head_dim, c.rope_theta, c.rope_scaling)
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

    def kernel_tables(self, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The table `angles` as the ingest kernel reads it, cos and sin (P, Dh / 2); None where there is no such kernel."""
        if self._kernels.is_reference:
            return None
        half = angles.shape[-1] // 2
        return angles[:, 0, :half].contiguous(), angles[:, 1, half:].contiguous()

    def ingest(
        self,
        pool: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        angles: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """Write keys and values of all layers for new rows to the pool (Lt, rows, 2, Hkv, Dh).

        features: (R, F). positions, slots: (R,) int64. angles, tables: `angle_table` and its `kernel_tables`.
        """
        if tables is None:
            pool.index_copy_(1, slots, self.context_rows(features, angles.index_select(0, positions)))
            return
        p = self.weights
        self._kernels.draft_ingest(
            features=features.to(self.dtype),
            fc=p["cond"],
            norm_weight=self._ones,  # the norm's weight is folded into the projection behind it
            kv_weight=p["context_kv"],
            k_norm_weight=p["context_k_norm"][:, 0],
            cos=tables[0],
            sin=tables[1],
            positions=positions,
            pool_rows=slots,
            pool=pool,
            eps=self.config.rms_eps,
        )

    def block_rows(self, anchor_token_ids: torch.Tensor) -> torch.Tensor:
        """Inputs of the blocks of B requests, (T, H)."""
        c = self.config
        x = self.weights["mask"].repeat(anchor_token_ids.numel(), c.num_slots + 1, 1)
        x[:, 0] = self._embed.index_select(0, anchor_token_ids)
        return x.flatten(0, 1)

    def enter(self, i: int, x: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Norm and fused projection of layer i: x (T, H) -> queries (T, Hq, Dh), keys and values (T, Hkv, Dh)."""
        c, p = self.config, self.weights
        qkv = torch.mm(self.norm(x), p[f"qkv{i}"]).view(x.shape[0], -1, c.head_dim)
        rotated = c.num_heads + c.num_kv_heads
        qk = self._rotate(self.norm(qkv[:, :rotated]) * p[f"qk_norm{i}"], angles)
        return qk[:, : c.num_heads], qk[:, c.num_heads :], qkv[:, rotated:]

    def finish(self, i: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection and MLP of layer i: x (T, H), attended (T, Hq * Dh) -> (T, H)."""
        p = self.weights
        x = torch.addmm(x, attended, p[f"o{i}"])
        gate, up = torch.mm(self.norm(x), p[f"gate_up{i}"]).chunk(2, dim=-1)
        return torch.addmm(x, F.silu(gate).mul_(up), p[f"down{i}"])

    def scales(self, temperatures: torch.Tensor) -> torch.Tensor:
        """(B, S) factors on the logits: exp(log_beta[class, slot]) / T, with T = 1 for greedy requests."""
        t = temperatures.to(self.device, torch.float32)
        is_sampled = t > 0
        factors = self.weights["beta"].index_select(0, is_sampled.long())
        return factors / torch.where(is_sampled, t.clamp_min(_MIN_TEMPERATURE), 1.0)[:, None]

    def heads(self, x: torch.Tensor, scale: torch.Tensor) -> Proposal:
        """Output head at the last S rows of each block: x (T, H), scale (B, S) -> a proposal of B nodes."""
        c, count = self.config, self.num_candidates
        z = self.norm(x.view(-1, c.num_slots + 1, c.hidden_size)[:, 1:].flatten(0, 1))
        logits = head_logits(z, self.weights["lm_head"], self.head_dtype)
        top, ids = self._rank(logits, scale.reshape(-1, 1), count)
        token_ids, logprobs = ids.view(-1, c.num_slots, count), top.view(-1, c.num_slots, count)
        edges = self.edge_logprobs(token_ids, logprobs, scale) if c.edge_rank and c.num_slots > 1 else None
        return Proposal(token_ids=token_ids, logprobs=logprobs, widths=None, edge_logprobs=edges)

    def edge_logprobs(self, token_ids: torch.Tensor, logprobs: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Scores of each slot's candidates below each candidate of the slot before: (B, S - 1, K, K) float32.

        The bias is computed for the K candidates only, in O(S K^2 r); tokens that are no candidates keep their mass in
        the normaliser, so that the scores are exact when K = V and otherwise as good as that one assumption.
        The first slot needs no correction: its parent is the anchor, which the block reads.

        Args:
            token_ids, logprobs: (B, S, K), over the whole vocabulary, without correction.
            scale: (B, S) factors on the logits.
        """
        p = self.weights
        before = F.embedding(token_ids[:, :-1], p["edge_in"])  # (B, S - 1, K, r)
        bias = torch.matmul(before, F.embedding(token_ids[:, 1:], p["edge_out"]).transpose(2, 3)).float()
        own = logprobs[:, 1:]
        scores = torch.addcmul(own[:, :, None], bias, scale[:, 1:, None, None])
        rest = (1.0 - own.exp().sum(-1)).clamp_min(_MIN_REST).log()
        return scores - torch.logaddexp(scores.logsumexp(-1), rest[..., None])[..., None]
