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

from paceline.kernels.cpu.library import (
    NativeDecoder,
    NativeLayer,
    PackedLinear,
    choose_isa,
    fits_native,
    interleave,
)
from paceline.serving.drafters.interface import DraftInputs, Frontier, Proposal
from paceline.serving.drafters.network import rope_cos_sin
from paceline.serving.specblock.forward import SlotForward
from paceline.serving.specblock.model import SpecBlockConfig

SPARE_ROWS = 512
"""Leaves that one call drafts for; more take several."""
_POSITIONS = 1024


def supports_native(config: SpecBlockConfig, device: torch.device) -> bool:
    """Whether the compiled forward takes the drafter's shapes here."""
    return device.type == "cpu" and choose_isa() is not None and fits_native(config.hidden_size, config.head_dim)


class NativeSpecBlock:
    """Both blocks of one drafter, as SlotForward's; what is not a layer or the head stays in torch."""

    def __init__(self, forward: SlotForward, dtype: torch.dtype) -> None:
        """dtype: of the layers' weights and of the pool, float32 or bfloat16."""
        self._forward, self.dtype = forward, dtype
        self._slots = torch.arange(forward.config.num_slots)
        self._num_positions = 0

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights. state: of the model, checked by the caller."""
        c = self._forward.config

        def pack(name: str) -> PackedLinear:
            return PackedLinear.pack(state[name].detach().to(self.dtype))

        layers = []
        for i in range(c.num_layers):
            name = f"layers.{i}."
            gate, up = state[name + "gate_up_proj.weight"].detach().to(self.dtype).chunk(2)
            layers.append(
                NativeLayer(
                    qkv=pack(name + "qkv_proj.weight"),
                    attention_out=pack(name + "o_proj.weight"),
                    gate_up=PackedLinear.pack(interleave(gate, up)),
                    down=pack(name + "down_proj.weight"),
                    norm1=state[name + "input_norm"].detach().float().contiguous(),
                    norm2=state[name + "post_norm"].detach().float().contiguous(),
                    shift=pack(f"shifts.{i - 1}.weight") if i > 0 and c.has_shift else None,
                )
            )
        self._layers, self._head = layers, pack("lm_head.weight")
        self._final_norm = state["final_norm"].detach().float().contiguous()
        self._make(max(self._num_positions, _POSITIONS))

    def _make(self, num_positions: int) -> None:
        c, isa = self._forward.config, choose_isa()
        assert isa is not None
        self._num_positions = num_positions
        cos, sin = rope_cos_sin(torch.arange(num_positions), c.head_dim, c.rope_theta, getattr(c, "rope_scaling", None))
        self._decoder = NativeDecoder(
            layers=self._layers, head=self._head, final_norm=self._final_norm, num_logits=c.num_draft_ids,
            rope=torch.cat((cos, sin), -1).contiguous(), num_heads=c.num_heads, num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim, eps=c.rms_eps, scale=c.head_dim**-0.5, isa=isa, block=c.num_slots,
        )  # fmt: skip

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
        parts = []
        for at in range(0, request.numel(), SPARE_ROWS):
            part = slice(at, at + SPARE_ROWS)
            count = min(SPARE_ROWS, request.numel() - at)
            own = torch.arange(count * k) + self._num_rows * k
            parts.append(
                self._decoder.run_stream(
                    x[at * k : (at + count) * k],
                    self._known(positions[part].reshape(-1)),
                    torch.arange(0, count * k + 1, k),
                    contexts[part],
                    inputs.slot_table,
                    own,
                    self._pool,
                    table_rows=request[part],
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
        hidden, logits = self._decoder.run_stream(
            x, self._known(positions), inputs.cu_new * k, contexts, inputs.slot_table, own, self._pool, tail=tail,
            wants_logits=tail != 0,
        )  # fmt: skip
        return hidden, logits, cond

    def _known(self, positions: torch.Tensor) -> torch.Tensor:
        """The positions, after the table of rotations has grown to hold them."""
        most = int(positions.max()) + 1
        if most > self._num_positions:
            self._make(2 * most)
        return positions
