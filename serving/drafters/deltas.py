"""Deltas: versions of a drafter that are what they add to one base, so that many are resident and draft in one pass.

A delta of rank r adds up @ down to linear layers (O, I) behind attention: those through which no key or value of the text's
rows passes (`DrafterConfig.delta_layers`), so that all deltas of a base share its KV.
Shape legend: r rank, I/O inputs/outputs of a linear layer.
Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685; many at once: Chen et al.
2023, "Punica: Multi-Tenant LoRA Serving", arXiv 2310.18547.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from paceline.errors import DrafterMismatchError

LINEARS = ("o_proj", "gate_up_proj", "down_proj")
"""Linear layers, of a layer of a drafter, that a delta adds to."""
DOWN, UP = ".down", ".up"
"""What the names of a delta's factors (r, I) and (O, r) have behind that of the linear layer."""
RANK_STEP = 32
"""Ranks that are held are multiples of it: compiled code reads so many inputs at once."""


def merge(base: Mapping[str, torch.Tensor], factors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The whole state of a version: a base's, and what a delta adds to it, in the wider of their number types: in a base's
    bfloat16 what is small would be lost, and the version be another than the one that drafts as a delta.

    Raises: DrafterMismatchError when the factors are not of this base.
    """
    state = dict(base)
    for name in factor_layers(factors):
        weight, down, up = (base.get(name + ".weight"), factors.get(name + DOWN), factors.get(name + UP))
        if weight is None or down is None or up is None or (up.shape[0], down.shape[1]) != tuple(weight.shape):
            raise DrafterMismatchError(
                f"delta factors of {name} must fit the base's weights; publish the version again"
            )
        state[name + ".weight"] = weight + up @ down
    return state


def rank_of(factors: Mapping[str, torch.Tensor]) -> int:
    """The rank of a delta."""
    return max(factor.shape[0] for name, factor in factors.items() if name.endswith(DOWN))


def factor_layers(names: Iterable[str]) -> list[str]:
    """Names of the linear layers that these factors belong to."""
    return list(dict.fromkeys(name.removesuffix(DOWN).removesuffix(UP) for name in names))


def check_factors(factors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], rank: int) -> None:
    """Raise DrafterMismatchError unless these are factors of every linear layer of `shapes`, of a rank up to `rank`, finite.

    shapes: linear layer -> (O, I).
    """
    wanted = {name + end for name in shapes for end in (DOWN, UP)}
    if set(factors) != wanted:
        missing, surplus = sorted(wanted - set(factors)), sorted(set(factors) - wanted)
        raise DrafterMismatchError(f"delta must have the drafter's layers: missing {missing}, surplus {surplus}")
    for name, (num_out, num_in) in shapes.items():
        down, up = factors[name + DOWN], factors[name + UP]
        if down.shape[1:] != (num_in,) or up.shape[:1] != (num_out,) or down.shape[0] != up.shape[1]:
            raise DrafterMismatchError(
                f"delta factors of {name} must be (r, {num_in}) and ({num_out}, r), got {tuple(down.shape)} and {tuple(up.shape)}"
            )
        if down.shape[0] > rank:
            raise DrafterMismatchError(f"delta must have a rank of at most {rank}, got {down.shape[0]}")
        if not bool(down.isfinite().all() and up.isfinite().all()):
            raise DrafterMismatchError(f"delta factors of {name} must be finite")
