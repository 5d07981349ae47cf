"""Both twins of slot attention equal a dense float64 softmax."""

import pytest
import torch

from paceline.kernels.reference.slot_attention import slot_attention as attend_reference
from tests.helpers.launches import launches

pytest.importorskip("triton")
from paceline.kernels.gpu import slot_attention as module
from paceline.kernels.gpu.launch import is_interpreted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TWINS = {"reference": attend_reference, "triton": module.slot_attention}
# float32: sums in another order. bfloat16: weights and result are stored with 8 bits.
TOLERANCE = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, torch.bfloat16: {"atol": 3e-2, "rtol": 2e-2}}
K, HEADS, KV_HEADS, DIM = 4, 4, 2, 16


def _inputs(context_rows, own_slots, *, dtype=torch.float32, slots=K, heads=HEADS, kv_heads=KV_HEADS, dim=DIM, table_length=None, seed=0):  # fmt: skip
    """Requests with their rows at shuffled places of a pool whose other rows are NaN."""
    g = torch.Generator().manual_seed(seed)
    context_rows, own_slots = torch.tensor(context_rows), torch.tensor(own_slots)
    batch, blocks = context_rows.shape
    most = [int((n + (s > 0)).max().clamp(min=0)) for n, s in zip(context_rows, own_slots, strict=True)]
    length = table_length or max([1, *most])
    size = sum(most) + 3
    width = 2 * kv_heads * dim
    order = torch.randperm(size, generator=g)
    pool = torch.full((size, slots, width), float("nan"))
    table, at = torch.full((batch, length), size - 1), 0
    table[:] = order[-1]  # a poisoned row
    for b, n in enumerate(most):
        table[b, :n] = order[at : at + n]
        pool[order[at : at + n]] = torch.randn(n, slots, width, generator=g)
        at += n
    tensors = {
        "query": torch.randn(batch, blocks, slots, heads, dim, generator=g).to(dtype),
        "current": torch.randn(batch, blocks, slots, width, generator=g).to(dtype),
        "pool": pool.to(dtype),
        "slot_table": table,
        "context_rows": context_rows,
        "own_slots": own_slots,
    }
    return {name: t.to(DEVICE) for name, t in tensors.items()} | {"scale": dim**-0.5}


def _dense(inputs):
    """One slot, one head at a time, in float64."""
    query, pool, table = inputs["query"], inputs["pool"], inputs["slot_table"]
    batch, blocks, slots, heads, dim = query.shape
    kv_heads = pool.shape[2] // (2 * dim)
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    for b in range(batch):
        for f in range(blocks):
            rows = int(inputs["context_rows"][b, f])
            if rows < 0:
                continue
            places = [(table[b, i], s) for i in range(rows) for s in range(slots)]
            places += [(table[b, rows], s) for s in range(int(inputs["own_slots"][b, f]))]
            seen = [pool[r, s] for r, s in places]
            for k in range(slots):
                kv = torch.stack(seen + [inputs["current"][b, f, i] for i in range(k + 1)]).double()
                for h in range(heads):
                    group = h * kv_heads // heads
                    keys = kv[:, group * dim : (group + 1) * dim]
                    values = kv[:, (kv_heads + group) * dim : (kv_heads + group + 1) * dim]
                    weights = torch.softmax(keys @ query[b, f, k, h].double() * inputs["scale"], 0)
                    out[b, f, k, h] = weights @ values
    return out


