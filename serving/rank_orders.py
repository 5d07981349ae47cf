"""How does rank 0 tell the other ranks of a tensor-parallel target what to run, and how do they obey?

An order is a few integers in a store of the host, numbered; its tensors follow by broadcast over the ranks' devices.

Shape legend: B requests, N packed rows, L columns of the slot table, W widest tree, M rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist

from paceline.serving.kv_cache import KVPool
from paceline.serving.target import TargetBatch, TargetModel

_NUM_KEPT = 4096
"""Orders kept in the store; the ranks meet in every forward, so none lags behind by so many."""


class Order(IntEnum):
    STOP = 0
    POOL = 1
    FORWARD = 2
    COMMIT = 3


class Orders:
    """The numbered orders of rank 0 in a store of the host: a rank without work waits there and not on its device."""

    def __init__(self, store: dist.TCPStore) -> None:
        self._store, self._next = store, 0

    def put(self, order: Order, sizes: Sequence[int]) -> None:
        """Rank 0: publish the next order."""
        self._store.set(f"order{self._next}", ",".join(map(str, (int(order), *sizes))))
        if self._next >= _NUM_KEPT:
            self._store.delete_key(f"order{self._next - _NUM_KEPT}")
        self._next += 1

    def take(self, wait_s: float = 60.0) -> tuple[Order, list[int]]:
        """Other ranks: the next order, waited for as long as it takes.

        Raises: RuntimeError when rank 0 is gone.
        """
        key = f"order{self._next}"
        while True:
            try:
                self._store.wait([key], timedelta(seconds=wait_s))
                break
            except dist.DistStoreError:  # nothing was ordered in this time
                continue
        self._next += 1
        order, *sizes = (int(n) for n in self._store.get(key).decode().split(","))
        return Order(order), sizes


class Leader:
    """Rank 0's line to the other ranks: orders through the store, tensors by broadcast."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    def send_pool(self, num_pages: int, page_tokens: int, num_scratch_rows: int) -> None:
        """The others allocate a pool of this shape; it replaces the one before."""
        self._send(Order.POOL, [num_pages, page_tokens, num_scratch_rows], [])

    def send_forward(self, batch: TargetBatch) -> None:
        """The others run this batch over their pool."""
        ancestors, logit_rows = batch.ancestors, batch.logit_rows
        columns = batch.slot_table.shape[1]
        width = -1 if ancestors is None else ancestors.shape[1]
        num_logits = -1 if logit_rows is None else logit_rows.numel()
        parts = [batch.token_ids, batch.positions, batch.cu_rows, batch.context_lens, batch.slot_table, batch.out_rows]
        parts += [t for t in (ancestors, logit_rows) if t is not None]
        self._send(
            Order.FORWARD, [batch.token_ids.numel(), batch.context_lens.numel(), columns, width, num_logits], parts
        )

    def send_commit(self, src_rows: torch.Tensor, dst_rows: torch.Tensor) -> None:
        """The others copy these pool rows."""
        self._send(Order.COMMIT, [src_rows.numel()], [src_rows, dst_rows])

    def stop(self) -> None:
        """The others leave their loops; nothing can be sent afterwards."""
        self._send(Order.STOP, [], [])

    def _send(self, order: Order, sizes: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
        self._orders.put(order, sizes)
        if parts:
            dist.broadcast(torch.cat([p.reshape(-1).long() for p in parts]), 0)


def follow(target: TargetModel, orders: Orders) -> None:
    """Obey rank 0 until it says stop: what every other rank does."""
    kv: KVPool | None = None
    while True:
        order, sizes = orders.take()
        if order == Order.STOP:
            return
        if order == Order.POOL:
            kv = target.new_kv_pool(*sizes)
            continue
        assert kv is not None, "a pool comes before its first use"
        if order == Order.COMMIT:
            kv.commit(*_receive([sizes[0], sizes[0]], target.device))
        else:
            target.forward(_receive_batch(sizes, target.device), kv)


def _receive(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    flat = torch.empty(sum(sizes), dtype=torch.int64, device=device)
    dist.broadcast(flat, 0)
    return list(flat.split(list(sizes)))


def _receive_batch(sizes: Sequence[int], device: torch.device) -> TargetBatch:
    rows, requests, columns, width, num_logits = sizes
    lengths = [rows, rows, requests + 1, requests, requests * columns, rows, rows * max(width, 0), max(num_logits, 0)]
    parts = _receive(lengths, device)
    return TargetBatch(
        token_ids=parts[0],
        positions=parts[1],
        cu_rows=parts[2],
        context_lens=parts[3],
        slot_table=parts[4].view(requests, columns),
        out_rows=parts[5],
        ancestors=parts[6].view(rows, width).bool() if width >= 0 else None,
        logit_rows=parts[7] if num_logits >= 0 else None,
    )
