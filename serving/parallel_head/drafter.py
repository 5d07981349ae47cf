"""JetSpec and DFlash drafting: one call a round drafts a whole block against context keys and values written once.

Shape legend: B requests, R new rows, L longest context, S draft slots, N = 1 + S block rows, Lt layers, P pool rows,
T = B * N packed block rows, Hq/Hkv query/KV heads, G = Hq / Hkv, Dh head dim, V target vocabulary, H hidden size,
K candidates per slot, r edge rank.
The drafter's KV of a pool row follows from the target's features at that row alone; block rows leave nothing behind.
The same candidates stand below every parent; with the edge correction their scores depend on the parent's token.
Source: DFlash and JetSpec, tree_speculation.md 1.3, 1.9 and 4.7.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
import torch.nn.functional as F

from paceline.errors import DrafterMismatchError
from paceline.serving.drafters.family import DrafterFamily, TrainedDrafter
from paceline.serving.drafters.forward import DrafterForward, Own, ScaleCache
from paceline.serving.drafters.interface import DrafterCaps, DraftInputs, Frontier, Proposal
from paceline.serving.parallel_head.model import (
    DRAFTER_TYPES,
    ParallelHeadConfig,
    ParallelHeadModel,
    block_visibility,
)

_MIN_REST = 1e-9
"""Least probability that the edge correction grants to tokens that are no candidates."""


class HeadForward(DrafterForward):
    """The fused weights of one drafter and the operations around its attention."""

    config: ParallelHeadConfig

    @cached_property
    def _anchors(self) -> torch.Tensor:
        """(V, H) token embedding in the drafter's number type, where it can be the target's tensor."""
        return self._embed.to(self.device, self.dtype)

    @cached_property
    def _ones(self) -> torch.Tensor:
        return torch.ones(self.config.hidden_size, dtype=self.dtype, device=self.device)

    def _fused(self, own: Own) -> Iterator[tuple[str, torch.Tensor]]:
        c = self.config
        layers = [f"layers.{i}." for i in range(c.num_layers)]
        yield "cond", own("cond_proj.weight").T
        yield "context_kv", torch.cat([own(n + "kv_proj.weight") * own("cond_norm") for n in layers]).T
        yield "context_k_norm", torch.stack([own(n + "k_norm") for n in layers])[:, None, :]  # (Lt, 1, Dh)
        yield "mask", own("mask_embedding") if c.mask_token_id is None else self._anchors[c.mask_token_id].float()
        yield "lm_head", (self._head.to(self.device) * own("final_norm")).T
        yield "beta", own("log_beta").exp()
        for i, n in enumerate(layers):
            qkv = torch.cat((own(n + "q_proj.weight"), own(n + "kv_proj.weight")))
            yield f"qkv{i}", (qkv * own(n + "input_norm")).T
            q_norm = (own(n + "q_norm") * c.head_dim**-0.5).expand(c.num_heads, -1)
            yield f"qk_norm{i}", torch.cat((q_norm, own(n + "k_norm").expand(c.num_kv_heads, -1)))  # (Hq + Hkv, Dh)
            yield from self._fused_output(own, i, n)
        if c.edge_rank:
            yield "edge_in", own("edge_in")
            yield "edge_out", own("edge_out")

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
        x = self.weights["mask"].repeat(anchor_token_ids.numel(), c.num_slots + 1, 1)
        x[:, 0] = self._anchors.index_select(0, anchor_token_ids)
        return x.flatten(0, 1)

    def enter(self, i: int, x: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Norm and fused projection of layer i: x (T, H) -> queries (T, Hq, Dh), keys and values (T, Hkv, Dh)."""
        c, p = self.config, self.weights
        qkv = torch.mm(self.norm(x), p[f"qkv{i}"]).view(x.shape[0], -1, c.head_dim)
        rotated = c.num_heads + c.num_kv_heads
        qk = self._rotate(self.norm(qkv[:, :rotated]) * p[f"qk_norm{i}"], angles)
        return qk[:, : c.num_heads], qk[:, c.num_heads :], qkv[:, rotated:]

    def heads(self, x: torch.Tensor, scale: torch.Tensor) -> Proposal:
        """Output head at the last S rows of each block: x (T, H), scale (B, S) -> a proposal of B nodes."""
        c, count = self.config, self.num_candidates
        z = self.norm(x.view(-1, c.num_slots + 1, c.hidden_size)[:, 1:].flatten(0, 1))
        top, ids = self.best(z, scale.reshape(-1, 1), count)
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


