"""Claims of deltas: each request drafts as with the merged weights of its own version, whatever the others of its pass have."""

import itertools

import numpy as np
import pytest
import torch

from paceline.bench.engine.versions import random_factors as deltas_of
from paceline.errors import DrafterMismatchError
from paceline.kernels.cpu.library import ISA_VARIABLE, ISAS, choose_isa, load_library
from paceline.serving.drafters.deltas import DOWN, UP, merge
from paceline.serving.drafters.interface import Frontier
from paceline.serving.eagle3.drafter import EagleDrafter
from paceline.serving.parallel_head.drafter import ParallelHeadDrafter
from paceline.serving.specblock.drafter import SpecBlockDrafter
from paceline.serving.specblock.forward import SlotForward
from tests.helpers.drafters import TOLERANCE, V, make_inputs, new_requests, tiny_eagle, tiny_head, tiny_specblock

FOUND = [] if load_library() is None else [isa for isa in ISAS if choose_isa(isa) == isa]
KIND_NAMES = ["specblock", "eagle3", "jetspec", "dflash"]
KINDS = pytest.mark.parametrize("kind", KIND_NAMES)
FORMS = pytest.mark.parametrize("form", [*FOUND, "none"])
ROUGH = pytest.mark.parametrize("form", [*FOUND, "torch"])
NUM_DELTAS, RANK = 5, 7


def tiny(kind, seed, **changes):
    """A model, the target's tables that it reads, and its drafter's class."""
    sizes = {"hidden_size": 32, "intermediate_size": 24 + 13 * (seed % 3), "num_slots": 3, **changes}
    if kind == "eagle3":
        model, *tables = tiny_eagle(seed, **sizes, max_depth=9, norm_before_residual=bool(seed % 2))
        return model, tables, EagleDrafter
    if kind == "specblock":
        model, *tables = tiny_specblock(seed, **sizes, num_layers=1 + seed % 3)
        return model, tables, SpecBlockDrafter
    model, *tables = tiny_head(kind == "jetspec", seed, **sizes, num_layers=1 + seed % 3)
    return model, tables, ParallelHeadDrafter


def random_factors(model, rng, rank):
    """A delta that changes what is drafted."""
    return deltas_of(model, rank, int(rng.integers(2**31)), 0.3)


def hold(drafter, versions):
    """Give a drafter these deltas."""
    drafter.hold_deltas(len(versions), RANK)
    for at, factors in enumerate(versions):
        drafter.load_delta(at, factors)
    return drafter


def leaves_of(inputs, drafter, rng, count):
    request = torch.tensor(rng.integers(len(inputs.request_ids), size=count))
    slot = torch.tensor(rng.integers(drafter.caps.num_slots, size=count))
    return Frontier(request=request, slot=slot, token_ids=torch.tensor(rng.integers(V, size=count)))


def alone(frontier, row):
    """The leaves of one request, as a frontier of a batch that is it alone, and which they are."""
    own = frontier.request == row
    leaves = {"slot": frontier.slot[own], "token_ids": frontier.token_ids[own]}
    return Frontier(request=torch.zeros(int(own.sum()), dtype=torch.int64), **leaves), own


