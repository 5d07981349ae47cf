"""Where does a decode round write the K/V of its tree rows, and which of them must move once paths are accepted?

A root is always accepted, so its K/V go straight to the row of its position; a plain round thus moves nothing. Draft nodes
of several requests go to scratch rows. A lone request's whole tree takes the rows behind its context, which it holds in
reserve anyway: its keys then lie in one piece, and a path along the first child of every node moves nothing either.

Shape legend: B requests, N packed tree rows (roots included), L widest row table, m tapped layers, Dm hidden size.
"""

from __future__ import annotations

import torch

from paceline.serving.draft_tree import TreeBatch
from paceline.serving.kv_cache import KVPool
from paceline.serving.running_request import RunningRequest
from paceline.serving.upload import upload


class RoundRows:
    """Places the rows of one round after the other; engine thread only."""

    def __init__(self, kv: KVPool) -> None:
        self._kv = kv
        self._scratch = kv.scratch_rows(kv.num_scratch_rows)  # (max rows of a round,) int64
        self._out_rows = self._scratch[:0]
        self._is_behind_context = False

    def place(
        self, requests: list[RunningRequest], tree: TreeBatch, table: torch.Tensor, context_lens: torch.Tensor
    ) -> torch.Tensor:
        """Pool rows (N,) int64 for the K/V of the round's packed rows.

        Args:
            table: (B, L) int64, pool row of each position, the next one of every request included.
            context_lens: (B,).
        Syncs: none.
        """
        num_rows = tree.token_ids.numel()
        self._is_behind_context = False
        if len(requests) == 1:
            start = requests[0].context_len
            self._is_behind_context = requests[0].row_capacity >= start + num_rows
            if self._is_behind_context:
                self._out_rows = table[0, start : start + num_rows]
                return self._out_rows
        roots = table.gather(1, context_lens[:, None]).view(-1)
        if num_rows == len(requests):
            self._out_rows = roots
        else:
            self._out_rows = self._scratch[:num_rows].index_copy(0, tree.cu_nodes[:-1], roots)
        return self._out_rows

    def commit(self, requests: list[RunningRequest], paths: list[list[int]], features: torch.Tensor | None) -> None:
        """Move accepted K/V to the rows of their positions and keep the tapped hidden states of all accepted rows.

        Args:
            paths: packed rows that each request keeps, its root first; call before context_len grows.
            features: (N, m * Dm) of the round's rows.
        """
        keeps_features = self._kv.features is not None and features is not None
        if self._out_rows.numel() == len(requests):
            if keeps_features:
                self._kv.features.index_copy_(0, self._out_rows, features)  # type: ignore[union-attr, arg-type]
            return
        device = self._scratch.device
        moved, dst_moved = [], []
        for r, path in zip(requests, paths, strict=True):
            first = 1
            if self._is_behind_context:  # the head of the path that lies where it belongs
                while first < len(path) and path[first] == first:
                    first += 1
            if first < len(path):
                moved += path[first:]
                dst_moved.append(r.rows[r.context_len + first : r.context_len + len(path)])  # type: ignore[index]
        if moved:
            src = self._out_rows.index_select(0, upload(moved, device, torch.int64))
            self._kv.commit(src, upload(_cat(dst_moved), device))
        if keeps_features:
            kept = [r.rows[r.context_len : r.context_len + len(p)] for r, p in zip(requests, paths, strict=True)]  # type: ignore[index]
            src = upload([row for path in paths for row in path], device, torch.int64)
            self._kv.features.index_copy_(0, upload(_cat(kept), device), features.index_select(0, src))  # type: ignore[union-attr]


def _cat(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
