"""Round rows: where a decode round writes the K/V of its tree rows, and which of them move once paths are accepted.

A root is always accepted, so its K/V go straight to the row of its position; a plain round thus moves nothing. Draft nodes
of several requests go to scratch rows. A lone request's whole tree takes the rows behind its context, which it holds in
reserve anyway: its keys then lie in one piece, and a path along the first child of every node moves nothing either.

Shape legend: B requests, N packed tree rows (roots included), L widest row table, m tapped layers, Dm hidden size.
"""

from __future__ import annotations

import torch

from paceline.serving.engine.running import RunningRequest
from paceline.serving.target_model.device import upload
from paceline.serving.target_model.kv_cache import KVPool
from paceline.serving.trees.tree import TreeBatch


class RoundRows:
    """Places the rows of one round after the other; engine thread only."""

    def __init__(self, kv: KVPool) -> None:
        self._kv = kv
        self._scratch = kv.scratch_rows(kv.num_scratch_rows)  # (max rows of a round,) int64
        self._out_rows = self._scratch[:0]
        self._table = self._scratch[None, :0]
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
        num_rows, self._table = tree.token_ids.numel(), table
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
        moved, stays = list[int](), list[int]()  # packed rows
        moved_at, stays_at = list[int](), list[int]()  # where the table has the rows of their positions
        width = self._table.shape[1]
        for i, (r, path) in enumerate(zip(requests, paths, strict=True)):
            first, at, num_rows = 1, i * width + r.context_len, len(path)
            if self._is_behind_context:  # the head of the path that lies where it belongs
                while first < num_rows and path[first] == first:
                    first += 1
            moved += path[first:]
            moved_at += range(at + first, at + num_rows)
            if keeps_features:
                stays += path[:first]
                stays_at += range(at, min(at + first, at + num_rows))
        if not moved and not keeps_features:
            return
        device, num_moved = self._scratch.device, len(moved)
        src = upload(moved + stays, device, torch.int64)
        dst = self._table.reshape(-1).index_select(0, upload(moved_at + stays_at, device, torch.int64))
        if moved:
            self._kv.commit(self._out_rows.index_select(0, src[:num_moved]), dst[:num_moved])
        if keeps_features:
            self._kv.features.index_copy_(0, dst, features.index_select(0, src))  # type: ignore[union-attr, arg-type]
