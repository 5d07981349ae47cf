"""How is an EAGLE-3 drafter made for a target, trained, updated and judged?"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.adapt.drafter_family import TrainingFamily
from paceline.adapt.drafter_recipe import DrafterRecipe, TargetShape
from paceline.adapt.eagle_loss import EagleLossConfig, training_loss
from paceline.adapt.new_drafter import even_taps, reduce_vocab, target_embedding
from paceline.adapt.target_handle import TargetHandle
from paceline.errors import ConfigError
from paceline.serving.eagle_model import EagleConfig, EagleModel
from paceline.serving.request import RequestTrace

_CALIBRATION = ("log_beta",)


def make_config(target: TargetHandle, shape: TargetShape, recipe: DrafterRecipe) -> EagleConfig:
    """One layer shaped like the target's. recipe: complete. Raises: ConfigError when it wants more layers."""
    if recipe.num_layers != 1:
        raise ConfigError(f"num_layers of an EAGLE-3 drafter must be 1, got {recipe.num_layers}")
    assert recipe.num_slots is not None and isinstance(recipe.loss, EagleLossConfig)
    return EagleConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=target.vocab_size,
        feature_size=target.feature_size,
        embed_size=target.embed_weight.shape[1],
        num_slots=recipe.num_slots,
        num_steps=recipe.loss.num_steps,
        draft_vocab_size=recipe.draft_vocab_size,
        rms_eps=shape.rms_eps,
    )


def prepare(model: EagleModel, traces: Sequence[RequestTrace], target: TargetHandle) -> None:
    """Even out the taps and choose the draft vocabulary, if it is a reduced one."""
    even_taps(model.fc.weight, traces, target)
    reduce_vocab(model, traces)


def update_loss(model: EagleModel, trains_backbone: bool) -> EagleLossConfig:
    """As many steps as the drafter was trained with; every row teaches calibration where rows are cheap."""
    return EagleLossConfig(num_steps=model.config.num_steps, side_share=0.25 if trains_backbone else 1.0)


def held_out_loss(config: EagleLossConfig) -> EagleLossConfig:
    return EagleLossConfig(num_steps=config.num_steps, step_decay=config.step_decay, calibration_weight=0)


FAMILY = TrainingFamily(
    name=EagleModel.drafter_type,
    defaults={"learning_rate": 2e-3, "num_layers": 1, "num_slots": 1, "loss": EagleLossConfig()},
    make_config=make_config,
    prepare=prepare,
    frozen=target_embedding,
    loss=training_loss,
    update_loss=update_loss,
    held_out_loss=held_out_loss,
    arms={"calibration": _CALIBRATION, "head": (*_CALIBRATION, "lm_head.", "final_norm"), "full": None},
)
