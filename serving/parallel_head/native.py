"""Native parallel head: the context rows of a round, the layers of its blocks and the output head in one compiled call.

A block's rows are a request of the target's kind that reads the context from the pool; their own K/V go to spare rows.
Shape legend: B requests, R new rows, S draft slots, N = 1 + S block rows, Hkv KV heads, Dh head dim, Lt layers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.kernels.cpu.library import Condition
from paceline.serving.drafters.interface import DraftInputs, Proposal
from paceline.serving.drafters.native import SPARE_ROWS, GrowingDecoder
from paceline.serving.parallel_head.forward import HeadForward


class NativeHead:
    """Context rows and blocks of one drafter; the candidates' scores and the edge correction stay in torch."""

    def __init__(self, forward: HeadForward, dtype: torch.dtype) -> None:
        """dtype: of the layers' weights and of the pool, float32 or bfloat16."""
        self._forward, c = forward, forward.config
        self._rows = torch.arange(c.num_rows)
        self._every = torch.ones(1, c.num_rows, dtype=torch.bool)
        self.decoder = GrowingDecoder(c, dtype)

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights. state: of the model, checked by the caller."""
        c, own = self._forward.config, self.decoder.pack(state)
        names = [f"layers.{i}." for i in range(c.num_layers)]
        layers = [
            own.layer(
                name,
                "q_proj.weight",
                "kv_proj.weight",
                q_norm=own.vector(name + "q_norm"),
                k_norm=own.vector(name + "k_norm"),
            )
            for name in names
        ]
        condition = Condition(
            product=own.product("cond_proj.weight"),
            feature_size=c.feature_size,
            dtype=self._forward.target_dtype,
            norm=own.vector("cond_norm"),
            context_kv=own.product(*(name + "kv_proj.weight" for name in names)),
        )
        self.decoder.load(
            layers=layers, head=own.head(self._forward), final_norm=own.vector("final_norm"), condition=condition
        )

    def bind(self, pool: torch.Tensor, num_rows: int) -> None:
        """Take the pool (Lt, num_rows + SPARE_ROWS, 2, Hkv, Dh)."""
        self._pool, self._num_rows = pool, num_rows

    def ingest(self, inputs: DraftInputs) -> None:
        """Write the K/V of the new rows, of which there are some."""
        assert inputs.new_features is not None
        decoder = self.decoder.reach(int(inputs.new_positions.max()) + 1)
        decoder.write_context(inputs.new_features, inputs.new_positions, inputs.new_slots, self._pool)

    def propose(self, inputs: DraftInputs, scales: torch.Tensor) -> Proposal:
        """Write the K/V of the new rows and propose S slots at each anchor. scales: (B, S)."""
        forward, c, rows = self._forward, self._forward.config, self._rows.numel()
        batch = inputs.context_lens.numel()
        x = forward.block_rows(inputs.anchor_token_ids)
        positions = (inputs.context_lens[:, None] + self._rows).flatten()
        decoder = self.decoder.reach(int(positions.max()) + 1)
        features, new_context = inputs.new_features, (inputs.new_positions, inputs.new_slots)
        most, parts = SPARE_ROWS // rows, []
        for at in range(0, batch, most):
            part, count = slice(at, at + most), min(most, batch - at)
            _, logits = decoder.run_stream(
                x[at * rows : (at + count) * rows],
                positions[at * rows : (at + count) * rows],
                torch.arange(0, count * rows + 1, rows),
                inputs.context_lens[part],
                inputs.slot_table[part],
                torch.arange(self._num_rows, self._num_rows + count * rows),
                self._pool,
                features=features,
                new_context=None if features is None else new_context,
                ancestors=None if c.is_causal else self._every.expand(count * rows, -1),
                deltas=None if inputs.deltas is None else inputs.deltas[part],
                tail=c.num_slots,
            )
            parts.append(logits)
            features = None  # written by the first call
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        return forward.heads(logits, scales, inputs.anchor_token_ids)
