"""Both twins of the tree builder give the trees of serving's builder, for any candidates and node counts."""

import pytest
import torch

from paceline.kernels.reference.tree_build import build_trees as build_reference
from paceline.kernels.reference.tree_build import unpack_bits
from paceline.serving.drafters.interface import Proposal
from paceline.serving.trees.device import DeviceCandidates
from tests.helpers.launches import launches
from tests.helpers.trees import on_host, trees_of

pytest.importorskip("triton")
from paceline.kernels.gpu import tree_build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TWINS = {"reference": build_reference, "triton": tree_build.build_trees}
FIELDS = ("token_ids", "parents", "depths", "scores", "candidates", "ancestor_bits", "num_nodes")


def _candidates(batch, count, *, seed=0, vocab=4, max_depth=6, levels=0, absent=0.2):
    """Random forests whose scores never rise along a path; few tokens make many duplicates, few levels many ties."""
    g = torch.Generator().manual_seed(seed)
    parents = torch.full((batch, count), -1)
    depths = torch.ones(batch, count, dtype=torch.int64)
    scores = torch.empty(batch, count)
    for b in range(batch):
        for c in range(count):
            p = int(torch.randint(-1, c, (1,), generator=g)) if c else -1
            if p >= 0 and depths[b, p] >= max_depth:
                p = -1
            parents[b, c] = p
            drop = torch.rand((), generator=g) * 3
            if levels:
                drop = (drop * levels).round() / levels
            scores[b, c] = (scores[b, p] if p >= 0 else 0.0) - drop
            depths[b, c] = depths[b, p] + 1 if p >= 0 else 1
            if torch.rand((), generator=g) < absent:
                scores[b, c] = float("-inf")
    tokens = torch.randint(0, vocab, (batch, count), generator=g)
    return DeviceCandidates(token_ids=tokens, parents=parents, scores=scores, depths=depths, cells=tokens.clone())


def _build(twin, candidates, wanted, max_nodes, max_depth=8, anchors=None):
    batch = candidates.scores.shape[0]
    anchors = torch.arange(100, 100 + batch) if anchors is None else anchors
    return TWINS[twin](
        scores=candidates.scores.to(DEVICE),
        parents=candidates.parents.contiguous().to(DEVICE),
        token_ids=candidates.token_ids.to(DEVICE),
        depths=candidates.depths.contiguous().to(DEVICE),
        anchor_token_ids=anchors.to(DEVICE),
        num_nodes=torch.tensor(wanted, dtype=torch.int64, device=DEVICE),
        max_nodes=max_nodes,
        max_depth=max_depth,
    )


def _check_against_serving(built, candidates, wanted, max_nodes):
    batch = candidates.scores.shape[0]
    anchors = torch.arange(100, 100 + batch)
    tree = trees_of(on_host(candidates).ranked(max_nodes), anchors, [min(n, max_nodes) for n in wanted])
    cu = tree.cu_nodes.tolist()
    for b in range(batch):
        rows = slice(cu[b], cu[b + 1])
        count = cu[b + 1] - cu[b]
        assert int(built.num_nodes[b]) == count - 1
        for mine, theirs in ((built.token_ids, tree.token_ids), (built.parents, tree.parents), (built.depths, tree.depths), (built.scores, tree.scores)):  # fmt: skip
            assert mine[b, :count].tolist() == theirs[rows].tolist()
        own = unpack_bits(built.ancestor_bits[b, :count].cpu(), count)
        assert torch.equal(own, tree.ancestors[rows, :count])
        assert built.parents[b, count:].eq(-1).all() and built.candidates[b, count:].eq(-1).all()
        assert built.scores[b, count:].eq(float("-inf")).all() and not built.token_ids[b, count:].any()
        padding = unpack_bits(built.ancestor_bits[b, count:].cpu(), max_nodes + 1)
        assert torch.equal(padding.sum(1), torch.ones_like(padding.sum(1)))  # itself: attention stays finite


CASES = {
    "unique tokens": {"batch": 3, "count": 40, "vocab": 10_000},
    "many duplicates": {"batch": 3, "count": 60, "vocab": 2},
    "ties": {"batch": 2, "count": 50, "vocab": 3, "levels": 1},
    "one candidate": {"batch": 1, "count": 1},
    "all absent": {"batch": 2, "count": 9, "absent": 1.1},
    "beyond one chunk": {"batch": 2, "count": 150, "vocab": 3, "absent": 0.0},
}


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_trees_of_serving(twin, name):
    candidates = _candidates(**CASES[name])
    wanted = [7, 40, 0][: candidates.scores.shape[0]]
    built = _build(twin, candidates, wanted, 40)
    _check_against_serving(built, candidates, wanted, 40)


