"""Reordered linears: modules' bfloat16 weights in the layout that oneDNN reads fastest on the CPU, reordered once.

torch reorders a plain weight at every call, which at few rows takes longer than the product. The result is the same, bit
for bit; who calls checks that. A reordered weight replaces its own, unless something else (a tied embedding) holds that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.serving.target_model.device import available_ram_bytes

_MEMORY_SHARE = 0.7
"""Part of the free memory that copies of shared weights may take."""


class ReorderedLinear(torch.nn.Module):
    """A linear layer whose weight is reordered; it has no parameter but its bias."""

    def __init__(self, own: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(own.weight.detach(), None)
        self.bias = own.bias
        self._run: Any = torch.ops.mkldnn._linear_pointwise.default  # looked up once: it is called in every round

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, self.weight, self.bias, "none", [], "")


def supports_reordered(model: torch.nn.Module) -> bool:
    """Whether the model's weights are bfloat16 on a CPU on which oneDNN computes with them."""
    parameters = list(model.parameters())
    return (
        torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        and all(p.device.type == "cpu" and p.dtype == torch.bfloat16 for p in parameters)
    )


def reorder_linears(model: Any, shared: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    """Reorder the weights of a model's linear layers, one after the other; returns what takes it back.

    shared: weights that somebody else holds; their reordered form is a copy, made where the free memory has room for it.
    """
    kept = {w.data_ptr() for w in shared}
    done: list[tuple[Any, str, bool, Any]] = []
    for parent in list(model.modules()):
        for name, own in list(parent.named_children()):
            if type(own) is not torch.nn.Linear:
                continue
            is_shared, size = own.weight.data_ptr() in kept, own.weight.numel() * own.weight.element_size()
            if not is_shared or size < available_ram_bytes() * _MEMORY_SHARE:
                setattr(parent, name, ReorderedLinear(own))
                done.append((parent, name, is_shared, own))
                if not is_shared:
                    own.weight = torch.nn.Parameter(own.weight.new_empty(0), requires_grad=False)

    def undo() -> None:
        for parent, name, is_shared, own in done:
            if not is_shared:
                own.weight = torch.nn.Parameter(getattr(parent, name).weight.to_dense(), requires_grad=False)
            setattr(parent, name, own)

    return undo
