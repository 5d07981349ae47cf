"""Rows of a round: roots at their positions, drafts in scratch or behind a lone context; committed, they are as if
decoded plainly."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.serving.engine.decode import RoundRows
from paceline.serving.engine.running import RunningRequest
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from paceline.serving.target_model.kv_cache import KVPool, PageAllocator
from paceline.serving.target_model.model import TargetBatch, TargetModel
from paceline.serving.trees.tree import TreeBatch
from tests.helpers.fakes import prefill, tiny_target

VOCAB, PAGE, NUM_PAGES = 64, 4, 48
MAX_NODES = 8


@functools.cache
def target() -> TargetModel:
    return tiny_target(vocab=VOCAB, layers=2, width=16, context=64)


class Round:
    """Requests with a context in a pool whose pages are scattered, and a tree for each."""

    def __init__(
        self, context_lens: list[int], parents: list[list[int]], seed: int = 0, num_more_rows: int = MAX_NODES + 1
    ) -> None:
        """parents: of each tree, root (-1) first. num_more_rows: behind each context, at least; whole pages are held."""
        rng = np.random.default_rng(seed)
        num_scratch = sum(map(len, parents))
        self.kv: KVPool = target().new_kv_pool(NUM_PAGES, PAGE, num_scratch, keeps_features=True)
        self.pages = PageAllocator(NUM_PAGES, PAGE)
        self.contexts = [rng.integers(3, VOCAB, n).tolist() for n in context_lens]
        self.requests = [self._request(f"r{i}", tokens) for i, tokens in enumerate(self.contexts)]
        for rows in range(1, max(context_lens) + num_more_rows + 1):  # page by page in turn: they lie scattered
            for r, n in zip(self.requests, context_lens, strict=True):
                if rows <= n + num_more_rows:
                    assert self.pages.ensure(r.request_id, rows)
        for r in self.requests:
            r.rows = self.pages.rows(r.request_id, 0, len(self.pages.pages(r.request_id)) * PAGE)
        self.tree = make_tree(parents, rng)
        self.context_lens = torch.tensor(context_lens)
        self.table = torch.zeros(len(parents), max(r.row_capacity for r in self.requests), dtype=torch.int64)
        for i, r in enumerate(self.requests):
            self.table[i, : r.row_capacity] = r.rows
        self.rows = RoundRows(self.kv)

    @staticmethod
    def _request(request_id: str, tokens: list[int]) -> RunningRequest:
        request = GenerationRequest(request_id=request_id, prompt_token_ids=tuple(tokens), params=SamplingParams())
        out = RunningRequest(
            request=request, on_event=lambda e: None, arrival=0, seed=0, token_limit=64, stop_token_ids=frozenset(),
            stop_checker=None, counts=None, submitted_s=0.0,
        )  # fmt: skip
        out.context_len = len(tokens)
        return out

    def place(self) -> torch.Tensor:
        return self.rows.place(self.requests, self.tree, self.table, self.context_lens)

    def own_rows(self, i: int, start: int, stop: int) -> torch.Tensor:
        rows = self.requests[i].rows
        assert rows is not None
        return rows[start:stop]

    def random_paths(self, rng: np.random.Generator) -> list[list[int]]:
        """Of every tree a path from the root, of any length, as packed rows."""
        paths = []
        for start, stop in zip(self.tree.cu_nodes.tolist(), self.tree.cu_nodes[1:].tolist(), strict=False):
            path = [start]
            while rng.random() < 0.8:
                children = [row for row in range(start, stop) if int(self.tree.parents[row]) == path[-1] - start]
                if not children:
                    break
                path.append(int(rng.choice(children)))
            paths.append(path)
        return paths


def make_tree(parents: list[list[int]], rng: np.random.Generator) -> TreeBatch:
    """Packed trees with random tokens."""
    counts = [len(p) for p in parents]
    width, depths, ancestors = max(counts), [], []
    for own in parents:
        seen = np.zeros((len(own), width), dtype=bool)
        for row, parent in enumerate(own):
            if parent >= 0:
                seen[row] = seen[parent]
            seen[row, row] = True
        ancestors.append(seen)
        depths += (seen.sum(1) - 1).tolist()
    num_rows = sum(counts)
    return TreeBatch(
        token_ids=torch.from_numpy(rng.integers(3, VOCAB, num_rows)), parents=torch.tensor([p for own in parents for p in own]),
        depths=torch.tensor(depths), scores=torch.zeros(num_rows), counts=counts,
        cu_nodes=torch.tensor([0, *np.cumsum(counts).tolist()]), ancestors=torch.from_numpy(np.concatenate(ancestors)),
    )  # fmt: skip


def random_parents(rng: np.random.Generator, num_nodes: int) -> list[int]:
    return [-1, *(int(rng.integers(0, row)) for row in range(1, num_nodes + 1))]


# ---- place ----------------------------------------------------------------------------------------------------------
def test_a_plain_round_writes_straight_to_the_next_positions():
    for context_lens in ([5], [5, 8, 3]):
        r = Round(context_lens, [[-1]] * len(context_lens))
        want = [int(r.own_rows(i, n, n + 1)) for i, n in enumerate(context_lens)]
        assert r.place().tolist() == want


def test_a_batch_has_its_roots_at_their_positions_and_its_drafts_in_scratch():
    r = Round([5, 8, 3], [[-1, 0, 0], [-1], [-1, 0, 1, 1]])
    rows, roots = r.place(), r.tree.cu_nodes[:-1]
    assert rows[roots].tolist() == [int(r.own_rows(i, n, n + 1)) for i, n in enumerate([5, 8, 3])]
    drafts = [int(row) for at, row in enumerate(rows) if at not in roots.tolist()]
    assert min(drafts) >= r.kv.scratch_start and max(drafts) < r.kv.num_rows and len(set(drafts)) == len(drafts) == 5
    assert r.kv.scratch_rows(8).tolist() == list(range(r.kv.scratch_start, r.kv.num_rows)), "the arena is not changed"


def test_a_lone_tree_lies_behind_its_context():
    r = Round([6], [[-1, 0, 0, 1]])
    assert r.place().tolist() == r.own_rows(0, 6, 10).tolist()


@pytest.mark.parametrize("num_more_rows, is_behind", [(2, True), (1, False)])
def test_a_lone_tree_that_does_not_fit_behind_its_context_goes_to_scratch(num_more_rows, is_behind):
    r = Round([10 if is_behind else 11], [[-1, 0]], num_more_rows=num_more_rows)
    context_len = r.requests[0].context_len
    assert r.requests[0].row_capacity == 12
    root, draft = r.place().tolist()
    assert root == int(r.own_rows(0, context_len, context_len + 1))
    assert (draft == int(r.own_rows(0, 11, 12))) == is_behind and (draft >= r.kv.scratch_start) != is_behind


def test_every_round_is_placed_anew():
    """Lone and in a batch in turn: what one round left behind decides nothing in the next."""
    lone, batch = Round([6], [[-1, 0, 0]]), Round([6, 4], [[-1, 0], [-1, 0, 1]])
    batch.rows.place(batch.requests[:1], lone.tree, batch.table[:1], batch.context_lens[:1])
    fill(batch.kv)
    before, out_rows = batch.kv.data.clone(), batch.place()
    batch.rows.commit(batch.requests, [[0, 1], [2, 3]], None)
    assert torch.equal(batch.kv.data[:, batch.own_rows(0, 7, 8)], before[:, out_rows[1:2]])
    assert torch.equal(batch.kv.data[:, batch.own_rows(1, 5, 6)], before[:, out_rows[3:4]])


# ---- commit ---------------------------------------------------------------------------------------------------------
def fill(kv: KVPool) -> None:
    """Give every row contents of its own."""
    kv.data.copy_(torch.arange(kv.data.numel(), dtype=kv.data.dtype).view_as(kv.data))
    assert kv.features is not None
    kv.features.copy_(torch.arange(kv.features.numel(), dtype=kv.features.dtype).view_as(kv.features))


@pytest.mark.parametrize(
    "path", [[0], [0, 1], [0, 1, 2, 3], [0, 2], [0, 2, 3, 4], [0, 1, 3, 4], [0, 3, 5], [0, 1, 2, 4, 5], [0, 5]]
)
def test_sources_and_destinations_of_a_lone_path_may_overlap(path):
    r = Round([6], [[-1] + [0] * 5])  # the tree's shape plays no part in what is moved
    fill(r.kv)
    before, out_rows = r.kv.data.clone(), r.place()
    features = -1.0 - torch.arange(6.0)[:, None].expand(-1, target().feature_size)
    r.rows.commit(r.requests, [path], features)
    kept = r.own_rows(0, 6, 6 + len(path))
    assert torch.equal(r.kv.data[:, kept], before[:, out_rows[path]])
    assert torch.equal(r.kv.features[kept], features[path])
    others = np.setdiff1d(np.arange(r.kv.num_rows), kept.numpy())
    assert torch.equal(r.kv.data[:, others], before[:, others]), "a row that is no destination was written"


def test_a_path_of_first_children_moves_nothing():
    for lens, parents, paths, moves in (
        ([6], [[-1, 0, 1, 2]], [[0, 1, 2]], False),
        ([6, 3], [[-1, 0], [-1, 0]], [[0], [2]], False),
        ([6], [[-1, 0, 0]], [[0, 2]], True),
    ):
        r = Round(lens, parents)
        r.place()
        before = r.kv.data.copy_(torch.rand_like(r.kv.data)).clone()
        r.rows.commit(r.requests, paths, torch.ones(sum(map(len, parents)), target().feature_size))
        assert torch.equal(r.kv.data, before) != moves


def test_nothing_is_kept_of_a_request_that_emits_nothing():
    r = Round([6, 3], [[-1, 0], [-1, 0]])
    fill(r.kv)
    before, features, out_rows = r.kv.data.clone(), r.kv.features.clone(), r.place()
    r.rows.commit(r.requests, [[], [2, 3]], torch.full((4, target().feature_size), -1.0))
    kept = r.own_rows(1, 3, 5)
    assert torch.equal(r.kv.data[:, kept], before[:, out_rows[2:]])
    assert ((r.kv.features != features).any(1).nonzero()[:, 0] == kept.sort().values).all()


def decode(r: Round) -> torch.Tensor:
    """Run the round's rows through the target; returns their features."""
    out_rows = r.place()
    counts = r.tree.cu_nodes.diff()
    out = target().forward(
        TargetBatch(
            token_ids=r.tree.token_ids, positions=r.tree.depths + r.context_lens.repeat_interleave(counts),
            cu_rows=r.tree.cu_nodes, context_lens=r.context_lens, slot_table=r.table[:, : int(r.context_lens.max())],
            out_rows=out_rows, ancestors=r.tree.ancestors,
        ),
        r.kv,
    )  # fmt: skip
    assert out.features is not None
    return out.features


