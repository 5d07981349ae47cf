"""Fused forward of a small dense target on the CPU, with the fewest operators per layer.

At widths of a few hundred an operator's fixed cost outweighs its arithmetic, so Qwen3 and Llama layers are re-expressed
with exact identities, no weight value changed:

- The residual stream is kept as [x, -x]; its mean is 0, so one LayerNorm over both halves is the RMSNorm of x.
- One product yields Q and K beside their half-swapped copies, [a, b, -b, -a] per head: again mean 0, so one LayerNorm is
  the per-head RMSNorm, and RoPE is one multiplication by a table (norm weights and softmax scale folded in) and one sum.
- Gate and up projections are one product; residual additions ride on the output products.

K/V and attention are float32 whatever the weights' dtype: at these shapes that is faster than bfloat16.

Shape legend: N packed rows, C keys, R pool rows, H/Hkv query/KV heads, G = H / Hkv, Dh head dim, Dm hidden size,
P positions, I intermediate size, V vocab, m tapped layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding, silu

from paceline.kernels.dispatch import Kernels
from paceline.kernels.reference.tree_attention import AttentionPlan
from paceline.serving.target_model.kv_cache import KVPool

KV_DTYPE = torch.float32
MAX_WEIGHT_BYTES = 512 * 2**20
"""Larger targets are bound by arithmetic and would pay for a second copy of their weights."""
_MAX_TABLE_ELEMENTS = 1 << 20
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""RoPE types whose rotations depend on nothing but the position."""
_DEEPEST_NODE = 256
"""Of a tree: it may reach beyond the end of the context, where none of its nodes is kept."""


