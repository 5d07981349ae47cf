"""Training through the target's output head: the loss of an own head that holds its rows, without a weight to learn there."""

import dataclasses

import pytest
import torch

from paceline.adapt.families.recipe import DrafterRecipe
from paceline.adapt.families.row_batch import collate
from paceline.adapt.families.target_handle import TargetTables
from paceline.adapt.families.training import training_family
from paceline.adapt.online.learner import select_parameters
from paceline.contracts import ArmSpec
from paceline.errors import ConfigError
from tests.helpers.drafters import EMBED, V, logged_text, tiny_eagle, tiny_specblock

MODELS = {"specblock": tiny_specblock, "eagle3": tiny_eagle}
KINDS = pytest.mark.parametrize("kind", MODELS)
HEAD = torch.randn(V, EMBED, generator=torch.Generator().manual_seed(3)) * 0.5


@pytest.mark.parametrize("draft_vocab", [None, 24])
@KINDS
def test_loss_and_gradients_are_those_of_an_own_head_of_the_same_rows(kind, draft_vocab):
    model, embed = MODELS[kind](draft_vocab_size=draft_vocab, hidden_size=EMBED, shares_head=True)
    own = type(model)(dataclasses.replace(model.config, shares_head=False))
    ids = torch.arange(V)
    if draft_vocab is not None:
        ids = ids[10 : 10 + draft_vocab]
        model.draft_token_ids.copy_(ids)
    own.load_state_dict({**model.state_dict(), "lm_head.weight": HEAD[ids]})
    family, batch = training_family(kind), collate([logged_text(i, 20, 4, temperature=0.4 * i) for i in range(3)])
    tables, config = TargetTables(embed, HEAD.to(torch.float64)), family.complete(DrafterRecipe()).loss
    gradients = []
    for one in (model, own):
        loss, report = family.loss(one, batch, tables, config, torch.Generator().manual_seed(0))
        loss.backward()
        gradients.append({n: p.grad for n, p in one.named_parameters() if n != "lm_head.weight"})
        gradients[-1] |= {"loss": loss.detach(), **report}
    assert gradients[0].keys() == gradients[1].keys()
    for name, value in gradients[0].items():
        assert (value is None and gradients[1][name] is None) or torch.equal(value, gradients[1][name]), name
    assert tables.embed is embed and not HEAD.requires_grad


def test_rows_follow_the_drafter_that_asks():
    embed = torch.randn(V, EMBED)
    tables = TargetTables(embed, HEAD)
    models = [tiny_eagle(draft_vocab_size=size, hidden_size=EMBED, shares_head=True)[0] for size in (20, 30)]
    models[1].draft_token_ids += 7
    for model in (*models, models[0]):
        assert torch.equal(tables.head_of(model), HEAD[model.draft_token_ids])
    assert torch.equal(TargetTables(embed).head_of(models[1]), embed[models[1].draft_token_ids])


@KINDS
def test_the_head_arm_learns_what_is_left_of_the_head(kind):
    model, _ = MODELS[kind](hidden_size=EMBED, shares_head=True)
    names = select_parameters(model, ArmSpec(name="a", parameters="head", num_rows=1))
    assert "final_norm" in names and "log_beta" in names and not any(n.startswith("lm_head") for n in names)


@pytest.mark.parametrize("name", ["jetspec", "dflash"])
def test_heads_that_always_share_refuse_the_option(name):
    with pytest.raises(ConfigError, match=f"share-head must be left out for {name} drafters"):
        training_family(name).complete(DrafterRecipe(drafter=name, shares_head=True))
