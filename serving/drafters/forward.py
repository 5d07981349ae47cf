"""Fused forward of a drafter: weights as drafting reads them, and the operations that every family has around attention.

Weights are fused by exact identities only: norm weights and the softmax scale fold into projections, which are stored
(in, out). Nothing here reads the host or has a shape that depends on data, so captured graphs use it too.
Shape legend: B requests, T drafter tokens, H drafter hidden size, V target vocabulary, Hq/Hkv query/KV heads, Dh head dim,
K candidates, P positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F

from paceline.kernels.dispatch import Kernels, select_kernels
from paceline.serving.drafters.network import DrafterConfig
from paceline.serving.drafters.ops import Ranking, choose_ranking, head_logits, norm, pack_head
from paceline.serving.drafters.rope import adjacent_pairs, pair_angles, rope_cos_sin

_MIN_TEMPERATURE = 0.05
_MIN_POSITIONS = 512
Own = Callable[[str], torch.Tensor]
"""Name of a tensor of the model's state -> it on the drafter's device, floats in float32."""


class FusedForward(ABC):
    """The fused weights of one drafter and the operations around its attention."""

    float32_weights: ClassVar[tuple[str, ...]] = ("beta",)
    """Fused tensors that stay float32 whatever the drafter's dtype."""

    def __init__(
        self,
        config: DrafterConfig,
        embed: torch.Tensor,
        head: torch.Tensor,
        *,
        dtype: torch.dtype,
        head_dtype: torch.dtype,
        device: torch.device,
        num_candidates: int,
        kernels: Kernels | None = None,
    ) -> None:
        """embed, head: (V, E), the target's token embedding and output head. kernels: None = those of the device."""
        self.config, self.dtype, self.head_dtype, self.device = config, dtype, head_dtype, device
        self.num_candidates = num_candidates
        self.weights: dict[str, torch.Tensor] = {}
        self.kernels = kernels or select_kernels(device)
        self._embed, self._head = embed.detach(), head.detach()
        self._rank = choose_ranking(self.kernels)
        self._angles = torch.empty(0)

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights, one after the other: serving goes on, so no second set of them may be in memory.

        Every tensor keeps its storage, so that captured graphs stay valid. state: of the model, checked by the caller.
        """

        def own(name: str) -> torch.Tensor:
            tensor = state[name].detach()
            return tensor.to(self.device, torch.float32 if tensor.is_floating_point() else tensor.dtype)

        for name, value in self._fused(own):
            if name == "lm_head" and self.head_dtype != self.dtype:
                value = pack_head(value.to(self.dtype), self.head_dtype)
            elif name not in self.weights:  # a copy of its own also where the state's tensor would do as it is
                is_kept = name in self.float32_weights or not value.is_floating_point()
                dtype = value.dtype if is_kept else self.dtype
                value = value.to(dtype, copy=True, memory_format=torch.contiguous_format)
            if name in self.weights:
                self.weights[name].copy_(value)
            else:
                self.weights[name] = value

    @abstractmethod
    def _fused(self, own: Own) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values of the weights, floats in float32, each made when it is asked for."""

    def _fused_output(self, own: Own, i: int = 0, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        """What `finish` reads of a layer."""
        yield f"o{i}", own(prefix + "o_proj.weight").T
        yield f"gate_up{i}", (own(prefix + "gate_up_proj.weight") * own(prefix + "post_norm")).T
        yield f"down{i}", own(prefix + "down_proj.weight").T

    def _fused_vocab(self, own: Own, is_reduced: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """What a drafter's own output head reads; is_reduced: its vocabulary is a part of the target's."""
        yield "lm_head", (own("lm_head.weight") * own("final_norm")).T
        if is_reduced:
            yield "d2t", own("draft_token_ids")
            yield "log_coverage", own("log_coverage")

    def _paired_heads(self, qkv: torch.Tensor) -> torch.Tensor:
        """Fused projections ((Hq + 2 Hkv) * Dh, in) with adjacent rotary pairs and the softmax scale folded in."""
        c = self.config
        heads, shape = c.num_heads + c.num_kv_heads, qkv.shape
        qkv = qkv.reshape(-1, c.head_dim, shape[1]).clone()
        qkv[:heads] = qkv[:heads][:, adjacent_pairs(c.head_dim, self.device)]
        qkv[: c.num_heads] *= c.head_dim**-0.5
        return qkv.view(shape)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last dimension; its weight is folded into what reads it."""
        return norm(x, self.config.rms_eps)

    def finish(self, x: torch.Tensor, attended: torch.Tensor, i: int = 0) -> torch.Tensor:
        """Output projection and MLP of layer i: x (T, H), attended (T, Hq * Dh) -> (T, H)."""
        w = self.weights
        x = torch.addmm(x, attended, w[f"o{i}"])
        gate, up = torch.mm(self.norm(x), w[f"gate_up{i}"]).chunk(2, dim=-1)
        return torch.addmm(x, F.silu(gate).mul_(up), w[f"down{i}"])

    def scales(self, temperatures: torch.Tensor) -> torch.Tensor:
        """(B, ...) factors on the logits: exp(log_beta[class, ...]) / T, with T = 1 for greedy requests."""
        t = temperatures.to(self.device, torch.float32)
        is_sampled = t > 0
        factors = self.weights["beta"].index_select(0, is_sampled.long())
        divisor = torch.where(is_sampled, t.clamp_min(_MIN_TEMPERATURE), 1.0)
        return factors / divisor.view(-1, *[1] * (factors.dim() - 1))

    def best(
        self, z: torch.Tensor, factor: torch.Tensor, count: int, rank: Ranking | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Best log-probabilities (T, K) float32, falling, and draft ids (T, K) of normed hidden states z (T, H).

        factor: (T, 1) on the logits. rank: None = that of the device.
        """
        return (rank or self._rank)(head_logits(z, self.weights["lm_head"], self.head_dtype), factor, count)

    def in_target_vocab(self, logprobs: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`best` of a reduced draft vocabulary as the target's ids; others as they are."""
        if "d2t" not in self.weights:
            return logprobs, ids
        return logprobs + self.weights["log_coverage"], self.weights["d2t"][ids]

    def angles(self, num_positions: int) -> torch.Tensor:
        """Rotations of at least the positions 0..P-1, indexed by position; grown by doubling."""
        if self._angles.shape[0] < num_positions:
            self._angles = self._angle_table(max(_MIN_POSITIONS, 2 * num_positions))
        return self._angles

    def _cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        c = self.config
        return rope_cos_sin(positions, c.head_dim, c.rope_theta, getattr(c, "rope_scaling", None))

    def _angle_table(self, num_positions: int) -> torch.Tensor:
        """Rotations of the positions 0..P-1, as `rotate_pairs` takes them."""
        return pair_angles(*self._cos_sin(torch.arange(num_positions, device=self.device)), self.dtype)
