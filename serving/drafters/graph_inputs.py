"""Graph inputs: the static tensors that captured drafting reads, and how a round is laid into them and padded.

Padding rows come behind those of the round, hold zeros, belong to no request and go to pool rows of their own; padding
requests have no context.

Shape legend: R new rows, B requests, L columns of the slot table; a graph has at least as many of each as the round.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from paceline.serving.drafters.interface import DraftInputs
from paceline.serving.target_model.graph_capture import REFINING_RANK, Staging, size_ladder
from paceline.serving.target_model.kv_cache import RowTables

MAX_GRAPH_ROWS = 512
"""New rows of a round beyond this are drafted eagerly: launches cost so many rows little."""


MAX_GATHERED_BYTES = 2**30
"""Of contexts that a graph gathers (twice: as they are, and beside the block's own rows): the memory of captured work stays
taken. Larger batches draft eagerly."""


def num_graph_rows(max_requests: int, max_depth: int) -> int:
    """New rows of the largest graph: the deepest path and the root for every request."""
    return min(MAX_GRAPH_ROWS, max(32, max_requests * (max_depth + 1)))


class GraphInputs:
    """Static `DraftInputs` of any size up to the largest graph's."""

    def __init__(
        self,
        *,
        feature_size: int,
        dtype: torch.dtype,
        padding_slots: torch.Tensor,
        max_requests: int,
        max_context: int,
        max_depth: int,
        has_deltas: bool = False,
    ) -> None:
        """padding_slots: (rows of the largest graph,) int64, where each padding row is written; negative = nowhere.
        has_deltas: whether requests may draft with deltas."""
        rows, device = padding_slots.numel(), padding_slots.device
        self.ladders = (
            size_ladder(rows, has_halves=True), size_ladder(max_requests), size_ladder(max_context, start=256, factor=4)
        )  # fmt: skip
        self._max_depth, self._padding_slots = max_depth, padding_slots

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._features = zeros(rows, feature_size, dtype=dtype)
        self._token_ids, self._positions = zeros(rows), zeros(rows)
        self._slots = padding_slots.clone()
        self._cu_new, self._context_lens, self._anchors = (
            zeros(max_requests + 1), zeros(max_requests), zeros(max_requests)
        )  # fmt: skip
        self._table = zeros(max_requests * max_context)  # taken as (B, L) of each graph
        self._temperatures = zeros(max_requests, dtype=torch.float32)
        self._deltas = zeros(max_requests) if has_deltas else None

    def steps(self, requests: int) -> list[int]:
        """Numbers of rows for which graphs of so many requests are worth having; the last holds every usual round."""
        rows = self.ladders[0]
        most = max(32, requests * (self._max_depth + 1))
        return [n for n in rows if requests <= n <= most or n == rows[-1] < requests]

    def rank(self, at: int, rows: int, requests: int) -> int:
        """Place of a graph in the order of capture: those that hold all others first."""
        return at if rows == self.steps(requests)[-1] else at + REFINING_RANK

    def load(self, inputs: DraftInputs, sizes: tuple[int, ...]) -> None:
        """Lay a round into the tensors of a graph of these (rows, requests, columns).  Syncs: none."""
        assert inputs.new_features is not None
        n, b, (rows, requests, width) = inputs.new_token_ids.numel(), inputs.context_lens.numel(), sizes
        self._features[:n].copy_(inputs.new_features)
        self._token_ids[:n].copy_(inputs.new_token_ids)
        self._token_ids[n:rows].zero_()
        self._positions[:n].copy_(inputs.new_positions)
        self._positions[n:rows].zero_()
        self._slots[:n].copy_(inputs.new_slots)
        self._slots[n:rows].copy_(self._padding_slots[n:rows])
        self._cu_new[: b + 1].copy_(inputs.cu_new)
        self._cu_new[b + 1 : requests + 1].fill_(n)
        self.load_requests(inputs, requests, width)

    def load_requests(self, inputs: DraftInputs, requests: int, width: int) -> None:
        """The part of `load` that says nothing of new rows."""
        b, columns = inputs.context_lens.numel(), inputs.slot_table.shape[1]
        self._context_lens[:b].copy_(inputs.context_lens)
        self._context_lens[b:requests].zero_()
        self._anchors[:b].copy_(inputs.anchor_token_ids)
        self._temperatures[:b].copy_(inputs.temperatures)
        if self._deltas is not None:
            self._deltas[:b] = -1 if inputs.deltas is None else inputs.deltas
        self._table[: requests * width].view(requests, width)[:b, :columns].copy_(inputs.slot_table)

    def view(self, rows: int, requests: int, width: int) -> DraftInputs:
        """What a graph of these sizes reads."""
        return DraftInputs(
            request_ids=[],
            context_lens=self._context_lens[:requests],
            anchor_token_ids=self._anchors[:requests],
            temperatures=self._temperatures[:requests],
            slot_table=self._table[: requests * width].view(requests, width),
            cu_new=self._cu_new[: requests + 1],
            new_positions=self._positions[:rows],
            new_token_ids=self._token_ids[:rows],
            new_features=self._features[:rows],
            new_slots=self._slots[:rows],
            histories=[],
            deltas=None if self._deltas is None else self._deltas[:requests],
        )


class StagedInputs:
    """`DraftInputs` that captured work computes from what the host stages: the numbers of one drafter's requests."""

    def __init__(
        self, staging: Staging, tables: RowTables, features: torch.Tensor | None, *, max_requests: int, max_rows: int,
        num_slots: int, num_ranks: int, has_deltas: bool = False,
    ) -> None:  # fmt: skip
        """features: (pool rows, m * Dm) of all canonical rows. num_slots, num_ranks: S and R of calibration. has_deltas: whether
        requests may draft with deltas."""
        self._tables, self._features, self._max_requests = tables, features, max_requests
        self._shape = (2, max_requests, num_slots, num_ranks)
        self._lines, self._starts, self._stops, self._anchors = (staging.reserve(max_requests) for _ in range(4))
        self._token_ids = staging.reserve(max_rows)
        self._temperatures = staging.reserve(max_requests, is_float=True)
        self._deltas = staging.reserve(max_requests) if has_deltas else None
        self._kappa = staging.reserve(2 * max_requests * num_slots * num_ranks, is_float=True)

    def stage(
        self,
        lines: Sequence[int],
        starts: Sequence[int],
        stops: Sequence[int],
        histories: Sequence[list[int]],
        temperatures: Sequence[float],
        kappa: np.ndarray,
        deltas: Sequence[int],
    ) -> None:
        """Numbers of the next upload.

        Args:
            lines: (G,) line of each request among the round's.
            starts, stops: (G,) new rows of each request: those at positions start..stop-1; stop is the anchor's position.
            histories: (G,) token ids.
            kappa: (2, G or 1, S, R) corrections.
            deltas: (G,) delta of each, -1 = none.
        """
        self._lines.set(lines, self._tables.padding_line)
        self._starts.set(starts)
        self._stops.set(stops)
        bounds = list(zip(histories, starts, stops, strict=True))
        self._anchors.set([tokens[stop] for tokens, _, stop in bounds])
        self._token_ids.set([t for tokens, start, stop in bounds for t in tokens[start + 1 : stop + 1]])
        self._temperatures.set(temperatures)
        if self._deltas is not None:
            self._deltas.set(deltas, -1)
        whole = np.zeros(self._shape)
        whole[:, : len(lines)] = kappa
        self._kappa.set(whole.reshape(-1))

    def lines(self, num_requests: int) -> torch.Tensor:
        """(B,) int64, line of each request; that of nobody for padding."""
        return self._lines.tensor[:num_requests]

    def kappa(self, num_requests: int) -> torch.Tensor:
        """(2, B, S, R) float32."""
        return self._kappa.tensor.view(self._shape)[:, :num_requests].float()

    def inputs(self, rows: int, requests: int, width: int, padding_slots: torch.Tensor) -> DraftInputs:
        """Inputs of these sizes, padded; a part of captured work.  Syncs: none."""
        starts, stops = self._starts.tensor[:requests], self._stops.tensor[:requests]
        lines, table = self.lines(requests), self._tables.lines
        cu_new = pad((stops - starts).cumsum(0), (1, 0))
        row = torch.arange(rows, device=table.device)
        owner = torch.searchsorted(cu_new[1:], row, right=True).clamp(max=requests - 1)
        is_row = row < cu_new[-1]
        positions = torch.where(is_row, row + (starts - cu_new[:-1])[owner], 0)
        slots = table[lines[owner], positions]
        features = None if self._features is None else self._features.index_select(0, torch.where(is_row, slots, 0))
        return DraftInputs(
            request_ids=[],
            context_lens=stops,
            anchor_token_ids=self._anchors.tensor[:requests],
            temperatures=self._temperatures.tensor[:requests].float(),
            slot_table=table[:, :width].index_select(0, lines),
            cu_new=cu_new,
            new_positions=positions,
            new_token_ids=self._token_ids.tensor[:rows],
            new_features=features,
            new_slots=torch.where(is_row, slots, padding_slots[:rows]),
            histories=[],
            deltas=None if self._deltas is None else self._deltas.tensor[:requests],
        )
