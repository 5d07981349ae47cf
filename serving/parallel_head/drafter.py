"""JetSpec and DFlash drafting: one call a round drafts a whole block against context keys and values written once.

Shape legend: B requests, R new rows, L longest context, S draft slots, N = 1 + S block rows, Lt layers, P pool rows,
Hq/Hkv query/KV heads, G = Hq / Hkv, Dh head dim, V target vocabulary, H hidden size.
The drafter's KV of a pool row follows from the target's features at that row alone; block rows leave nothing behind.
The same candidates stand below every parent; with the edge correction their scores depend on the parent's token.
Source: DFlash and JetSpec, tree_speculation.md 1.3, 1.9 and 4.7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from paceline.errors import ConfigError, DrafterMismatchError
from paceline.kernels.dispatch import Kernels
from paceline.serving.drafters.family import DrafterFamily, TargetHandles, check_state, serving_dtype
from paceline.serving.drafters.interface import DrafterCaps, DraftInputs, Frontier, Proposal
from paceline.serving.drafters.ops import ScaleCache, choose_head_dtype
from paceline.serving.parallel_head.forward import HeadForward
from paceline.serving.parallel_head.model import (
    DRAFTER_TYPES,
    ParallelHeadConfig,
    ParallelHeadModel,
    block_visibility,
)

_MIN_POSITIONS = 512


class ParallelHeadDrafter:
    """A product block proposer whose KV lives at the target's pool rows. Not thread-safe; owned by the engine."""

    def __init__(
        self,
        model: ParallelHeadModel,
        target_embed: torch.Tensor,
        target_head: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        head_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        num_candidates: int = 8,
        version: str = "",
        kernels: Kernels | None = None,
    ) -> None:
        """target_embed, target_head: (V, H); no head = tied to the embedding. The weights are copied into fused tensors.

        head_dtype: of the output head; None = dtype. Everything behind its logits is float32.
        kernels: None = those of the device.
        """
        c = self.config = model.config
        self.version = version
        self.dtype, self.device = dtype, torch.device(device)
        head = target_embed if target_head is None else target_head
        for name, table in (("embedding", target_embed), ("output head", head)):
            if tuple(table.shape) != (c.vocab_size, c.hidden_size):
                wanted = (c.vocab_size, c.hidden_size)
                raise DrafterMismatchError(f"target {name} must be {wanted}, got {tuple(table.shape)}")
        count = min(num_candidates, c.vocab_size)
        self.caps = DrafterCaps(
            name=c.drafter_type,
            num_slots=c.num_slots,
            num_candidates=count,
            max_depth=c.num_slots,
            is_reentrant=False,
            needs_features=True,
            is_product=True,
            is_row_local=True,
        )
        self._shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        self._forward = HeadForward(
            c,
            target_embed,
            head,
            dtype=dtype,
            head_dtype=head_dtype or dtype,
            device=self.device,
            num_candidates=count,
            kernels=kernels,
        )
        self._pool = self._new_pool(0)
        self._angles = torch.empty(0, 2, c.head_dim)
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None  # the same for the ingest kernel
        self._hidden_rows = ~block_visibility(c.num_slots, c.is_causal, self.device)  # (N, N)
        self._lone_bias = torch.empty(0, 0)
        self._scale_cache = ScaleCache()
        self.load_state(model.state_dict())

    # ---- weights and KV

    @torch.no_grad()
    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights in place. Live drafter KV becomes stale.

        Raises: DrafterMismatchError on missing, surplus, misshapen or non-finite tensors, and on weights that were trained
            with the other kind of block; nothing is changed then.
        """
        check_state(state, self._shapes)
        if bool(state["is_causal"]) != self.config.is_causal:
            raise DrafterMismatchError(
                f"weights of a {self.caps.name} drafter must have is_causal {self.config.is_causal}, "
                f"got {bool(state['is_causal'])}"
            )
        self._forward.load(state)
        self._pool.zero_()  # what other weights wrote is stale, and weights that were broken may have left NaN
        self._scale_cache.clear()

    def _new_pool(self, num_rows: int) -> torch.Tensor:
        c = self.config
        shape = (c.num_layers, num_rows, 2, c.num_kv_heads, c.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def alloc(self, num_pool_rows: int) -> None:
        """Allocate zeroed drafter KV for pool rows 0..num_pool_rows-1."""
        self._pool = self._new_pool(num_pool_rows)

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of one pool row over all layers."""
        c = self.config
        return c.num_layers * 2 * c.num_kv_heads * c.head_dim * self._pool.element_size()

    def release(self, request_id: str) -> None:
        """Nothing is kept per request: the engine's page allocator owns the rows."""

    # ---- the drafter interface

    @torch.no_grad()
    def ingest(self, inputs: DraftInputs) -> None:
        """Write drafter KV for the new rows, which depend on nothing but their own features. Syncs: none on devices."""
        assert inputs.new_features is not None
        if inputs.new_positions.numel() == 0:
            return
        self._grow_angles(int(inputs.slot_table.shape[1]) if self.device.type != "cpu" else int(inputs.new_positions.max()) + 1)  # fmt: skip
        self._forward.ingest(
            self._pool, inputs.new_features, inputs.new_positions, inputs.new_slots, self._angles, self._tables
        )

    @torch.no_grad()
    def propose(self, inputs: DraftInputs) -> Proposal:
        """Ingest the new rows and propose S slots at each anchor. Syncs: none on devices."""
        self.ingest(inputs)
        c, batch, rows = self.config, len(inputs.request_ids), self.config.num_slots + 1
        is_host = self.device.type == "cpu"
        longest = int(inputs.context_lens.max()) if is_host else int(inputs.slot_table.shape[1])
        self._grow_angles(longest + rows)
        positions = inputs.context_lens[:, None] + torch.arange(rows, device=self.device)
        angles = self._angles.index_select(0, positions.flatten())
        keys = self._context(inputs, longest, rows)  # (Lt, B, L + N, 2, Hkv, Dh), the block's part to be filled
        bias = self._lone_mask(longest) if batch == 1 and is_host else self._mask(inputs.context_lens, longest)
        x = self._forward.block_rows(inputs.anchor_token_ids)
        for i in range(c.num_layers):
            q, k, v = self._forward.enter(i, x, angles)
            layer = keys[i]
            layer[:, longest:, 0] = k.unflatten(0, (batch, rows))
            layer[:, longest:, 1] = v.unflatten(0, (batch, rows))
            x = self._forward.finish(i, x, self._attend(q, layer, bias))
        return self._forward.heads(x, self._scale_cache.get(inputs.temperatures, self._forward.scales))

    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        """Never called: the head is not re-entrant."""
        raise NotImplementedError(f"{self.caps.name} drafts one block a round and is not re-entered")

    # ---- pieces

    def _grow_angles(self, num_positions: int) -> None:
        if self._angles.shape[0] < num_positions:
            self._angles = self._forward.angle_table(max(_MIN_POSITIONS, 2 * num_positions))
            self._tables = self._forward.kernel_tables(self._angles)

    def _context(self, inputs: DraftInputs, longest: int, rows: int) -> torch.Tensor:
        """Every layer's context keys and values, padded to the longest request, with room for the block's own."""
        batch, table = len(inputs.request_ids), inputs.slot_table[:, :longest]
        keys = self._pool.new_empty(self._pool.shape[0], batch, longest + rows, *self._pool.shape[2:])
        if batch == 1 and self.device.type == "cpu":
            first = int(table[0, 0])
            if torch.equal(table[0], torch.arange(first, first + longest)):
                keys[:, 0, :longest] = self._pool[:, first : first + longest]
                return keys
        known = torch.arange(longest, device=self.device) < inputs.context_lens[:, None]
        table = (table * known).clamp_(0, self._pool.shape[1] - 1)  # entries past a context are undefined
        keys[:, :, :longest] = self._pool.index_select(1, table.flatten()).unflatten(1, (batch, longest))
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