class ParallelHeadDrafter(TrainedDrafter):
    """A product block proposer."""

    forward_class = HeadForward
    config: ParallelHeadConfig
    forward: HeadForward

    def _capabilities(self, num_candidates: int) -> DrafterCaps:
        c = self.config
        return DrafterCaps(
            name=c.drafter_type,
            num_slots=c.num_slots,
            num_candidates=num_candidates,
            max_depth=c.num_slots,
            is_reentrant=False,
            needs_features=True,
            is_product=True,
            is_row_local=True,
        )

    def _pool_shape(self, num_rows: int) -> tuple[int, ...]:
        c = self.config
        return c.num_layers, num_rows, 2, c.num_kv_heads, c.head_dim

    def _prepare(self) -> None:
        self._hidden_rows = ~block_visibility(self.config.num_slots, self.config.is_causal, self.device)  # (N, N)
        self._lone_bias = torch.empty(0, 0)
        self._scale_cache = ScaleCache()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """As TrainedDrafter.load_state; weights that were trained with the other kind of block do not fit either."""
        is_causal = state.get("is_causal")
        if is_causal is not None and bool(is_causal.all()) != self.config.is_causal:
            raise DrafterMismatchError(
                f"weights of a {self.caps.name} drafter must have is_causal {self.config.is_causal}, "
                f"got {bool(is_causal.all())}"
            )
        super().load_state(state)
        self._scale_cache.clear()

    # ---- the drafter interface

    @torch.no_grad()
    def ingest(self, inputs: DraftInputs) -> None:
        """Write drafter KV for the new rows, which depend on nothing but their own features. Syncs: none on devices."""
        assert inputs.new_features is not None
        if inputs.new_positions.numel() == 0:
            return
        is_host = self.device.type == "cpu"
        length = int(inputs.new_positions.max()) + 1 if is_host else int(inputs.slot_table.shape[1])
        self.forward.ingest(self.pool, inputs.new_features, inputs.new_positions, inputs.new_slots, length)

    @torch.no_grad()
    def propose(self, inputs: DraftInputs) -> Proposal:
        """Ingest the new rows and propose S slots at each anchor. Syncs: none on devices."""
        self.ingest(inputs)
        c, batch, rows = self.config, len(inputs.request_ids), self.config.num_slots + 1
        is_host = self.device.type == "cpu"
        longest = int(inputs.context_lens.max()) if is_host else int(inputs.slot_table.shape[1])
        positions = inputs.context_lens[:, None] + torch.arange(rows, device=self.device)
        angles = self.forward.angles(longest + rows).index_select(0, positions.flatten())
        keys = self._context(inputs, longest, rows)  # (Lt, B, L + N, 2, Hkv, Dh), the block's part to be filled
        bias = self._lone_mask(longest) if batch == 1 and is_host else self._mask(inputs.context_lens, longest)
        x = self.forward.block_rows(inputs.anchor_token_ids)
        for i in range(c.num_layers):
            q, k, v = self.forward.enter(i, x, angles)
            layer = keys[i]
            layer[:, longest:, 0] = k.unflatten(0, (batch, rows))
            layer[:, longest:, 1] = v.unflatten(0, (batch, rows))
            x = self.forward.finish(x, self._attend(q, layer, bias), i)
        return self.forward.heads(x, self._scale_cache.get(inputs.temperatures, self.forward.scales))

    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        """Never called: the head is not re-entrant."""
        raise NotImplementedError(f"{self.caps.name} drafts one block a round and is not re-entered")

    # ---- pieces

    def _context(self, inputs: DraftInputs, longest: int, rows: int) -> torch.Tensor:
        """Every layer's context keys and values, padded to the longest request, with room for the block's own."""
        batch, table = len(inputs.request_ids), inputs.slot_table[:, :longest]
        keys = self.pool.new_empty(self.pool.shape[0], batch, longest + rows, *self.pool.shape[2:])
        if batch == 1 and self.device.type == "cpu":
            first = int(table[0, 0])
            if torch.equal(table[0], torch.arange(first, first + longest)):
                keys[:, 0, :longest] = self.pool[:, first : first + longest]
                return keys
        known = torch.arange(longest, device=self.device) < inputs.context_lens[:, None]
        table = (table * known).clamp_(0, self.pool.shape[1] - 1)  # entries past a context are undefined
        keys[:, :, :longest] = self.pool.index_select(1, table.flatten()).unflatten(1, (batch, longest))
        return keys

    def _mask(self, context_lens: torch.Tensor, longest: int) -> torch.Tensor:
        """(B, 1, G * N, L + N) additive mask: a request's own context and the visible rows of its block."""
        rows = self._hidden_rows.shape[0]
        beyond = torch.arange(longest, device=self.device) >= context_lens[:, None, None]  # (B, 1, L)
        hidden = torch.cat((beyond.expand(-1, rows, -1), self._hidden_rows.expand(context_lens.numel(), -1, -1)), dim=2)
        bias = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, float("-inf"))
        return bias[:, None].repeat(1, 1, self.config.num_heads // self.config.num_kv_heads, 1)

    def _lone_mask(self, longest: int) -> torch.Tensor | None:
        """(G * N, L + N) additive mask of a lone request: a view of a buffer kept from round to round, None = all."""
        c, rows = self.config, self._hidden_rows.shape[0]
        if not c.is_causal:
            return None
        if self._lone_bias.shape[1] < longest + rows:
            one = torch.zeros(rows, max(2048, 2 * (longest + rows)), dtype=self.dtype)
            one[:, -rows:].masked_fill_(self._hidden_rows, float("-inf"))
            self._lone_bias = one.repeat(c.num_heads // c.num_kv_heads, 1)
        return self._lone_bias[:, -(longest + rows) :]

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """q (B * N, Hq, Dh), keys (B, L + N, 2, Hkv, Dh) -> (B * N, Hq * Dh); the G heads of a KV head share its rows."""
        c, batch = self.config, keys.shape[0]
        groups = c.num_heads // c.num_kv_heads
        q = q.view(batch, -1, c.num_kv_heads, groups, c.head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        k, v = keys[:, :, 0].transpose(1, 2), keys[:, :, 1].transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, bias, scale=1.0)  # (B, Hkv, G * N, Dh)
        return out.unflatten(2, (groups, -1)).permute(0, 3, 1, 2, 4).reshape(-1, c.num_heads * c.head_dim)


JETSPEC, DFLASH = (
    DrafterFamily(name=name, config=ParallelHeadConfig, model=ParallelHeadModel, drafter=ParallelHeadDrafter)
    for name in DRAFTER_TYPES
)
