"""Triton tree attention equals a dense float64 softmax, whatever unused memory holds and however batches are padded.

Tolerances, as a share of the largest output: float32 1e-4 (sums in another order, log2 scores; most cases reach 1e-6);
bfloat16 1e-2 and float16 2e-3 (weights and result are stored with 8 and 11 bits).
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from paceline.kernels.dispatch import select_kernels
from paceline.kernels.gpu import tree_attention as module
from paceline.kernels.gpu.tree_attention import TilePlan, plan_attention
from tests.helpers.launches import launches

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
TREE = [-1, 0, 0, 1, 1, 2]
CHAIN = [-1, 0, 1, 2, 3]


def ancestor_matrix(trees: list[list[int]], width: int) -> torch.Tensor:
    rows = []
    for parents in trees:
        own = torch.zeros(len(parents), width, dtype=torch.bool)
        own[:, len(parents) :] = True  # columns past the request's rows mean nothing
        for i, parent in enumerate(parents):
            if parent >= 0:
                own[i] = own[parent]
            own[i, i] = True
        rows.append(own)
    return torch.cat(rows)


class Case:
    """A batch over a shuffled pool whose unused rows are NaN; the table's unused entries point past the pool's end."""

    def __init__(
        self, contexts, trees, *, heads=4, kv_heads=2, dim=16, dtype=torch.float32, is_causal=False, padding=0,
        spare=3, scale=0.3, loud=1.0, seed=0, pool_dtype=None,
    ):  # fmt: skip
        counts = [len(t) for t in trees]
        used, num_rows = sum(contexts) + sum(counts), sum(counts)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(used + 7, generator=generator)
        pool_dtype = pool_dtype or dtype
        self.pool = torch.full((used + 7, 2, kv_heads, dim), float("nan"), dtype=pool_dtype)
        self.pool[order[:used]] = torch.randn(used, 2, kv_heads, dim, generator=generator).to(pool_dtype)
        table = torch.full((len(trees), max([0, *contexts]) + spare), 2**40)
        out_rows, at = [], 0
        for b, (context, count) in enumerate(zip(contexts, counts, strict=True)):
            table[b, :context] = order[at : at + context]
            out_rows.append(order[at + context : at + context + count])
            at += context + count
        out_rows.append(torch.full((padding,), 2**40))
        query = torch.randn(num_rows + padding, heads, dim, generator=generator).to(dtype) * loud
        query[num_rows:] = float("nan")
        width = max([1, *counts]) + 2
        ancestors = None
        if not is_causal:
            padding_bits = torch.ones(padding, width, dtype=torch.bool)
            ancestors = torch.cat((ancestor_matrix(trees, width), padding_bits)) if num_rows else padding_bits
        self.query, self.scale, self.counts, self.contexts, self.dtype = query, scale, counts, contexts, dtype
        self.inputs = {
            "cu_rows": torch.tensor([0, *counts]).cumsum(0),
            "context_lens": torch.tensor(contexts, dtype=torch.int64),
            "slot_table": table,
            "out_rows": torch.cat(out_rows),
            "ancestors": ancestors,
        }

    def run(self, device, kernels=None, num_splits=None):
        kernels = kernels or select_kernels(device, "triton")
        inputs = {k: v if v is None else v.to(device) for k, v in self.inputs.items()}
        groups = self.query.shape[1] // self.pool.shape[2]
        plan = kernels.plan_attention(**inputs, num_groups=groups, dtype=self.dtype)
        if num_splits is not None:
            plan = dataclasses.replace(plan, num_splits=num_splits)
        return kernels.tree_attention(self.query.to(device), self.pool.to(device), plan, self.scale).cpu()

    def expected(self) -> torch.Tensor:
        out, at = torch.zeros(self.query.shape, dtype=torch.float64), 0
        for b, (context, count) in enumerate(zip(self.contexts, self.counts, strict=True)):
            own = self.inputs["out_rows"][at : at + count]
            kv = self.pool[torch.cat((self.inputs["slot_table"][b, :context], own))].double()
            kv = kv.repeat_interleave(self.query.shape[1] // kv.shape[2], 2)  # (C, 2, H, Dh)
            if self.inputs["ancestors"] is None:
                seen = torch.ones(count, count, dtype=torch.bool).tril()
            else:
                seen = self.inputs["ancestors"][at : at + count, :count]
            seen = torch.cat((torch.ones(count, context, dtype=torch.bool), seen), 1)
            scores = torch.einsum("nhd,chd->hnc", self.query[at : at + count].double(), kv[:, 0]) * self.scale
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[at : at + count] = torch.einsum("hnc,chd->nhd", weights, kv[:, 1])
            at += count
        return out

    def check(self, device, **args):
        got, expected = self.run(device, **args), self.expected()
        assert got.dtype == self.dtype
        assert torch.isfinite(got).all()
        error = (got.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-6)
        assert error <= TOLERANCE[self.dtype], float(error)
        assert not got[sum(self.counts) :].any(), "padding rows are zero"


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("context", [0, 1, 63, 64, 65, 257])
def test_every_context_length_around_the_block_sizes(device, context, num_splits, poisoned_memory):
    Case([context], [TREE]).check(device, num_splits=num_splits)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_ragged_trees_with_empty_requests_and_padding_rows(device, is_causal, num_splits, poisoned_memory):
    case = Case([0, 130, 7, 40, 0], [TREE, [-1], [], CHAIN, []], padding=5, is_causal=is_causal)
    case.check(device, num_splits=num_splits)


SHAPES = {
    "one row, one head, no context": ([0], [[-1]], {"heads": 1, "kv_heads": 1}),
    "one row a request": ([9, 30], [[-1], [-1]], {}),
    "three query heads a KV head": ([21], [TREE], {"heads": 6, "kv_heads": 2}),
    "head dim 80": ([33], [CHAIN], {"dim": 80, "heads": 2, "kv_heads": 1}),
    "head dim 96": ([33], [CHAIN], {"dim": 96, "heads": 2, "kv_heads": 1}),
    "head dim 256": ([33], [CHAIN], {"dim": 256, "heads": 2, "kv_heads": 1}),
    "head dim below 16": ([33], [CHAIN], {"dim": 8}),
    "tree of several words and tiles": ([5], [[-1, *range(39), *range(30)]], {"heads": 2, "kv_heads": 1}),
    "prefill of several tiles": ([5], [[-1] * 70], {"heads": 2, "kv_heads": 1, "is_causal": True}),
    "table no wider than the contexts": ([17, 3], [TREE, CHAIN], {"spare": 0}),
    "table without columns": ([0, 0], [TREE, CHAIN], {"spare": 0}),
    "only padding rows": ([0], [[]], {"padding": 3}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(device, name, poisoned_memory):
    contexts, trees, args = SHAPES[name]
    Case(contexts, trees, **args).check(device)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_types(device, dtype, num_splits, poisoned_memory):
    Case([200, 3], [TREE, CHAIN], dtype=dtype, padding=2).check(device, num_splits=num_splits)


def test_queries_and_pool_of_different_types(device):
    Case([20, 3], [TREE, CHAIN], pool_dtype=torch.bfloat16).check(device)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_extreme_logits_stay_finite(device, num_splits):
    """Scores up to about 1e4: exp overflows unless the peak is subtracted, in every part and in the merge."""
    case = Case([150], [TREE], loud=5e3, scale=1.0)
    scores = torch.einsum(
        "nhd,rd->nhr", case.query.double(), case.pool[case.inputs["slot_table"][0, :150], 0, 0].double()
    )
    assert scores.abs().max() > 1e4
    case.check(device, num_splits=num_splits)


def test_extremely_equal_logits_average(device):
    """A part whose scores lie 1e4 below another's adds exactly nothing; equal ones weigh the same."""
    case = Case([140], [[-1]], heads=1, kv_heads=1, scale=1.0)
    rows = case.inputs["slot_table"][0, :140]
    case.pool[:, 0] = 0.0
    case.pool[rows[:128], 0, 0, 0] = -1e4
    case.query[:] = 0.0
    case.query[0, 0, 0] = 1.0
    seen = torch.cat((rows[128:], case.inputs["out_rows"]))
    got = case.run(device, num_splits=2)[0, 0]
    torch.testing.assert_close(got, case.pool[seen, 1, 0].mean(0), atol=1e-6, rtol=1e-5)