def make_drafter(
    model: ParallelHeadModel,
    target: TargetHandles,
    *,
    dtype: torch.dtype | None = None,
    head_dtype: torch.dtype | None = None,
    num_candidates: int = 8,
    version: str = "",
) -> ParallelHeadDrafter:
    """The serving form of a model; a number type that is None is chosen for the target's device."""
    device = torch.device(target.device)
    dtype = dtype or serving_dtype(device)
    return ParallelHeadDrafter(
        model,
        target.embed_weight,
        target.head_weight,
        dtype=dtype,
        head_dtype=head_dtype or choose_head_dtype(dtype, device, target.head_weight.numel()),
        device=device,
        num_candidates=num_candidates,
        version=version,
    )


def _family(name: str) -> DrafterFamily:
    def read_config(values: Mapping[str, Any]) -> ParallelHeadConfig:
        config = ParallelHeadConfig.from_dict({"is_causal": DRAFTER_TYPES[name], **values})
        if config.drafter_type != name:
            raise ConfigError(f"is_causal of a {name} drafter must be {DRAFTER_TYPES[name]}, got {config.is_causal}")
        return config

    return DrafterFamily(name=name, read_config=read_config, make_model=ParallelHeadModel, make_drafter=make_drafter)


JETSPEC, DFLASH = _family("jetspec"), _family("dflash")