@pytest.mark.parametrize("seed", range(4))
def test_twins_agree_on_random_forests(seed):
    candidates = _candidates(2, 33 + 7 * seed, seed=seed, vocab=3, levels=seed % 2 * 2, max_depth=8)
    wanted = [5 + 3 * seed, 63]
    pair = [_build(twin, candidates, wanted, 33) for twin in TWINS]
    for field in FIELDS:
        assert torch.equal(getattr(pair[0], field), getattr(pair[1], field)), field
    _check_against_serving(pair[1], candidates, wanted, 33)


def _proposal(count, seed):
    """Three slots of four candidates from a vocabulary so small that re-entry repeats what the first block proposed."""
    g = torch.Generator().manual_seed(seed)
    logprobs = torch.log_softmax(torch.randn(count, 3, 6, generator=g) * 2, -1).sort(descending=True).values[..., :4]
    token_ids = torch.stack([torch.randperm(6, generator=g)[:4] for _ in range(count * 3)]).view(count, 3, 4)
    return Proposal(token_ids=token_ids, logprobs=logprobs, widths=torch.randint(1, 5, (count, 3), generator=g))


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("seed", range(3))
def test_equals_serving_on_a_block_and_its_re_entry(twin, seed):
    candidates = DeviceCandidates.of(_proposal(3, seed), False, 20, torch.zeros(3, 3, 3))
    leaves = candidates.leaves(4)
    candidates = candidates.append(leaves, _proposal(12, seed + 50), torch.zeros(12, 3, 3))
    wanted = [20, 6, 13]
    built = _build(twin, candidates, wanted, 20)
    _check_against_serving(built, candidates, wanted, 20)


@pytest.mark.parametrize("twin", TWINS)
def test_equals_serving_on_a_table_drafter(twin):
    candidates = DeviceCandidates.of(_proposal(2, 7), True, 16, torch.zeros(2, 3, 3))
    built = _build(twin, candidates, [16, 5], 16)
    _check_against_serving(built, candidates, [16, 5], 16)


def test_smaller_trees_are_prefixes_of_larger_ones():
    candidates = _candidates(1, 50, vocab=3)
    large, small = _build("triton", candidates, [30], 40), _build("triton", candidates, [11], 40)
    for field in ("token_ids", "parents", "depths", "scores", "candidates", "ancestor_bits"):
        assert torch.equal(getattr(large, field)[:, :12], getattr(small, field)[:, :12])


@pytest.mark.parametrize("twin", TWINS)
def test_minus_zero_and_extreme_scores_sort_as_numbers(twin):
    scores = torch.tensor([[-0.0, 0.0, -3e38, -1e-45, float("nan"), -0.0, float("-inf")]])
    n = scores.shape[1]
    candidates = DeviceCandidates(
        token_ids=torch.arange(n)[None], parents=torch.full((1, n), -1), scores=scores,
        depths=torch.ones(1, n, dtype=torch.int64), cells=torch.zeros(1, n, dtype=torch.int64),
    )  # fmt: skip
    built = _build(twin, candidates, [n], n)
    assert built.candidates[0].tolist() == [-1, 0, 1, 5, 3, 2, -1, -1]
    assert built.num_nodes.tolist() == [5]


@pytest.mark.parametrize("twin", TWINS)
def test_no_requests_and_no_candidates(twin):
    nothing = _build(twin, _candidates(0, 5), [], 6)
    assert nothing.token_ids.shape == (0, 7)
    lone = _build(twin, _candidates(2, 0), [3, 0], 4)
    assert lone.num_nodes.tolist() == [0, 0] and lone.token_ids[:, 0].tolist() == [100, 101]
    assert lone.ancestor_bits[0, :, 0].tolist() == [1, 2, 4, 8, 16]
    assert _build(twin, _candidates(1, 5), [5], 0).token_ids.tolist() == [[100]]


def test_the_triton_kernel_runs_and_fills_poisoned_buffers(poisoned_memory):
    candidates = _candidates(3, 21, vocab=3)
    with launches(tree_build._build_kernel) as ran:
        built = _build("triton", candidates, [4, 0, 12], 33)
    assert len(ran.names) == 1
    _check_against_serving(built, candidates, [4, 0, 12], 33)


def test_the_launcher_refuses_what_the_kernel_cannot_take():
    candidates = _candidates(2, 5)
    with pytest.raises(ValueError, match="max_nodes must be in"):
        _build("triton", candidates, [1, 1], -1)
    with pytest.raises(ValueError, match="max_depth must be in"):
        _build("triton", candidates, [1, 1], 4, max_depth=0)
    with pytest.raises(ValueError, match=r"num_nodes must have shape \(2\)"):
        _build("triton", candidates, [1], 4)
    candidates.scores = candidates.scores.double()
    with pytest.raises(ValueError, match=r"scores must be torch.float32"):
        _build("triton", candidates, [1, 1], 4)
