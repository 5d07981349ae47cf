"""Drafters that propose given tables, and what a tree over such a table may contain, enumerated."""

from __future__ import annotations

import heapq
import itertools
import math

import torch

from paceline.config import TreeConfig
from paceline.serving.budget.cost_model import CostModel
from paceline.serving.drafters.interface import DraftInputs, Proposal
from paceline.serving.trees.policy import TreePolicy
from paceline.serving.trees.propose import DraftGroup, RoundDraft
from tests.helpers.scripted_drafters import ScriptedDrafter

VOCAB = 40


class TableDrafter(ScriptedDrafter):
    """Proposes row i of the tables for the i-th request; tables are (B, S, K), edges (B, S - 1, K, K)."""

    def __init__(
        self, token_ids: torch.Tensor, logprobs: torch.Tensor, edges: torch.Tensor | None = None, *, is_product: bool
    ) -> None:
        slots, width = token_ids.shape[1:]
        super().__init__("table", num_slots=slots, num_candidates=width, is_product=is_product)
        self.token_ids, self.logprobs, self.edges = token_ids, logprobs, edges

    def propose(self, inputs: DraftInputs) -> Proposal:
        num = len(inputs.request_ids)
        edges = None if self.edges is None else self.edges[:num]
        return Proposal(token_ids=self.token_ids[:num], logprobs=self.logprobs[:num], widths=None, edge_logprobs=edges)


def random_tables(seed: int, batch: int, slots: int, width: int, absent: float = 0.0) -> tuple[torch.Tensor, ...]:
    """Distinct tokens of falling log-probabilities in every slot; some absent at the end of a slot."""
    g = torch.Generator().manual_seed(seed)
    token_ids = torch.rand(batch, slots, VOCAB, generator=g).argsort(-1)[..., :width]
    logits = torch.randn(batch, slots, VOCAB, generator=g) * 2.5
    logprobs = logits.log_softmax(-1).topk(width, -1).values
    present = torch.randint(1, width + 1, (batch, slots, 1), generator=g)
    gone = (torch.rand(batch, slots, 1, generator=g) < absent) & (torch.arange(width) >= present)
    return token_ids, logprobs.masked_fill(gone, -math.inf)


def random_edges(seed: int, batch: int, slots: int, width: int) -> torch.Tensor:
    """(B, S - 1, K, K) log-probabilities below each candidate of the slot before, in no order, some absent."""
    g = torch.Generator().manual_seed(seed)
    edges = torch.randn(batch, slots - 1, width, width + 2, generator=g).mul(2.0).log_softmax(-1)[..., :width]
    return edges.masked_fill(torch.rand(edges.shape, generator=g) < 0.15, -math.inf)


def draft_tables(tables: tuple[torch.Tensor, ...], *, is_product: bool, **config) -> tuple[RoundDraft, TreePolicy]:
    """One drafted round of a fresh policy over the tables."""
    batch = tables[0].shape[0]
    policy = TreePolicy(
        TreeConfig(**config), cost=CostModel(lambda q: 5e-3 + 1e-4 * q), timer=itertools.count().__next__
    )
    zeros = torch.zeros(batch, dtype=torch.int64)
    inputs = DraftInputs(
        request_ids=[f"r{i}" for i in range(batch)], context_lens=zeros + 2, anchor_token_ids=zeros + 5,
        temperatures=zeros.float(), slot_table=zeros[:, None], cu_new=torch.arange(batch + 1), new_positions=zeros,
        new_token_ids=zeros, new_features=None, new_slots=zeros, histories=[[1, 2, 5]] * batch,
    )  # fmt: skip
    group = DraftGroup(drafter=TableDrafter(*tables, is_product=is_product), inputs=inputs, rows=list(range(batch)))
    return policy.draft([group], [("v", "b", True)] * batch, zeros + 5, 2 * batch), policy


def paths_of(out: RoundDraft, request: int) -> dict[tuple[int, ...], float]:
    """Every draft node of a request's tree: path of tokens -> mass; checks that parents come first."""
    tree = out.tree
    lo, hi = int(tree.cu_nodes[request]), int(tree.cu_nodes[request + 1])
    paths: list[tuple[int, ...]] = [()]
    found = {}
    for row in range(lo + 1, hi):
        parent = int(tree.parents[row])
        assert 0 <= parent < row - lo
        paths.append((*paths[parent], int(tree.token_ids[row])))
        assert paths[-1] not in found, "the same node twice"
        found[paths[-1]] = math.exp(float(tree.scores[row]))
    return found


def children_of(tables: tuple[torch.Tensor, ...], request: int, path: tuple[int, ...], *, is_product: bool):
    """(token, conditional log-probability) of the children that a node has in the whole lattice, best first."""
    token_ids, own = tables[0][request], tables[1][request]
    depth = len(path)
    if depth == token_ids.shape[0]:
        return []
    if not is_product and path != tuple(token_ids[:depth, 0].tolist()):
        return []
    own = own[depth]
    if depth > 0 and len(tables) > 2:
        own = tables[2][request, depth - 1, token_ids[depth - 1].tolist().index(path[-1])]
    pairs = zip(token_ids[depth].tolist(), own.tolist(), strict=True)
    return sorted(((t, p) for t, p in pairs if p > -math.inf), key=lambda pair: -pair[1])


def lattice(tables: tuple[torch.Tensor, ...], request: int, *, is_product: bool) -> dict[tuple[int, ...], float]:
    """Every possible node -> its mass."""
    found: dict[tuple[int, ...], float] = {}
    level = {(): 0.0}
    while level:
        level = {
            (*path, token): score + logprob
            for path, score in level.items()
            for token, logprob in children_of(tables, request, path, is_product=is_product)
        }
        found.update({path: math.exp(score) for path, score in level.items()})
    return found


def best_tree_mass(masses: dict[tuple[int, ...], float], size: int) -> float:
    """The largest sum of masses over all trees of so many draft nodes, by trying all of them."""
    best = 0.0
    for nodes in itertools.combinations(masses, min(size, len(masses))):
        chosen = set(nodes)
        if all(len(path) == 1 or path[:-1] in chosen for path in nodes):
            best = max(best, sum(masses[path] for path in nodes))
    return best


def bundle_tree(tables, request: int, *, is_product: bool, budget: int, width: int) -> dict[tuple[int, ...], float]:
    """JetSpec's algorithm word for word (tree_speculation.md 1.7); budget counts the root."""
    depth = tables[0].shape[1]
    heap: list[tuple[float, tuple[int, ...]]] = [(-0.0, ())]
    nodes: dict[tuple[int, ...], float] = {}
    n = 1
    while n < budget and heap:
        negative, v = heapq.heappop(heap)
        if len(v) < depth:
            children = children_of(tables, request, v, is_product=is_product)
            for k in range(min(width, budget - n, len(children))):
                token, logprob = children[k]
                child = (*v, token)
                nodes[child] = math.exp(-negative + logprob)
                heapq.heappush(heap, (negative - logprob, child))
                n += 1
    return nodes