@FORMS
@KINDS
def test_a_request_drafts_as_with_its_own_versions_weights(kind, form, monkeypatch):
    """Compiled and by torch, both blocks, in mixed batches over two rounds; also one that goes back to the base's weights."""
    monkeypatch.setenv(ISA_VARIABLE, form)
    # half of the sizes and settings with each form, the other half with the next kind
    half = ([*FOUND, "none"].index(form) + KIND_NAMES.index(kind)) % 2
    for seed in range(3 * half, 3 * half + 3):
        rng = np.random.default_rng(seed)
        model, tables, drafter_class = tiny(kind, seed)
        shared = drafter_class(model, *tables, num_candidates=6)
        shared.hold_deltas(NUM_DELTAS, RANK)
        versions = [random_factors(model, rng, int(rng.integers(1, RANK + 1))) for _ in range(NUM_DELTAS)]
        for at, factors in enumerate(versions):
            shared.load_delta(at, random_factors(model, rng, RANK))  # another one had the place before
            shared.load_delta(at, factors)
        own_version = [int(v) for v in rng.integers(-1, NUM_DELTAS, size=5)]
        requests = new_requests(shared, 5, rng, scattered=bool(seed % 2))
        singles = []
        for version in own_version:
            state = model.state_dict() if version < 0 else merge(model.state_dict(), versions[version])
            single = drafter_class(model, *tables, num_candidates=6)
            single.load_state(state)
            single.alloc(5 * 60)
            singles.append(single)

        def chosen(inputs, rows, own_version=own_version):
            inputs.deltas = torch.tensor([own_version[r] for r in rows])
            return inputs

        for row, (r, single) in enumerate(zip(requests, singles, strict=True)):
            for span in ((0, 2), (2, r.context - 2)):
                shared.ingest(chosen(make_inputs([r], [span]), [row]))
                single.ingest(make_inputs([r], [span]))
            r.done = r.context - 2
        for _ in range(2):
            spans = [(r.done, r.context) for r in requests]
            inputs = chosen(make_inputs(requests, spans, 0.8 * (seed % 2)), range(5))
            proposal = shared.propose(inputs)
            frontier = leaves_of(inputs, shared, rng, 9) if shared.caps.is_reentrant else None
            ids, logprobs = proposal.token_ids.clone(), proposal.logprobs.clone()
            more = None if frontier is None else shared.expand(inputs, proposal, frontier)
            for row, (r, span, single) in enumerate(zip(requests, spans, singles, strict=True)):
                own_inputs = make_inputs([r], [span], 0.8 * (seed % 2))
                expected = single.propose(own_inputs)
                check(ids[row], logprobs[row], expected.token_ids[0], expected.logprobs[0])
                if more is not None and (frontier.request == row).any():
                    own_frontier, own = alone(frontier, row)
                    below = single.expand(own_inputs, expected, own_frontier)
                    check(more.token_ids[own], more.logprobs[own], below.token_ids, below.logprobs)
            for r in requests:
                r.done, r.context = r.context, r.context + int(rng.integers(1, 6))


def check(ids, logprobs, expected_ids, expected_logprobs):
    assert torch.equal(ids, expected_ids) and torch.allclose(logprobs, expected_logprobs, atol=TOLERANCE)


@ROUGH
@KINDS
def test_bfloat16_is_as_near_to_the_own_version_as_that_is_to_float32(kind, form, monkeypatch):
    """The first slot's scores of mixed batches: compiled beside a target in bfloat16, and a drafter in bfloat16 by torch."""
    distances = torch.zeros(2)
    for seed in range(6):
        rng = np.random.default_rng(seed)
        model, tables, drafter_class = tiny(kind, seed)
        rough = {"dtype": torch.bfloat16} if form == "torch" else {}
        monkeypatch.setenv(ISA_VARIABLE, "none" if form == "torch" else form)
        shared, single = (
            drafter_class(model, *(t.bfloat16() for t in tables), num_candidates=6, **rough) for _ in range(2)
        )
        versions = [random_factors(model, rng, RANK) for _ in range(NUM_DELTAS)]
        hold(shared, versions)
        requests = new_requests(shared, NUM_DELTAS, rng)
        inputs = make_inputs(requests, [(0, r.context) for r in requests])
        inputs.deltas = torch.arange(NUM_DELTAS)
        found = shared.propose(inputs)
        monkeypatch.setenv(ISA_VARIABLE, "none")
        exact = drafter_class(model, *tables, num_candidates=6)
        for row, (r, factors) in enumerate(zip(requests, versions, strict=True)):
            own = make_inputs([r], [(0, r.context)])
            scores = []
            for drafter in (single, exact):
                drafter.load_state(merge(model.state_dict(), factors))
                drafter.alloc(NUM_DELTAS * 60)
                scores.append(drafter.propose(own).logprobs[0, 0])
            distances += torch.stack([(s - scores[1]).abs().mean() for s in (found.logprobs[row, 0], scores[0])])
    assert distances[0] < 1.5 * distances[1]


