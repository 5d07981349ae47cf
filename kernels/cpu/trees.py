"""Native trees: the compiled tree builder of the host, its acceptance walk and the sums of its score calibration.

serving/trees says in NumPy what they compute; trees.cpp what the records mean.

Shape legend: B requests of the round, G requests of one drafter, F nodes of a proposal or leaves, S draft slots, K candidates
per slot, R rank classes, N packed tree rows (roots included), W widest tree, Q calibration cells.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
import weakref
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import Any

import numpy as np
import torch

from paceline.kernels.cpu.library import held_library, load_library

ProposalFields = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Token ids and log-probabilities (F, S, K), widths (F, S) or None, edges (F, S - 1, K, K) or None."""
_TAKEN, _EMPTY, _WRONG = range(3)
_HELD_BYTES = 1 << 18
"""Copied within some ten microseconds."""


@functools.cache
def load_trees() -> ctypes.PyDLL | None:
    """The library with its tree functions, or None where the CPU's native code is not used; what takes longer than
    microseconds is called by `_released`."""
    number, at = c_int64, c_void_p
    return held_library((
        ("trees_new", at, ()),
        ("trees_free", None, (at,)),
        ("trees_start", None, (at, number)),
        ("trees_begin", number, (at, at, at)),
        ("trees_leaves", number, (at, number, number, at, at)),
        ("trees_extend", number, (at, at, at)),
        ("trees_rank", None, (at, at)),
        ("trees_scores", None, (at, number, at)),
        ("trees_cut", number, (at, at, at)),
        ("trees_pack", None, (at, at, number, number, at, at, at, at)),
        ("trees_walk", number, (at, at, at, at, number, at, at, at)),
        ("trees_copy", number, (at, at, at, at, number, number, number, number, number)),
        ("trees_fold", number, (at,)),
    ))  # fmt: skip


@functools.cache
def _released(name: str) -> Any:
    """A function of the library that is called with the interpreter's lock released."""
    held, library = getattr(load_trees(), name), load_library()
    function = getattr(library, name)
    function.restype, function.argtypes = held.restype, held.argtypes
    return function


class Record:
    """A record of the library that is filled at once."""

    def __init__(self, form: str) -> None:
        layout = struct.Struct(form)
        self._room = ctypes.create_string_buffer(layout.size)
        self._pack = functools.partial(layout.pack_into, self._room, 0)
        self.address = ctypes.addressof(self._room)

    def fill(self, *values: float) -> int:
        """Returns its address."""
        self._pack(*values)
        return self.address


