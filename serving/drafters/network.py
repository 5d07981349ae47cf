"""Drafter networks: the settings that every family has, the base of the models, and the parts of their layers.

Drafting stores rotary pairs as neighbours, so that float32 rotates by one complex product; training rotates by halves.
Shape legend: V target vocabulary, Dm target hidden size, T drafter tokens, H drafter hidden size, Hq/Hkv query/KV heads,
Hr rotated heads (queries and keys), Dh head dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
import torch.nn.functional as F
from torch import nn

from paceline.errors import ConfigError, DrafterMismatchError
from paceline.serving.drafters.deltas import LINEARS


def rope_cos_sin(
    positions: torch.Tensor, head_dim: int, theta: float, scaling: tuple[float, ...] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of the rotary angles, (..., head_dim / 2) float32 each.

    scaling: Llama-3.1's (factor, low frequency factor, high frequency factor, original context): frequencies that turn
    less than `low` times in the original context are divided by the factor, those above `high` kept, mixed in between.
    """
    inverse = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim)
    if scaling is not None:
        factor, low, high, context = scaling
        kept = ((context * inverse / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        inverse = inverse * (kept + (1 - kept) / factor)
    angles = positions.to(torch.float64)[..., None] * inverse
    return angles.cos().float(), angles.sin().float()


def is_rope_scaling(scaling: tuple[float, ...] | None) -> bool:
    """Whether rope_cos_sin takes these."""
    return scaling is None or (len(scaling) == 4 and min(scaling) > 0 and scaling[1] < scaling[2])


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate (..., heads, Dh) by half-split pairs; cos and sin are (..., 1, Dh / 2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def adjacent_pairs(head_dim: int, device: torch.device) -> torch.Tensor:
    """(Dh,) int64 order of a head's rows that turns half-split rotary pairs into adjacent ones."""
    return torch.arange(head_dim, device=device).view(2, -1).T.reshape(-1)


def pair_angles(cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rotations as `rotate_pairs` takes them: (..., 1, Dh / 2) complex64 for float32, else (..., 2, 1, Dh / 2)."""
    table = torch.complex(cos, sin) if dtype == torch.float32 else torch.stack((cos, sin), -2)
    return table[..., None, :]


def rotate_pairs(qkv: torch.Tensor, angles: torch.Tensor, num_rotated: int, head_dim: int) -> None:
    """Rotate the first Hr heads of qkv (T, heads * Dh) in place. angles: (T, ...) of `pair_angles`."""
    shape, strides = (qkv.shape[0], num_rotated, head_dim // 2, 2), (qkv.shape[1], head_dim, 2, 1)
    pairs = qkv.as_strided(shape, strides)
    if qkv.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(angles)
    else:
        cos, sin = angles.unbind(1)
        a, b = pairs.float().unbind(-1)
        pairs.copy_(torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1))


Check = tuple[bool, str, object]
"""(holds, "field must <rule>", value)."""


class TargetHandles(Protocol):
    """What a drafter needs to know of its target."""

    @property
    def version(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def feature_size(self) -> int: ...

    @property
    def device(self) -> torch.device | str: ...

    @property
    def embed_weight(self) -> torch.Tensor: ...

    @property
    def head_weight(self) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """Architecture of a drafter, stored as config.json next to its weights; a family adds its own fields."""

    title: ClassVar[str]
    """How errors name the family."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    feature_size: int
    """Width of a fused feature row: tapped layers x target hidden size."""
    num_slots: int
    """Draft tokens of a call."""
    draft_vocab_size: int | None = None
    """None: the draft vocabulary is the target's."""
    rms_eps: float = 1e-6
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
        common = (
            (min(sizes.values()) >= 1, f"{', '.join(sizes)} must be >= 1", sizes),
            (
                self.num_kv_heads >= 1 and self.num_heads % self.num_kv_heads == 0,
                "num_heads must be a multiple of num_kv_heads",
                self.num_heads,
            ),
            (self.head_dim % 2 == 0, "head_dim must be even", self.head_dim),
            (
                1 <= self.num_draft_ids <= self.vocab_size,
                "draft_vocab_size must be in [1, vocab_size]",
                self.draft_vocab_size,
            ),
        )
        for ok, rule, value in (*common, *self._checks()):
            if not ok:
                raise ConfigError(f"{self.title}.{rule}, got {value!r}")

    def _checks(self) -> tuple[Check, ...]:
        """Rules on the family's own fields."""
        raise NotImplementedError

    @classmethod
    def _implied(cls, drafter_type: str) -> dict[str, Any]:
        """Settings that the `drafter_type` of a config.json says."""
        return {}

    @property
    def num_draft_ids(self) -> int:
        """Size of the draft vocabulary."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def max_candidates(self) -> int:
        """Most candidates per slot."""
        return self.num_draft_ids

    @property
    def delta_layers(self) -> dict[int, str]:
        """Layers that deltas add to, with what the names of their weights begin with: those through which no key or value
        passes that later rounds read, so that all deltas of a base can share its KV."""
        raise NotImplementedError

    @property
    def delta_linears(self) -> list[str]:
        """Linear layers that deltas add to, as the model's state names them."""
        return [prefix + name for prefix in self.delta_layers.values() for name in LINEARS]

    def to_dict(self) -> dict[str, Any]:
        """Settings as JSON holds them."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read the fields of a config.json; keys that are not settings of the network are ignored.

        Raises: ConfigError when a setting is missing or not allowed.
        """
        implied = cls._implied(str(values.get("drafter_type")))
        for name, value in implied.items():
            if values.get(name, value) != value:
                kind = values["drafter_type"]
                raise ConfigError(f"{name} of a {kind} drafter must be {value!r}, got {values[name]!r}")
        values, names = {**implied, **values}, {f.name for f in dataclasses.fields(cls)}
        kept: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in names}
        try:
            return cls(**kept)
        except TypeError as e:
            raise ConfigError(f"drafter config.json must hold every {cls.title} setting: {e}") from e


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnHeadConfig(DrafterConfig):
    """Architecture of a drafter that may have an output head of its own, over the draft vocabulary."""

    embed_size: int
    """Width of the target's token embedding and output head."""
    shares_head: bool = False
    """True: the output head is the target's own rows of the draft vocabulary, which are no weights of the drafter."""


def scaling_check(scaling: tuple[float, ...] | None) -> Check:
    """The rule on `rope_scaling`."""
    return is_rope_scaling(scaling), "rope_scaling must be null or 4 numbers > 0, low before high", scaling


def head_check(c: OwnHeadConfig) -> Check:
    """The rule on `shares_head`."""
    fits = not c.shares_head or c.hidden_size == c.embed_size
    return fits, f"hidden_size must be the target's {c.embed_size} to share its output head", c.hidden_size


class DrafterModel(nn.Module):
    """All trainable parameters of a drafter. What it reads of the target is passed in where needed, never stored."""

    drafter_type: str
    """The family's name, as in config.json."""
    config: DrafterConfig
    final_norm: nn.Parameter
    lm_head: nn.Linear | None
    """The output head; None: the target's, of which the draft vocabulary's rows count."""

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """Final norm of (..., H): what the output head reads."""
        return rms_norm(x, self.final_norm, self.config.rms_eps)


def add_vocabulary(model: nn.Module, c: DrafterConfig) -> None:
    """Give a model the buffers of a reduced draft vocabulary, where it has one."""
    if c.draft_vocab_size is not None:
        model.register_buffer("draft_token_ids", torch.arange(c.draft_vocab_size))  # (Vd,) int64 target ids
        model.register_buffer("log_coverage", torch.zeros(()))  # log share of target tokens in the draft vocabulary


def own_head(c: OwnHeadConfig) -> nn.Linear | None:
    """A drafter's output head with initial weights; None where it is the target's."""
    if c.shares_head:
        return None
    head = nn.Linear(c.hidden_size, c.num_draft_ids, bias=False)
    nn.init.normal_(head.weight, std=0.02)
    return head


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension of x, in its number type."""
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def add_output(layer: nn.Module, c: DrafterConfig) -> None:
    """Give a layer what follows its attention: output projection, norm and gated MLP."""
    layer.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
    layer.post_norm = nn.Parameter(torch.ones(c.hidden_size))
    layer.gate_up_proj = nn.Linear(c.hidden_size, 2 * c.intermediate_size, bias=False)
    layer.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)


def finish_layer(layer: Any, x: torch.Tensor, attended: torch.Tensor, eps: float) -> torch.Tensor:
    """Output projection and MLP of `add_output` with their residuals: x (..., H), attended (..., Hq * Dh) -> (..., H)."""
    x = x + layer.o_proj(attended)
    gate, up = layer.gate_up_proj(rms_norm(x, layer.post_norm, eps)).chunk(2, -1)
    return x + layer.down_proj(F.silu(gate) * up)


def split_heads(
    qkv: torch.Tensor, c: DrafterConfig, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fused projections (B, T, ..), angles (B or 1, T, Dh / 2) -> q (B, Hq, T, Dh), k and v (B, Hkv, T, Dh), rotated."""
    y = qkv.unflatten(-1, (c.num_heads + 2 * c.num_kv_heads, c.head_dim))
    qk, v = y[..., : c.num_heads + c.num_kv_heads, :], y[..., c.num_heads + c.num_kv_heads :, :]
    qk = rotate(qk, cos[..., None, :], sin[..., None, :]).transpose(1, 2)
    return qk[:, : c.num_heads], qk[:, c.num_heads :], v.transpose(1, 2)


def check_state(state: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], vocab_size: int) -> None:
    """Raise DrafterMismatchError unless `state` has exactly these tensors, all finite, and draft ids of the vocabulary: an
    index out of bounds would end a process on CUDA."""
    missing, surplus = sorted(set(shapes) - set(state)), sorted(set(state) - set(shapes))
    if missing or surplus:
        raise DrafterMismatchError(f"drafter weights must match their config: missing {missing}, surplus {surplus}")
    for name, tensor in state.items():
        if tuple(tensor.shape) != tuple(shapes[name]):
            raise DrafterMismatchError(f"drafter tensor {name} must be {shapes[name]}, got {tuple(tensor.shape)}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise DrafterMismatchError(f"drafter tensor {name} must be finite")
    ids = state.get("draft_token_ids")
    if ids is not None and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise DrafterMismatchError(
            f"draft_token_ids must be in [0, {vocab_size}), got {int(ids.min())}..{int(ids.max())}"
        )
