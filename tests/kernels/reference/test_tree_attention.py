"""Tree attention over a paged pool equals a dense float64 softmax with an explicit mask."""

import pytest
import torch

from paceline.kernels.reference.tree_attention import plan_attention, tree_attention

HEADS, KV_HEADS, DIM, ROWS = 6, 2, 8, 96


def _ancestors(parents_of: list[list[int]], width: int) -> torch.Tensor:
    rows = []
    for parents in parents_of:
        own = torch.zeros(len(parents), width, dtype=torch.bool)
        for i, parent in enumerate(parents):
            if parent >= 0:
                own[i] = own[parent]
            own[i, i] = True
        rows.append(own)
    return torch.cat(rows)


def _dense(query, pool, contexts, counts, table, out_rows, ancestors):
    """One request, one row, one head at a time, in float64."""
    out, at = torch.empty_like(query, dtype=torch.float64), 0
    for b, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        for i in range(count):
            own = ancestors[at + i, :count] if ancestors is not None else torch.arange(count) <= i
            rows = torch.cat((table[b, :context], out_rows[at : at + count][own]))
            for h in range(HEADS):
                kv = pool[rows, :, h * KV_HEADS // HEADS].double()
                weights = torch.softmax(kv[:, 0] @ query[at + i, h].double() * 0.3, 0)
                out[at + i, h] = weights @ kv[:, 1]
        at += count
    return out


CASES = {
    "one row, no context": ([0], [[-1]]),
    "one row": ([17], [[-1]]),
    "tree, no context": ([0], [[-1, 0, 0, 1, 1, 2]]),
    "tree": ([23], [[-1, 0, 0, 1, 1, 2]]),
    "equal trees": ([5, 9], [[-1, 0, 0], [-1, 0, 1]]),
    "ragged trees": ([0, 31, 7], [[-1, 0, 0, 1], [-1], [-1, 0]]),
    "plain batch": ([4, 4, 4], [[-1], [-1], [-1]]),
    "plain ragged batch": ([1, 12, 3], [[-1], [-1], [-1]]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_dense_softmax_and_ignores_unused_rows(name, is_causal, in_order, dtype):
    contexts, trees = CASES[name]
    counts = [len(t) for t in trees]
    generator = torch.Generator().manual_seed(0)
    order = torch.arange(ROWS) if in_order else torch.randperm(ROWS, generator=generator)
    pool = torch.full((ROWS, 2, KV_HEADS, DIM), float("nan"), dtype=dtype)  # poisoned
    table = torch.full((len(trees), max(contexts)), ROWS - 1)
    out_rows, at = [], 0
    for b, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        table[b, :context] = order[at : at + context]
        out_rows.append(order[at + context : at + context + count])
        at += context + count
    pool[order[:at]] = torch.randn(at, 2, KV_HEADS, DIM, generator=generator).to(dtype)
    out_rows = torch.cat(out_rows)
    query = torch.randn(sum(counts), HEADS, DIM, generator=generator).to(dtype)
    ancestors = None if is_causal else _ancestors(trees, max(counts) + 1)
    plan = plan_attention(
        cu_rows=torch.tensor([0, *counts]).cumsum(0),
        context_lens=torch.tensor(contexts),
        slot_table=table,
        out_rows=out_rows,
        ancestors=ancestors,
        num_groups=HEADS // KV_HEADS,
        dtype=dtype,
    )
    got = tree_attention(query, pool, plan, 0.3)
    expected = _dense(query, pool, contexts, counts, table, out_rows, ancestors)
    # bfloat16: the result itself is stored with 8 bits.
    torch.testing.assert_close(got.double(), expected, atol=1e-5 if dtype == torch.float32 else 3e-2, rtol=1e-5)


def test_rows_in_order_are_read_as_a_slice():
    plan = plan_attention(
        cu_rows=torch.tensor([0, 2]),
        context_lens=torch.tensor([3]),
        slot_table=torch.tensor([[4, 5, 6]]),
        out_rows=torch.tensor([7, 8]),
        ancestors=None,
        num_groups=1,
        dtype=torch.float32,
    )
    assert plan.key_slice == (4, 9)
    assert plan.key_rows is None
