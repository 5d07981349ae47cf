"""Drafters of known faults and ties, drafter inputs from histories alone, and trees without budget or learning."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from paceline.config import TreeConfig
from paceline.kernels.dispatch import Kernels, select_kernels
from paceline.serving.budget.cost_model import CostModel
from paceline.serving.drafters.interface import Drafter, DraftInputs, Proposal
from paceline.serving.target_model.model import TargetBatch
from paceline.serving.trees.candidates import (
    Candidates,
    HostProposal,
    Ranked,
    pack_trees,
    root_columns,
    table_candidates,
)
from paceline.serving.trees.device import DeviceCandidates
from paceline.serving.trees.host import HostBlocks
from paceline.serving.trees.policy import TreePolicy, plain_round
from paceline.serving.trees.propose import DraftGroup, propose_blocks
from paceline.serving.trees.tree import TreeBatch
from tests.helpers.scripted_drafters import RandomDrafter, ScriptedDrafter

VOCAB = 32


def inputs_for(
    histories: list[list[int]], ids: list[str] | None = None, temperatures: list[float] | None = None
) -> DraftInputs:
    num = len(histories)
    zeros = torch.zeros(num, dtype=torch.int64)
    return DraftInputs(
        request_ids=ids or [f"r{i}" for i in range(num)],
        context_lens=torch.tensor([len(h) - 1 for h in histories]),
        anchor_token_ids=torch.tensor([h[-1] for h in histories]),
        temperatures=torch.zeros(num) if temperatures is None else torch.tensor(temperatures),
        slot_table=zeros[:, None],
        cu_new=torch.arange(num + 1),
        new_positions=zeros,
        new_token_ids=zeros,
        new_features=None,
        new_slots=zeros,
        histories=histories,
    )


def present(proposal: Proposal, request: int, slot: int) -> list[int]:
    """Tokens that a slot proposes."""
    keep = proposal.logprobs[request, slot] > -torch.inf
    return proposal.token_ids[request, slot][keep].tolist()


def candidates_of(
    proposal: Proposal, max_nodes: int, *, is_product: bool, kappa: np.ndarray | None = None
) -> Candidates:
    read = HostProposal.read(proposal)
    return table_candidates(read, max_nodes, kappa) if is_product else Candidates.of(read, kappa)


def on_host(candidates: DeviceCandidates) -> Candidates:
    """The same candidates as the host holds them."""
    num_requests, width = candidates.scores.shape
    request = np.arange(num_requests)[:, None]
    parents = candidates.parents.numpy()
    parents = np.where(parents < 0, request, num_requests + request * width + parents)
    fields = (candidates.token_ids.numpy(), parents, candidates.depths.numpy(), candidates.cells.numpy())
    block = np.stack(np.broadcast_arrays(request, *fields)).reshape(5, -1)
    columns = np.concatenate((root_columns(num_requests), block), 1)
    scores = np.append(np.zeros(num_requests, dtype=np.float32), candidates.scores.numpy())
    return Candidates(num_requests, columns, scores, num_requests, (1, width))


def trees_of(ranked: Ranked, anchor_token_ids: torch.Tensor, num_nodes: list[int]) -> TreeBatch:
    """The best `num_nodes[b]` candidates of each request."""
    return pack_trees([(ranked, range(len(num_nodes)))], np.array(num_nodes), anchor_token_ids)


def draft_fixed(drafter: Drafter, inputs: DraftInputs, num_nodes: int, max_frontier: int = 4) -> TreeBatch:
    """Trees of `num_nodes` draft nodes, fewer only where candidates run out; errors of the drafter pass through."""
    num_requests = len(inputs.request_ids)
    out = plain_round([None] * num_requests, inputs.anchor_token_ids, 0)
    blocks = HostBlocks(
        is_product=drafter.caps.is_product, max_nodes=num_nodes, max_frontier=max_frontier, corrections=lambda _: None
    )
    if num_nodes and propose_blocks(drafter, inputs, blocks, out, lambda: 0.0) and not blocks.is_empty:
        return trees_of(blocks.ranked(), inputs.anchor_token_ids, [num_nodes] * num_requests)
    return out.tree


class DevicePolicy(TreePolicy):
    """Drafts on the CPU as on other devices: with the tree kernel's reference unless kernels are given."""

    def __init__(self, config: TreeConfig, *, kernels: Kernels | None = None, **options) -> None:
        if kernels is None:
            kernels = dataclasses.replace(select_kernels("cpu", "reference"), backend="twins")
        super().__init__(config, kernels=kernels, **options)

    def trees_for(self, groups, device):
        return super().trees_for(groups, torch.device("meta"))


