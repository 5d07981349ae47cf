"""How long does a verify forward take, if its shape is known beforehand and only the machine's speed changes?

BASTION's latency model: an offline prior times an online scale. The prior is the table that the engine measures at start
(costs of many rows and many requests, with every step that the device really has) plus the roofline's cost of the
committed context, which that table lacks; without a table it is the roofline alone.
Source: tree_speculation.md 3.2 (BASTION), with the memory term of attention kernels that store no score matrix (4.5).

Shape legend: n packed tree rows, c committed context rows (both over all requests), B requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.serving.budget.cost_model import CostModel, log2_bucket


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


_ROWS_A_REQUEST = 65
"""Rows a request whose times are kept; for more the prior is computed."""
_MAX_KEPT = 65 * 1024
"""Times kept, 3 MB."""


class ScaledPrior(CostModel):
    """T = r * prior(n, c): the shape is fixed offline, r follows the measured times, one r for every doubling of c.

    The prior is never dropped: estimates that follow the measurements alone are unstable (tree_speculation.md 3.2).
    """

    RATE = 0.05
    """Weight of one round in r; tree_speculation.md 3.2 suggests it, the paper does not say."""
    MAX_JUMP = 4.0
    """A round that took more than so many times what r says is a hiccup and counts as this."""

    def __init__(self, shape: TargetShape | None = None, roofline: Roofline | None = None) -> None:
        """shape: adds the context's cost to the table that `calibrate` measures. roofline: declared bandwidth and speed,
        the prior until then. Neither: the weak default of CostModel, scaled by the first observation."""
        super().__init__(None if roofline is None else lambda rows: float(roofline.seconds(rows, 0)))
        self._shape = shape if shape is not None or roofline is None else roofline.shape
        self._roofline = roofline
        self._is_known = roofline is not None
        self._tables: dict[tuple[int, int], tuple[list[float], np.ndarray]] = {}  # by requests and context
        self._num_kept = 0
        self._scales: dict[int, float] = {}
        self._scale = 1.0

    def calibrate(self, measure: Callable[[int, int], float], **limits: Any) -> None:
        """Measure the prior (CostModel.calibrate)."""
        super().calibrate(measure, **limits)
        self._tables.clear()
        self._num_kept = 0
        if self._shape is not None:
            self._roofline = Roofline.measured(self._shape, lambda n: self.at_start(n, 1))
        self._is_known, self._scale = True, 1.0
        self._scales.clear()

    @property
    def speed(self) -> float:
        """r of the newest round: time now over time at calibration."""
        return self._scale

    def scale(self, context_rows: int) -> float:
        """r at so much context; of the newest round where none was seen yet."""
        return self._scales.get(log2_bucket(context_rows), self._scale)

    def prior(self, rows: Any, context_rows: int = 0, num_requests: int = 1) -> Any:
        """Seconds as they were known at start: of a row count (a number), or of an array of them."""
        table: Any
        larger: Any
        if isinstance(rows, np.ndarray):
            table, larger = super().predict(rows, 0, num_requests), np.maximum
        else:
            table, larger = super().seconds(rows, 0, num_requests), max
        # Nothing was observed at context 0, so that is the table itself. It includes what the roofline says of c = 0.
        if self._roofline is None or context_rows == 0:
            return table
        a, b, d, e = self._roofline.terms(context_rows, num_requests)
        a0, b0, d0, e0 = self._roofline.terms(0, num_requests)
        return table + larger(a + b * rows, rows * (d + e * rows)) - larger(a0 + b0 * rows, rows * (d0 + e0 * rows))

    def _times(self, context_rows: int, num_requests: int) -> tuple[list[float], np.ndarray]:
        """The prior of 0, 1, ... rows as numbers and as an array, kept: rounds ask for it several times. The context is
        rounded to one of eight steps a doubling, of whose cost all row counts bear about the same."""
        step = 1 << max(log2_bucket(context_rows) - 4, 0)
        key = (num_requests, context_rows // step * step)
        known = self._tables.get(key)
        if known is None:
            size = _ROWS_A_REQUEST * num_requests
            if self._num_kept + size > _MAX_KEPT:
                self._tables.clear()
                self._num_kept = 0
            self._num_kept += size
            times = self.prior(np.arange(size), key[1], num_requests)
            known = self._tables[key] = (times.tolist(), times)
        return known

    def seconds(self, rows: float, context_rows: int = 0, num_requests: int = 1) -> float:
        """`predict` of one row count, without an array."""
        scale = self.scale(context_rows)
        if isinstance(rows, int):
            times = self._times(context_rows, num_requests)[0]
            if rows < len(times):
                return times[rows] * scale
        return float(self.prior(rows, context_rows, num_requests)) * scale

    def predict(self, rows: Any, context_rows: int = 0, num_requests: int = 1) -> np.ndarray:
        """Seconds of a verify forward of `rows` packed rows of so many requests over `context_rows` committed rows."""
        rows = np.asarray(rows)
        if rows.dtype.kind == "i":
            times = self._times(context_rows, num_requests)[1]
            if rows.max(initial=0) < len(times):
                return times[rows] * self.scale(context_rows)
        return np.asarray(self.prior(rows, context_rows, num_requests) * self.scale(context_rows))

    def observe(self, rows: int, context_rows: int, seconds: float, num_requests: int = 1) -> None:
        """Fold one measured verify forward: r <- (1 - RATE) r + RATE T_measured / T_prior."""
        if not seconds > 0:
            return
        old = self.scale(context_rows)
        ratio = seconds * old / self.seconds(rows, context_rows, num_requests)
        if not self._is_known:
            self._is_known, old = True, ratio
        self._scale = old + self.RATE * (min(ratio, self.MAX_JUMP * old) - old)
        self._scales[log2_bucket(context_rows)] = self._scale
