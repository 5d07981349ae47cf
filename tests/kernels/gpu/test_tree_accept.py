"""Both twins of acceptance give the plan of serving's walk on the host."""

import pytest
import torch

from paceline.kernels.reference.tree_accept import accept_rows as accept_rows_reference
from paceline.serving.trees.tree import TreeBatch
from paceline.serving.trees.verify import accept
from tests.helpers.launches import launches

pytest.importorskip("triton")
from paceline.kernels.gpu import tree_accept

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_DEPTH = 7


def _trees(counts, width, seed, vocab=5):
    """Packed random trees with distinct sibling tokens."""
    g = torch.Generator().manual_seed(seed)
    batch = len(counts)
    token_ids, parents = torch.full((batch, width), 3), torch.full((batch, width), -1)
    depths, seen = torch.zeros(batch, width, dtype=torch.int64), torch.zeros(batch, width, width, dtype=torch.bool)
    for b, count in enumerate(counts):
        seen[b, 0, 0] = True
        for i in range(1, count):
            while True:
                p = int(torch.randint(0, i, (1,), generator=g))
                t = int(torch.randint(0, vocab + width, (1,), generator=g))
                used = any(int(parents[b, j]) == p and int(token_ids[b, j]) == t for j in range(1, i))
                if not used and depths[b, p] < MAX_DEPTH:
                    break
            parents[b, i], token_ids[b, i], depths[b, i] = p, t, depths[b, p] + 1
            seen[b, i] = seen[b, p]
            seen[b, i, i] = True
        parents[b, count:], depths[b, count:] = 1, 1  # padding that looks like nodes
        seen[b, count:] = True
    keep = torch.arange(width) < torch.tensor(counts)[:, None] if counts else torch.zeros(0, width, dtype=torch.bool)
    return TreeBatch(
        token_ids=token_ids[keep], parents=parents[keep], depths=depths[keep], scores=torch.zeros(sum(counts)),
        cu_nodes=torch.tensor([0, *counts]).cumsum(0), ancestors=seen[keep],
    )  # fmt: skip


def _drawn(packed, seed, follow=0.8):
    """Tokens drawn at every row: mostly one of the row's children."""
    g = torch.Generator().manual_seed(seed)
    cu = packed.cu_nodes.tolist()
    drawn = torch.randint(0, 50, (packed.token_ids.numel(),), generator=g)
    for b in range(len(cu) - 1):
        for i in range(cu[b], cu[b + 1]):
            children = [j for j in range(cu[b], cu[b + 1]) if int(packed.parents[j]) == i - cu[b]]
            if children and torch.rand((), generator=g) < follow:
                drawn[i] = packed.token_ids[children[int(torch.randint(0, len(children), (1,), generator=g))]]
    return drawn


CASES = {
    "one root": ([1], 1),
    "roots only, padded": ([1, 1, 1], 9),
    "one tree": ([13], 13),
    "ragged": ([7, 1, 33, 12], 33),
    "padded beyond a word": ([65, 40], 70),
}


def _packed_inputs(packed, drawn, *, num_rows, num_requests, width):
    """A round in the static tensors of a larger graph: rows and requests of nobody behind it, columns of nobody."""
    n, b = packed.token_ids.numel(), packed.num_requests
    tokens, draws = torch.full((num_rows,), 3), torch.full((num_rows,), 3)
    tokens[:n], draws[:n] = packed.token_ids, drawn
    cu_rows = torch.full((num_requests + 1,), n)
    cu_rows[: b + 1] = packed.cu_nodes
    seen = torch.zeros(num_rows, width, dtype=torch.bool)
    seen[:n, : packed.ancestors.shape[1]] = packed.ancestors
    inputs = {"token_ids": tokens, "cu_rows": cu_rows, "ancestors": seen, "next_token_ids": draws}
    return {name: t.to(DEVICE) for name, t in inputs.items()}


@pytest.mark.parametrize("name", CASES)
def test_packed_rows_are_judged_as_serving_walks_them(name, poisoned_memory):
    counts, width = CASES[name]
    packed = _trees(counts, width, 4)
    for follow, padding in ((0.0, (5, 3, 2)), (0.8, (5, 3, 2)), (1.0, (5, 3, 2)), (1.0, (0, 0, 0))):
        _check_rows(packed, counts, width, _drawn(packed, 7, follow), *padding)


def _check_rows(packed, counts, width, drawn, more_rows, more_requests, more_width):
    inputs = _packed_inputs(
        packed, drawn, num_rows=sum(counts) + more_rows, num_requests=len(counts) + more_requests,
        width=width + more_width,
    )  # fmt: skip
    plan, b = accept(packed, drawn), len(counts)
    paths = [path for path, _ in plan.on_host()]
    found_path = torch.full((b, width + more_width), -1)
    for line, path in zip(found_path, paths, strict=True):
        line[: len(path)] = torch.tensor(path)
    for twin in (accept_rows_reference, tree_accept.accept_rows):
        found = twin(**inputs)
        assert found.path.shape == found.path_token_ids.shape == (b + more_requests, width + more_width)
        assert torch.equal(found.path[:b].cpu(), found_path)
        tokens = torch.where(found_path < 0, -1, packed.token_ids[found_path.clamp(min=0)])
        assert torch.equal(found.path_token_ids[:b].cpu(), tokens)
        assert found.num_accepted_tokens[:b].tolist() == [len(path) - 1 for path in paths]
        assert found.bonus_token_ids[:b].tolist() == [bonus for _, bonus in plan.on_host()]


def test_packed_rows_wider_than_a_tile_are_judged_block_by_block():
    """A chain of 100 nodes that misses at its 90th, beside a lone root."""
    count = 101
    packed = TreeBatch(
        token_ids=torch.arange(count + 1), parents=torch.tensor([*range(-1, count - 1), -1]),
        depths=torch.tensor([*range(count), 0]), scores=torch.zeros(count + 1), cu_nodes=torch.tensor([0, count, count + 1]),
        ancestors=torch.cat((torch.ones(count, count).tril(), torch.eye(1, count))).bool(),
    )  # fmt: skip
    drawn = torch.arange(1, count + 2)
    drawn[89] = 0
    with launches(tree_accept._accept_rows_kernel) as ran:
        found = tree_accept.accept_rows(
            **_packed_inputs(packed, drawn, num_rows=count + 1, num_requests=2, width=count)
        )
    assert len(ran.names) == 1
    assert found.num_accepted_tokens.tolist() == [89, 0] and found.bonus_token_ids.tolist() == [0, count + 1]
    assert found.path.tolist() == [[*range(90), *[-1] * 11], [count, *[-1] * 100]]


def test_packed_rows_of_a_wrong_form_are_refused():
    packed = _trees([3], 3, 1)
    inputs = _packed_inputs(packed, torch.zeros(3, dtype=torch.int64), num_rows=3, num_requests=1, width=3)
    for name, wrong in (
        ("ancestors", inputs["ancestors"].long()),
        ("next_token_ids", inputs["next_token_ids"][:2]),
        ("cu_rows", inputs["cu_rows"].int()),
    ):
        with pytest.raises(ValueError, match=name):
            tree_accept.accept_rows(**{**inputs, name: wrong})