class TwinDrafter(RandomDrafter):
    """Random candidates over few tokens, so that siblings are often equal."""

    def _slots(self, histories, request_ids):
        found = super()._slots(histories, request_ids)
        found.token_ids = found.token_ids % 4
        return found


class EdgedDrafter(RandomDrafter):
    """A product table whose scores depend on the parent's token."""

    def __init__(self, seed, worst=None):
        super().__init__(VOCAB, seed, is_product=True, is_reentrant=False)
        self.worst = worst

    def _slots(self, histories, request_ids):
        found = super()._slots(histories, request_ids)
        slots, width = self.caps.num_slots, self.caps.num_candidates
        rng = np.random.default_rng([len(histories), *histories[0]])
        edges = torch.from_numpy(-rng.exponential(1.0, (len(histories), slots - 1, width, width))).float()
        if self.worst is not None:
            edges[0, 0, 0, 0] = self.worst
        return dataclasses.replace(found, edge_logprobs=edges)


class FaultyDrafter(ScriptedDrafter):
    """Raises, proposes a token outside of the vocabulary, or a log-probability that is none ('nan', '3.0')."""

    def __init__(self, how: str) -> None:
        super().__init__("broken", num_slots=2, num_candidates=2)
        self.how = how

    def _slots(self, histories, request_ids):
        if self.how == "raise":
            raise RuntimeError("boom")
        logprobs = torch.full((len(histories), 2, 2), -0.5)
        token_ids = torch.arange(2).expand(len(histories), 2, 2).clone()
        if self.how == "token":
            token_ids[0, 0, 0] = VOCAB
        else:
            logprobs[-1, 1, 1] = float(self.how)
        return Proposal(token_ids=token_ids, logprobs=logprobs, widths=None)


def make_policy(kind, kernels=None, **config):
    config = {"max_draft_tokens": 8, "max_frontier": 3, "policy": "fixed", **config}
    cost = CostModel(lambda q: 5e-3 + 1e-4 * q)
    return kind(TreeConfig(**config), cost=cost, vocab_size=VOCAB, kernels=kernels)


def nodes_of(out):
    """Per request: every node as (path of tokens, score), sorted."""
    tree, found = out.tree, []
    for b in range(tree.num_requests):
        lo, hi = tree.cu_nodes[b].item(), tree.cu_nodes[b + 1].item()
        own = []
        for row in range(lo, hi):
            path = tree.token_ids[lo:hi][tree.ancestors[row, : hi - lo]].tolist()
            own.append((tuple(path), round(float(tree.scores[row]), 4), int(tree.cells[row])))
            assert int(tree.depths[row]) == len(path) - 1
        found.append(sorted(own))
    return found


def random_round(rng, drafters, count):
    histories = [rng.integers(VOCAB, size=3).tolist() for _ in range(count)]
    owner = rng.integers(len(drafters), size=count)
    groups = [
        DraftGroup(drafter=d, inputs=inputs_for([histories[i] for i in rows]), rows=rows)
        for j, d in enumerate(drafters)
        if (rows := np.flatnonzero(owner == j).tolist())
    ]
    keys = [(f"v{j}", "x", True) for j in owner]
    return groups, keys, torch.tensor([h[-1] for h in histories])


def groups_with_a_broken_drafter(how):
    """Three requests, the middle one with a broken drafter."""
    histories = [[1, 2], [3, 4], [5, 6]]
    return [
        DraftGroup(drafter=FaultyDrafter(how), inputs=inputs_for([histories[1]]), rows=[1]),
        DraftGroup(drafter=RandomDrafter(VOCAB), inputs=inputs_for([histories[0], histories[2]]), rows=[0, 2]),
    ]


def tree_path(parents, node):
    """The node and its ancestors, root first."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def _ancestors(trees):
    out = torch.zeros(sum(map(len, trees)), max(map(len, trees)), dtype=torch.bool)
    at = 0
    for parents in trees:
        for i in range(len(parents)):
            out[at + i, tree_path(parents, i)] = True
        at += len(parents)
    return out


def tree_batch(pages, kv, names, contexts, trees, tokens, **extra):
    """Tree rows of requests as one forward: each tree a list of parents, its K/V in scratch rows."""
    depths = [len(tree_path(parents, i)) - 1 for parents in trees for i in range(len(parents))]
    counts = torch.tensor([len(t) for t in trees])
    starts = torch.tensor(contexts).repeat_interleave(counts)
    return TargetBatch(
        token_ids=torch.tensor(tokens),
        positions=starts + torch.tensor(depths),
        cu_rows=torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))),
        context_lens=torch.tensor(contexts),
        slot_table=pages.table(names, max(contexts)),
        out_rows=kv.scratch_rows(len(tokens)),
        ancestors=_ancestors(trees),
        **extra,
    )
