"""Native round on the CPU: the compiled forward of a dense decoder, called through a plain C interface.

A weight is packed once: panels of 16 outputs, inputs in pairs (bfloat16, int8), so that one vector load feeds 16 sums. What
the numbers mean is written in round.h; this module mirrors its records.

Shape legend: N packed rows, B requests, M rows with logits, O/K outputs/inputs of a linear layer.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Iterable
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.kernels.cpu.build import NAME, built_version, source_version
from paceline.kernels.cpu.memory import pool_zeros

log = logging.getLogger(__name__)

ISAS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx")
"""Instruction sets, worst first; bit i of available_isas() is the i-th. AMX is a part of the code for avx512_bf16."""
ISA_VARIABLE = "PACELINE_CPU_ISA"
"""Environment variable that names the instruction set to use; `none`: the torch path."""
_REMEDY = "with a C++ compiler (or pip install ziglang) run python -m paceline.kernels.cpu.build"
LANES = 16
_THREAD_BYTES = 2**17
"""A layer's weights that keep a thread busy for longer than its barriers take: two threads gain 1.4 at 0.4 MB a layer."""
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128, 256)
_IN_MULTIPLE = 32
_NUMBER_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class _Linear(Structure):
    _fields_ = [("weight", c_void_p), ("scale", c_void_p), ("num_in", c_int64), ("num_out", c_int64)]


class _Delta(Structure):
    _fields_ = [("down", c_void_p), ("up", c_void_p)]


class _Layer(Structure):
    _fields_ = [
        *((name, _Linear) for name in ("qkv", "attention_out", "gate_up", "down")),
        *((name, c_void_p) for name in ("norm1", "norm2", "q_norm", "k_norm", "embed_norm")),
        ("shift", _Linear),
        *((name, c_int64) for name in ("tap", "norms_stream")),
        *((name, _Delta) for name in ("attention_out_delta", "gate_up_delta", "down_delta")),
    ]


class _Model(Structure):
    _fields_ = [
        ("layers", POINTER(_Layer)),
        *((name, _Linear) for name in ("head", "condition", "context_kv")),
        *((name, c_void_p) for name in ("embedding", "final_norm", "condition_norm", "rope")),
        *((name, c_int64) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "num_taps")),
        *((name, c_int64) for name in ("embed_size", "feature_size", "weights", "features", "uses_tiles", "delta_rank", "block")),
        ("eps", c_float), ("scale", c_float),
    ]  # fmt: skip


_BATCH_TENSORS = (
    "token_ids", "positions", "out_rows", "stream", "cu_rows", "context_lens", "slot_table", "table_rows", "cu_keys",
    "key_rows", "ancestors", "logit_rows", "pool", "logits", "tapped", "features", "feature_positions", "feature_rows", "deltas",
)  # fmt: skip


