"""Drafters through the target's own output head: as drafters whose own head holds those rows, with none of it in their weights."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline.errors import ConfigError, DrafterMismatchError
from paceline.kernels.cpu.library import ISA_VARIABLE
from paceline.serving.drafters.interface import Frontier
from paceline.serving.drafters.network import own_head
from paceline.serving.eagle3.drafter import EagleDrafter
from paceline.serving.loading.families import load_drafter, save_drafter
from paceline.serving.specblock.drafter import SpecBlockDrafter
from tests.helpers.drafters import EMBED, FakeTarget, Request, V, make_inputs, tiny_eagle, tiny_specblock

DRAFTERS = {"specblock": (tiny_specblock, SpecBlockDrafter), "eagle3": (tiny_eagle, EagleDrafter)}
KINDS = pytest.mark.parametrize("kind", DRAFTERS)
SIZES = pytest.mark.parametrize("draft_vocab", [None, 24])
HEAD = torch.randn(V, EMBED, generator=torch.Generator().manual_seed(3)) * 0.5


def twins(kind, draft_vocab, seed=0):
    """A model that shares the target's head, one whose own head holds the same rows, and the target's embedding."""
    model, embed = DRAFTERS[kind][0](seed, draft_vocab_size=draft_vocab, hidden_size=EMBED, shares_head=True)
    ids = torch.arange(V)
    if draft_vocab is not None:
        ids = torch.randperm(V, generator=torch.Generator().manual_seed(seed))[:draft_vocab].sort().values
        model.draft_token_ids.copy_(ids)
        model.log_coverage.fill_(-0.1 - seed)
    own = type(model)(dataclasses.replace(model.config, shares_head=False))
    own.load_state_dict({**model.state_dict(), "lm_head.weight": HEAD[ids]})
    return model, own, embed


def proposals(drafter):
    """Both blocks, or levels, of one round."""
    drafter.alloc(40)
    request = Request("r", np.random.default_rng(4), 40, 20, list(range(40)))
    inputs = make_inputs([request], [(0, 20)], 0.8)
    first = drafter.propose(inputs)
    leaf = Frontier(request=torch.tensor([0, 0]), slot=torch.tensor([0, 1]), token_ids=torch.tensor([7, 9]))
    return first, drafter.expand(inputs, first, leaf)


@pytest.mark.parametrize("isa", [None, "none"], ids=["compiled", "torch"])
@SIZES
@KINDS
def test_it_drafts_as_an_own_head_of_the_targets_rows_also_after_a_swap_to_another_vocabulary(kind, draft_vocab, isa, monkeypatch):  # fmt: skip
    if isa is not None:
        monkeypatch.setenv(ISA_VARIABLE, isa)
    make = DRAFTERS[kind][1]
    (model, own, embed), (next_model, next_own, _) = (twins(kind, draft_vocab, seed) for seed in (0, 1))
    drafters = make(model, embed, HEAD, num_candidates=6), make(own, embed, HEAD, num_candidates=6)
    seen = []
    for states in ((model, own), (next_model, next_own)):
        for drafter, state in zip(drafters, states, strict=True):
            drafter.load_state(state.state_dict())
        for got, expected in zip(*map(proposals, drafters), strict=True):
            assert torch.equal(got.token_ids, expected.token_ids) and torch.equal(got.logprobs, expected.logprobs)
        seen.append(got.logprobs)
    assert not torch.equal(*seen)


@SIZES
@KINDS
def test_its_weights_hold_no_head_and_load_with_the_targets(kind, draft_vocab, tmp_path):
    model, own, embed = twins(kind, draft_vocab)
    for name, saved in (("shared", model), ("own", own)):
        save_drafter(tmp_path / name, saved, "abc")
    sizes = [(tmp_path / name / "drafter.safetensors").stat().st_size for name in ("own", "shared")]
    assert abs(sizes[0] - sizes[1] - model.config.num_draft_ids * EMBED * 4) < 200
    assert "lm_head.weight" not in load_file(tmp_path / "shared" / "drafter.safetensors")
    target = FakeTarget(embed, HEAD)
    got, expected = (proposals(load_drafter(tmp_path / name, target))[0] for name in ("shared", "own"))
    assert torch.equal(got.logprobs, expected.logprobs) and torch.equal(got.token_ids, expected.token_ids)
    drafter = load_drafter(tmp_path / "shared", target)
    with pytest.raises(DrafterMismatchError, match=r"surplus \['lm_head.weight'\]"):
        drafter.load_state(own.state_dict())


@KINDS
def test_drafters_from_before_the_setting_load_as_they_were(kind, tmp_path):
    _, own, embed = twins(kind, 24)
    save_drafter(tmp_path, own, "abc")
    path = tmp_path / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    assert values.pop("shares_head") is False
    path.write_text(json.dumps(values), encoding="utf-8")
    drafter = load_drafter(tmp_path, FakeTarget(embed, HEAD))
    assert drafter.config == own.config
    assert torch.equal(proposals(drafter)[0].logprobs, proposals(DRAFTERS[kind][1](own, embed, HEAD))[0].logprobs)


@KINDS
def test_only_a_drafter_as_wide_as_the_target_can_share_its_head(kind):
    with pytest.raises(ConfigError, match=f"hidden_size must be the target's {EMBED} to share its output head, got 16"):
        DRAFTERS[kind][0](shares_head=True)
    config = DRAFTERS[kind][0](hidden_size=EMBED, shares_head=True)[0].config
    assert own_head(config) is None and own_head(dataclasses.replace(config, shares_head=False)) is not None
