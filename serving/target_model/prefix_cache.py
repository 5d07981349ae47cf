"""Prefix cache: pages that already hold the KV rows of a prompt's beginning.

A tree of full pages: a node is one page, found by (its parent, the page's token ids and the one token behind them), and
the path from the root is the text before it. Keys are compared in full, so no hash can be forged or collide; each tenant
has a root of its own, so no tenant can learn from response times what another one sent. The token behind the page is part
of the key because a drafter's row pairs the feature at a position with the token at the next one (drafter.DraftInputs):
with it, everything that is stored at a page's rows follows from the key.

    positions   0 ................ path ................ own pages ............ row capacity
    pages       nodes, held by every request on them   | one owner, written by it alone
    may evict   nodes that nobody holds, leaves first    never

A request that ends or is preempted leaves its full pages as nodes. Nodes that nobody holds are evicted, the ones that
were held longest ago first, when pages are needed. One cache belongs to one engine, thus to one target.

Source: hash-chained KV pages as in vLLM (arXiv 2309.06180), kept as a radix tree as in SGLang (arXiv 2312.07104).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

DraftWriter = tuple[str, int]
"""Drafter slot and the load of its weights (DrafterSlots.num_loads): which drafter wrote the rows' drafter KV."""


@dataclass(slots=True, eq=False)
class CachedPage:
    """One node of the tree."""

    page: int
    parent: CachedPage | None
    key: bytes
    children: dict[bytes, CachedPage] = field(default_factory=dict)
    num_holders: int = 0
    """Requests whose path holds the node; never more than those of its parent."""
    drafted: dict[str, int] = field(default_factory=dict)
    """Drafter slot -> load of its weights that wrote drafter KV at every row of the page."""


class PrefixCache:
    """Finds, holds and evicts cached pages. Engine thread only; knows page ids, no tensors."""

    def __init__(self, page_tokens: int, *, is_enabled: bool = True) -> None:
        self.page_tokens = page_tokens
        self.is_enabled = is_enabled
        self._roots: dict[str, CachedPage] = {}
        self._idle: OrderedDict[CachedPage, None] = OrderedDict()
        """Nodes without a holder, the next to evict first. A child is let go before or with its parent and stands before
        it, so the first one is always a leaf."""
        self.num_nodes = 0
        self.num_evictions = 0

    @property
    def num_idle(self) -> int:
        """Pages that can be evicted."""
        return len(self._idle)

    def root(self, tenant: str) -> CachedPage:
        """Where the paths of a tenant begin; it stands for no page."""
        root = self._roots.get(tenant)
        if root is None:
            root = self._roots[tenant] = CachedPage(page=-1, parent=None, key=tenant.encode("utf-8", "surrogatepass"))
        return root

    def known_root(self, tenant: str) -> CachedPage | None:
        """`root`, if the tenant has one already."""
        return self._roots.get(tenant)

    def key(self, token_ids: Sequence[int], index: int) -> bytes:
        """Key of a text's page `index`; the text must reach at least one token behind it."""
        start = index * self.page_tokens
        part = token_ids[start : start + self.page_tokens + 1]
        assert len(part) == self.page_tokens + 1, "a page's key needs the token behind it"
        return array("i", part).tobytes()

    def extend(self, path: list[CachedPage], tenant: str, token_ids: Sequence[int], num_pages: int) -> int:
        """Hold the nodes that continue a path along the text, at most `num_pages` in all; returns how many were added."""
        held = len(path)
        if not self.is_enabled:
            return 0
        node = path[-1] if path else self._roots.get(tenant)
        while node is not None and len(path) < num_pages:
            node = node.children.get(self.key(token_ids, len(path)))
            if node is not None:
                self._hold(node)
                path.append(node)
        return len(path) - held

    def insert(self, path: list[CachedPage], tenant: str, key: bytes, page: int) -> CachedPage | None:
        """Make a page the next node of a path and hold it; None when there is one with this key already."""
        parent = path[-1] if path else self.root(tenant)
        if key in parent.children:
            return None
        node = CachedPage(page=page, parent=parent, key=key, num_holders=1)
        parent.children[key] = node
        path.append(node)
        self.num_nodes += 1
        return node

    def let_go(self, path: list[CachedPage]) -> None:
        """A request no longer uses its path."""
        for node in reversed(path):
            node.num_holders -= 1
            if node.num_holders == 0:
                self._idle[node] = None
        path.clear()

    def evict(self, num_pages: int) -> list[int]:
        """Forget at most so many idle nodes, least recently held first; returns their pages."""
        pages: list[int] = []
        while self._idle and len(pages) < num_pages:
            node, _ = self._idle.popitem(last=False)
            assert not node.children and node.parent is not None, "leaves are evicted first"
            parent = node.parent
            del parent.children[node.key]
            if parent.parent is None and not parent.children:  # a tenant without pages
                del self._roots[parent.key.decode("utf-8", "surrogatepass")]
            self.num_nodes -= 1
            self.num_evictions += 1
            pages.append(node.page)
        return pages

    def check_integrity(self, paths: dict[str, list[CachedPage]]) -> list[int]:
        """Pages of all nodes; AssertionError when holders, order or links do not fit the requests' paths."""
        holders: dict[CachedPage, int] = {}
        for path in paths.values():
            for above, node in zip([None, *path], path, strict=False):
                holders[node] = holders.get(node, 0) + 1
                assert above is None or node.parent is above, "a path skips a node"
        order = {node: i for i, node in enumerate(self._idle)}
        pages: list[int] = []
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            pages.append(node.page)
            assert node.num_holders == holders.pop(node, 0), "holders of a cached page are miscounted"
            assert (node in order) == (node.num_holders == 0), "a cached page is idle and held, or neither"
            for key, child in node.children.items():
                assert child.parent is node and child.key == key, "the tree's links are broken"
                assert child.num_holders <= node.num_holders, "a cached page is held without the text before it"
                assert node not in order or order[child] < order[node], "a page would be evicted before its children"
                stack.append(child)
        assert not holders, "a request holds an evicted page"
        assert len(pages) == self.num_nodes and len(set(pages)) == len(pages), "cached pages are miscounted"
        return pages

    def _hold(self, node: CachedPage) -> None:
        if node.num_holders == 0:
            del self._idle[node]
        node.num_holders += 1