class _Batch(Structure):
    _fields_ = [
        *((name, c_void_p) for name in _BATCH_TENSORS),
        *((name, c_int64) for name in (
            "num_rows", "num_requests", "num_logits", "slot_stride", "ancestor_stride", "logit_stride", "pool_rows",
            "num_threads", "num_features", "tail",
        )),
    ]  # fmt: skip


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The compiled library, or None where it was not built."""
    path = Path(__file__).with_name(NAME)
    if not path.is_file():
        log.warning("native CPU rounds are not built, torch computes forwards: %s", _REMEDY)
        return None
    if built_version(path) != source_version():
        log.warning(
            "native CPU rounds were built from other sources or elsewhere, torch computes forwards: %s", _REMEDY
        )
        return None
    library = ctypes.CDLL(str(path))
    library.available_isas.restype = c_int64
    return library


def held_library(functions: Iterable[tuple[str, Any, tuple[Any, ...]]]) -> ctypes.PyDLL | None:
    """The library for calls with the interpreter's lock held, or None where the CPU's native code is not used.

    For what takes microseconds: a whole step takes a millisecond, and getting a released lock back from a busy thread takes
    milliseconds.

    Args:
        functions: name, type of the result and types of the arguments of each.
    """
    library = load_library() if choose_isa() is not None else None
    if library is None:
        return None
    held = ctypes.PyDLL(library._name, handle=library._handle)
    for name, result, arguments in functions:
        function = getattr(held, name)
        function.restype, function.argtypes = result, arguments
    return held


def choose_isa(wanted: str | None = None) -> str | None:
    """The best instruction set of this machine, or the one that is wanted if it is here; None = no native round.

    wanted: None = what PACELINE_CPU_ISA names.
    """
    library, wanted = load_library(), os.environ.get(ISA_VARIABLE, "") if wanted is None else wanted
    if library is None or wanted == "none":
        return None
    if wanted and wanted not in ISAS:
        _say_unknown(wanted)
    bits = library.available_isas()
    found = [isa for i, isa in enumerate(ISAS) if bits >> i & 1 and hasattr(library, f"forward_{_code(isa)}")]
    return wanted if wanted in found else found[-1] if found else None


@functools.cache
def _say_unknown(wanted: str) -> None:
    log.warning(
        "%s must be none or one of %s, got %r: the best of this machine is used", ISA_VARIABLE, ", ".join(ISAS), wanted
    )


def _code(isa: str) -> str:
    return "avx512_bf16" if isa == "amx" else isa


def fits_native(hidden_size: int, head_dim: int) -> bool:
    """Whether the code takes such layers: whole vectors."""
    return hidden_size % LANES == 0 and head_dim in HEAD_DIMS


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """(O, K) of float32, bfloat16 or int8 -> panels; outputs are padded to 16 and inputs to 32, with zeros."""
    num_out, num_in = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -num_in % _IN_MULTIPLE, 0, -num_out % LANES))
    if weight.dtype == torch.float32:
        panels = padded.view(-1, LANES, padded.shape[1]).transpose(1, 2)
    else:
        panels = padded.view(-1, LANES, padded.shape[1] // 2, 2).transpose(1, 2)
    return pool_zeros(panels.shape, panels.dtype).copy_(panels)


def unpack_weight(packed: torch.Tensor) -> torch.Tensor:
    """Panels of bfloat16 or int8 -> (O, K) with the padding."""
    return packed.transpose(1, 2).reshape(packed.shape[0] * LANES, -1)


@dataclass(slots=True)
class PackedLinear:
    """A packed weight (O, K) and the factors of its outputs."""

    weight: torch.Tensor
    scale: torch.Tensor | None
    num_in: int
    num_out: int

    @classmethod
    def pack(cls, weight: torch.Tensor, scale: torch.Tensor | None = None) -> PackedLinear:
        packed = pack_weight(weight)
        num_out = packed.shape[0] * LANES
        num_in = packed[0].numel() // LANES
        if scale is not None:
            scale = torch.nn.functional.pad(scale.float(), (0, num_out - scale.numel())).contiguous()
        return cls(packed, scale, num_in, num_out)

    def record(self) -> _Linear:
        return _Linear(
            self.weight.data_ptr(), None if self.scale is None else self.scale.data_ptr(), self.num_in, self.num_out
        )


class PackedDelta:
    """What versions of a linear layer (O, K) add to its output, packed: factors (r, K) and (O, r) for each."""

    def __init__(self, linear: PackedLinear, num_versions: int, rank: int) -> None:
        """rank: a multiple of 32. Versions begin with zeros, which add nothing."""
        pair, dtype = (1, LANES) if linear.weight.dtype == torch.float32 else (2, LANES, 2), linear.weight.dtype
        self.down = pool_zeros((num_versions, rank // LANES, linear.num_in // pair[0], *pair[1:]), dtype)
        self.up = pool_zeros((num_versions, linear.num_out // LANES, rank // pair[0], *pair[1:]), dtype)
        self.rank = rank

    def load(self, version: int, down: torch.Tensor, up: torch.Tensor) -> None:
        """Replace the factors (r', K) and (O, r') of a version, r' <= r; `up` with the rows in the layer's order."""
        for to, factor in ((self.down, down), (self.up, up)):
            packed = pack_weight(factor.to(to.dtype))
            to[version].zero_()[tuple(map(slice, packed.shape))].copy_(packed)

    def record(self) -> _Delta:
        return _Delta(self.down.data_ptr(), self.up.data_ptr())


@dataclass(kw_only=True, slots=True)
class NativeLayer:
    """Weights of a layer: q, k and v in one, gate and up interleaved by panels."""

    qkv: PackedLinear
    attention_out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    norm1: torch.Tensor
    norm2: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    shift: PackedLinear | None = None
    """Of [row, row before it in its block], before the layer."""
    tap: int = 0
    """Bit j: the layer's output is the j-th tapped hidden state."""
    embed_norm: torch.Tensor | None = None
    """Of token embeddings (E,): `qkv` reads [normed embedding, normed row]."""
    norms_stream: bool = False
    """Whether the attention's output is added to the normed row."""
    deltas: tuple[PackedDelta, PackedDelta, PackedDelta] | None = None
    """Of `attention_out`, `gate_up` and `down`."""

    def products(self) -> tuple[PackedLinear, ...]:
        """Its linear layers, the shift apart."""
        return self.qkv, self.attention_out, self.gate_up, self.down


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """(I, K) each -> (2 I', K): 16 rows of gate, 16 of up, in turn; I' is I padded to 16."""
    pad = (0, 0, 0, -gate.shape[0] % LANES)
    both = [torch.nn.functional.pad(w, pad).view(-1, LANES, w.shape[1]) for w in (gate, up)]
    return torch.stack(both, 1).reshape(-1, gate.shape[1])


