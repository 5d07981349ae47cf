"""Native drafter: what the families' compiled forwards share: packed layers, the table of rotations, spare rows of the pool.

A drafter computes in its target's number type then: it needs no more digits.
Shape legend: H drafter hidden size, Dh head dim, V target vocabulary, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from paceline.kernels.cpu.library import (
    LANES,
    NativeDecoder,
    NativeLayer,
    PackedDelta,
    PackedLinear,
    choose_isa,
    fits_native,
    interleave,
)
from paceline.serving.drafters.deltas import DOWN, LINEARS, UP
from paceline.serving.drafters.forward import DrafterForward
from paceline.serving.drafters.network import DrafterConfig, rope_cos_sin

SPARE_ROWS = 512
"""Rows of the pool behind those of the text, for K/V of draft tokens that no later round reads."""
_POSITIONS = 1024


def supports_native(forward: DrafterForward, *widths: int) -> bool:
    """Whether compiled code takes the drafter: float32 on the CPU, and whole vectors everywhere.

    widths: of rows that it reads beside those of the layers.
    """
    c = forward.config
    return (
        forward.device.type == "cpu"
        and forward.kernels.is_reference
        and forward.dtype == torch.float32
        and forward.target_dtype in (torch.float32, torch.bfloat16)
        and choose_isa() is not None
        and fits_native(c.hidden_size, c.head_dim)
        and not any(width % LANES for width in widths)
    )


class PackedState:
    """A model's state, packed tensor by tensor into the memory of the state before it."""

    def __init__(self, state: Mapping[str, torch.Tensor], dtype: torch.dtype, kept: dict[str, torch.Tensor]) -> None:
        """dtype: of the products' weights, float32 or bfloat16. kept: what earlier states were packed into, by name."""
        self._state, self._dtype, self._kept = state, dtype, kept

    def _pack(self, name: str, *parts: Callable[[], torch.Tensor]) -> PackedLinear:
        """Weights (out, in), one below the other, of which one at a time is made; all but the last fill whole panels."""
        kept, panels = self._kept.get(name), []
        for part in parts:
            packed = PackedLinear.pack(part())
            if kept is None:
                panels.append(packed.weight)
            else:
                kept[: packed.weight.shape[0]].copy_(packed.weight)
                kept = kept[packed.weight.shape[0] :]
        if kept is None:
            self._kept[name] = panels[0] if len(panels) == 1 else torch.cat(panels)
        weight = self._kept[name]
        return PackedLinear(weight, None, packed.num_in, weight.shape[0] * LANES)

    def _weight(self, name: str) -> torch.Tensor:
        return self._state[name].detach().to(self._dtype)

    def product(self, *names: str) -> PackedLinear:
        """These weights (out, in), one below the other."""
        return self._pack(" ".join(names), *(partial(self._weight, name) for name in names))

    def head(self, forward: DrafterForward) -> PackedLinear:
        """The output head: a drafter's own, or the target's rows, gathered anew because another state may draft others."""
        if "lm_head.weight" in self._state:
            return self.product("lm_head.weight")
        ids, kept = self._state.get("draft_token_ids"), self._kept.get("lm_head")
        if ids is None and kept is not None:  # all rows of a target whose weights stay
            return PackedLinear(kept, None, forward.head_weight.shape[1], kept.shape[0] * LANES)
        return self._pack("lm_head", lambda: forward.target_rows(ids).to(self._dtype))

    def vector(self, name: str) -> torch.Tensor:
        """A norm's weight, float32."""
        if name not in self._kept:
            self._kept[name] = torch.empty_like(self._state[name], dtype=torch.float32)
        return self._kept[name].copy_(self._state[name])

    def layer(self, prefix: str, *qkv: str, norm: str = "input_norm", **more: Any) -> NativeLayer:
        """A layer whose output is that of `add_output`. qkv, norm: names of its first product's weights and of their norm."""
        name = prefix + "gate_up_proj.weight"
        return NativeLayer(
            qkv=self.product(*(prefix + name for name in qkv)),
            attention_out=self.product(prefix + "o_proj.weight"),
            gate_up=self._pack(name, lambda: interleave(*self._weight(name).chunk(2))),
            down=self.product(prefix + "down_proj.weight"),
            norm1=self.vector(prefix + norm),
            norm2=self.vector(prefix + "post_norm"),
            **more,
        )


class GrowingDecoder:
    """The compiled forward of one drafter, made again when positions go beyond its table of rotations."""

    def __init__(self, config: DrafterConfig, dtype: torch.dtype) -> None:
        """dtype: of the products' weights, float32 or bfloat16."""
        isa = choose_isa()
        assert isa is not None
        self._config, self._dtype, self._isa = config, dtype, isa
        self._kept: dict[str, torch.Tensor] = {}
        self._parts: dict[str, Any] = {}

    def pack(self, state: Mapping[str, torch.Tensor]) -> PackedState:
        """A model's state for `load`; it takes the place of the one before, tensor by tensor."""
        return PackedState(state, self._dtype, self._kept)

    def load(self, **parts: Any) -> None:
        """Take packed weights: parts of NativeDecoder, those that the settings do not say.

        Later ones lie in the memory of the first ones, which a decoder reads already.
        """
        if not self._parts:
            self._parts = parts
            self._make(_POSITIONS)

    def hold_deltas(self, num_deltas: int, rank: int) -> None:
        """Make room for deltas, which add nothing until they are loaded; behind the first `load`."""
        for i in self._config.delta_layers:
            layer = self._parts["layers"][i]
            own = (layer.attention_out, layer.gate_up, layer.down)
            layer.deltas = tuple(PackedDelta(linear, num_deltas, rank) for linear in own)
        self._make(self._num_positions)

    def load_delta(self, at: int, factors: Mapping[str, torch.Tensor]) -> None:
        """Replace one delta in place. factors: checked by the caller."""
        for i, prefix in self._config.delta_layers.items():
            layer = self._parts["layers"][i]
            for linear, delta in zip(LINEARS, layer.deltas, strict=True):
                down, up = factors[prefix + linear + DOWN], factors[prefix + linear + UP]
                delta.load(at, down, interleave(*up.chunk(2)) if linear == "gate_up_proj" else up)

    def _make(self, num_positions: int) -> None:
        c = self._config
        self._num_positions = num_positions
        cos, sin = rope_cos_sin(torch.arange(num_positions), c.head_dim, c.rope_theta, getattr(c, "rope_scaling", None))
        self._decoder = NativeDecoder(
            rope=torch.cat((cos, sin), -1).contiguous(), num_heads=c.num_heads, num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim, num_logits=c.num_draft_ids, eps=c.rms_eps, scale=c.head_dim**-0.5, isa=self._isa, **self._parts,
        )  # fmt: skip

    def reach(self, num_positions: int) -> NativeDecoder:
        """The decoder for the positions 0..P-1."""
        if num_positions > self._num_positions:
            self._make(2 * num_positions)
        return self._decoder
