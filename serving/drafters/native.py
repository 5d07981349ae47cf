"""Native drafter: what the families' compiled forwards share: packed layers, the table of rotations, spare rows of the pool.

A drafter computes in its target's number type then: it needs no more digits.
Shape legend: H drafter hidden size, Dh head dim, V target vocabulary, P positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.kernels.cpu.library import (
    LANES,
    NativeDecoder,
    NativeLayer,
    PackedLinear,
    choose_isa,
    fits_native,
    interleave,
)
from paceline.serving.drafters.forward import DrafterForward
from paceline.serving.drafters.network import DrafterConfig, rope_cos_sin

SPARE_ROWS = 512
"""Rows of the pool behind those of the text, for K/V of draft tokens that no later round reads."""
_POSITIONS = 1024


def supports_native(forward: DrafterForward) -> bool:
    """Whether compiled code takes the drafter: float32 on the CPU, and whole vectors everywhere."""
    c = forward.config
    return (
        forward.device.type == "cpu"
        and forward.dtype == torch.float32
        and forward.target_dtype in (torch.float32, torch.bfloat16)
        and choose_isa() is not None
        and fits_native(c.hidden_size, c.head_dim)
        and c.feature_size % LANES == 0
        and getattr(c, "embed_size", 0) % LANES == 0
    )


class PackedState:
    """A model's state, packed tensor by tensor."""

    def __init__(self, state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        """dtype: of the products' weights, float32 or bfloat16."""
        self._state, self._dtype = state, dtype

    def product(self, *names: str) -> PackedLinear:
        """These weights (out, in), one below the other."""
        found = [self._state[name].detach().to(self._dtype) for name in names]
        return PackedLinear.pack(found[0] if len(found) == 1 else torch.cat(found))

    def vector(self, name: str) -> torch.Tensor:
        """A norm's weight, float32."""
        return self._state[name].detach().float().contiguous()

    def layer(self, prefix: str, *qkv: str, norm: str = "input_norm", **more: Any) -> NativeLayer:
        """A layer whose output is that of `add_output`. qkv, norm: names of its first product's weights and of their norm."""
        gate, up = self._state[prefix + "gate_up_proj.weight"].detach().to(self._dtype).chunk(2)
        return NativeLayer(
            qkv=self.product(*(prefix + name for name in qkv)),
            attention_out=self.product(prefix + "o_proj.weight"),
            gate_up=PackedLinear.pack(interleave(gate, up)),
            down=self.product(prefix + "down_proj.weight"),
            norm1=self.vector(prefix + norm),
            norm2=self.vector(prefix + "post_norm"),
            **more,
        )


class GrowingDecoder:
    """The compiled forward of one drafter, made again when its weights are replaced or positions go beyond its table."""

    def __init__(self, config: DrafterConfig) -> None:
        self._config = config
        self._num_positions = _POSITIONS

    def load(self, **parts: Any) -> None:
        """Replace the weights. parts: of NativeDecoder, those that the settings do not say."""
        self._parts = parts
        self._make(self._num_positions)

    def _make(self, num_positions: int) -> None:
        c, isa = self._config, choose_isa()
        assert isa is not None
        self._num_positions = num_positions
        cos, sin = rope_cos_sin(torch.arange(num_positions), c.head_dim, c.rope_theta, getattr(c, "rope_scaling", None))
        self._decoder = NativeDecoder(
            rope=torch.cat((cos, sin), -1).contiguous(), num_heads=c.num_heads, num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim, num_logits=c.num_draft_ids, eps=c.rms_eps, scale=c.head_dim**-0.5, isa=isa, **self._parts,
        )  # fmt: skip

    def reach(self, num_positions: int) -> NativeDecoder:
        """The decoder for the positions 0..P-1."""
        if num_positions > self._num_positions:
            self._make(2 * num_positions)
        return self._decoder
