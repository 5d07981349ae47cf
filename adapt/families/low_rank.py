"""Low-rank learning: factors beside linear layers whose own weights stay, so that what is learned is a delta.

Shape legend: r rank, I inputs, O outputs of a linear layer.
Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from paceline.serving.drafters.deltas import DOWN, UP, check_factors
from paceline.serving.drafters.network import DrafterModel


class LowRankLinear(nn.Module):
    """A linear layer (O, I) that stays, plus up @ down, which begins at zero."""

    def __init__(self, linear: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = linear.weight
        num_out, num_in = linear.weight.shape
        down = torch.randn(rank, num_in, generator=generator) * num_in**-0.5
        self.down = nn.Parameter(down.to(linear.weight.device))
        self.up = nn.Parameter(linear.weight.new_zeros(num_out, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.down), self.up)


def add_factors(
    model: DrafterModel, rank: int, seed: int, found: Mapping[str, torch.Tensor] | None = None
) -> list[str]:
    """Give a model the factors of a delta and return their names, as in its state.

    Args:
        seed: of the factors' first values.
        found: factors of a rank up to `rank` that they begin with; None = the delta begins at zero.
    Raises: DrafterMismatchError when they are not this model's.
    """
    generator, names = torch.Generator().manual_seed(seed % 2**63), list[str]()
    shapes = {name: tuple(model.get_parameter(name + ".weight").shape) for name in model.config.delta_linears}
    if found is not None:
        check_factors(found, shapes, rank)
    for name in shapes:
        parent, _, own = name.rpartition(".")
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        layer = LowRankLinear(linear, rank, generator)
        setattr(model.get_submodule(parent), own, layer)
        names += [name + DOWN, name + UP]
        if found is not None:
            begun = found[name + DOWN].shape[0]
            with torch.no_grad():
                layer.down[:begun].copy_(found[name + DOWN])
                layer.up[:, :begun].copy_(found[name + UP])
    return names
