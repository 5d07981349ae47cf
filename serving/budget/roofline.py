"""Roofline: the work of a target's forward and the seconds that follow from it.

Source: tree_speculation.md 3.2 (BASTION), with the memory term of attention kernels that store no score matrix (4.5).

Shape legend: n packed tree rows, c committed context rows (both over all requests), B requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetShape:
    """What a forward's work follows from."""

    num_layers: int
    hidden_size: int
    query_size: int
    """Query heads times head size."""
    kv_size: int
    """Key (or value) heads times head size."""
    mlp_size: int
    """Inner size that one row passes through; of an MoE, over the experts that it takes."""
    vocab_size: int
    value_bytes: int = 2
    """Bytes of a weight, an activation and a cached key."""

    @classmethod
    def of(cls, config: Any, value_bytes: int) -> TargetShape:
        """The shape in a transformers text configuration."""
        heads = config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        num_experts = getattr(config, "num_experts_per_tok", None)
        expert_size = getattr(config, "moe_intermediate_size", None)
        return cls(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            query_size=heads * head_size,
            kv_size=(getattr(config, "num_key_value_heads", None) or heads) * head_size,
            mlp_size=num_experts * expert_size if num_experts and expert_size else config.intermediate_size,
            vocab_size=config.vocab_size,
            value_bytes=value_bytes,
        )

    def flops(self, rows: Any, context_rows: int, num_requests: int = 1) -> Any:
        """Floating-point operations of a forward of n rows, a number or an array, over c context rows."""
        n, h = rows, self.hidden_size
        keys = (context_rows + n) / num_requests  # that one row attends to
        layer = 4 * h * (self.query_size + self.kv_size) + 4 * keys * self.query_size + 6 * h * self.mlp_size
        return n * (self.num_layers * layer + 2 * h * self.vocab_size)

    def bytes(self, rows: Any, context_rows: int) -> Any:
        """Bytes that it moves: every weight once, cached and new keys and values, activations between the operators."""
        n, h = rows, self.hidden_size
        weights = 2 * h * (self.query_size + self.kv_size) + 3 * h * self.mlp_size
        layer = weights + 2 * (context_rows + n) * self.kv_size + n * (4 * h + 2 * self.mlp_size)
        return self.value_bytes * (self.num_layers * layer + h * self.vocab_size + n * self.vocab_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """Seconds from work: the slower of moving the bytes and doing the operations."""

    shape: TargetShape
    bytes_per_s: float
    flops_per_s: float

    @classmethod
    def measured(cls, shape: TargetShape, seconds: Callable[[int], float], max_rows: int = 513) -> Roofline:
        """Effective bandwidth and speed of a machine: what one row's time says of the bytes, and the best that any number
        of rows says of the operations. seconds(n) > 0: of a forward of n rows without context."""
        rows = np.unique(np.geomspace(1, max_rows, 16).astype(int))
        speeds = [float(shape.flops(int(n), 0)) / seconds(int(n)) for n in rows]
        return cls(shape=shape, bytes_per_s=float(shape.bytes(1, 0)) / seconds(1), flops_per_s=max(speeds))

    def terms(self, context_rows: int, num_requests: int = 1) -> tuple[float, float, float, float]:
        """(a, b, d, e) of T_v(n, c) = max(a + b n, n (d + e n)): plain numbers, because rounds ask with c ever new."""
        first, second = (float(self.shape.bytes(n, context_rows)) for n in (0, 1))
        one, two = (float(self.shape.flops(n, context_rows, num_requests)) for n in (1, 2))
        quadratic = (two - 2 * one) / 2
        memory = (first / self.bytes_per_s, (second - first) / self.bytes_per_s)
        return *memory, (one - quadratic) / self.flops_per_s, quadratic / self.flops_per_s

    def seconds(self, rows: int | np.ndarray, context_rows: int, num_requests: int = 1) -> np.ndarray:
        """T_v(n, c)."""
        a, b, d, e = self.terms(context_rows, num_requests)
        n = np.asarray(rows, dtype=np.float64)
        return np.maximum(a + b * n, n * (d + e * n))
