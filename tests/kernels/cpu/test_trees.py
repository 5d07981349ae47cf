"""Claims of the native trees: whatever is proposed, they are bit for bit those that serving/trees builds in NumPy."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from paceline.kernels.cpu.trees import TreeMaker, load_trees
from paceline.serving.drafters.interface import Proposal
from paceline.serving.trees.calibration import NUM_RANK_CLASSES, ScoreCalibration
from paceline.serving.trees.candidates import pack_trees
from paceline.serving.trees.host import HostBlocks
from paceline.serving.trees.tree import TreeBatch
from paceline.serving.trees.verify import accept
from tests.helpers.rounds import random_trees

pytestmark = pytest.mark.skipif(
    load_trees() is None, reason="needs the compiled library: python -m paceline.kernels.cpu.build"
)
VOCAB = 11


def random_proposal(rng: np.random.Generator, form, *, has_edges: bool, coarse: bool) -> Proposal:
    """Few tokens, so that siblings are twins; coarse scores, so that they tie; absent candidates; widths."""

    def logprobs(*shape):
        found = -rng.exponential(1.0, shape)
        found = np.round(found * 2) / 2 if coarse else found
        found[rng.random(shape) < 0.1] = -np.inf
        found[rng.random(shape) < 0.05] = 0.0
        return torch.from_numpy(found.astype(np.float32))

    num_nodes, num_slots, num = form
    scores = logprobs(*form)
    if rng.random() < 0.7:
        scores = scores.sort(-1, descending=True).values
    edges = logprobs(num_nodes, num_slots - 1, num, num) if has_edges else None
    widths = torch.from_numpy(rng.integers(0, num + 1, (num_nodes, num_slots))) if rng.random() < 0.4 else None
    token_ids = torch.from_numpy(rng.integers(0, VOCAB if rng.random() < 0.5 else 3, form))
    return Proposal(token_ids=token_ids, logprobs=scores, widths=widths, edge_logprobs=edges)


@dataclasses.dataclass
class Case:
    """What both builders get."""

    num_requests: int
    settings: dict
    kappa: np.ndarray | None
    first: Proposal
    later: list[Proposal]
    kept: float

    @staticmethod
    def random(seed: int) -> "Case":
        rng = np.random.default_rng(seed)
        num_requests, num_slots, num = int(rng.integers(1, 5)), int(rng.integers(1, 6)), int(rng.integers(1, 7))
        is_product = bool(rng.random() < 0.5)
        has_edges = is_product and num_slots > 1 and bool(rng.random() < 0.5)
        kappa = None
        if rng.random() < 0.7:
            kappa = rng.normal(0, 0.5, (2, num_requests, num_slots, NUM_RANK_CLASSES)).clip(-3, 0.5).astype(np.float32)
            if rng.random() < 0.5:
                kappa = kappa[:, :1]
            elif rng.random() < 0.7:
                kappa = kappa[
                    :, rng.permutation(num_requests).tolist()
                ]  # as calibrations pick: in another order of memory
            if rng.random() < 0.3:
                kappa = np.round(kappa * 2) / 2
        settings = {
            "is_product": is_product,
            "max_nodes": int(rng.integers(1, 20)),
            "max_frontier": int(rng.integers(1, 6)),
            "bundle_width": int(rng.integers(1, 5)) if rng.random() < 0.3 else None,
            "vocab_size": VOCAB,
        }
        coarse = bool(rng.random() < 0.5)
        size = num_requests * settings["max_frontier"]
        # As many nodes as leaves are known later: the first ones are taken.
        later = [
            random_proposal(rng, (size, num_slots, num), has_edges=False, coarse=coarse)
            for _ in range(int(rng.integers(0, 4)))
        ]
        first = random_proposal(rng, (num_requests, num_slots, num), has_edges=has_edges, coarse=coarse)
        return Case(num_requests, settings, kappa, first, later, float(rng.choice([1.0, 0.6])))

    def grow(self, maker: TreeMaker | None) -> tuple[HostBlocks, list]:
        """All blocks, and what was seen on the way."""

        def choose(owners, masses):
            seen.append((owners, masses))
            return [i for i in range(len(owners)) if (i * 7 + 3) % 10 < 10 * self.kept]

        seen: list = []
        blocks = HostBlocks(corrections=lambda _: self.kappa, choose_leaves=choose, maker=maker, **self.settings)
        blocks.begin(self.first)
        for proposal in self.later:
            frontier = blocks.frontier()
            if frontier is None:
                seen.append(None)
                break
            count = frontier.request.numel()
            found = (frontier.request, frontier.slot, frontier.token_ids, frontier.node)
            seen.append([None if t is None else t.tolist() for t in found])
            blocks.extend(
                dataclasses.replace(
                    proposal, token_ids=proposal.token_ids[:count], logprobs=proposal.logprobs[:count],
                    widths=None if proposal.widths is None else proposal.widths[:count],
                )
            )  # fmt: skip
        return blocks, [*seen, blocks.frontier_mass, blocks.num_leaves, blocks.is_empty]


def assert_same_tree(own: tuple[torch.Tensor, ...], expected: TreeBatch) -> None:
    wanted = (
        expected.token_ids, expected.parents, expected.depths, expected.scores, expected.cu_nodes, expected.ancestors,
        expected.cells,
    )  # fmt: skip
    for a, b in zip(own, wanted, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("start", range(0, 2000, 100))
def test_trees_of_random_proposals_are_the_references(start: int) -> None:
    maker = TreeMaker.new()
    for seed in range(start, start + 100):
        case, rng = Case.random(seed), np.random.default_rng(seed)
        everyone, anchors = list(range(case.num_requests)), torch.arange(case.num_requests) + 100
        maker.start(case.num_requests)
        blocks, seen = case.grow(maker)
        reference, wanted = case.grow(None)
        assert seen == wanted, seed
        if blocks.is_empty:
            continue
        blocks.ranked(everyone)
        ranked, limit = reference.ranked(), case.settings["max_nodes"]
        scores = np.full((case.num_requests, limit + 1), -np.inf)
        scores[ranked.columns[0], ranked.local] = ranked.scores
        assert np.array_equal(maker.scores(limit), scores[:, 1:]), seed
        for num_nodes in (np.full(case.num_requests, limit), rng.integers(0, limit + 1, case.num_requests)):
            own, counts = maker.cut(num_nodes, anchors)
            expected = pack_trees([(copy.deepcopy(ranked), everyone)], num_nodes, anchors)  # it writes into them
            assert_same_tree(own, expected)
            assert [1 + count for count in counts] == expected.counts


@pytest.mark.parametrize("seed", range(40))
def test_trees_of_several_drafters_are_the_references(seed: int) -> None:
    rng, maker = np.random.default_rng(seed), TreeMaker.new()
    cases = [case for case in (Case.random(1000 + 3 * seed + i) for i in range(3)) if not case.grow(None)[0].is_empty]
    num_requests = sum(case.num_requests for case in cases) + 2  # two are not drafted for
    order = rng.permutation(num_requests).tolist()
    maker.start(num_requests)
    parts = []
    for case in cases:
        rows, order = sorted(order[: case.num_requests]), order[case.num_requests :]
        case.grow(maker)[0].ranked(rows)
        parts.append((case.grow(None)[0].ranked(), rows))
    num_nodes, anchors = rng.integers(0, 20, num_requests), torch.arange(num_requests)
    if parts:
        assert_same_tree(maker.cut(num_nodes, anchors)[0], pack_trees(parts, num_nodes, anchors))


@pytest.mark.parametrize(
    "what", ["nan", "high", "edge", "token", "negative", "late", "widths", "edges", "nodes", "slots"]
)
def test_a_proposal_of_wrong_numbers_or_form_is_refused(what: str) -> None:
    rng, maker = np.random.default_rng(1), TreeMaker.new()
    first = random_proposal(rng, (2, 3, 4), has_edges=True, coarse=False)
    second = random_proposal(rng, (2, 3, 4), has_edges=False, coarse=False)
    match what:
        case "nan":
            first.logprobs[1, 2, 3] = torch.nan
        case "high":
            first.logprobs[0, 0, 0] = 0.5
        case "edge":
            first.edge_logprobs[1, 1, 3, 3] = torch.nan
        case "token":
            first.token_ids[1, 2, 3] = VOCAB
        case "negative":
            first.token_ids[1, 2, 3] = -1
        case "late":
            second.logprobs[1, 2, 3] = torch.nan
        case "widths":
            first.widths = torch.ones(2, 2, dtype=torch.int64)
        case "edges":
            first.edge_logprobs = first.edge_logprobs[:, :1]
        case "nodes":
            second = random_proposal(rng, (3, 3, 4), has_edges=False, coarse=False)
        case "slots":
            second = random_proposal(rng, (2, 2, 4), has_edges=False, coarse=False)
    maker.start(2)
    kappa = np.zeros((2, 1, 3, NUM_RANK_CLASSES), dtype=np.float32)
    blocks = HostBlocks(
        is_product=True, max_nodes=8, max_frontier=1, corrections=lambda _: kappa, vocab_size=VOCAB, maker=maker
    )
    with pytest.raises(ValueError):
        blocks.begin(first)
        assert blocks.frontier().request.tolist() == [0, 1]
        blocks.extend(second)


@pytest.mark.parametrize("num_requests", [1, 2, 5])
def test_a_calibration_learns_the_same_with_and_without_native_code(num_requests: int, monkeypatch) -> None:
    rng, num_slots = np.random.default_rng(num_requests), 4
    keys = [("v", "ab"[int(i)], True) for i in rng.integers(0, 2, num_requests)]
    own, reference = ScoreCalibration(), ScoreCalibration()
    for _ in range(40):
        drafted = (rng.random(num_requests) < 0.8).tolist()
        tree = random_trees(rng, rng.integers(1, 9, num_requests).tolist())
        tree.cells = torch.from_numpy(rng.integers(0, 2 * num_slots * NUM_RANK_CLASSES, tree.token_ids.numel()))
        tree.scores = -tree.depths * torch.from_numpy(rng.exponential(1.0, tree.token_ids.numel())).float()
        drawn = torch.from_numpy(rng.integers(6, size=tree.token_ids.numel()))
        accepted = np.array([row for path, _ in accept(tree, drawn).on_host() for row in path])
        kappas = own.corrections(keys, num_slots), reference.corrections(keys, num_slots)
        np.testing.assert_allclose(*kappas, rtol=1e-6, atol=1e-9)
        own.observe(tree, keys, drafted, accepted)
        with monkeypatch.context() as patch:
            patch.setattr("paceline.kernels.cpu.trees.load_trees", lambda: None)
            reference.observe(tree, keys, drafted, accepted)
    assert np.abs(own.corrections(keys, num_slots)).max() > 0.1


def test_a_cell_of_another_drafter_is_refused() -> None:
    calibration, tree = ScoreCalibration(), random_trees(np.random.default_rng(0), [3])
    calibration.corrections([("v", "a", True)], 2)
    tree.cells = torch.tensor([-1, 99, 99])
    with pytest.raises(IndexError):
        calibration.observe(tree, [("v", "a", True)], [True], np.array([0]))
