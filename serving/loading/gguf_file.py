"""GGUF file: its values and tensors, read within bounds: a damaged or hostile file ends in one sentence.

Format: header, key-values, tensor records, then the tensors, each at a multiple of the alignment (gguf versions 2 and 3,
little endian; docs/gguf.md of ggml).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from paceline.errors import ConfigError

PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""Types whose blocks share factors; their values are sums and products of 16-bit factors and small integers."""
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_DIMENSIONS, _MAX_ALIGNMENT = 4, 2**20
_CHUNK_VALUES = 2**24
"""Values that are float32 at the same time while a tensor is read."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where a tensor lies."""

    type: str
    shape: tuple[int, ...]
    """As torch says it, the fastest dimension last."""
    start: int
    num_bytes: int


class GgufFile:
    """An open file: `values` by key, `tensors` by name."""

    def __init__(self, path: str | Path) -> None:
        """Raises: ConfigError when the file is no complete GGUF file."""
        self.path = Path(path)
        try:
            is_empty = self.path.stat().st_size == 0
            # a plain array: views of a memmap cost more than what is done with them
            self._data = np.empty(0, np.uint8) if is_empty else np.memmap(self.path, np.uint8, "r").view(np.ndarray)
        except OSError as e:
            raise ConfigError(f"model must be a file that can be read, got {self.path}: {e.strerror}") from e
        self._view, self._at = memoryview(self._data), 0  # type: ignore[arg-type]
        self.values: dict[str, Any] = {}
        self.tensors: dict[str, TensorRecord] = {}
        try:
            self._read_header()
        except (_BrokenFile, struct.error, UnicodeDecodeError) as e:
            raise ConfigError(
                f"model must be a complete GGUF file, got {self.path}: {e}; download or convert it again"
            ) from e

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a key, of this kind (int, float, str, bool, list); `default` where the file does not say it.

        Raises: ConfigError when the key is of another kind, or absent without a default.
        """
        found = self.values.get(key, default)
        is_right = isinstance(found, kind) and (kind is bool or not isinstance(found, bool))
        if found is None or (found is not default and not is_right):
            what = "none" if found is None else f"a value of another kind ({type(found).__name__})"
            raise ConfigError(
                f"model {self.path} must be a GGUF file with {key}, it has {what}; convert it again with a current llama.cpp"
            )
        return found

    def optional(self, key: str, kind: type) -> Any:
        """The value of a key, None where the file does not say it. Raises: ConfigError when it is of another kind."""
        return self.value(key, kind) if key in self.values else None

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor's values in `dtype`; None = its own type, bfloat16 for types of blocks.

        Raises: ConfigError when a number in the file makes no value.
        """
        record = self.tensors[name]
        own = PLAIN_TYPES.get(record.type)
        raw = self._data[record.start : record.start + record.num_bytes]
        if own is not None:
            return torch.from_numpy(raw.copy()).view(own).view(record.shape).to(dtype or own)
        rows = raw.reshape(math.prod(record.shape[:-1]), -1)
        out = torch.empty(len(rows), record.shape[-1], dtype=dtype or torch.bfloat16)
        step, kind = max(1, _CHUNK_VALUES // record.shape[-1]), GGMLQuantizationType[record.type]
        for start in range(0, len(rows), step):
            with np.errstate(all="ignore"):  # values that are not finite are refused where the model is made
                out[start : start + step] = torch.from_numpy(dequantize(rows[start : start + step], kind))
        return out.view(record.shape)

    def _read_header(self) -> None:
        if bytes(self._view[:4]) != b"GGUF":
            raise _BrokenFile(f"it begins with {bytes(self._view[:4])!r} instead of b'GGUF'")
        self._at = 4
        version = self._number("<I")
        if version not in _VERSIONS:
            is_swapped = struct.unpack(">I", struct.pack("<I", version))[0] in _VERSIONS
            raise _BrokenFile("it is big-endian" if is_swapped else f"its version is {version}, not 2 or 3")
        num_tensors, num_values = self._count("tensors", 24), self._count("values", 13)
        for _ in range(num_values):
            key = self._text()
            if key in self.values:
                raise _BrokenFile(f"it has {key!r} twice")
            self.values[key] = self._value(self._number("<I"))
        alignment = self.values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment.bit_count() != 1 or alignment > _MAX_ALIGNMENT:
            raise _BrokenFile(f"general.alignment is {alignment!r}, no power of two")
        found = [self._record() for _ in range(num_tensors)]
        start = -(-self._at // alignment) * alignment
        if sum(record.num_bytes for _, record in found) > len(self._data) - self._at:
            # cut off, or tensors share bytes, which would be read many times
            raise _BrokenFile("it has less bytes than its tensors take")
        for name, record in found:
            if name in self.tensors:
                raise _BrokenFile(f"it has tensor {name!r} twice")
            if record.start % alignment or start + record.start + record.num_bytes > len(self._data):
                raise _BrokenFile(f"tensor {name!r} reaches beyond the end of the file, which is cut off or damaged")
            self.tensors[name] = TensorRecord(record.type, record.shape, start + record.start, record.num_bytes)

    def _record(self) -> tuple[str, TensorRecord]:
        name, rank = self._text(), self._number("<I")
        if not 0 < rank <= _MAX_DIMENSIONS:
            raise _BrokenFile(f"tensor {name!r} has {rank} dimensions")
        shape = tuple(self._number("<Q") for _ in range(rank))[::-1]
        number, start = self._number("<I"), self._number("<Q")
        known = GGMLQuantizationType(number).name if number in set(GGMLQuantizationType) else f"number {number}"
        if known not in PLAIN_TYPES and known not in BLOCK_TYPES:
            raise ConfigError(
                f"model {self.path} must hold tensors of the types {', '.join((*PLAIN_TYPES, *BLOCK_TYPES))}, got {known} for "
                f"{name!r}; take another quantization of the model, such as Q4_K_M or Q8_0"
            )
        block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[known]]
        if 0 in shape or shape[-1] % block or math.prod(shape) > 8 * len(self._data):  # no type has less than 4 bits
            raise _BrokenFile(f"tensor {name!r} cannot have the shape {shape}")
        return name, TensorRecord(known, shape, start, math.prod(shape) // block * num_bytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _NUMBERS:
            return self._numbers(kind, 1)[0]
        if kind != _ARRAY:
            raise _BrokenFile(f"a value has the unknown type {kind}")
        kind = self._number("<I")
        if kind == _STRING:
            return [self._text() for _ in range(self._count("strings", 8))]
        if kind not in _NUMBERS:
            raise _BrokenFile(f"an array holds the unknown type {kind}")
        return self._numbers(kind, self._count("numbers", np.dtype(_NUMBERS[kind]).itemsize))

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self._take(dtype.itemsize * count), dtype).tolist()

    def _count(self, what: str, least_bytes: int) -> int:
        """A number of things that each take so many bytes; refused before anything is made of it."""
        count: int = self._number("<Q")
        if count * least_bytes > len(self._data) - self._at:
            raise _BrokenFile(f"it claims {count} {what}, more than its {len(self._data)} bytes can hold")
        return count

    def _number(self, form: str) -> int:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _text(self) -> str:
        return str(self._take(self._number("<Q")), "utf-8")

    def _take(self, size: int) -> memoryview:
        if size > len(self._data) - self._at:
            raise _BrokenFile(f"it ends after {len(self._data)} bytes, in the middle of its header")
        self._at += size
        return self._view[self._at - size : self._at]


class _BrokenFile(ValueError):
    """What is wrong with the bytes of a file."""
