"""The `drafter_type` of a config.json decides which drafter is built; what does not fit is refused by name."""

import resource

import pytest
import torch

from paceline.adapt.families.recipe import DrafterRecipe
from paceline.adapt.families.training import FAMILIES as TRAINING_FAMILIES
from paceline.adapt.families.training import training_family
from paceline.errors import ConfigError, DrafterMismatchError
from paceline.paths import bundled
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.loading.families import (
    FAMILIES,
    build_drafter,
    build_model,
    drafter_family,
    read_drafter_files,
    save_drafter,
)
from paceline.serving.specblock.drafter import SpecBlockDrafter
from tests.helpers.fakes import tiny_target


def test_every_family_can_be_trained_and_served():
    assert {name: family.serving for name, family in TRAINING_FAMILIES.items()} == FAMILIES
    assert all(family.name == name for name, family in FAMILIES.items())


@pytest.mark.parametrize("kind", [None, "eagle9", 7])
def test_an_unknown_drafter_type_is_refused_with_the_known_ones(kind):
    with pytest.raises(DrafterMismatchError, match=r"must be one of .*specblock.*got"):
        build_drafter({"drafter_type": kind, "target_version": "t"}, {}, tiny_target())
    with pytest.raises(ConfigError, match=r"must be one of .*specblock.*got"):
        training_family(str(kind))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_settings_that_are_missing_or_not_allowed_are_refused(name):
    with pytest.raises(DrafterMismatchError, match="hidden_size"):
        build_model({"drafter_type": name}, {})


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_recipe_is_completed_by_its_family_and_keeps_what_it_says(name):
    recipe = training_family(name).complete(DrafterRecipe(drafter=name, learning_rate=1e-5))
    assert recipe.learning_rate == 1e-5 and recipe.drafter == name
    assert None not in (recipe.num_layers, recipe.num_slots, recipe.loss)


def test_bundled_weights_load_as_a_specblock_drafter_bit_for_bit():
    config, state = read_drafter_files(bundled("specblock"))
    model = build_model(config, state)
    assert drafter_family(config["drafter_type"]).model is type(model)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in state.items())

    class Target:
        version, vocab_size, feature_size, device = config["target_version"], 4096, 384, "cpu"
        embed_weight = head_weight = torch.zeros(4096, 128)

    drafter = build_drafter(config, state, Target())
    assert isinstance(drafter, SpecBlockDrafter)
    again = SpecBlockDrafter(model, Target.embed_weight, head_dtype=drafter.forward.head_dtype)
    names = [k for k, t in again.forward.weights.items() if t.layout == torch.strided and k != "lm_head"]
    assert len(names) > 10 and all(torch.equal(drafter.forward.weights[k], again.forward.weights[k]) for k in names)


def test_a_write_that_fails_leaves_the_drafter_that_was_there(tmp_path):
    config, state = read_drafter_files(bundled("jetspec"))
    save_drafter(tmp_path, build_model(config, state), "t")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))  # a write beyond it fails, as one to a full disk does
    try:
        with pytest.raises(OSError):
            save_drafter(tmp_path, build_model(config, state), "another")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_drafter_files(tmp_path)[0]["target_version"] == "t"


def test_weights_of_another_family_are_refused_and_change_nothing():
    target = tiny_target()
    sizes = {
        "hidden_size": target.hidden_size, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
        "vocab_size": target.vocab_size, "feature_size": target.feature_size, "embed_size": target.hidden_size,
    }  # fmt: skip
    states = {
        name: f.model(f.config.from_dict({"drafter_type": name, **sizes})).state_dict() for name, f in FAMILIES.items()
    }
    for name in FAMILIES:
        config = {"drafter_type": name, "target_version": target.version, **sizes}
        drafter = build_drafter(config, states[name], target)
        slots = DrafterSlots(drafter, "v0", spawn=lambda d=drafter: d)
        for other, state in states.items():
            if other != name:
                with pytest.raises(DrafterMismatchError, match=r"missing|is_causal"):
                    build_drafter(config, state, target)
                with pytest.raises(DrafterMismatchError, match=r"missing|is_causal"):
                    slots.stage("v1", state)
