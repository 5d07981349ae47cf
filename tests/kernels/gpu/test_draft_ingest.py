"""Both twins of draft ingest write every layer's K and V of the new rows, and nothing else."""

import pytest
import torch

from paceline.kernels.reference.draft_ingest import draft_ingest as ingest_reference
from paceline.serving.drafters.network import rope_cos_sin
from tests.helpers.launches import launches

pytest.importorskip("triton")
from paceline.kernels.gpu import draft_ingest as module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TWINS = {"reference": ingest_reference, "triton": module.draft_ingest}
# float32: two GEMMs of tens of terms in another order. bfloat16: the result and the projections are stored with 8 bits.
TOLERANCE = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, torch.bfloat16: {"atol": 6e-2, "rtol": 3e-2}}
LAYERS, POOL, HEADS, DIM, FEATURES, HIDDEN, EPS = 3, 24, 2, 16, 40, 24, 1e-6


def _inputs(num_rows, dtype=torch.float32, *, heads=HEADS, dim=DIM, has_norm=True, scale=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g).to(dtype).to(DEVICE)

    cos, sin = rope_cos_sin(torch.arange(64), dim, 1e4)
    return {
        "features": randn(num_rows, FEATURES) * scale,
        "fc": randn(FEATURES, HIDDEN) * FEATURES**-0.5,
        "norm_weight": 1 + 0.1 * randn(HIDDEN),
        "kv_weight": randn(HIDDEN, LAYERS * 2 * heads * dim) * HIDDEN**-0.5,
        "k_norm_weight": 1 + 0.1 * randn(LAYERS, dim) if has_norm else None,
        "cos": cos.to(DEVICE),
        "sin": sin.to(DEVICE),
        "positions": torch.randint(0, 64, (num_rows,), generator=g).to(DEVICE),
        "pool_rows": torch.randperm(POOL, generator=g)[:num_rows].to(DEVICE),
        "pool": torch.full((LAYERS, POOL, 2, heads, dim), float("nan"), dtype=dtype, device=DEVICE),
        "eps": EPS,
    }


def _dense(inputs, layer, row):
    """One row of one layer in float64: (2, heads, dim)."""
    x = inputs["features"][row].double() @ inputs["fc"].double()
    x = x / (x.square().mean() + EPS).sqrt() * inputs["norm_weight"].double()
    heads, dim = inputs["pool"].shape[3:]
    kv = (x @ inputs["kv_weight"].double()).view(LAYERS, 2, heads, dim)[layer].clone()
    for h in range(heads):
        k = kv[0, h]
        if inputs["k_norm_weight"] is not None:
            k = k / (k.square().mean() + EPS).sqrt() * inputs["k_norm_weight"][layer].double()
        position = int(inputs["positions"][row])
        pairs = torch.complex(k[: dim // 2], k[dim // 2 :])
        turn = torch.complex(inputs["cos"][position].double(), inputs["sin"][position].double())
        kv[0, h] = torch.cat(((pairs * turn).real, (pairs * turn).imag))
    return kv


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norm", [True, False])
def test_writes_the_rows_of_a_dense_float64_computation_and_nothing_else(twin, dtype, has_norm):
    inputs = _inputs(5, dtype, has_norm=has_norm)
    inputs["pool_rows"][2] = -1  # padding
    TWINS[twin](**inputs)
    written = [r for r in inputs["pool_rows"].tolist() if r >= 0]
    for row, pool_row in enumerate(inputs["pool_rows"].tolist()):
        for layer in range(LAYERS):
            if pool_row >= 0:
                expected = _dense(inputs, layer, row)
                torch.testing.assert_close(inputs["pool"][layer, pool_row].double(), expected, **TOLERANCE[dtype])
    untouched = [r for r in range(POOL) if r not in written]
    assert inputs["pool"][:, untouched].isnan().all()


@pytest.mark.parametrize("heads, dim", [(1, 8), (3, 12), (2, 64), (5, 2)])
def test_head_counts_and_dims_that_are_no_powers_of_two(heads, dim):
    pair = [_inputs(4, heads=heads, dim=dim, seed=3) for _ in TWINS]
    for twin, inputs in zip(TWINS.values(), pair, strict=True):
        twin(**inputs)
    torch.testing.assert_close(pair[0]["pool"], pair[1]["pool"], equal_nan=True, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e6])
def test_twins_agree_on_extreme_features(scale):
    pair = [_inputs(3, scale=scale) for _ in TWINS]
    for twin, inputs in zip(TWINS.values(), pair, strict=True):
        twin(**inputs)
    assert pair[1]["pool"][:, pair[1]["pool_rows"]].isfinite().all()
    torch.testing.assert_close(pair[0]["pool"], pair[1]["pool"], equal_nan=True, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("twin", TWINS)
def test_a_pool_that_is_a_view_of_a_larger_one(twin):
    inputs = _inputs(2)
    whole = torch.full((LAYERS, POOL, 5, HEADS, DIM), float("nan"), device=DEVICE)
    inputs["pool"] = whole[:, :, 1:3]
    TWINS[twin](**inputs)
    assert whole[:, inputs["pool_rows"], 1:3].isfinite().all()
    assert whole[:, :, [0, 3, 4]].isnan().all()


@pytest.mark.parametrize("twin", TWINS)
def test_no_rows_and_only_padding_write_nothing(twin):
    for num_rows in (0, 3):
        inputs = _inputs(num_rows)
        inputs["pool_rows"].fill_(-1)
        TWINS[twin](**inputs)
        assert inputs["pool"].isnan().all()


def test_the_triton_kernel_runs():
    with launches(module._write_kernel) as ran:
        module.draft_ingest(**_inputs(1))
    assert len(ran.names) == 1


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("pool", lambda t: t.transpose(3, 4), "pool must"),
        ("pool", lambda t: t.double(), "pool must be"),
        ("cos", lambda t: t.bfloat16(), "cos must be torch.float32"),
        ("kv_weight", lambda t: t[:, :-1], r"kv_weight must have shape \(24, 192\)"),
        ("positions", lambda t: t[:-1], r"positions must have shape \(2\)"),
    ],
)
def test_the_launcher_refuses_what_the_kernel_cannot_take(name, change, message):
    inputs = _inputs(2)
    inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=message):
        module.draft_ingest(**inputs)