class _Room:
    """A growing array whose address is known; what `take` returns is overwritten by whoever takes next."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._grow(256)

    def _grow(self, size: int) -> None:
        tensor = torch.zeros(size, dtype=self._dtype)
        self._array, self.address = tensor.numpy(), tensor.data_ptr()

    def take(self, size: int) -> np.ndarray:
        if size > len(self._array):
            self._grow(2 * size)
        return self._array[:size]


class TreeMaker:
    """Builds the trees of one round after the other: blocks of one drafter, ranked, then those of the next, then all cut
    and packed. One thread only."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library, self._trees = library, library.trees_new()
        # An engine's thread may still run when the interpreter ends.
        weakref.finalize(self, library.trees_free, self._trees).atexit = False
        self._proposal, self._growth = Record("8q"), Record("5q")
        self._fields, self._nodes, self._scores = _Room(torch.int64), _Room(torch.int64), _Room(torch.float64)
        self._num_requests = self._num_drafted = 0

    @staticmethod
    def new() -> TreeMaker | None:
        """None where there is no native code."""
        library = load_trees()
        return None if library is None else TreeMaker(library)

    def start(self, num_requests: int) -> None:
        """A round of B requests begins; their trees are roots."""
        self._num_requests = num_requests
        self._library.trees_start(self._trees, num_requests)

    def _read(
        self,
        token_ids: torch.Tensor,
        logprobs: torch.Tensor,
        widths: torch.Tensor | None,
        edge_logprobs: torch.Tensor | None,
        vocab_size: int | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Fill the proposal's record; returns what must live until it was read."""
        num_nodes, num_slots, num_candidates = logprobs.shape
        ids, values = _plain(token_ids, torch.int64), _plain(logprobs, torch.float32)
        if widths is not None:
            widths = _plain(widths, torch.int64)
            if widths.shape != (num_nodes, num_slots):
                raise ValueError(f"widths must be (F, S) = {(num_nodes, num_slots)}, got {tuple(widths.shape)}")
        if edge_logprobs is not None:
            edge_logprobs = _plain(edge_logprobs, torch.float32)
            form = (num_nodes, num_slots - 1, num_candidates, num_candidates)
            if edge_logprobs.shape != form:
                raise ValueError(f"edge_logprobs must be {form}, got {tuple(edge_logprobs.shape)}")
        self._proposal.fill(
            ids.data_ptr(), values.data_ptr(), 0 if widths is None else widths.data_ptr(),
            0 if edge_logprobs is None else edge_logprobs.data_ptr(), num_nodes, num_slots, num_candidates,
            -1 if vocab_size is None else vocab_size,
        )  # fmt: skip
        return ids, values, widths, edge_logprobs

    def begin(
        self,
        proposal: ProposalFields,
        vocab_size: int | None,
        kappa: np.ndarray | None,
        *,
        is_product: bool,
        max_nodes: int,
        bundle_width: int | None,
    ) -> bool | None:
        """Take the first block of a drafter's G requests.

        Args:
            proposal: F = G.
            kappa: (2, G or 1, S, R) float32 or None.
        Returns: whether it holds candidates; None where its numbers are wrong.
        """
        kept, kappa_at, num_kappas = self._read(*proposal, vocab_size), 0, 1
        num_requests, num_slots = kept[1].shape[:2]  # type: ignore[union-attr]
        if kappa is not None:
            # corrections of several keys are picked by index, which leaves another order of memory
            kappa = np.ascontiguousarray(kappa)
            num_kappas, kappa_at = kappa.shape[1], torch.from_numpy(kappa).data_ptr()
            if num_kappas not in (1, num_requests) or kappa.shape[2] != num_slots:
                raise ValueError(f"a proposal must have {num_kappas} nodes, one a request, got {num_requests}")
        growth = self._growth.fill(kappa_at, num_kappas, is_product, max_nodes, bundle_width or 0)
        self._num_drafted = num_requests
        found = self._library.trees_begin(self._trees, self._proposal.address, growth)
        return None if found == _WRONG else found == _TAKEN

    def leaves(self, max_frontier: int, *, is_limited: bool) -> tuple[np.ndarray, np.ndarray]:
        """The latest block's heaviest leaves: (5, F) int64 request, slot, token, node, number, and their scores (F,).

        is_limited: leaves below which nothing can become a node are left out.
        """
        size = self._num_drafted * max_frontier
        fields, scores = np.empty((5, size), dtype=np.int64), self._scores.take(size)
        address = torch.from_numpy(fields).data_ptr()
        count = self._library.trees_leaves(self._trees, max_frontier, is_limited, address, self._scores.address)
        return fields[:, :count], scores[:count]

    def extend(self, proposal: ProposalFields, vocab_size: int | None, numbers: np.ndarray) -> bool:
        """Take the block below the F leaves of these numbers; whether its numbers are right. As `begin`."""
        kept, count = self._read(*proposal, vocab_size), len(numbers)
        if kept[1].shape[0] != count:  # type: ignore[union-attr]
            raise ValueError(f"a proposal must have {count} nodes, one a leaf, got {kept[1].shape[0]}")  # type: ignore[union-attr]
        self._nodes.take(count)[:] = numbers
        return self._library.trees_extend(self._trees, self._proposal.address, self._nodes.address) == _TAKEN

    def rank(self, rows: Sequence[int]) -> None:
        """The largest trees of the drafter's requests become those of these rows (G,) of the round."""
        if len(rows) != self._num_drafted:
            raise ValueError(f"a proposal must have {len(rows)} nodes, one a request, got {self._num_drafted}")
        self._nodes.take(len(rows))[:] = rows
        self._library.trees_rank(self._trees, self._nodes.address)

    def scores(self, max_nodes: int) -> np.ndarray:
        """(B, max_nodes) float64 of the draft nodes, falling, -inf = absent; until the next call."""
        found = self._scores.take(self._num_requests * max_nodes)
        self._library.trees_scores(self._trees, max_nodes, self._scores.address)
        return found.reshape(self._num_requests, max_nodes)

    def cut(self, num_nodes: np.ndarray, anchor_token_ids: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], list[int]]:
        """Pack the best `num_nodes` (B,) of each tree, fewer where they run out.

        Returns: token ids, parents, depths, scores, offsets (B + 1,), ancestors (N, W) and cells; draft nodes of each request.
        """
        library, count = self._library, self._num_requests
        nodes, anchors = self._nodes.take(count + 1), _plain(anchor_token_ids, torch.int64)
        nodes[:count] = num_nodes
        size = library.trees_cut(self._trees, self._nodes.address, self._nodes.address + 8 * count)
        *kept, width = nodes.tolist()
        columns, bounds = np.empty((4, size), dtype=np.int64), np.empty(count + 1, dtype=np.int64)
        token_ids, parents, depths, cells = torch.from_numpy(columns).unbind(0)
        scores, cu_nodes, ancestors = map(
            torch.from_numpy, (np.empty(size, dtype=np.float32), bounds, np.empty((size, width), dtype=np.bool_))
        )
        library.trees_pack(
            self._trees, anchors.data_ptr(), size, width, token_ids.data_ptr(), scores.data_ptr(), cu_nodes.data_ptr(),
            ancestors.data_ptr(),
        )  # fmt: skip
        return (token_ids, parents, depths, scores, cu_nodes, ancestors, cells), kept


