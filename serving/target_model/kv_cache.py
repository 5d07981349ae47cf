"""KV cache: one paged pool per model, a scratch arena for tree nodes, and the owners of its pages.

Shape legend: Lt layers, R pool rows, Hkv KV heads, Dh head dim, B requests, L context length.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
import torch

from paceline.errors import ConfigError
from paceline.kernels.cpu.memory import pool_zeros
from paceline.kernels.cpu.trees import copy_rows
from paceline.kernels.dispatch import Kernels, select_kernels
from paceline.serving.target_model.device import upload
from paceline.serving.target_model.graph_capture import Staging
from paceline.serving.target_model.prefix_cache import CachedPage, DraftWriter, PrefixCache


class PageRuns:
    """The free pages of a pool as runs [start, end); taking and giving cost O(log runs)."""

    def __init__(self, num_pages: int) -> None:
        self._end_of = {0: num_pages}  # start -> end
        self._start_of = {num_pages: 0}  # end -> start
        self._longest = [(-num_pages, 0)]  # (-length, start); entries of runs that changed since are skipped
        self.num_free = num_pages

    def take(self, num_pages: int, after: int | None) -> list[int]:
        """Take free pages, in order as far as possible; `num_free` must cover them.

        Args:
            after: the page before them. They start right behind it if that page is free, else in the longest run; there
                in the middle when another owner's page lies before it, which leaves that owner room to grow in order.
        """
        assert num_pages <= self.num_free, "pages are taken only when they are free"
        taken: list[int] = []
        while len(taken) < num_pages:
            wanted = num_pages - len(taken)
            run = start = after + 1 if after is not None else -1
            if run not in self._end_of:
                run, start = self._find(wanted)
            end = self._end_of[run]
            self._remove(run)
            if run < start:
                self._add(run, start)
            stop = min(end, start + wanted)
            if stop < end:
                self._add(stop, end)
            taken += range(start, stop)
            after = stop - 1
        self.num_free -= num_pages
        return taken

    def give(self, page: int) -> None:
        """Give one page back."""
        start, end = page, page + 1
        before, behind = self._start_of.get(page), self._end_of.get(end)
        if before is not None:
            self._remove(before)
            start = before
        if behind is not None:
            self._remove(end)
            end = behind
        self._add(start, end)
        self.num_free += 1

    def pages(self) -> set[int]:
        """All free pages; for checks."""
        return {page for start, end in self._end_of.items() for page in range(start, end)}

    # ---- private ------------------------------------------------------------------------------------------------
    def _find(self, wanted: int) -> tuple[int, int]:
        """(start of the longest run, where to start in it)."""
        heap = self._longest
        while self._end_of.get(heap[0][1]) != heap[0][1] - heap[0][0]:
            heapq.heappop(heap)
        length, start = -heap[0][0], heap[0][1]
        return start, start + length // 2 if start > 0 and length > 2 * wanted else start

    def _add(self, start: int, end: int) -> None:
        self._end_of[start], self._start_of[end] = end, start
        heapq.heappush(self._longest, (start - end, start))
        if len(self._longest) > 4 * len(self._end_of) + 64:
            self._longest = [(s - e, s) for s, e in self._end_of.items()]
            heapq.heapify(self._longest)

    def _remove(self, start: int) -> None:
        del self._start_of[self._end_of.pop(start)]


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
        feature_size: int = 0,
        feature_dtype: torch.dtype = torch.float32,
        kernels: Kernels | None = None,
        on_commit: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    ) -> None:
        """feature_size: m * Dm of the tapped hidden states kept beside the KV of every canonical row; 0 = none.
        on_commit: told the rows of every commit beforehand (other tensor-parallel ranks do the same).
        """
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.scratch_start = num_pages * page_tokens
        self.num_scratch_rows = num_scratch_rows
        self.num_rows = self.scratch_start + num_scratch_rows
        # K beside V: one scatter and one gather per layer move both.
        self.data = pool_zeros((num_layers, self.num_rows, 2, num_kv_heads, head_dim), dtype, device)
        self.keys = self.data[:, :, 0]  # (Lt, R, Hkv, Dh) view
        self.values = self.data[:, :, 1]  # (Lt, R, Hkv, Dh) view
        # Views of each layer, made once: on the CPU a view costs as much as a small operator.
        self.layers = self.data.unbind(0)  # (R, 2, Hkv, Dh) each
        self.key_rows = self.keys.unbind(0)  # (R, Hkv, Dh) each
        self.value_rows = self.values.unbind(0)  # (R, Hkv, Dh) each
        self.key_heads = self.keys.permute(0, 2, 3, 1).unbind(0)  # (Hkv, Dh, R) each
        self.value_heads = self.values.transpose(1, 2).unbind(0)  # (Hkv, R, Dh) each
        self.features: torch.Tensor | None = None
        """(canonical rows, m * Dm) tapped hidden states, for drafters and traces; None when nobody wants them."""
        if feature_size:
            self.features = pool_zeros((self.scratch_start, feature_size), feature_dtype, device)
        self._on_commit = on_commit
        self._commit_rows = (kernels or select_kernels(device)).commit_rows

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
        """Copy accepted rows (M,) to canonical rows (M,), all layers, K and V; the two may overlap."""
        if self._on_commit is not None:
            self._on_commit(src_rows, dst_rows)
        if not copy_rows(self.data, dst_rows, self.data, src_rows):
            self._commit_rows(self.data, src_rows, dst_rows)

    def commit_padded(self, src_rows: torch.Tensor, dst_rows: torch.Tensor) -> None:
        """`commit` of captured work: pairs with a negative row are padding."""
        if self._on_commit is not None:
            self._on_commit(src_rows, dst_rows)
        self._commit_rows(self.data, src_rows, dst_rows)


class RowTables:
    """The pool rows of the running requests' positions, resident on the device for captured work.

    New pages ride along with a round's staged numbers; only a batch of other requests is uploaded as a whole.
    """

    def __init__(
        self, staging: Staging, *, max_requests: int, max_context: int, max_growth: int, page_tokens: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        """max_requests: lines. max_growth: positions by which a request may grow in a round without an upload of all."""
        self._num_pages, self._page_tokens = -(-max_context // page_tokens), page_tokens
        self.padding_line = max_requests
        """A line that belongs to no request."""
        width = self._num_pages * page_tokens
        self.lines = torch.zeros(max_requests + 1, width, dtype=torch.int64, device=device)
        """(max_requests + 1, positions) int64; entries past a request's pages mean nothing, but are rows of the pool."""
        self._known = np.full((max_requests, self._num_pages), -1)
        self.is_dirty = False
        """Other rows than those of the latest `note` lie here."""
        num_changes = max_requests * (max_growth // page_tokens + 2)
        self._at, self._pages = staging.reserve(num_changes), staging.reserve(num_changes)
        self._num_changes = num_changes
        self._offsets = torch.arange(page_tokens, device=device)

    def note(self, lines: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Take the tables of some lines, (positions,) int64 each on the host, whole pages.  Syncs: none."""
        self.is_dirty &= not rows
        size, at, pages = self._page_tokens, list[np.ndarray](), list[np.ndarray]()
        for i, table in zip(lines, rows, strict=True):
            own = table.numpy()[::size] // size
            changed = np.flatnonzero(self._known[i, : len(own)] != own)
            if len(changed):
                self._known[i, changed] = own[changed]
                at.append(i * self._num_pages + changed)
                pages.append(own[changed])
        changes = sum(map(len, at))
        if changes > self._num_changes:
            end = max(lines) + 1
            first = np.maximum(self._known[:end], 0) * size
            whole = torch.from_numpy((first[:, :, None] + np.arange(size)).reshape(end, -1))
            self.lines[:end].copy_(upload(whole, self.lines.device), non_blocking=True)
            changes, at, pages = 0, [], []
        self._at.set(np.concatenate(at) if changes else [], self.padding_line * self._num_pages)
        self._pages.set(np.concatenate(pages) if changes else [])

    def apply(self) -> None:
        """Write the staged pages; a part of captured work, and doing it twice changes nothing."""
        pages = self._pages.tensor[:, None] * self._page_tokens + self._offsets
        self.lines.view(-1, self._page_tokens).index_copy_(0, self._at.tensor, pages)

    def overwrite(self, slot_table: torch.Tensor) -> None:
        """Hold (B, L) int64 pool rows for one round; the next `note` uploads its tables as a whole."""
        self.lines[: slot_table.shape[0], : slot_table.shape[1]].copy_(slot_table)
        self._known.fill(-1)
        self.is_dirty = True


class PageAllocator:
    """Hands out pages to requests; page ids are shared by every pool of the engine.

    A request's next page is the one after its last whenever that is free, so that a lone request's rows stay in order
    and can be read as a slice. The first pages of a request may be cached ones that it shares and never writes
    (prefix_cache.py); every other page has one owner.
    """

    def __init__(self, num_pages: int, page_tokens: int, cache: PrefixCache | None = None) -> None:
        """cache: where full pages of ended requests stay; None keeps none."""
        if num_pages < 1 or page_tokens < 1:
            raise ConfigError(f"num_pages and page_tokens must be >= 1, got {num_pages} and {page_tokens}")
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.cache = cache or PrefixCache(page_tokens, is_enabled=False)
        self._runs = PageRuns(num_pages)
        self._pages: dict[str, list[int]] = {}
        self._paths: dict[str, list[CachedPage]] = {}
        self._rows: dict[str, torch.Tensor] = {}

    @property
    def num_free_pages(self) -> int:
        """Pages that a request can get: free ones, and cached ones that nobody uses."""
        return self._runs.num_free + self.cache.num_idle

    @property
    def num_ever_cached(self) -> int:
        """Pages that have become cached ones so far; grows when a text may find more of itself."""
        return self.cache.num_nodes + self.cache.num_evictions

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
        if missing > self.num_free_pages:
            return False
        if missing > self._runs.num_free:
            # A few more than needed: whole ended requests go at once and leave rows in order.
            for page in self.cache.evict(missing - self._runs.num_free + self.num_pages // 32):
                self._runs.give(page)
        self._set_pages(request_id, held + self._runs.take(missing, held[-1] if held else None))
        return True

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
        """Give all pages of a request back; unknown requests are ignored. Cached pages stay until they are needed."""
        path = self._paths.pop(request_id, [])
        for page in self._pages.pop(request_id, [])[len(path) :]:
            self._runs.give(page)
        self.cache.let_go(path)
        self._rows.pop(request_id, None)

    # ---- shared prefixes ----------------------------------------------------------------------------------------
    def share(self, request_id: str, tenant: str, token_ids: list[int], max_rows: int) -> int:
        """Begin a request's page table with cached pages of the same text; pages of its own there are given back.

        For a request without rows of its own yet. Args: max_rows: share at most so many rows (whole pages).
        Returns: rows that the request shares now, from position 0.
        """
        path = self._paths.setdefault(request_id, [])
        num_new = self.cache.extend(path, tenant, token_ids, max_rows // self.page_tokens)
        if num_new:
            pages = self._pages.get(request_id, [])
            for page in pages[len(path) - num_new : len(path)]:
                self._runs.give(page)
            self._set_pages(request_id, [node.page for node in path] + pages[len(path) :])
        return len(path) * self.page_tokens

    def num_shared_rows(self, request_id: str) -> int:
        """Rows in pages that the request must not write."""
        return len(self._paths.get(request_id, ())) * self.page_tokens

    def next_page_key(self, request_id: str, tenant: str, token_ids: list[int]) -> tuple[int, bytes] | None:
        """What the page behind the shared ones will be found by; None when the text ends before."""
        path = self._paths.get(request_id, ())
        if not self.cache.is_enabled or (len(path) + 1) * self.page_tokens >= len(token_ids):
            return None
        parent = path[-1] if path else self.cache.known_root(tenant)
        return id(parent) if parent is not None else hash(tenant), self.cache.key(token_ids, len(path))

    def publish(
        self,
        request_id: str,
        tenant: str,
        token_ids: list[int],
        num_rows: int,
        *,
        draft_writer: DraftWriter | None = None,
        num_drafted_rows: int = 0,
        is_last: bool = False,
    ) -> None:
        """Let others share the full pages of a request's first num_rows rows; it does not write them any more.

        Args:
            draft_writer: the drafter that wrote KV for the first num_drafted_rows rows.
            is_last: the request is about to be released: where the cache has a page with the same text already, the
                request's own one is given up, so that the pages behind it can follow in the tree.
        """
        if not self.cache.is_enabled or request_id not in self._pages:
            return
        path, pages, size = self._paths.setdefault(request_id, []), self._pages[request_id], self.page_tokens
        num_drafted = 0
        if draft_writer is not None:
            self.note_drafted(request_id, draft_writer, num_drafted_rows)
            num_drafted = num_drafted_rows // size
        for index in range(len(path), min(num_rows, len(token_ids) - 1) // size):
            node = self.cache.insert(path, tenant, self.cache.key(token_ids, index), pages[index])
            if node is None:
                if not is_last:
                    return
                self.cache.extend(path, tenant, token_ids, index + 1)
                self._runs.give(pages[index])
                pages[index] = path[-1].page
            elif draft_writer is not None and index < num_drafted:
                node.drafted[draft_writer[0]] = draft_writer[1]

    def note_drafted(self, request_id: str, draft_writer: DraftWriter, num_rows: int) -> None:
        """A drafter has written KV at the first num_rows rows of a request."""
        for node in self._paths.get(request_id, ())[: num_rows // self.page_tokens]:
            node.drafted[draft_writer[0]] = draft_writer[1]

    def num_drafted_rows(self, request_id: str, draft_writer: DraftWriter) -> int:
        """First rows of a request that have the KV of this drafter already."""
        slot, load = draft_writer
        count = 0
        for node in self._paths.get(request_id, ()):
            if node.drafted.get(slot) != load:
                break
            count += 1
        return count * self.page_tokens

    def clear_cache(self) -> int:
        """Free every cached page that no request uses; returns how many."""
        pages = self.cache.evict(self.cache.num_idle)
        for page in pages:
            self._runs.give(page)
        return len(pages)

    # ---- checks -------------------------------------------------------------------------------------------------
    def check_integrity(self) -> None:
        """Raise AssertionError if pages leak or overlap."""
        cached, free = self.cache.check_integrity(self._paths), self._runs.pages()
        owned: list[int] = []
        for request_id, pages in self._pages.items():
            path = self._paths.get(request_id, [])
            assert [node.page for node in path] == pages[: len(path)], "a page table and its cached pages differ"
            assert self._rows[request_id].numel() == len(pages) * self.page_tokens, "row table and page table differ"
            owned += pages[len(path) :]
        assert len(owned) == len(set(owned)), "a page has two owners"
        assert not set(owned) & set(cached), "a cached page has an owner"
        assert self._runs.num_free == len(free), "the free-page count is wrong"
        assert not free & {*owned, *cached}, "a page in use is marked free"
        assert len(owned) + len(cached) + len(free) == self.num_pages, "a page leaked"
        assert all(self._pages.get(request_id) for request_id, path in self._paths.items() if path), "a path leaked"

    def _set_pages(self, request_id: str, pages: list[int]) -> None:
        self._pages[request_id] = pages
        first = np.array(pages, dtype=np.int64)[:, None] * self.page_tokens
        self._rows[request_id] = torch.from_numpy((first + np.arange(self.page_tokens)).reshape(-1))
