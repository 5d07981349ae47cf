"""Kernel forward: a dense decoder on a device, ten launches a layer, as few as its kernels and matrix products are.

A layer: residual add and norm, QKV product, head norm with RoPE and the K/V write, attention (context, own rows), output
product, residual add and norm, gate and up product, gate, down product.
q, k and v are one product, gate and up another: their weights lie in one tensor, of which the modules' own are views.

Shape legend: N packed rows, M rows with logits, V vocab, P positions, H/Hkv query/KV heads, Dh head dim, Dm hidden size,
m tapped layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding, linear

from paceline.kernels.dispatch import Kernels
from paceline.serving.target_model.fused import rope_table
from paceline.serving.target_model.kv_cache import KVPool


@dataclass(slots=True)
class _Layer:
    norm1: torch.Tensor  # (Dm,)
    qkv: tuple[torch.Tensor, torch.Tensor | None]  # weight and bias of a product
    head_norms: dict[str, Any]
    scale: float
    out: tuple[torch.Tensor, torch.Tensor | None]
    norm2: torch.Tensor  # (Dm,)
    gate_up: tuple[torch.Tensor, torch.Tensor | None]
    down: tuple[torch.Tensor, torch.Tensor | None]


class KernelForward:
    """The forward of a model that `is_dense` (fused.py); shares its weights."""

    def __init__(self, model: Any, tap_layers: tuple[int, ...], kernels: Kernels) -> None:
        config, decoder = model.config, model.get_decoder()
        self._kernels, self._taps = kernels, tap_layers
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads: int = config.num_key_value_heads
        self._eps: float = config.rms_norm_eps
        self._embed: torch.Tensor = model.get_input_embeddings().weight
        self._final_norm: torch.Tensor = decoder.norm.weight
        head = model.get_output_embeddings()
        self._head = (head.weight, head.bias)
        self._layers = [_layer(layer) for layer in decoder.layers]
        self._cos, self._sin = rope_table(model)

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        out_rows: torch.Tensor,
        logit_rows: torch.Tensor | None,
        plan: Any,
        kv: KVPool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits (M, V) float32 and features (N, m * Dm) or None; writes K/V to `out_rows`.  Syncs: none."""
        kernels, heads, kv_heads, eps = self._kernels, self._num_heads, self._num_kv_heads, self._eps
        add_norm, count = kernels.add_norm, token_ids.numel()
        x, delta = embedding(token_ids, self._embed), None
        hidden = x.shape[1]
        features = x.new_empty(count, len(self._taps) * hidden) if self._taps else None
        for i, layer in enumerate(self._layers):
            normed = add_norm(x, delta, layer.norm1, eps)
            self._tap(i - 1, x, features)
            qkv = linear(normed, *layer.qkv).view(count, heads + 2 * kv_heads, self._cos.shape[1])
            query, key, value = qkv.split((heads, kv_heads, kv_heads), 1)
            query = kernels.rope_scatter(
                query, key, value, kv.layers[i], out_rows, positions, self._cos, self._sin, **layer.head_norms
            )
            attended = kernels.tree_attention(query, kv.layers[i], plan, layer.scale).flatten(1)
            normed = add_norm(x, linear(attended, *layer.out), layer.norm2, eps)
            delta = linear(kernels.silu_mul(linear(normed, *layer.gate_up)), *layer.down)
        normed = add_norm(x, delta, self._final_norm, eps)
        self._tap(len(self._layers) - 1, x, features)
        if logit_rows is not None:
            normed = normed.index_select(0, logit_rows)
        return linear(normed, *self._head).float(), features

    def _tap(self, layer: int, x: torch.Tensor, features: torch.Tensor | None) -> None:
        """Keep a layer's output, which is whole once the next norm has added the layer's last product."""
        if features is not None:
            hidden = x.shape[1]
            for j, tap in enumerate(self._taps):
                if tap == layer:
                    features[:, j * hidden : (j + 1) * hidden] = x


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms: dict[str, Any] = {}
    if hasattr(attention, "q_norm"):
        norms = {
            "q_norm": attention.q_norm.weight, "k_norm": attention.k_norm.weight,
            "eps": attention.q_norm.variance_epsilon,
        }  # fmt: skip
    return _Layer(
        norm1=layer.input_layernorm.weight,
        qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=norms,
        scale=attention.scaling,
        out=(attention.o_proj.weight, attention.o_proj.bias),
        norm2=layer.post_attention_layernorm.weight,
        gate_up=_joined(mlp.gate_proj, mlp.up_proj),
        down=(mlp.down_proj.weight, mlp.down_proj.bias),
    )


def _joined(*parts: torch.nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of one product that computes all of these; theirs become views of them."""
    sizes, joined = [part.out_features for part in parts], list[torch.Tensor | None]()
    with torch.inference_mode(False):  # trainers read the modules' parameters
        for name in ("weight", "bias"):
            if getattr(parts[0], name) is None:
                joined.append(None)
                continue
            whole = torch.cat([getattr(part, name).detach() for part in parts])
            for part, own in zip(parts, whole.split(sizes), strict=True):
                setattr(part, name, torch.nn.Parameter(own, requires_grad=False))
            joined.append(whole)
    weight, bias = joined
    assert weight is not None
    return weight, bias