def test_no_rows_give_no_output(device):
    assert Case([4], [[]]).run(device).shape == (0, 4, 16)


def test_strided_queries_as_transformers_hands_them_over(device, kernels):
    case = Case([20], [TREE])
    query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not query.is_contiguous()
    expected = case.run(device)
    case.query = query
    assert torch.equal(case.run(device), expected)


def test_the_triton_kernels_ran(device):
    case = Case([300], [TREE])
    for num_splits, expected in ((2, ["_context_kernel", "_own_kernel"]), (1, ["_own_kernel"])):
        with launches(module._context_kernel, module._own_kernel) as ran:
            case.run(device, num_splits=num_splits)
        assert ran.names == expected


def test_grid_follows_from_shapes_and_every_row_has_a_tile(device):
    """The number of tiles is the same for every batch of the same shapes; used tiles cover each folded row once."""
    groups, num_rows = 3, 64
    sizes = set()
    for counts in ([64, 0, 0], [1, 1, 62], [20, 21, 22], [0, 0, 0]):
        plan = plan_attention(
            cu_rows=torch.tensor([0, *counts]).cumsum(0).to(device),
            context_lens=torch.tensor([1, 2, 9]).to(device),
            slot_table=torch.zeros(3, 4, dtype=torch.int64, device=device),
            out_rows=torch.zeros(num_rows, dtype=torch.int64, device=device),
            ancestors=None,
            num_groups=groups,
            dtype=torch.float32,
        )
        assert isinstance(plan, TilePlan)
        sizes.add(plan.tiles.shape[0])
        covered = torch.zeros(num_rows * groups, dtype=torch.int64)
        for request, start, first_row, count, context in plan.tiles.tolist():
            if count == 0:
                continue
            assert context == ([1, 2, 4][request] if request >= 0 else 0), "never past the table's end"
            covered[first_row * groups + start : first_row * groups + min(start + plan.block_m, count * groups)] += 1
        assert (covered == 1).all()
    assert len(sizes) == 1


