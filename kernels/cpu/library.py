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
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.kernels.cpu.build import NAME

log = logging.getLogger(__name__)

ISAS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx")
"""Instruction sets, worst first; bit i of available_isas() is the i-th. AMX is a part of the code for avx512_bf16."""
ISA_VARIABLE = "PACELINE_CPU_ISA"
"""Environment variable that names the instruction set to use, or `none` for the torch path."""
LANES = 16
_IN_MULTIPLE = 32
_NUMBER_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class _Linear(Structure):
    _fields_ = [("weight", c_void_p), ("scale", c_void_p), ("num_in", c_int64), ("num_out", c_int64)]


class _Layer(Structure):
    _fields_ = [
        *((name, _Linear) for name in ("qkv", "attention_out", "gate_up", "down")),
        *((name, c_void_p) for name in ("norm1", "norm2", "q_norm", "k_norm")),
        ("tap", c_int64),
    ]


class _Model(Structure):
    _fields_ = [
        ("layers", POINTER(_Layer)), ("head", _Linear),
        *((name, c_void_p) for name in ("embedding", "final_norm", "rope")),
        *((name, c_int64) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "num_taps")),
        *((name, c_int64) for name in ("weights", "features", "uses_tiles")),
        ("eps", c_float), ("scale", c_float),
    ]  # fmt: skip


_BATCH_TENSORS = (
    "token_ids", "positions", "out_rows", "cu_rows", "context_lens", "slot_table", "ancestors", "logit_rows", "pool",
    "logits", "tapped",
)  # fmt: skip


class _Batch(Structure):
    _fields_ = [
        *((name, c_void_p) for name in _BATCH_TENSORS),
        *((name, c_int64) for name in (
            "num_rows", "num_requests", "num_logits", "slot_stride", "ancestor_stride", "logit_stride", "pool_rows",
            "num_threads",
        )),
    ]  # fmt: skip


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The compiled library, or None where it was not built."""
    path = Path(__file__).with_name(NAME)
    if not path.is_file():
        log.warning(
            "native CPU rounds are not built, torch computes forwards: install a C++ compiler (or pip install ziglang), "
            "then run python -m paceline.kernels.cpu.build"
        )
        return None
    library = ctypes.CDLL(str(path))
    library.available_isas.restype = c_int64
    return library


def choose_isa(wanted: str | None = None) -> str | None:
    """The best instruction set of this machine, or the one that is wanted if it is here; None = no native round.

    wanted: None = what PACELINE_CPU_ISA names.
    """
    library, wanted = load_library(), os.environ.get(ISA_VARIABLE, "") if wanted is None else wanted
    if library is None or wanted == "none":
        return None
    bits = library.available_isas()
    found = [isa for i, isa in enumerate(ISAS) if bits >> i & 1 and hasattr(library, f"forward_{_code(isa)}")]
    return wanted if wanted in found else found[-1] if found else None


def _code(isa: str) -> str:
    return "avx512_bf16" if isa == "amx" else isa


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """(O, K) of float32, bfloat16 or int8 -> panels; outputs are padded to 16 and inputs to 32, with zeros."""
    num_out, num_in = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -num_in % _IN_MULTIPLE, 0, -num_out % LANES))
    if weight.dtype == torch.float32:
        return padded.view(-1, LANES, padded.shape[1]).transpose(1, 2).contiguous()
    return padded.view(-1, LANES, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()


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


@dataclass(kw_only=True, slots=True)
class NativeLayer:
    """Weights of a layer: q, k and v in one, gate and up interleaved by panels."""

    qkv: PackedLinear
    attention_out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    norm1: torch.Tensor
    norm2: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    tap: int


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """(I, K) each -> (2 I', K): 16 rows of gate, 16 of up, in turn; I' is I padded to 16."""
    pad = (0, 0, 0, -gate.shape[0] % LANES)
    both = [torch.nn.functional.pad(w, pad).view(-1, LANES, w.shape[1]) for w in (gate, up)]
    return torch.stack(both, 1).reshape(-1, gate.shape[1])


class NativeDecoder:
    """A decoder whose whole forward is one call; not thread-safe."""

    def __init__(
        self,
        *,
        layers: list[NativeLayer],
        head: PackedLinear,
        embedding: torch.Tensor,
        final_norm: torch.Tensor,
        rope: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        vocab_size: int,
        eps: float,
        scale: float,
        num_taps: int,
        isa: str,
    ) -> None:
        self._kept = (layers, head, embedding, final_norm, rope)  # the records below point into them
        self._vocab_size, self._num_taps = vocab_size, num_taps
        self._hidden, self._dtype = embedding.shape[1], embedding.dtype
        self._layers = (_Layer * len(layers))(*(self._layer_record(layer) for layer in layers))
        self._model = _Model(
            self._layers, head.record(), embedding.data_ptr(), final_norm.data_ptr(), rope.data_ptr(), len(layers),
            self._hidden, num_heads, num_kv_heads, head_dim, layers[0].down.num_in, num_taps,
            _NUMBER_TYPES[head.weight.dtype], _NUMBER_TYPES[embedding.dtype], int(isa == "amx"), eps, scale,
        )  # fmt: skip
        self._logit_stride = head.num_out
        library = load_library()
        assert library is not None
        self._forward = getattr(library, f"forward_{_code(isa)}")
        self._scratch_bytes = getattr(library, f"scratch_bytes_{_code(isa)}")
        self._scratch_bytes.restype = c_int64
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self.isa = isa

    @staticmethod
    def _layer_record(layer: NativeLayer) -> _Layer:
        norms = [None if n is None else n.data_ptr() for n in (layer.norm1, layer.norm2, layer.q_norm, layer.k_norm)]
        return _Layer(
            *(x.record() for x in (layer.qkv, layer.attention_out, layer.gate_up, layer.down)), *norms, layer.tap
        )

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
        """Return logits (M, V) float32 and tapped hidden states (N, m * Dm) or None; writes K/V to `out_rows`."""
        num_rows = token_ids.numel()
        num_logits = num_rows if logit_rows is None else logit_rows.numel()
        logits = torch.empty(num_logits, self._logit_stride)
        tapped = torch.empty(num_rows, self._num_taps * self._hidden, dtype=self._dtype) if self._num_taps else None
        if slot_table.stride(-1) != 1:
            slot_table = slot_table.contiguous()
        if ancestors is not None and ancestors.stride(-1) != 1:
            ancestors = ancestors.contiguous()
        kept = [t.contiguous() for t in (token_ids, positions, out_rows, cu_rows, context_lens)]
        batch = _Batch(
            *(t.data_ptr() for t in kept), slot_table.data_ptr(),
            None if ancestors is None else ancestors.data_ptr(), None if logit_rows is None else logit_rows.data_ptr(),
            pool.data_ptr(), logits.data_ptr(), None if tapped is None else tapped.data_ptr(),
            num_rows, context_lens.numel(), num_logits, slot_table.stride(0),
            0 if ancestors is None else ancestors.stride(0), self._logit_stride, pool.shape[1], torch.get_num_threads(),
        )  # fmt: skip
        size = self._scratch_bytes(byref(self._model), byref(batch))
        if self._scratch.numel() < size + 64:
            self._scratch = torch.empty(size + (size >> 2) + 64, dtype=torch.uint8)
        start = -(-self._scratch.data_ptr() // 64) * 64
        self._forward(byref(self._model), byref(batch), c_void_p(start))
        return logits[:, : self._vocab_size], tapped
