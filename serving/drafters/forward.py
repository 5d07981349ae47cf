"""Fused forward of a drafter: weights as drafting reads them, and the operations that every family has around attention.

Weights are fused by exact identities only: norm weights and the softmax scale fold into projections, which are stored
(in, out). Nothing here reads the host or has a shape that depends on data, so captured graphs use it too.
Shape legend: B requests, T drafter tokens, H drafter hidden size, V/Vd target/draft vocabulary, Hq/Hkv query/KV heads,
Dh head dim, K candidates, P positions, D deltas, r their rank.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F

from paceline.kernels.cpu.library import choose_isa, rank_rows
from paceline.kernels.dispatch import Kernels, select_kernels
from paceline.kernels.reference.topk_lse import MAX_K
from paceline.serving.drafters.deltas import DOWN, LINEARS, UP
from paceline.serving.drafters.network import DrafterConfig, adjacent_pairs, pair_angles, rope_cos_sin

_MAX_CACHED_SCALES = 256


class ScaleCache:
    """A drafter's factors on its logits by the temperatures of a batch: they stay the same while the same requests run.

    On the CPU only: elsewhere reading the temperatures would wait for the device.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[float, ...], torch.Tensor] = {}

    def clear(self) -> None:
        """New weights have other factors."""
        self._found.clear()

    def get(self, temperatures: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """compute(temperatures (B,)), remembered."""
        if temperatures.device.type != "cpu":
            return compute(temperatures)
        key = tuple(temperatures.tolist())
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= _MAX_CACHED_SCALES:
                self._found.clear()
            found = self._found[key] = compute(temperatures)
        return found


def norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension without a weight, which is folded into the projection behind it."""
    width = x.shape[-1]
    if x.device.type == "cpu":  # [x, -x] has mean 0, so its LayerNorm, one operator, is the RMSNorm of x
        return F.layer_norm(torch.cat((x, -x), dim=-1), (2 * width,), None, None, eps)[..., :width]
    return F.rms_norm(x, (width,), None, eps)


Ranking = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""(logits (T, Vd), which may be overwritten; factors (T, 1) float32; K) -> the K best log-probabilities of the products,
(T, K) float32, falling, and their ids (T, K) int64."""

_MIN_HEAD_WEIGHTS = 2**18


def pack_head(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(H, Vd) -> the layout that oneDNN reads fastest."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.T.contiguous().to(dtype), None)


def head_logits(z: torch.Tensor, head: torch.Tensor, head_dtype: torch.dtype) -> torch.Tensor:
    """Logits (T, Vd) of normed hidden states z (T, H), in the head's dtype; one of another dtype than z is a packed one."""
    if head_dtype == z.dtype:
        return torch.mm(z, head)
    return torch.ops.mkldnn._linear_pointwise(z.to(head_dtype), head, None, "none", [], "")


def rank_by_softmax(logits: torch.Tensor, factors: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A `Ranking` of torch operators."""
    top = torch.log_softmax(logits.float().mul_(factors), dim=-1).topk(count, dim=-1)
    return top.values, top.indices


def rank_natively(logits: torch.Tensor, factors: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A `Ranking` by one pass of compiled code; of logits on a device by torch's operators."""
    if logits.device.type != "cpu":
        return rank_by_softmax(logits, factors, count)
    values, ids, lse = rank_rows(logits.float(), count, factors[:, 0].contiguous())
    return values.sub_(lse[:, None]), ids


def choose_ranking(kernels: Kernels) -> Ranking:
    """The `Ranking` of a drafter whose device has these kernels; on the CPU torch's operators without compiled ones."""
    if kernels.is_reference:
        return rank_by_softmax if choose_isa() is None else rank_natively

    def rank(logits: torch.Tensor, factors: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        if count > MAX_K:
            return rank_by_softmax(logits, factors, count)
        # One pass over the logits as the head leaves them: neither float32 ones nor a softmax of them are stored.
        values, ids, lse = kernels.topk_lse(logits, count, scale=factors[:, 0].contiguous())
        return values - lse[:, None], ids

    return rank


def best_tokens(logits: torch.Tensor, ranking: Ranking, count: int) -> torch.Tensor:
    """(n, 2, k) int32: ids of the best tokens of each row of logits (n, V), bits of their log-probabilities."""
    factors = torch.ones(logits.shape[0], 1, device=logits.device)
    logprobs, ids = ranking(logits, factors, min(count, logits.shape[1]))
    return torch.stack((ids.int(), logprobs.view(torch.int32)), 1)


def choose_head_dtype(dtype: torch.dtype, device: torch.device, num_weights: int) -> torch.dtype:
    """The output head's dtype: bfloat16 for large heads where the CPU computes it natively, else the drafter's.

    The head is half of the weights that a round reads; rounding its logits moves no calibration noticeably.
    """
    is_native = torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()
    if dtype == torch.float32 and device.type == "cpu" and num_weights >= _MIN_HEAD_WEIGHTS and is_native:
        return torch.bfloat16
    return dtype


def leaf_grid(request: torch.Tensor, batch: int) -> tuple[torch.Tensor, int]:
    """Place of each leaf (F,) in a (B, W) grid, whose rows are the requests, and W.  Syncs: one."""
    one_hot = request[:, None] == torch.arange(batch, device=request.device)
    order = (one_hot.long().cumsum(0) - 1).gather(1, request[:, None])[:, 0]
    width = int(order.max()) + 1 if request.numel() else 1
    return request * width + order, width


_MIN_TEMPERATURE = 0.05
_MIN_POSITIONS = 512
Own = Callable[[str], torch.Tensor]
"""Name of a tensor of the model's state -> it on the drafter's device, floats in float32."""


class DrafterForward(ABC):
    """The fused weights of one drafter and the operations around its attention."""

    float32_weights: ClassVar[tuple[str, ...]] = ("beta", "log_coverage")
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
        self.embed_weight, self.head_weight = embed.detach(), head.detach()
        self.target_dtype = embed.dtype
        self.is_native = False
        """Whether compiled code, which packs weights of its own, computes the layers: those are not fused."""
        self.use_kernels(kernels or select_kernels(device))
        self._angles = torch.empty(0)
        self._deltas: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # (D * r, I) and (D * r, O) by fused weight
        self._num_deltas = self._delta_rank = 0

    def use_kernels(self, kernels: Kernels) -> None:
        """Take these kernels from now on."""
        self.kernels, self.rank = kernels, choose_ranking(kernels)

    @property
    def is_host(self) -> bool:
        """Whether torch's operators draft on the CPU, where reading a number is cheap and saves work."""
        return self.device.type == "cpu" and self.kernels.is_reference

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights, one after the other: serving goes on, so no second set of them may be in memory.

        Every tensor keeps its storage, so that captured graphs stay valid. state: of the model, checked by the caller.
        """

        def own(name: str) -> torch.Tensor:
            tensor = state[name].detach()
            return tensor.to(self.device, torch.float32 if tensor.is_floating_point() else tensor.dtype)

        self._post_norms = {i: own(prefix + "post_norm") for i, prefix in self.config.delta_layers.items()}
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

    def hold_deltas(self, num_deltas: int, rank: int) -> None:
        """Make room for deltas, which add nothing until they are loaded; before work is captured."""
        c, zeros = self.config, functools.partial(torch.zeros, dtype=self.dtype, device=self.device)
        sizes = {"o": (c.num_heads * c.head_dim, c.hidden_size), "down": (c.intermediate_size, c.hidden_size)}
        sizes["gate_up"] = (c.hidden_size, 2 * c.intermediate_size)
        self._num_deltas, self._delta_rank, rows = num_deltas, rank, num_deltas * rank
        for i in self.config.delta_layers:
            self._deltas |= {f"{name}{i}": (zeros(rows, n), zeros(rows, m)) for name, (n, m) in sizes.items()}

    @torch.no_grad()
    def load_delta(self, at: int, factors: Mapping[str, torch.Tensor]) -> None:
        """Replace one delta in place. factors: checked by the caller."""
        place = slice(at * self._delta_rank, (at + 1) * self._delta_rank)
        for i, prefix in self.config.delta_layers.items():
            for fused, linear in zip(("o", "gate_up", "down"), LINEARS, strict=True):
                down, up = factors[prefix + linear + DOWN], factors[prefix + linear + UP]
                if fused == "gate_up":
                    down = down.to(self.device) * self._post_norms[i]
                for stack, factor in zip(self._deltas[f"{fused}{i}"], (down, up.T), strict=True):
                    stack[place].zero_()[: factor.shape[0]].copy_(factor)

    def choose_deltas(self, deltas: torch.Tensor | None, repeats: int = 1) -> torch.Tensor | None:
        """What `finish` takes of rows (T / repeats,) with these deltas, each of which stands for `repeats` rows: (T, D * r) bool,
        which numbers between the factors are no row's own."""
        if deltas is None or not self._num_deltas:
            return None
        others = deltas[:, None] != torch.arange(self._num_deltas, device=deltas.device)
        return others.repeat_interleave(self._delta_rank, 1).repeat_interleave(repeats, 0)

    def _added(self, y: torch.Tensor, name: str, x: torch.Tensor, others: torch.Tensor | None) -> torch.Tensor:
        """y and what the rows' deltas add to it. One product of all deltas, of which each row keeps its own: they are read
        once however many requests use them, and one whose numbers overflow spoils no other's rows."""
        if others is None or name not in self._deltas:
            return y
        down, up = self._deltas[name]
        return torch.addmm(y, torch.mm(x, down.T).masked_fill_(others, 0.0), up)

    def target_rows(self, draft_token_ids: torch.Tensor | None) -> torch.Tensor:
        """(Vd, E) the target's output head at the draft vocabulary, in the target's number type; None = all of it."""
        if draft_token_ids is None:
            return self.head_weight
        return self.head_weight.index_select(0, draft_token_ids.to(self.head_weight.device))

    def _fused_head(self, own: Own, *, is_shared: bool) -> torch.Tensor:
        """The output head: a drafter's own, or the target's rows."""
        if is_shared:
            ids = None if self.config.draft_vocab_size is None else own("draft_token_ids")
            rows = self.target_rows(ids).to(self.device, torch.float32)
        else:
            rows = own("lm_head.weight")
        return (rows * own("final_norm")).T

    def _fused_ids(self, own: Own) -> Iterator[tuple[str, torch.Tensor]]:
        """What maps a draft vocabulary that is a part of the target's; nothing where it is all of it."""
        if self.config.draft_vocab_size is not None:
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

    def finish(
        self, x: torch.Tensor, attended: torch.Tensor, i: int = 0, others: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Output projection and MLP of layer i: x (T, H), attended (T, Hq * Dh) -> (T, H). others: of `choose_deltas`."""
        w = self.weights
        x = self._added(torch.addmm(x, attended, w[f"o{i}"]), f"o{i}", attended, others)
        z = self.norm(x)
        gate, up = self._added(torch.mm(z, w[f"gate_up{i}"]), f"gate_up{i}", z, others).chunk(2, dim=-1)
        inner = F.silu(gate).mul_(up)
        return self._added(torch.addmm(x, inner, w[f"down{i}"]), f"down{i}", inner, others)

    def scales(self, temperatures: torch.Tensor) -> torch.Tensor:
        """(B, ...) factors on the logits: exp(log_beta[class, ...]) / T, with T = 1 for greedy requests."""
        t = temperatures.to(self.device, torch.float32)
        is_sampled = t > 0
        factors = self.weights["beta"].index_select(0, is_sampled.long())
        divisor = torch.where(is_sampled, t.clamp_min(_MIN_TEMPERATURE), 1.0)
        return factors / divisor.view(-1, *[1] * (factors.dim() - 1))

    def logits(self, z: torch.Tensor) -> torch.Tensor:
        """Logits (T, Vd) of normed hidden states z (T, H), in the head's dtype."""
        return head_logits(z, self.weights["lm_head"], self.head_dtype)

    def in_target_vocab(self, logprobs: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Best of a reduced draft vocabulary as the target's ids; others as they are."""
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