@settings(max_examples=60)
@given(
    context_lens=st.lists(st.integers(1, 14), min_size=1, max_size=5),
    num_nodes=st.lists(st.integers(0, MAX_NODES), min_size=5, max_size=5),
    num_more_rows=st.sampled_from([1, 3, MAX_NODES + 1]),
    seed=st.integers(0, 10_000),
)
def test_committed_rows_are_those_of_plain_decoding(context_lens, num_nodes, num_more_rows, seed):
    rng = np.random.default_rng(seed)
    parents = [random_parents(rng, num_nodes[i]) for i in range(len(context_lens))]
    r = Round(context_lens, parents, seed, num_more_rows)
    for i, tokens in enumerate(r.contexts):
        out = prefill(target(), r.kv, r.pages, f"r{i}", tokens)
        r.kv.features[r.own_rows(i, 0, len(tokens))] = out.features
    features = decode(r)
    # As in the engine, a path is cut where a request's rows end.
    paths = [p[: q.row_capacity - q.context_len] for p, q in zip(r.random_paths(rng), r.requests, strict=True)]
    r.rows.commit(r.requests, paths, features)
    for i, (tokens, path) in enumerate(zip(r.contexts, paths, strict=True)):
        text = [*tokens, *r.tree.token_ids[path].tolist()]
        pages = PageAllocator(len(text) // PAGE + 1, PAGE)
        plain = target().new_kv_pool(pages.num_pages, PAGE, 0)
        want = [prefill(target(), plain, pages, "p", tokens).features]
        for at in range(len(tokens), len(text)):
            want.append(prefill(target(), plain, pages, "p", [text[at]], start=at).features)
        rows = r.own_rows(i, 0, len(text))
        torch.testing.assert_close(r.kv.data[:, rows], plain.data[:, : len(text)], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(r.kv.features[rows], torch.cat(want), atol=1e-4, rtol=1e-4)