@dataclass(kw_only=True, slots=True)
class Condition:
    """What a drafter computes from rows of the target's features."""

    product: PackedLinear
    feature_size: int
    dtype: torch.dtype
    """Of the features, float32 or bfloat16."""
    norm: torch.Tensor | None = None
    context_kv: PackedLinear | None = None
    """Of the normed product: keys and values of all layers, layer by layer. None: the products begin the stream."""


class NativeDecoder:
    """Layers whose whole forward is one call, with or without token embedding and output head; not thread-safe.

    Rows of a drafter's block lie in the pool side by side: `block` of them for every row of a slot table.
    """

    def __init__(
        self,
        *,
        layers: list[NativeLayer],
        rope: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        scale: float,
        isa: str,
        head: PackedLinear | None = None,
        final_norm: torch.Tensor | None = None,
        num_logits: int = 0,
        embedding: torch.Tensor | None = None,
        num_taps: int = 0,
        block: int = 1,
        condition: Condition | None = None,
    ) -> None:
        """rope: (P, Dh) float32, cosines of half a head, then sines. num_logits: V, without the head's padding."""
        self._kept = (layers, head, embedding, final_norm, rope, condition)  # the records below point into them
        self._num_logits, self._num_taps = num_logits, num_taps
        self._hidden = layers[0].norm1.numel()
        self._dtype = torch.float32 if embedding is None else embedding.dtype
        projections = [head, None, None]
        if condition is not None:
            assert embedding is None or embedding.dtype == condition.dtype
            self._dtype, projections = condition.dtype, [head, condition.product, condition.context_kv]
        self._layers = (_Layer * len(layers))(*(self._layer_record(layer) for layer in layers))
        self._model = _Model(
            self._layers, *(_Linear() if p is None else p.record() for p in projections),
            *map(_address, (embedding, final_norm, None if condition is None else condition.norm, rope)),
            len(layers), self._hidden, num_heads, num_kv_heads, head_dim, layers[0].down.num_in, num_taps,
            0 if embedding is None else embedding.shape[1], 0 if condition is None else condition.feature_size,
            _NUMBER_TYPES[layers[0].qkv.weight.dtype], _NUMBER_TYPES[self._dtype], int(isa == "amx"),
            next((layer.deltas[0].rank for layer in layers if layer.deltas is not None), 0), block, eps, scale,
        )  # fmt: skip
        layer_bytes = sum(p.weight.numel() * p.weight.element_size() for p in layers[0].products())
        self._max_threads = max(1, layer_bytes // _THREAD_BYTES)
        self._kv_dtype = torch.float32 if layers[0].qkv.weight.dtype == torch.float32 else torch.bfloat16
        self._logit_stride = 0 if head is None else head.num_out
        library = load_library()
        assert library is not None
        self._forward = getattr(library, f"forward_{_code(isa)}")
        self._scratch_bytes = getattr(library, f"scratch_bytes_{_code(isa)}")
        self._scratch_bytes.restype = c_int64
        self._scratch = threading.local()  # .room: engines of one process may share a target
        self.isa = isa

    @staticmethod
    def _layer_record(layer: NativeLayer) -> _Layer:
        return _Layer(
            *(x.record() for x in layer.products()),
            *map(_address, (layer.norm1, layer.norm2, layer.q_norm, layer.k_norm, layer.embed_norm)),
            _Linear() if layer.shift is None else layer.shift.record(), layer.tap, layer.norms_stream,
            *(() if layer.deltas is None else (delta.record() for delta in layer.deltas)),
        )  # fmt: skip

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cu_rows: torch.Tensor,
        context_lens: torch.Tensor,
        slot_table: torch.Tensor,
        out_rows: torch.Tensor,
        ancestors: torch.Tensor | None,
        logit_rows: torch.Tensor | None,
        pool: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits (M, V) float32 and tapped hidden states (N, m * Dm) or None of tokens; writes K/V to `out_rows`.

        pool: (L, R, 2, Hkv, Dh), float32 beside float32 weights, else bfloat16. Other arguments: as TargetBatch.
        """
        num_rows = token_ids.numel()
        num_logits = num_rows if logit_rows is None else logit_rows.numel()
        tapped = torch.empty(num_rows, self._num_taps * self._hidden, dtype=self._dtype) if self._num_taps else None
        logits = self._call(
            positions, cu_rows, context_lens, slot_table, out_rows, pool, num_logits,
            token_ids=token_ids, ancestors=ancestors, logit_rows=logit_rows, tapped=tapped,
        )  # fmt: skip
        return logits, tapped

    def run_stream(
        self,
        stream: torch.Tensor,
        positions: torch.Tensor,
        cu_rows: torch.Tensor,
        context_lens: torch.Tensor,
        slot_table: torch.Tensor,
        out_rows: torch.Tensor,
        pool: torch.Tensor,
        *,
        token_ids: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
        new_context: tuple[torch.Tensor, torch.Tensor] | None = None,
        table_rows: torch.Tensor | None = None,
        keys: tuple[torch.Tensor, torch.Tensor] | None = None,
        ancestors: torch.Tensor | None = None,
        deltas: torch.Tensor | None = None,
        tail: int = -1,
        wants_logits: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layers' output of a residual stream (N, Dm) float32, which is overwritten, and its logits; writes K/V.

        Args:
            positions, out_rows: (N,) int64; rows of a request are causal. Pool rows count blocks' rows one by one.
            context_lens: (B,) int64 rows of the pool before a request's own, counted likewise.
            slot_table: (., L) int64, one entry a block.
            token_ids: (N,) int64, where the first layer reads embeddings.
            features: (C, F) of the target. The stream is set to their products, C = N, or, with `new_context`,
                K/V made of them is written before the layers begin.
            new_context: (C,) int64 positions and (C,) int64 pool rows of that K/V.
            table_rows: (B,) int64 row of the table of each request; None = its own.
            keys: (B + 1,) int64 offsets and pool rows of the keys behind each context; None = the rows' own.
            ancestors: (N, .) bool, which of those keys a row sees; None = causal.
            deltas: (B,) int64 version whose additions a request's rows get, negative = none; None = nobody's.
            tail: rows of a request, its last ones, that go beyond the last layer's K/V; negative = all.
        Returns: (M, Dm) and (M, V), M = B * tail, or N.
        """
        num_last = stream.shape[0] if tail < 0 else tail * context_lens.numel()
        logits = self._call(
            positions, cu_rows, context_lens, slot_table, out_rows, pool, num_last if wants_logits else 0,
            token_ids=token_ids, stream=stream, table_rows=table_rows, keys=keys, ancestors=ancestors, tail=tail,
            features=features, new_context=new_context, deltas=deltas,
        )  # fmt: skip
        return stream[:num_last], logits

    def write_context(
        self, features: torch.Tensor, positions: torch.Tensor, out_rows: torch.Tensor, pool: torch.Tensor
    ) -> None:
        """Write K/V of all layers, made of features (C, F), to rows (C,) of the pool."""
        nothing = torch.zeros(1, dtype=torch.int64)
        none = nothing[:0]
        self._call(
            none, nothing, none, nothing[None], none, pool, 0, stream=torch.empty(0, self._hidden), features=features,
            new_context=(positions, out_rows),
        )  # fmt: skip

    def _call(
        self,
        positions: torch.Tensor,
        cu_rows: torch.Tensor,
        context_lens: torch.Tensor,
        slot_table: torch.Tensor,
        out_rows: torch.Tensor,
        pool: torch.Tensor,
        num_logits: int,
        *,
        token_ids: torch.Tensor | None = None,
        stream: torch.Tensor | None = None,
        table_rows: torch.Tensor | None = None,
        keys: tuple[torch.Tensor, torch.Tensor] | None = None,
        ancestors: torch.Tensor | None = None,
        logit_rows: torch.Tensor | None = None,
        tapped: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
        new_context: tuple[torch.Tensor, torch.Tensor] | None = None,
        deltas: torch.Tensor | None = None,
        tail: int = -1,
    ) -> torch.Tensor:
        if (
            pool.dtype != self._kv_dtype
            or not pool.is_contiguous()
            or (stream is not None and (stream.dtype != torch.float32 or not stream.is_contiguous()))
        ):
            raise TypeError(f"the pool must be contiguous {self._kv_dtype} and the stream float32, got {pool.dtype}")
        if features is not None:
            features = features.to(self._dtype).contiguous()
        logits = torch.empty(num_logits, self._logit_stride)
        slot_table = slot_table if slot_table.stride(-1) == 1 else slot_table.contiguous()
        if ancestors is not None and ancestors.stride(-1) != 1:
            ancestors = ancestors.contiguous()
        cu_keys, key_rows = keys or (None, None)
        feature_positions, feature_rows = new_context or (None, None)
        flat = [
            t if t is None or t.is_contiguous() else t.contiguous()
            for t in (
                token_ids, positions, out_rows, cu_rows, context_lens, table_rows, cu_keys, key_rows, logit_rows,
                feature_positions, feature_rows, deltas,
            )
        ]  # fmt: skip
        if slot_table.dtype != torch.int64 or any(t is not None and t.dtype != torch.int64 for t in flat):
            raise TypeError("indices must be int64")
        at = [*map(_address, flat)]
        batch = _Batch(
            *at[:3], _address(stream), *at[3:5], _address(slot_table), *at[5:8], _address(ancestors), at[8],
            *map(_address, (pool, logits, tapped, features)), *at[9:],
            positions.numel(), context_lens.numel(), num_logits, slot_table.stride(0),
            0 if ancestors is None else ancestors.stride(0), self._logit_stride, pool[0].numel() // self._row_size,
            min(torch.get_num_threads(), self._max_threads), 0 if features is None else features.shape[0], tail,
        )  # fmt: skip
        size = self._scratch_bytes(byref(self._model), byref(batch))
        room: torch.Tensor | None = getattr(self._scratch, "room", None)
        if room is None or room.numel() < size + 64:
            room = self._scratch.room = torch.empty(size + (size >> 2) + 64, dtype=torch.uint8)
        start = -(-room.data_ptr() // 64) * 64
        self._forward(byref(self._model), byref(batch), c_void_p(start))
        return logits[:, : self._num_logits]

    @functools.cached_property
    def _row_size(self) -> int:
        return 2 * self._model.kv_heads * self._model.head_dim


def rank_rows(logits: torch.Tensor, count: int, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best of scale times each row: values (T, K) float32, falling, ids (T, K) int64, log of the sum of exponentials (T,).

    logits: (T, V) float32, rows side by side or padded. scale: (T,) float32. Of equal values the first is the better.
    """
    num_rows = logits.shape[0]
    values, ids = torch.empty(num_rows, count), torch.empty(num_rows, count, dtype=torch.int64)
    lse = torch.empty(num_rows)
    _rank_function()(
        c_void_p(logits.data_ptr()), c_int64(num_rows), c_int64(logits.shape[1]), c_int64(logits.stride(0)),
        c_void_p(scale.data_ptr()), c_int64(count), c_void_p(values.data_ptr()), c_void_p(ids.data_ptr()),
        c_void_p(lse.data_ptr()),
    )  # fmt: skip
    return values, ids, lse


@functools.cache
def _rank_function() -> Any:
    library, isa = load_library(), choose_isa()
    assert library is not None and isa is not None
    return getattr(library, f"rank_rows_{_code(isa)}")


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
