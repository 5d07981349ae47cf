"""Graph inputs: the static tensors that captured drafting reads, and how a round is laid into them and padded.

Padding rows come behind those of the round, hold zeros, belong to no request and go to pool rows of their own; padding
requests have no context.

Shape legend: R new rows, B requests, L columns of the slot table; a graph has at least as many of each as the round.
"""

from __future__ import annotations

import torch

from paceline.serving.drafters.interface import DraftInputs
from paceline.serving.target_model.graph_capture import REFINING_RANK, size_ladder

MAX_GRAPH_ROWS = 512
"""New rows of a round beyond this are drafted eagerly: launches cost so many rows little."""


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
    ) -> None:
        """padding_slots: (rows of the largest graph,) int64, where each padding row is written; negative = nowhere."""
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
        )