@pytest.mark.parametrize("width", [1, 31, 32, 33, 70])
def test_ancestor_words_hold_every_bit(device, width):
    ancestors = torch.rand(37, width, generator=torch.Generator().manual_seed(width)) < 0.5
    plan = plan_attention(
        cu_rows=torch.tensor([0, 37]).to(device),
        context_lens=torch.tensor([0]).to(device),
        slot_table=torch.zeros(1, 0, dtype=torch.int64, device=device),
        out_rows=torch.zeros(37, dtype=torch.int64, device=device),
        ancestors=ancestors.to(device),
        num_groups=1,
        dtype=torch.float32,
    )
    bits = (plan.words.cpu()[:, :, None] >> torch.arange(32)) & 1
    assert torch.equal(bits.flatten(1)[:, :width].bool(), ancestors)
    assert not bits.flatten(1)[:, width:].any()


def test_splits_fill_the_device_and_never_cut_below_a_useful_part():
    assert module.choose_num_splits(1, 8192, 132) == 64
    assert module.choose_num_splits(16, 8192, 132) == 16
    assert module.choose_num_splits(16, 1000, 132) == 8
    assert module.choose_num_splits(1000, 8192, 132) == 1
    assert module.choose_num_splits(1, 0, 132) == 1


def test_wrong_arguments_are_refused(device):
    case = Case([4], [TREE])
    inputs = {k: v.to(device) for k, v in case.inputs.items()}
    plan = plan_attention(**inputs, num_groups=2, dtype=torch.float32)
    query, pool = case.query.to(device), case.pool.to(device)
    with pytest.raises(ValueError, match="cu_rows"):
        plan_attention(**{**inputs, "cu_rows": inputs["cu_rows"][:1]}, num_groups=2, dtype=torch.float32)
    with pytest.raises(ValueError, match="ancestors"):
        plan_attention(**{**inputs, "ancestors": inputs["ancestors"].float()}, num_groups=2, dtype=torch.float32)
    with pytest.raises(ValueError, match="int64"):
        plan_attention(**{**inputs, "out_rows": inputs["out_rows"].int()}, num_groups=2, dtype=torch.float32)
    with pytest.raises(ValueError, match="rows"):
        module.tree_attention(query[:3], pool, plan, 1.0)
    with pytest.raises(ValueError, match="stride"):
        module.tree_attention(query.repeat(1, 1, 2)[..., ::2], pool, plan, 1.0)
    with pytest.raises(ValueError, match="float32"):
        module.tree_attention(query.double(), pool, plan, 1.0)
    with pytest.raises(ValueError, match="must be on"):
        module.tree_attention(query, pool.to("meta"), plan, 1.0)