@KINDS
def test_a_small_delta_is_not_lost_in_a_base_of_bfloat16(kind):
    model = tiny(kind, 1)[0]
    base = {n: t.bfloat16() if t.is_floating_point() else t for n, t in model.state_dict().items()}
    factors = {
        n: f * 0.03 if n.endswith(UP) else f for n, f in random_factors(model, np.random.default_rng(0), RANK).items()
    }
    whole = merge(base, factors)
    for name in model.config.delta_linears:
        added = factors[name + UP] @ factors[name + DOWN]
        assert 0 < float(added.abs().max()) < float(base[name + ".weight"].abs().max()) / 16
        assert torch.allclose(whole[name + ".weight"], base[name + ".weight"].float() + added, atol=1e-7)


@KINDS
def test_versions_are_told_apart(kind):
    """Two deltas of one base draft differently, so that the test above could fail."""
    rng = np.random.default_rng(0)
    model, tables, drafter_class = tiny(kind, 0)
    versions = [random_factors(model, rng, RANK) for _ in range(2)]
    shared = hold(drafter_class(model, *tables, num_candidates=6), versions)
    (request,) = new_requests(shared, 1, rng)
    found = []
    for delta in (-1, 0, 1):
        inputs = make_inputs([request], [(0, request.context)])
        inputs.deltas = torch.tensor([delta])
        found.append(shared.propose(inputs).logprobs.clone())
    assert all(not torch.allclose(a, b, atol=1e-2) for a, b in itertools.combinations(found, 2))


@KINDS
def test_factors_that_do_not_fit_change_nothing(kind):
    rng = np.random.default_rng(1)
    model, tables, drafter_class = tiny(kind, 1)
    good = random_factors(model, rng, RANK)
    shared = hold(drafter_class(model, *tables, num_candidates=6), [good])
    (request,) = new_requests(shared, 1, rng)

    def drafted():
        inputs = make_inputs([request], [(0, request.context)])
        inputs.deltas = torch.tensor([0])
        return shared.propose(inputs).logprobs.clone()

    before, name = drafted(), next(iter(good))
    wrong = [
        ({k: v for k, v in good.items() if k != name}, "missing"),
        ({**good, "other" + UP: good[name]}, "surplus"),
        ({**good, name: good[name][:, :-1]}, "must be"),
        ({**good, name: torch.full_like(good[name], float("nan"))}, "finite"),
        (random_factors(model, rng, 33), "rank"),
    ]
    for factors, words in wrong:
        with pytest.raises(DrafterMismatchError, match=words):
            shared.load_delta(0, factors)
    assert torch.equal(drafted(), before)


def with_one_thread(call):
    def made(*args):
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return call(*args)
        finally:
            torch.set_num_threads(before)

    return made


@pytest.mark.skipif(not FOUND, reason="needs the compiled library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("isa", FOUND)
@KINDS
def test_drafts_do_not_depend_on_the_threads(kind, isa, dtype, monkeypatch):
    """Layers wide enough for several; few versions in a pass, and many."""
    monkeypatch.setenv(ISA_VARIABLE, isa)
    for name in ("conditions", "fuse"):  # torch's products, which depend on its threads on AMD's processors
        monkeypatch.setattr(SlotForward, name, with_one_thread(getattr(SlotForward, name)))
    model, tables, drafter_class = tiny(kind, 1, hidden_size=128, intermediate_size=384, head_dim=32)
    before = torch.get_num_threads()
    for own_version in ([0], [1, 1, -1], [0, 1, 2, 3, 4]):
        found = []
        for num_threads in (1, 2, 3):
            rng = np.random.default_rng(0)
            versions = [random_factors(model, rng, RANK) for _ in range(NUM_DELTAS)]
            drafter = hold(drafter_class(model, *(t.to(dtype) for t in tables), num_candidates=6), versions)
            requests = new_requests(drafter, len(own_version), rng)
            inputs = make_inputs(requests, [(0, r.context) for r in requests])
            inputs.deltas = torch.tensor(own_version)
            torch.set_num_threads(num_threads)
            try:
                found.append(drafter.propose(inputs).logprobs.clone())
            finally:
                torch.set_num_threads(before)
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
