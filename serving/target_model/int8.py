"""Targets of 8-bit weights: linear layers hold integers and a factor for each output, all else keeps the checkpoint's type.

What such a target computes: y = (x @ q.T) * scale with q = round(w / scale) in [-127, 127] and scale = max |w| of the output's
row / 127. It is a target of its own: its version differs from the checkpoint's, and answers are checked against it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from paceline.kernels.cpu.library import LANES, NativeLayer, PackedLinear, unpack_weight

_SUFFIX = "-int8"


def served_version(version: str, dtype: str) -> str:
    """The version of a checkpoint's target that is served in `dtype`."""
    return version + _SUFFIX if dtype == "int8" else version


def is_int8_version(version: str) -> bool:
    """Whether a target's version names the 8-bit form of its checkpoint."""
    return version.endswith(_SUFFIX)


def fits_version(trained_for: Any, version: str) -> bool:
    """Whether a drafter of target `trained_for` may draft for `version`: the same, or the checkpoint of its 8-bit form.

    Drafts are proposals: rounding the target's weights costs acceptance, not exactness.
    """
    return trained_for in (version, version.removesuffix(_SUFFIX))


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(O, K) -> integers (O, K) int8 and factors (O,) float32."""
    weight = weight.float()
    scale = weight.abs().amax(1).clamp_min(1e-30) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


def pack_int8(weight: torch.Tensor) -> PackedLinear:
    """The compiled forward's form of a weight (O, K), quantized."""
    return PackedLinear.pack(*quantize(weight))


@torch.no_grad()
def round_to_int8(model: torch.nn.Module) -> None:
    """Give the linear layers of a model the values of its 8-bit form, in their own type; a tied output head is untied."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            integers, scale = quantize(module.weight)
            rounded = (integers.float() * scale[:, None]).to(module.weight.dtype)
            module.weight = torch.nn.Parameter(rounded, requires_grad=False)


class Int8Linear(torch.nn.Module):
    """A linear layer that reads some outputs of a packed weight; slow: the modules check the compiled forward."""

    def __init__(self, packed: PackedLinear, rows: torch.Tensor, num_in: int) -> None:
        """rows: (O,) int64 outputs of the packed weight. num_in: inputs without the padding."""
        super().__init__()
        self._packed, self._rows, self._num_in = packed, rows, num_in

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self._packed.scale is not None
        integers = unpack_weight(self._packed.weight)[self._rows, : self._num_in]
        # Integers up to 127 are exact in bfloat16: the factors come after the product, as in the compiled forward.
        return (linear(x, integers.to(x.dtype)).float() * self._packed.scale[self._rows]).to(x.dtype)


def lend_layer(layer: Any, packed: NativeLayer) -> None:
    """A decoder layer's modules read the packed weights from now on; their own are freed."""
    attention, mlp, start = layer.self_attn, layer.mlp, 0
    for name in ("q_proj", "k_proj", "v_proj"):
        own = getattr(attention, name)
        setattr(attention, name, _reader(packed.qkv, own, torch.arange(start, start + own.out_features)))
        start += own.out_features
    attention.o_proj = _reader(packed.attention_out, attention.o_proj)
    rows = torch.arange(mlp.gate_proj.out_features)
    rows = rows // LANES * 2 * LANES + rows % LANES  # panels of gate and up in turn
    mlp.gate_proj = _reader(packed.gate_up, mlp.gate_proj, rows)
    mlp.up_proj = _reader(packed.gate_up, mlp.up_proj, rows + LANES)
    mlp.down_proj = _reader(packed.down, mlp.down_proj)


def lend_head(model: Any, packed: PackedLinear) -> None:
    """The output head's module reads the packed weight from now on."""
    model.set_output_embeddings(_reader(packed, model.get_output_embeddings()))


def _reader(packed: PackedLinear, own: torch.nn.Linear, rows: torch.Tensor | None = None) -> Int8Linear:
    return Int8Linear(packed, torch.arange(own.out_features) if rows is None else rows, own.in_features)
