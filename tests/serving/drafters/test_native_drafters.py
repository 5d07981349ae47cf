"""Claims of compiled drafting: it equals torch's, and a request's draft depends on neither its batch nor the threads."""

import numpy as np
import pytest
import torch

from paceline.kernels.cpu.library import ISA_VARIABLE, ISAS, choose_isa, load_library
from paceline.serving.drafters.interface import Frontier
from paceline.serving.drafters.native import SPARE_ROWS
from paceline.serving.drafters.network import adjacent_pairs
from paceline.serving.eagle3.drafter import EagleDrafter
from paceline.serving.parallel_head.drafter import ParallelHeadDrafter
from tests.helpers.drafters import TOLERANCE, Request, V, make_inputs, new_requests, tiny_eagle, tiny_head

FOUND = [] if load_library() is None else [isa for isa in ISAS if choose_isa(isa) == isa]
KINDS = pytest.mark.parametrize("kind", ["eagle3", "jetspec", "dflash"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
pytestmark = pytest.mark.skipif(not FOUND, reason="needs the compiled library: python -m paceline.kernels.cpu.build")
WIDE = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32}  # layers for several threads


def random_sizes(kind, rng):
    """Settings whose widths fill panels and pairs of inputs, or do not."""
    kv_heads = int(rng.integers(1, 4))
    sizes = {
        "hidden_size": 16 * int(rng.integers(1, 6)), "intermediate_size": int(rng.integers(5, 90)),
        "num_kv_heads": kv_heads, "num_heads": kv_heads * int(rng.integers(1, 4)),
        "head_dim": int(rng.choice([16, 32, 48, 80])), "num_slots": int(rng.integers(1, 7)),
    }  # fmt: skip
    sizes |= {"draft_vocab_size": 37} if rng.integers(2) else {}
    if kind == "eagle3":
        sizes["num_slots"] = int(rng.integers(1, 3))  # a step multiplies the error of the one before
        more = {"norm_before_residual": bool(rng.integers(2)), "max_depth": 4 * sizes["num_slots"]}
        return sizes | more
    more = {
        "num_layers": int(rng.integers(1, 4)),
        "edge_rank": int(rng.integers(3)),
        "is_shifted": bool(rng.integers(2)),
    }
    more["corrects_first"] = more["edge_rank"] > 0 and "draft_vocab_size" not in sizes
    return sizes | more | ({"mask_token_id": 4} if rng.integers(2) else {})


def tiny(kind, sizes, seed=0):
    """A model and the target's tables that it reads."""
    model, *tables = tiny_eagle(seed, **sizes) if kind == "eagle3" else tiny_head(kind == "jetspec", seed, **sizes)
    return model, tables


def make(kind, target_dtype, sizes, **options):
    """A drafter for a target of this number type."""
    model, tables = tiny(kind, sizes)
    drafter_class = EagleDrafter if kind == "eagle3" else ParallelHeadDrafter
    return drafter_class(model, *(t.to(target_dtype) for t in tables), num_candidates=6, **options)


def make_plain(kind, target_dtype, sizes, monkeypatch):
    """The same by torch."""
    with monkeypatch.context() as patch:
        patch.setenv(ISA_VARIABLE, "none")
        return make(kind, target_dtype, sizes)


def leaves_of(inputs, drafter, rng, count):
    """Random leaves of the first block, in no order."""
    request = torch.tensor(rng.integers(len(inputs.request_ids), size=count))
    slot = torch.tensor(rng.integers(drafter.caps.num_slots, size=count))
    return Frontier(request=request, slot=slot, token_ids=torch.tensor(rng.integers(V, size=count)))


def below(frontier, rng, num_slots, count):
    """Random leaves of the block that an expansion of `frontier` gives."""
    node = torch.tensor(rng.integers(frontier.request.numel(), size=count))
    return Frontier(
        request=frontier.request[node], slot=torch.tensor(rng.integers(num_slots, size=count)),
        token_ids=torch.tensor(rng.integers(V, size=count)), node=node,
    )  # fmt: skip


def draft(drafter, inputs, frontiers):
    """Proposals of a round: the first block, and a block below each of these frontiers in turn."""
    found = [drafter.propose(inputs)]
    if drafter.caps.is_reentrant:
        for frontier in frontiers:
            found.append(drafter.expand(inputs, found[-1], frontier))
    return found


def numbers(proposals):
    """What a round proposes, for comparison bit by bit."""
    return [t for p in proposals for t in (p.token_ids, p.logprobs, p.edge_logprobs, p.hidden) if t is not None]


def rounds(drafters, requests, rng, temperature):
    """Inputs of two rounds; the rows before the first are ingested."""
    for r in requests:
        for drafter in drafters:
            drafter.ingest(make_inputs([r], [(0, r.context - 2)]))
        r.done = r.context - 2
    for _ in range(2):
        yield make_inputs(requests, [(r.done, r.context) for r in requests], temperature)
        for r in requests:
            r.done, r.context = r.context, r.context + int(rng.integers(1, 6))


@pytest.mark.parametrize("isa", FOUND)
@KINDS
def test_compiled_drafting_equals_torchs(kind, isa, monkeypatch):
    """Up to the order of sums."""
    for seed in range(8):
        sizes, rng = random_sizes(kind, np.random.default_rng(seed)), np.random.default_rng(seed + 100)
        monkeypatch.setenv(ISA_VARIABLE, isa)
        native, plain = make(kind, torch.float32, sizes), make_plain(kind, torch.float32, sizes, monkeypatch)
        assert native.forward.is_native and not plain.forward.is_native
        requests = new_requests(native, int(rng.integers(1, 5)), rng, scattered=bool(seed % 2))
        plain.alloc(len(requests) * 60)
        for inputs in rounds((native, plain), requests, rng, 0.8 * (seed % 2)):
            first = leaves_of(inputs, native, rng, 7)
            frontiers = [first, below(first, rng, native.caps.num_slots, 9)]
            for got, expected in zip(*(draft(d, inputs, frontiers) for d in (native, plain)), strict=True):
                assert torch.equal(got.token_ids, expected.token_ids)
                for ours, theirs in ((got.logprobs, expected.logprobs), (got.edge_logprobs, expected.edge_logprobs)):
                    assert ours is None or torch.allclose(ours, theirs, atol=TOLERANCE)
        check_pools(kind, native, plain, requests)


@pytest.mark.parametrize("isa", FOUND)
@KINDS
def test_bfloat16_is_no_further_from_float32_than_torchs(kind, isa, monkeypatch):
    """A target in bfloat16 gets compiled drafters in bfloat16."""
    distances = torch.zeros(2)
    for seed in range(8):
        sizes, rng = random_sizes(kind, np.random.default_rng(seed)), np.random.default_rng(seed + 100)
        monkeypatch.setenv(ISA_VARIABLE, isa)
        exact = make_plain(kind, torch.bfloat16, sizes, monkeypatch)
        drafters = make(kind, torch.bfloat16, sizes), make(kind, torch.bfloat16, sizes, dtype=torch.bfloat16)
        assert [d.forward.is_native for d in (*drafters, exact)] == [True, False, False]
        assert [d.kv_dtype for d in (*drafters, exact)] == [torch.bfloat16, torch.bfloat16, torch.float32]
        requests = new_requests(exact, 3, rng, scattered=True)
        for drafter in drafters:
            drafter.alloc(len(requests) * 60)
        for inputs in rounds((exact, *drafters), requests, rng, 0.0):
            expected = exact.propose(inputs).logprobs
            for i, drafter in enumerate(drafters):
                distances[i] += (drafter.propose(inputs).logprobs - expected)[:, :1].norm()
    assert 0 < distances[0] < 1.1 * distances[1]


def check_pools(kind, native, plain, requests):
    """K/V of the text's rows are torch's, apart from the order of an EAGLE-3 key's numbers."""
    rows = torch.cat([r.slots[: r.done] for r in requests])
    got, expected = (d.pool.index_select(0 if kind == "eagle3" else 1, rows).float() for d in (native, plain))
    if kind == "eagle3":
        c = native.config
        got, expected = (x.view(rows.numel(), 2, c.num_kv_heads, c.head_dim) for x in (got, expected))
        got = torch.stack((got[:, 0][..., adjacent_pairs(c.head_dim, got.device)], got[:, 1]), 1)
    assert float((got - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("isa", FOUND)
@DTYPES
@KINDS
def test_a_draft_depends_on_neither_its_batch_nor_the_threads(kind, dtype, isa, monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, isa)
    drafter, rng = make(kind, dtype, WIDE), np.random.default_rng(7)
    requests = new_requests(drafter, 4, rng, scattered=True)
    inputs = make_inputs(requests, [(0, r.context) for r in requests], 0.7)
    first = leaves_of(inputs, drafter, rng, 11)
    frontiers = [first, below(first, rng, drafter.caps.num_slots, 13)]
    together, threads = [], torch.get_num_threads()
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        together.append(draft(drafter, inputs, frontiers))
    torch.set_num_threads(threads)
    for other in together[1:]:
        assert all(map(torch.equal, numbers(other), numbers(together[0])))
    for i, r in enumerate(requests):
        alone, mine, own = make_inputs([r], [(0, r.context)], 0.7), [torch.tensor([i])], []
        for frontier in frontiers if drafter.caps.is_reentrant else ():
            mine.append((frontier.request == i).nonzero()[:, 0])
            node = None if frontier.node is None else torch.searchsorted(mine[-2], frontier.node[mine[-1]])
            own.append(
                Frontier(
                    request=torch.zeros_like(mine[-1]), slot=frontier.slot[mine[-1]],
                    token_ids=frontier.token_ids[mine[-1]], node=node,
                )
            )  # fmt: skip
        own = own[: next((at for at, f in enumerate(own) if f.request.numel() == 0), len(own))]
        for got, whole, rows in zip(draft(drafter, alone, own), together[0], mine, strict=False):
            assert torch.equal(got.token_ids, whole.token_ids[rows]) and torch.equal(got.logprobs, whole.logprobs[rows])
            assert got.hidden is None or torch.equal(got.hidden, whole.hidden[rows])


@KINDS
def test_rounds_may_need_more_rows_than_are_spare(kind, monkeypatch):
    """Blocks are drafted part by part then, and the pool grows by a round's tree rows."""
    rng = np.random.default_rng(2)
    sizes = {"max_depth": 4, "num_slots": 1} if kind == "eagle3" else {"num_slots": 31}
    native = make(kind, torch.float32, sizes)
    plain = make_plain(kind, torch.float32, sizes, monkeypatch)
    requests = new_requests(native, 20, rng, length=100)
    plain.alloc(20 * 100)
    inputs = make_inputs(requests, [(0, r.context) for r in requests])
    frontiers = []
    if kind == "eagle3":
        frontiers = [leaves_of(inputs, native, rng, 300)]
        frontiers.append(below(frontiers[0], rng, 1, 300))
    for _ in range(2):
        with torch.inference_mode():  # as the engine drafts
            pairs = list(zip(*(draft(d, inputs, frontiers) for d in (native, plain)), strict=True))
        for got, expected in pairs:
            assert torch.allclose(got.logprobs, expected.logprobs, atol=TOLERANCE)
    assert (native.pool.shape[0] > 20 * 100 + SPARE_ROWS) == (kind == "eagle3")
    native.load_state(tiny(kind, sizes, seed=1)[0].state_dict())
    assert not native.pool.any(), "what other weights wrote is stale"


@pytest.mark.parametrize("changes", [{"head_dim": 24}, {"hidden_size": 20}])
@KINDS
def test_shapes_that_do_not_fit_draft_by_torch(kind, changes):
    drafter, rng = make(kind, torch.float32, changes), np.random.default_rng(2)
    requests = new_requests(drafter, 2, rng)
    proposal = drafter.propose(make_inputs(requests, [(0, r.context) for r in requests]))
    assert not drafter.forward.is_native and bool(torch.isfinite(proposal.logprobs).all())


@KINDS
def test_a_drafter_in_bfloat16_drafts_by_torch(kind):
    assert not make(kind, torch.bfloat16, {}, dtype=torch.bfloat16).forward.is_native


@KINDS
def test_positions_beyond_the_first_table_draft_as_torch_does(kind, monkeypatch):
    native, plain = make(kind, torch.float32, {}), make_plain(kind, torch.float32, {}, monkeypatch)
    request = Request("r", np.random.default_rng(4), 1300, 1290, list(range(1300)))
    found = []
    for drafter in (native, plain):
        drafter.alloc(1300)
        inputs = make_inputs([request], [(0, 1290)])
        found.append(draft(drafter, inputs, [leaves_of(inputs, drafter, np.random.default_rng(5), 3)]))
    for got, expected in zip(*found, strict=True):
        assert torch.allclose(got.logprobs, expected.logprobs, atol=TOLERANCE)
