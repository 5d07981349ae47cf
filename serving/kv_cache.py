"""Where do K/V rows live: one paged pool per model, a scratch arena for tree nodes, and who owns which page?

Shape legend: Lt layers, R pool rows, Hkv KV heads, Dh head dim, B requests, L context length.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.errors import ConfigError
from paceline.kernels.dispatch import select_kernels


class KVPool:
    """K and V of all layers; row ids are shared by the layers and by the drafter's own pool.

    Rows [0, scratch_start) are canonical (page p holds rows p * page_tokens ...), the rest is scratch.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        page_tokens: int,
        num_scratch_rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
        on_commit: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    ) -> None:
        """on_commit: told the rows of every commit beforehand (other tensor-parallel ranks do the same)."""
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.scratch_start = num_pages * page_tokens
        self.num_scratch_rows = num_scratch_rows
        self.num_rows = self.scratch_start + num_scratch_rows
        # K beside V: one scatter and one gather per layer move both.
        self.data = torch.zeros(num_layers, self.num_rows, 2, num_kv_heads, head_dim, dtype=dtype, device=device)
        self.keys = self.data[:, :, 0]  # (Lt, R, Hkv, Dh) view
        self.values = self.data[:, :, 1]  # (Lt, R, Hkv, Dh) view
        # Views of each layer, made once: on the CPU a view costs as much as a small operator.
        self.layers = self.data.unbind(0)  # (R, 2, Hkv, Dh) each
        self.key_rows = self.keys.unbind(0)  # (R, Hkv, Dh) each
        self.value_rows = self.values.unbind(0)  # (R, Hkv, Dh) each
        self.key_heads = self.keys.permute(0, 2, 3, 1).unbind(0)  # (Hkv, Dh, R) each
        self.value_heads = self.values.transpose(1, 2).unbind(0)  # (Hkv, R, Dh) each
        self._on_commit = on_commit
        self._commit_rows = select_kernels(device).commit_rows

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all layers, K and V."""
        return self.data[:, 0].numel() * self.data.element_size()

    def scratch_rows(self, num_rows: int) -> torch.Tensor:
        """(num_rows,) int64 first scratch rows; raises ConfigError when the arena is smaller."""
        if num_rows > self.num_scratch_rows:
            raise ConfigError(f"num_scratch_rows must be at least {num_rows}, got {self.num_scratch_rows}")
        return torch.arange(self.scratch_start, self.scratch_start + num_rows, device=self.data.device)

    def commit(self, src_rows: torch.Tensor, dst_rows: torch.Tensor) -> None:
        """Copy accepted scratch rows (M,) to canonical rows (M,), all layers, K and V."""
        if self._on_commit is not None:
            self._on_commit(src_rows, dst_rows)
        self._commit_rows(self.data, src_rows, dst_rows)


class PageAllocator:
    """Hands out pages to requests; page ids are shared by every pool of the engine.

    A request's next page is the one after its last whenever that is free, so that a lone request's rows stay in order
    and can be read as a slice.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        if num_pages < 1 or page_tokens < 1:
            raise ConfigError(f"num_pages and page_tokens must be >= 1, got {num_pages} and {page_tokens}")
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._is_free = [True] * num_pages
        self._num_free = num_pages
        self._pages: dict[str, list[int]] = {}
        self._rows: dict[str, torch.Tensor] = {}

    @property
    def num_free_pages(self) -> int:
        return self._num_free

    def num_pages_for(self, num_rows: int) -> int:
        """Pages that `num_rows` rows need."""
        return -(-num_rows // self.page_tokens)

    def pages(self, request_id: str) -> tuple[int, ...]:
        """Page table of a request; empty when it holds none."""
        return tuple(self._pages.get(request_id, ()))

    def ensure(self, request_id: str, num_rows: int) -> bool:
        """Grow the page table to cover positions [0, num_rows); False and unchanged if pages ran out."""
        held = self._pages.get(request_id, [])
        missing = self.num_pages_for(num_rows) - len(held)
        if missing <= 0:
            return True
        if missing > self._num_free:
            return False
        new: list[int] = []
        for _ in range(missing):
            page = self._next_page(new[-1] if new else (held[-1] if held else None), missing - len(new))
            self._is_free[page] = False
            new.append(page)
        self._num_free -= missing
        self._pages[request_id] = pages = held + new
        first = torch.tensor(pages, dtype=torch.int64)[:, None] * self.page_tokens
        self._rows[request_id] = (first + torch.arange(self.page_tokens)).reshape(-1)
        return True

    def _next_page(self, last: int | None, wanted: int) -> int:
        """The page after `last` if free, else the start of the longest free run (room to grow in order)."""
        if last is not None and last + 1 < self.num_pages and self._is_free[last + 1]:
            return last + 1
        best, best_len, start = -1, 0, -1
        for page, is_free in enumerate((*self._is_free, False)):
            if is_free and start < 0:
                start = page
            elif not is_free and start >= 0:
                if page - start > best_len:
                    best, best_len = start, page - start
                start = -1
        # Starting in the middle of a large run leaves the run's owner before it room to grow.
        if best > 0 and not self._is_free[best - 1] and best_len > 2 * wanted:
            best += best_len // 2
        return best

    def rows(self, request_id: str, start: int, stop: int) -> torch.Tensor:
        """(stop - start,) int64 pool rows of positions [start, stop); they must be covered by the page table."""
        rows = self._rows.get(request_id)
        covered = 0 if rows is None else rows.numel()
        if not 0 <= start <= stop <= covered:
            raise ValueError(f"positions must lie in [0, {covered}) of request {request_id}, got [{start}, {stop})")
        return rows[start:stop] if rows is not None else torch.empty(0, dtype=torch.int64)

    def table(self, request_ids: list[str], length: int) -> torch.Tensor:
        """(B, length) int64 pool rows of positions 0..length-1, padded with 0 past each request's pages."""
        if len(request_ids) == 1:
            rows = self._rows.get(request_ids[0])
            if rows is not None and rows.numel() >= length:
                return rows[None, :length]
        out = torch.zeros(len(request_ids), length, dtype=torch.int64)
        for i, request_id in enumerate(request_ids):
            rows = self._rows.get(request_id)
            if rows is not None:
                part = rows[:length]
                out[i, : part.numel()] = part
        return out

    def release(self, request_id: str) -> None:
        """Give all pages of a request back; unknown requests are ignored."""
        for page in self._pages.pop(request_id, ()):
            self._is_free[page] = True
            self._num_free += 1
        self._rows.pop(request_id, None)

    def check_integrity(self) -> None:
        """Raise AssertionError if pages leak or overlap."""
        owned = [page for pages in self._pages.values() for page in pages]
        assert len(owned) == len(set(owned)), "a page has two owners"
        assert self._num_free == sum(self._is_free), "the free-page count is wrong"
        assert not any(self._is_free[page] for page in owned), "an owned page is marked free"
        assert len(owned) + self._num_free == self.num_pages, "a page leaked"
        for request_id, pages in self._pages.items():
            assert self._rows[request_id].numel() == len(pages) * self.page_tokens, "row table and page table differ"