def _plain(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype != dtype or not tensor.is_cpu:
        tensor = tensor.to("cpu", dtype)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


_walks = threading.local()  # .room: what a walk writes, read at once


def walk_trees(
    token_ids: torch.Tensor, parents: torch.Tensor, cu_nodes: torch.Tensor, drawn: torch.Tensor
) -> tuple[list[int], list[int], list[int]] | None:
    """Walk every tree while the token drawn at a row is one of its children; None without native code.

    drawn: tokens (N,) int64, or logits (N, V) float32, of whose rows the first best ones are taken.
    Returns: the paths' rows, request after request, roots first; the tokens drawn at them; rows of each request.
    """
    library, size, count = load_trees(), token_ids.numel(), cu_nodes.numel() - 1
    if library is None:
        return None
    walk = library.trees_walk
    room = getattr(_walks, "room", None)
    if room is None:
        room = _walks.room = _Room(torch.int64)
    found = room.take(2 * size + count)
    ids, parents, cu_nodes = _plain(token_ids, torch.int64), _plain(parents, torch.int64), _plain(cu_nodes, torch.int64)
    assert parents.numel() == drawn.shape[0] == size
    if drawn.dim() == 1:
        drawn = _plain(drawn, torch.int64)
        draws = struct.pack("4q", drawn.data_ptr(), 0, 0, 0)
    else:
        if drawn.dtype != torch.float32 or drawn.stride(1) != 1:
            drawn = drawn.float().contiguous()
        walk = _released("trees_walk")
        draws = struct.pack("4q", 0, drawn.data_ptr(), drawn.stride(0), drawn.shape[1])
    at = room.address
    num_rows = walk(
        ids.data_ptr(), parents.data_ptr(), cu_nodes.data_ptr(), draws, count, at, at + 8 * size, at + 16 * size
    )
    values = found.tolist()
    return values[:num_rows], values[size : size + num_rows], values[2 * size :]


def copy_rows(to: torch.Tensor, to_rows: torch.Tensor, source: torch.Tensor, source_rows: torch.Tensor) -> bool:
    """Copy rows (M,) int64 of `source` to those of `to`; False, and nothing is done, where that is torch's work.

    Both: (R, .) or, of several layers, (Lt, R, 2, Hkv, Dh). All rows are read before one is written.
    Raises: IndexError for rows that are not there.
    """
    library, num_rows, rows_at = load_trees(), to_rows.numel(), int(to.dim() > 2)
    if library is None or not to.is_cpu or to.dtype != source.dtype or source_rows.numel() != num_rows:
        return False
    if not (to.is_contiguous() and source.is_contiguous() and to_rows.is_contiguous() and source_rows.is_contiguous()):
        return False
    stride = to.stride(rows_at)
    if stride != source.stride(rows_at):
        return False
    num_bytes, num_layers = stride * to.element_size(), to.shape[0] if rows_at else 1
    copy = library.trees_copy if num_rows * num_bytes * num_layers <= _HELD_BYTES else _released("trees_copy")
    if copy(
        to.data_ptr(), source.data_ptr(), to_rows.data_ptr(), source_rows.data_ptr(), num_rows, num_bytes, num_layers,
        to.shape[rows_at], source.shape[rows_at],
    ):  # fmt: skip
        raise IndexError(f"rows must be in [0, {source.shape[rows_at]}) and [0, {to.shape[rows_at]})")
    return True


class KeySums:
    """Decayed sums of one key of the score calibration by cell."""

    def __init__(self, num_slots: int, num_classes: int) -> None:
        self.predicted, self.hits, self.kappa = np.zeros((3, 2 * num_slots * num_classes))
        self.blocks = np.zeros((2, 1, num_slots, num_classes), dtype=np.float32)
        """kappa as drafting adds it."""
        self._record: Record | None = None

    def fold_natively(
        self,
        columns: tuple[torch.Tensor, ...],
        accepted: np.ndarray,
        is_folded: np.ndarray,
        decay: float,
        prior: float,
    ) -> bool:
        """Fold the tested nodes of some requests; False without native code.

        Args:
            columns: parents, cells, scores (N,) and offsets (B + 1,) of packed trees.
            accepted: (M,) int64 rows of the accepted paths, roots included. is_folded: (B,) int64, not 0 for those requests.
        """
        library = load_trees()
        if library is None:
            return False
        if self._record is None:
            self._record = Record("13q2d")
            arrays = self.predicted, self.hits, self.kappa, self.blocks
            self._addresses = [torch.from_numpy(array).data_ptr() for array in arrays]
        parents, cells, cu_nodes = (_plain(columns[i], torch.int64) for i in (0, 1, 3))
        scores, rows, folded = (
            _plain(columns[2], torch.float32),
            torch.from_numpy(accepted),
            torch.from_numpy(is_folded),
        )
        record = self._record.fill(
            parents.data_ptr(), cells.data_ptr(), scores.data_ptr(), cu_nodes.data_ptr(), rows.data_ptr(),
            folded.data_ptr(), *self._addresses, len(accepted), len(is_folded), len(self.kappa), decay, prior,
        )  # fmt: skip
        if library.trees_fold(record):
            raise IndexError(f"calibration cells must be in [0, {len(self.kappa)}) of their key")
        return True