def rope_table(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (P, Dh) of every position that a round may have, rounded as the model rounds them."""
    embedding = model.get_input_embeddings().weight.detach()
    last = model.config.max_position_embeddings + _DEEPEST_NODE
    cos, sin = model.get_decoder().rotary_emb(embedding[:1], torch.arange(last, device=embedding.device)[None])
    return cos[0].contiguous(), sin[0].contiguous()


class _Linear:
    """x @ weight.T, optionally added to a residual; bfloat16 weights are packed once for oneDNN."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._is_packed = weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()
        if self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        else:
            self._weight = weight.t().contiguous()
        # The generated overloads are looked up once: attribute access would cost as much as a small operator.
        self._run: Any = torch.ops.mkldnn._linear_pointwise.default if self._is_packed else torch.mm
        self._run_add: Any = torch.ops.mkldnn._linear_pointwise.binary if self._is_packed else torch.addmm

    def bind(self) -> Callable[[torch.Tensor], torch.Tensor]:
        run, weight = self._run, self._weight
        if self._is_packed:
            return lambda x: run(x, weight, None, "none", [], "")
        return lambda x: run(x, weight)

    def bind_add(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        run, weight = self._run_add, self._weight
        if self._is_packed:
            return lambda x, residual: run(x, residual, weight, None, "add")
        return lambda x, residual: run(residual, x, weight)


@dataclass(slots=True)
class _Layer:
    norm1: torch.Tensor  # (2 Dm,)
    qkv: Callable[[torch.Tensor], torch.Tensor]
    fold: torch.Tensor  # (H + Hkv, 2, Dh) float32: norm weights, signs and the softmax scale
    out: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    norm2: torch.Tensor  # (2 Dm,)
    gate_up: Callable[[torch.Tensor], torch.Tensor]
    down: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    is_tapped: bool


def is_dense(model: Any) -> bool:
    """Whether the model is a dense Llama or Qwen3 without dynamic RoPE: RMS norm, attention with RMS norm over each head or
    none and RoPE by halves over the whole head, RMS norm, SwiGLU."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in ("qwen3", "llama")
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in _STATIC_ROPE
    )


def is_plain_on_cpu(model: Any) -> bool:
    """Whether the model is dense, without biases and sliding windows, float32 or bfloat16 on the CPU."""
    config, parameters = model.config, list(model.parameters())
    return (
        is_dense(model)
        and not getattr(config, "attention_bias", False)
        and not getattr(config, "mlp_bias", False)
        and "sliding_attention" not in (getattr(config, "layer_types", None) or ())
        and all(p.device.type == "cpu" for p in parameters)
        and {p.dtype for p in parameters} in ({torch.float32}, {torch.bfloat16})
    )


def weight_bytes(model: Any) -> int:
    """Bytes of all parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def supports_fused(model: Any) -> bool:
    """Whether the model is small and plain."""
    return is_plain_on_cpu(model) and weight_bytes(model) <= MAX_WEIGHT_BYTES


class FusedForward:
    """The fused re-expression of one model; weights are copied at construction."""

    def __init__(self, model: Any, tap_layers: tuple[int, ...], kernels: Kernels) -> None:
        config = model.config
        decoder = model.get_decoder()
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads: int = config.num_key_value_heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self._num_heads
        self._hidden: int = config.hidden_size
        self._eps: float = config.rms_norm_eps
        self._has_head_norm = config.model_type == "qwen3"
        self._kernels = kernels
        self._taps = tap_layers
        self._embed: torch.Tensor = model.get_input_embeddings().weight
        self._dtype = self._embed.dtype
        self._final_norm = decoder.norm.weight.detach().repeat(2)
        self._lm_head = _Linear(model.get_output_embeddings().weight.detach()).bind()
        self._layers = [self._fuse_layer(layer, is_tapped=i in tap_layers) for i, layer in enumerate(decoder.layers)]
        self._folds = torch.stack([layer.fold for layer in self._layers])[:, None]  # (Lt, 1, H + Hkv, 2, Dh)
        self._rope = torch.stack(rope_table(model), 1).float()  # (P, 2, Dh)

    def _fuse_layer(self, layer: Any, *, is_tapped: bool) -> _Layer:
        attention, mlp, dim = layer.self_attn, layer.mlp, self._head_dim
        heads, kv_heads = self._num_heads, self._num_kv_heads
        qk = torch.cat((attention.q_proj.weight, attention.k_proj.weight)).detach().view(heads + kv_heads, dim, -1)
        a, b = qk.chunk(2, 1)
        swapped = torch.cat((a, b, -b, -a), 1).reshape(2 * (heads + kv_heads) * dim, -1)
        parts = [swapped, attention.v_proj.weight.detach()]
        if kv_heads % 2:  # rows of one LayerNorm hold two heads' worth of values
            parts.append(torch.zeros(dim, self._hidden, dtype=self._dtype))
        weights = torch.ones(2, dim)
        if self._has_head_norm:
            weights = torch.stack((attention.q_norm.weight, attention.k_norm.weight)).detach().float()
        weights = torch.stack((weights[0] * attention.scaling, weights[1]))
        first, second = weights.chunk(2, 1)
        # [a, b] * [cos, cos] + [-b, -a] * [sin, -sin], each value times its own norm weight.
        fold = torch.stack((weights, torch.cat((second, -first), 1)), 1)  # (2, 2, Dh)
        fold = torch.cat((fold[:1].expand(heads, 2, dim), fold[1:].expand(kv_heads, 2, dim)))
        out, down = attention.o_proj.weight.detach(), mlp.down_proj.weight.detach()
        return _Layer(
            norm1=layer.input_layernorm.weight.detach().repeat(2),
            qkv=_Linear(torch.cat(parts)).bind(),
            fold=fold.contiguous(),
            out=_Linear(torch.cat((out, -out))).bind_add(),
            norm2=layer.post_attention_layernorm.weight.detach().repeat(2),
            gate_up=_Linear(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).detach()).bind(),
            down=_Linear(torch.cat((down, -down))).bind_add(),
            is_tapped=is_tapped,
        )

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        out_rows: torch.Tensor,
        logit_rows: torch.Tensor | None,
        plan: AttentionPlan,
        kv: KVPool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits (M, V) float32 and features (N, m * Dm) or None; writes K/V to `out_rows`.

        The plan's mask and the pool are float32.
        """
        count, dim, hidden, eps = token_ids.numel(), self._head_dim, self._hidden, self._eps
        heads, kv_heads = self._num_heads, self._num_kv_heads
        qk_heads = heads + kv_heads
        pair, both, qk_size, kv_size = (2 * dim,), (2 * hidden,), 2 * qk_heads * dim, kv_heads * dim
        rope = self._rope.index_select(0, positions)[:, None]  # (N, 1, 2, Dh)
        is_small = self._folds.numel() * count <= _MAX_TABLE_ELEMENTS
        tables = (self._folds * rope).unbind(0) if is_small else None
        attend = self._single_attention(plan, kv) if plan.num_requests == 1 else self._ragged_attention(plan, kv)
        layer_norm, has_head_norm = torch.layer_norm, self._has_head_norm
        x = embedding(token_ids, self._embed)
        x = torch.cat((x, -x), 1)
        features = torch.empty(count, len(self._taps) * hidden, dtype=self._dtype) if self._taps else None
        for i, layer in enumerate(self._layers):
            normed = layer_norm(x, both, layer.norm1, None, eps)
            qkv = layer.qkv(normed.narrow(1, 0, hidden))
            pairs = qkv.view(count, -1, 2 * dim)
            if has_head_norm:
                pairs = layer_norm(pairs, pair, None, None, eps)
            turned = pairs.view(count, -1, 2, dim).narrow(1, 0, qk_heads) * (tables[i] if tables else layer.fold * rope)
            straight, crossed = turned.unbind(2)
            qk = straight + crossed  # (N, H + Hkv, Dh) float32
            kv.key_rows[i].index_copy_(0, out_rows, qk.narrow(1, heads, kv_heads))
            value = qkv.narrow(1, qk_size, kv_size).to(KV_DTYPE).view(count, kv_heads, dim)
            kv.value_rows[i].index_copy_(0, out_rows, value)
            x = layer.out(attend(i, qk), x)
            normed = layer_norm(x, both, layer.norm2, None, eps)
            gate, up = layer.gate_up(normed.narrow(1, 0, hidden)).chunk(2, 1)
            x = layer.down(silu(gate).mul_(up), x)
            if layer.is_tapped:
                for j, tap in enumerate(self._taps):
                    if tap == i:
                        features[:, j * hidden : (j + 1) * hidden] = x[:, :hidden]  # type: ignore[index]
        if logit_rows is not None:
            x = x.index_select(0, logit_rows)
        normed = layer_norm(x, both, self._final_norm, None, eps)
        return self._lm_head(normed.narrow(1, 0, hidden)).float(), features

    def _single_attention(self, plan: AttentionPlan, kv: KVPool) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """Attention of one request: two batched products; a slice of the pool when its rows lie in order."""
        count, dim, heads, kv_heads = plan.num_rows, self._head_dim, self._num_heads, self._num_kv_heads
        groups, row = heads // kv_heads, (heads + kv_heads) * dim
        shape, strides = (kv_heads, count, groups, dim), (groups * dim, row, dim, 1)
        mask = None if plan.mask is None else plan.mask[0]  # (1, N * G, C)
        out = torch.empty(count, kv_heads, groups, dim, dtype=self._dtype)
        out_view, out_rows = out.transpose(0, 1), out.view(count, heads * dim)
        dtype, folded_shape, flat = self._dtype, (kv_heads, count * groups, dim), (1, heads * dim)
        bmm, baddbmm, softmax = torch.bmm, torch.baddbmm, torch.softmax

        def attend(i: int, qk: torch.Tensor) -> torch.Tensor:
            if plan.key_slice is not None:
                start, size = plan.key_slice[0], plan.num_keys
                keys = kv.key_heads[i].narrow(2, start, size)  # (Hkv, Dh, C)
                values = kv.value_heads[i].narrow(1, start, size)  # (Hkv, C, Dh)
            else:
                rows: Any = plan.key_rows
                gathered = kv.layers[i].index_select(0, rows).permute(1, 2, 3, 0)  # (2, Hkv, Dh, C)
                keys, turned = gathered.unbind(0)
                values = turned.transpose(1, 2)
            query = qk.as_strided(shape, strides).reshape(folded_shape)
            scores = bmm(query, keys) if mask is None else baddbmm(mask, query, keys)
            result = bmm(softmax(scores, -1), values)
            if count == 1:
                return result.view(flat).to(dtype)
            out_view.copy_(result.view(shape))
            return out_rows

        return attend

    def _ragged_attention(self, plan: AttentionPlan, kv: KVPool) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """Attention of several requests through the tree-attention kernel."""
        heads, size, dtype = self._num_heads, self._num_heads * self._head_dim, self._dtype
        kernel = self._kernels.tree_attention

        def attend(i: int, qk: torch.Tensor) -> torch.Tensor:
            query = qk.narrow(1, 0, heads).contiguous()
            return kernel(query, kv.layers[i], plan, 1.0).view(-1, size).to(dtype)

        return attend
