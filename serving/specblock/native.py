"""Native SpecBlock: the layers and the output head of both blocks in one compiled call each.

A block's K slots are K rows of a causal decoder whose context is every slot of the request's rows, so the drafter's pool is
that decoder's, K rows for each row of the target's. A leaf is a request of its own that shares its request's context up to
the leaf's slot; its K/V go to spare rows.
Shape legend: B requests, R new rows, K draft slots, F leaves, H drafter hidden size, Hq/Hkv query/KV heads, Dh head dim,
P positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.serving.drafters.interface import DraftInputs, Frontier, Proposal
from paceline.serving.drafters.native import SPARE_ROWS, GrowingDecoder
from paceline.serving.specblock.forward import SlotForward


class NativeSpecBlock:
    """Both blocks of one drafter, as SlotForward's; what is not a layer or the head stays in torch.

    Leaves beyond SPARE_ROWS take several calls.
    """

    def __init__(self, forward: SlotForward, dtype: torch.dtype) -> None:
        """dtype: of the layers' weights and of the pool, float32 or bfloat16."""
        self._forward = forward
        self._slots = torch.arange(forward.config.num_slots)
        self.decoder = GrowingDecoder(forward.config, dtype)

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights. state: of the model, checked by the caller."""
        c, own = self._forward.config, self.decoder.pack(state)
        layers = []
        for i in range(c.num_layers):
            shift = own.product(f"shifts.{i - 1}.weight") if i > 0 and c.has_shift else None
            layers.append(own.layer(f"layers.{i}.", "qkv_proj.weight", shift=shift))
        self.decoder.load(
            layers=layers, head=own.head(self._forward), final_norm=own.vector("final_norm"), block=c.num_slots
        )

    def bind(self, pool: torch.Tensor, num_rows: int) -> None:
        """Take the pool (layers, num_rows + SPARE_ROWS, K, 2 * Hkv * Dh)."""
        self._pool, self._num_rows = pool, num_rows

    # ---- the blocks

    def ingest(self, inputs: DraftInputs) -> None:
        """Write the K/V of the new rows."""
        self._rows(inputs, tail=0)

    def block1(self, inputs: DraftInputs, scales: torch.Tensor) -> Proposal:
        """Write the K/V of the new rows and propose K slots at each anchor. scales: (2, B, K)."""
        forward, c = self._forward, self._forward.config
        hidden, logits, cond = self._rows(inputs, tail=c.num_slots)
        proposal = forward.heads(hidden, scales[0], logits=logits)
        if not c.inherits_hidden:
            proposal.hidden = forward.anchor_hidden(cond, inputs)
        return proposal

    def block2(self, inputs: DraftInputs, hidden: torch.Tensor, frontier: Frontier, scales: torch.Tensor) -> Proposal:
        """Propose K slots at the leaves. hidden: (B, K, H) of block 1. scales: (2, B, K)."""
        forward, c, k = self._forward, self._forward.config, self._forward.config.num_slots
        request, slot = frontier.request, frontier.slot
        x = forward.fuse(hidden.flatten(0, 1).index_select(0, request * k + slot), frontier.token_ids)
        before = inputs.context_lens.index_select(0, request) - 1  # the anchor's row
        positions = (before if c.compat_rope else before + 1 + slot)[:, None] + 1 + self._slots
        contexts = before * k + slot + 1
        decoder, parts = self.decoder.reach(int(positions.max()) + 1), []
        deltas = None if inputs.deltas is None else inputs.deltas.index_select(0, request)
        for at in range(0, request.numel(), SPARE_ROWS):
            part = slice(at, at + SPARE_ROWS)
            count = min(SPARE_ROWS, request.numel() - at)
            own = torch.arange(count * k) + self._num_rows * k
            parts.append(
                decoder.run_stream(
                    x[at * k : (at + count) * k],
                    positions[part].reshape(-1),
                    torch.arange(0, count * k + 1, k),
                    contexts[part],
                    inputs.slot_table,
                    own,
                    self._pool,
                    table_rows=request[part],
                    deltas=None if deltas is None else deltas[part],
                )
            )
        out, logits = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        return forward.heads(out, scales[1].index_select(0, request), logits=logits)

    def _rows(self, inputs: DraftInputs, tail: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        forward, k = self._forward, self._forward.config.num_slots
        cond = forward.conditions(inputs)
        x = forward.fuse(cond, inputs.new_token_ids)
        positions = (inputs.new_positions[:, None] + 1 + self._slots).reshape(-1)
        own = (inputs.new_slots[:, None] * k + self._slots).reshape(-1)
        contexts = inputs.new_positions.index_select(0, inputs.cu_new[:-1]) * k
        hidden, logits = self.decoder.reach(int(positions.max()) + 1).run_stream(
            x, positions, inputs.cu_new * k, contexts, inputs.slot_table, own, self._pool, tail=tail,
            deltas=inputs.deltas, wants_logits=tail != 0,
        )  # fmt: skip
        return hidden, logits, cond
