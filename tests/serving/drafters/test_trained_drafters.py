"""What drafters with weights share, whatever their family: saving, loading for a target, weights replaced in place, number types."""

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline.errors import DrafterMismatchError
from paceline.serving.drafters.interface import Frontier
from paceline.serving.eagle3.drafter import EagleDrafter
from paceline.serving.loading.families import load_drafter, save_drafter
from paceline.serving.parallel_head.drafter import ParallelHeadDrafter
from paceline.serving.specblock.drafter import SpecBlockDrafter
from tests.helpers.drafters import (
    FEATURES,
    HIDDEN,
    FakeTarget,
    Request,
    V,
    make_inputs,
    tiny_eagle,
    tiny_head,
    tiny_specblock,
)

DRAFTERS = {
    "specblock": SpecBlockDrafter, "eagle3": EagleDrafter, "jetspec": ParallelHeadDrafter, "dflash": ParallelHeadDrafter,
}  # fmt: skip
pytestmark = pytest.mark.parametrize("kind", DRAFTERS)


def tiny(kind, seed=0):
    """A model and the target's tables that it reads."""
    if kind == "specblock":
        model, *tables = tiny_specblock(seed)
    elif kind == "eagle3":
        model, *tables = tiny_eagle(seed, draft_vocab_size=20)
    else:
        model, *tables = tiny_head(kind == "jetspec", seed, edge_rank=2)
    return model, tables


def first_block(drafter, temperature=0.0):
    drafter.alloc(40)
    request = Request("r", np.random.default_rng(4), 40, 20, list(range(40)))
    inputs = make_inputs([request], [(0, 20)], temperature)
    return drafter.propose(inputs), inputs


def test_draft_ids_outside_the_vocabulary_are_refused(kind):
    if kind != "eagle3":
        pytest.skip("its draft vocabulary is the target's here")
    model, tables = tiny(kind)
    drafter = DRAFTERS[kind](model, *tables)
    for wrong in (V, -1):
        state = {**model.state_dict(), "draft_token_ids": torch.full((20,), wrong)}
        with pytest.raises(DrafterMismatchError, match=rf"draft_token_ids must be in \[0, {V}\), got {wrong}..{wrong}"):
            drafter.load_state(state)


def test_a_saved_drafter_loads_for_its_own_target_only(tmp_path, kind):
    model, tables = tiny(kind)
    save_drafter(tmp_path, model, "abc")
    target = FakeTarget(*tables)
    drafter = load_drafter(tmp_path, target, version="v1")
    assert (drafter.version, drafter.caps.name, drafter.config) == ("v1", kind, model.config)
    own = DRAFTERS[kind](model, *tables).forward.weights
    assert all(torch.equal(t, own[name]) for name, t in drafter.forward.weights.items())
    head = tables[-1]
    save_drafter(tmp_path / "half", model, "abc", matrix_dtype=torch.bfloat16)
    assert load_drafter(tmp_path / "half", target).config == model.config
    kept, exact = load_file(tmp_path / "half/drafter.safetensors"), model.state_dict()
    assert {str(t.dtype) for name, t in kept.items() if t.dim() < 2} <= {"torch.float32", "torch.bool", "torch.int64"}
    assert all(torch.allclose(t.to(exact[name].dtype), exact[name], rtol=2**-8, atol=0) for name, t in kept.items())
    assert (tmp_path / "half/drafter.safetensors").stat().st_size < (tmp_path / "drafter.safetensors").stat().st_size
    for changes, message in (
        ({"version": "other"}, "trained for target"),
        ({"vocab_size": V + 1}, "vocabulary"),
        ({"feature_size": FEATURES + 1}, "features"),
        ({"embed_weight": tables[0][:, :-1]}, "target embedding"),
        ({"head_weight": head[:, :-1]}, "target output head"),
    ):
        with pytest.raises(DrafterMismatchError, match=message):
            load_drafter(tmp_path, dataclasses.replace(target, **changes))
    with pytest.raises(DrafterMismatchError, match="must hold"):
        load_drafter(tmp_path / "nowhere", target)
    (tmp_path / "drafter.safetensors").write_bytes(b"damaged")
    with pytest.raises(DrafterMismatchError, match="must hold"):
        load_drafter(tmp_path, target)


def test_new_weights_replace_the_old_in_place_and_wrong_ones_change_nothing(kind):
    (model, tables), (other, _) = tiny(kind), tiny(kind, seed=1)
    with torch.no_grad():
        other.log_beta.copy_(torch.randn_like(other.log_beta) * 0.3)
    drafter = DRAFTERS[kind](model, *tables)
    storage = {name: t.data_ptr() for name, t in drafter.forward.weights.items()}
    before, good = first_block(drafter)[0], other.state_dict()
    for bad in (
        {**good, "surplus": torch.ones(1)},
        {**good, "final_norm": torch.full((HIDDEN,), float("nan"))},
        {**good, "final_norm": torch.ones(HIDDEN + 1)},
        {name: t for name, t in good.items() if name != "final_norm"},
    ):
        with pytest.raises(DrafterMismatchError):
            drafter.load_state(bad)
    assert torch.equal(first_block(drafter)[0].logprobs, before.logprobs)
    drafter.load_state(good)
    assert storage == {name: t.data_ptr() for name, t in drafter.forward.weights.items()}
    got, expected = first_block(drafter)[0], first_block(DRAFTERS[kind](other, *tables))[0]
    assert torch.equal(got.token_ids, expected.token_ids) and torch.equal(got.logprobs, expected.logprobs)


@pytest.mark.parametrize("head_dtype", [None, torch.bfloat16])
def test_bfloat16_drafting_stays_close_to_float32(kind, head_dtype):
    if head_dtype is not None and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this CPU has no bfloat16 products")
    model, tables = tiny_eagle(num_slots=1) if kind == "eagle3" else tiny(kind)
    out = []
    for options in ({}, {"dtype": torch.bfloat16} if head_dtype is None else {"head_dtype": head_dtype}):
        drafter = DRAFTERS[kind](
            model, *(tables if isinstance(tables, list) else [tables]), num_candidates=1, **options
        )
        first, inputs = first_block(drafter)
        out.append(first.logprobs)
        if drafter.caps.is_reentrant:
            leaf = Frontier(request=torch.tensor([0]), slot=torch.tensor([0]), token_ids=torch.tensor([7]))
            out[-1] = torch.stack([first.logprobs, drafter.expand(inputs, first, leaf).logprobs])
    assert torch.allclose(*out, atol=0.3)
