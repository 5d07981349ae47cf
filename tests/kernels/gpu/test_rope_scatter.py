"""Head norm, RoPE and K/V write: the reference equals transformers' modules, the Triton twin equals the reference.

Twin tolerance: both compute in float32 and round once, so float32 differs by the order of a sum (1e-6) and 16-bit
results by at most one rounding step.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from paceline.kernels.gpu import rope_scatter
from paceline.kernels.reference import rope_scatter as rope_scatter_ref
from tests.helpers.launches import launches

STEP = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def tables(dim: int, positions: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(positions)[:, None] * 100.0 ** (-torch.arange(dim // 2) / (dim // 2))
    angle = torch.cat((angle, angle), 1)
    return angle.cos(), angle.sin()


def inputs(num_rows, heads=6, kv_heads=2, dim=16, dtype=torch.float32, pool_dtype=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(num_rows, heads, dim, generator=generator).to(dtype)
    key = torch.randn(kv_heads, num_rows, dim, generator=generator).to(dtype).transpose(0, 1)
    value = torch.randn(num_rows, kv_heads, dim, generator=generator).to(dtype)
    pool = torch.full((num_rows + 4, 2, kv_heads, dim), float("nan"), dtype=pool_dtype or dtype)
    rows = torch.randperm(num_rows + 4, generator=generator)[:num_rows]
    positions = torch.randint(0, 50, (num_rows,), generator=generator)
    return [query, key, value, pool, rows, positions, *tables(dim)]


def test_reference_equals_the_modules_of_transformers():
    args = inputs(7)
    query, key, value, pool, rows, positions, cos, sin = args
    norms = [Qwen3RMSNorm(16, eps=1e-5), Qwen3RMSNorm(16, eps=1e-5)]
    for i, norm in enumerate(norms):
        norm.weight.data = torch.rand(16, generator=torch.Generator().manual_seed(i)) + 0.5
    got = rope_scatter_ref.rope_scatter(*args, q_norm=norms[0].weight, k_norm=norms[1].weight, eps=1e-5)
    heads = [norm(x).transpose(0, 1)[None] for norm, x in zip(norms, (query, key), strict=True)]
    expected_query, expected_key = apply_rotary_pos_emb(*heads, cos[positions][None], sin[positions][None])
    torch.testing.assert_close(got, expected_query[0].transpose(0, 1))
    torch.testing.assert_close(pool[rows, 0], expected_key[0].transpose(0, 1))
    assert torch.equal(pool[rows, 1], value)


@pytest.mark.parametrize(
    ("num_rows", "args", "has_norm"),
    [
        (0, {}, True),
        (1, {"heads": 1, "kv_heads": 1}, True),
        (5, {"dtype": torch.bfloat16}, True),
        (5, {"dtype": torch.float16}, False),
        (5, {"dim": 80, "heads": 5, "kv_heads": 5}, True),
        (3, {"dim": 2}, False),
        (9, {"dtype": torch.bfloat16, "pool_dtype": torch.float32}, True),
    ],
)
def test_triton_equals_the_reference_and_writes_no_other_row(device, num_rows, args, has_norm, poisoned_memory):
    args = inputs(num_rows, **args)
    dtype, pool, rows = args[0].dtype, args[3], args[4]
    weight = torch.rand(args[0].shape[2], generator=torch.Generator().manual_seed(3)).to(dtype) + 0.5
    norms = {"q_norm": weight if has_norm else None, "k_norm": weight.flip(0) if has_norm else None}
    moved = [a.to(device) for a in args]
    got = rope_scatter.rope_scatter(*moved, **{k: v if v is None else v.to(device) for k, v in norms.items()})
    expected = rope_scatter_ref.rope_scatter(*args, **norms)
    assert got.dtype == dtype
    torch.testing.assert_close(got.cpu(), expected, atol=STEP[dtype], rtol=STEP[dtype])
    written = moved[3].cpu()
    step = STEP[pool.dtype]
    torch.testing.assert_close(written[rows], pool[rows], atol=step, rtol=step)
    assert torch.equal(written[rows, 1], pool[rows, 1]), "values are not computed with"
    untouched = torch.ones(pool.shape[0], dtype=torch.bool).index_fill(0, rows, False)
    assert written[untouched].isnan().all()


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 16), (torch.bfloat16, 80), (torch.float32, 2)])
def test_neighbours_are_halves_in_another_order(device, dtype, dim, poisoned_memory):
    args = inputs(4, dim=dim, dtype=dtype)
    weight = torch.rand(dim, generator=torch.Generator().manual_seed(5)).to(dtype)
    expected_pool = args[3].clone()
    expected = rope_scatter_ref.rope_scatter(*args[:3], expected_pool, *args[4:], q_norm=weight, k_norm=weight)
    order = torch.arange(dim).view(2, -1).T.flatten()  # element of the halves at each place of the neighbours
    for module in (rope_scatter_ref, rope_scatter):
        moved = [a[..., order].contiguous() if i not in (4, 5) else a for i, a in enumerate(args)]
        moved = [a.to(device) if module is rope_scatter else a for a in moved]
        norm = weight[order].to(moved[0].device)
        got = module.rope_scatter(*moved, q_norm=norm, k_norm=norm, is_adjacent=True)
        torch.testing.assert_close(got.cpu(), expected[..., order], atol=STEP[dtype], rtol=STEP[dtype])
        torch.testing.assert_close(
            moved[3].cpu(), expected_pool[..., order], atol=STEP[dtype], rtol=STEP[dtype], equal_nan=True
        )


def test_negative_rows_are_not_written_but_their_queries_are_rotated(device):
    args = [a.to(device) for a in inputs(3)]
    args[4] = torch.tensor([2, -1, 0]).to(device)
    pools = [args[3].clone(), args[3].clone()]
    results = [
        module.rope_scatter(*args[:3], pool, *args[4:])
        for module, pool in zip((rope_scatter, rope_scatter_ref), pools, strict=True)
    ]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*pools, equal_nan=True)
    assert pools[0][[1, 3, 4, 5, 6]].isnan().all()


def test_the_triton_kernel_ran(device):
    with launches(rope_scatter._rope_kernel) as ran:
        rope_scatter.rope_scatter(*[a.to(device) for a in inputs(2)])
    assert len(ran.names) == 1


def test_wrong_arguments_are_refused(device):
    args = [a.to(device) for a in inputs(2)]
    with pytest.raises(ValueError, match="even"):
        rope_scatter.rope_scatter(args[0][..., :15], *args[1:])
    with pytest.raises(ValueError, match="pool"):
        rope_scatter.rope_scatter(*args[:3], args[3][:, :1], *args[4:])
    with pytest.raises(ValueError, match="cos and sin"):
        rope_scatter.rope_scatter(*args[:7], args[7][:, :4])
    with pytest.raises(ValueError, match="q_norm"):
        rope_scatter.rope_scatter(*args, q_norm=torch.ones(3, device=device))
    with pytest.raises(ValueError, match="int64"):
        rope_scatter.rope_scatter(*args[:4], args[4].int(), *args[5:])
