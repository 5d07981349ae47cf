"""Random trees and verification rounds of a few requests, for tests of the target's passes."""

import numpy as np
import torch

from paceline.serving.target_model.model import TargetBatch
from paceline.serving.trees.tree import TreeBatch
from paceline.serving.trees.verify import AcceptPlan
from tests.helpers.fakes import prefill

WIDTH, VOCAB = 7, 64
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}  # float32 sums in another order


def random_tree(rng, size):
    parents = [-1, *(int(rng.integers(0, i)) for i in range(1, size))]
    ancestors = np.eye(size, dtype=bool)
    for i in range(1, size):
        ancestors[i] |= ancestors[parents[i]]
    tokens, taken = [int(rng.integers(VOCAB))], set()
    for i in range(1, size):
        token = next(t for t in rng.permutation(6).tolist() if (parents[i], t) not in taken)
        taken.add((parents[i], token))
        tokens.append(token)
    return parents, tokens, ancestors


def random_trees(rng, sizes):
    trees = [random_tree(rng, n) for n in sizes]
    width = max(sizes)
    ancestors = torch.zeros(sum(sizes), width, dtype=torch.bool)
    cu = np.concatenate([[0], np.cumsum(sizes)])
    for start, (_, _, own) in zip(cu, trees, strict=False):
        ancestors[start : start + len(own), : len(own)] = torch.from_numpy(own)
    return TreeBatch(
        token_ids=torch.tensor([t for _, tokens, _ in trees for t in tokens]),
        parents=torch.tensor([p for parents, _, _ in trees for p in parents]),
        depths=ancestors.sum(1) - 1,
        scores=torch.zeros(sum(sizes)),
        cu_nodes=torch.from_numpy(cu),
        ancestors=ancestors,
    )


def assert_same_plan(got: AcceptPlan, expected: AcceptPlan):
    assert got.on_host() == expected.on_host()
    assert got.accepted_tokens() == expected.accepted_tokens()


def make_rounds(target, kv, pages, rng):
    """A few rounds over requests with contexts of 3, 11, 20 and 33 rows; yields (tree, batch)."""
    contexts = {"a": 3, "b": 11, "c": 20, "d": 33}
    for name, length in contexts.items():
        prefill(target, kv, pages, name, rng.integers(3, VOCAB, size=length).tolist())
    for names in ("a", "bc", "abcd", "d", "db", "abc"):
        tree = random_trees(rng, rng.integers(1, WIDTH + 1, size=len(names)).tolist())
        lens = torch.tensor([contexts[n] for n in names])
        counts = tree.cu_nodes[1:] - tree.cu_nodes[:-1]
        yield (
            tree,
            TargetBatch(
                token_ids=tree.token_ids,
                positions=tree.depths + lens.repeat_interleave(counts),
                cu_rows=tree.cu_nodes,
                context_lens=lens,
                slot_table=pages.table(list(names), int(lens.max())),
                out_rows=kv.scratch_rows(tree.token_ids.numel()),
                ancestors=tree.ancestors,
            ),
        )