CASES = {
    "nothing committed": {"context_rows": [[0]], "own_slots": [[0]]},
    "own row only": {"context_rows": [[0]], "own_slots": [[3]]},
    "block 1 of one row": {"context_rows": [[11]], "own_slots": [[0]]},
    "leaves of one request": {"context_rows": [[9, 9, 9, 9, 9]], "own_slots": [[1, 2, 3, 4, 4]]},
    "ragged with padding": {
        "context_rows": [[20, 20, -1], [-1, -1, -1], [3, 4, 5]], "own_slots": [[1, 4, 0], [0, 0, 0], [0, 0, 0]]
    },
    "multi-head": {"context_rows": [[7, 2]], "own_slots": [[2, 0]], "heads": 3, "kv_heads": 3},
    "one KV head, odd sizes": {
        "context_rows": [[17, 6]], "own_slots": [[2, 1]], "heads": 6, "kv_heads": 1, "dim": 24, "slots": 3
    },
    "one slot": {"context_rows": [[33, 30]], "own_slots": [[0, 1]], "slots": 1},
}  # fmt: skip


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_equals_dense_softmax_and_ignores_unused_rows(twin, dtype, name):
    inputs = _inputs(dtype=dtype, **CASES[name])
    torch.testing.assert_close(TWINS[twin](**inputs).double(), _dense(inputs), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_contexts_are_split_and_merged(dtype):
    # The second request has fewer keys than there are splits, so that some splits of it see none.
    inputs = _inputs([[150, 149], [0, 1]], [[3, 0], [0, 2]], dtype=dtype, heads=2, kv_heads=1, table_length=400)
    with launches(module._partial_kernel) as ran:
        found = module.slot_attention(**inputs)
    assert ran.arguments[0]["num_splits"] > 2
    torch.testing.assert_close(found.double(), _dense(inputs), **TOLERANCE[dtype])


def test_extreme_scores_give_no_nan():
    inputs = _inputs([[12, 12]], [[1, 3]])
    inputs["query"] *= 1e4
    found = module.slot_attention(**inputs)
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), _dense(inputs), atol=1e-2, rtol=1e-2)  # scores of 1e5 in float32


def test_query_and_current_may_be_views_of_one_projection():
    inputs = _inputs([[5, 2]], [[1, 0]])
    expected = module.slot_attention(**inputs)
    qkv = torch.cat((inputs["query"].flatten(3), inputs["current"]), dim=3)
    inputs["query"] = qkv[..., : HEADS * DIM].unflatten(3, (HEADS, DIM))
    inputs["current"] = qkv[..., HEADS * DIM :]
    assert not inputs["query"].is_contiguous()
    assert torch.equal(module.slot_attention(**inputs), expected)


def test_the_triton_kernels_run_and_fill_poisoned_buffers(poisoned_memory):
    inputs = _inputs([[20, 20, -1], [-1, 3, 4]], [[1, 4, 0], [0, 2, 0]])
    expected = _dense(inputs)
    with launches(module._partial_kernel, module._merge_kernel) as ran:
        found = module.slot_attention(**inputs)
    assert ran.names == ["_partial_kernel", "_merge_kernel"]
    torch.testing.assert_close(found.double(), expected, **TOLERANCE[torch.float32])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or is_interpreted(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_call_replays_on_new_lengths(dtype):
    inputs = _inputs([[500, 499], [30, -1]], [[3, 0], [1, 0]], dtype=dtype, heads=32, kv_heads=8, dim=128)
    inputs["pool"] = torch.nan_to_num(inputs["pool"])
    module.slot_attention(**inputs)  # compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = module.slot_attention(**inputs)
    for rows, own in (([[7, 6], [5, 5]], [[1, 0], [4, 2]]), ([[0, -1], [400, 3]], [[0, 0], [0, 4]])):
        inputs["context_rows"].copy_(torch.tensor(rows))
        inputs["own_slots"].copy_(torch.tensor(own))
        graph.replay()
        torch.testing.assert_close(found.double(), attend_reference(**inputs).double(), **TOLERANCE[dtype])


@pytest.mark.parametrize("twin", TWINS)
def test_no_requests_and_no_blocks(twin):
    inputs = _inputs([[3]], [[0]])
    for name in ("query", "current", "slot_table", "context_rows", "own_slots"):
        inputs[name] = inputs[name][:0]
    assert TWINS[twin](**inputs).shape == (0, 1, K, HEADS, DIM)


def test_splits_follow_from_shapes():
    assert module.num_splits(1, 131072, 132) == 64
    assert module.num_splits(8, 131072, 132) == 33
    assert module.num_splits(512, 131072, 132) == 1
    assert module.num_splits(8, 600, 132) == 2
    assert module.num_splits(8, 0, 132) == 1


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("pool", lambda t: t[:, :, :-1], "pool must hold keys and values"),
        ("pool", lambda t: t.bfloat16(), "pool must be torch.float32"),
        ("pool", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "pool must have stride 1"),
        ("current", lambda t: t[:, :, :-1], "current must have shape"),
        ("own_slots", lambda t: t.int(), "own_slots must be torch.int64"),
    ],
)
def test_the_launcher_refuses_what_the_kernel_cannot_take(name, change, message):
    inputs = _inputs([[3, 4]], [[0, 1]])
    inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=message):
        module.slot_attention(**inputs)
