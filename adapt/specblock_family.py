"""How is a SpecBlock drafter made for a target, trained, updated and judged?"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.adapt.drafter_family import TrainingFamily, leave_out
from paceline.adapt.drafter_recipe import DrafterRecipe, TargetShape
from paceline.adapt.new_drafter import even_taps, reduce_vocab, target_embedding
from paceline.adapt.specblock_loss import LossConfig, training_loss
from paceline.adapt.target_handle import TargetHandle
from paceline.serving.request import RequestTrace
from paceline.serving.specblock_model import SpecBlockConfig, SpecBlockModel

_CALIBRATION = ("log_beta", "rank_in.", "rank_out.")
_PARTS = {
    "shift": "has_shift",
    "inheritance": "inherits_hidden",
    "valid-prefix": "has_valid_prefix",
    "rank-head": "has_rank_head",
}


def make_config(target: TargetHandle, shape: TargetShape, recipe: DrafterRecipe) -> SpecBlockConfig:
    """Layers shaped like the target's. recipe: complete."""
    assert recipe.num_layers is not None and recipe.num_slots is not None
    assert isinstance(recipe.loss, LossConfig)
    whole = SpecBlockConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=target.vocab_size,
        feature_size=target.feature_size,
        embed_size=target.embed_weight.shape[1],
        num_layers=recipe.num_layers,
        num_slots=recipe.num_slots,
        num_blocks=recipe.loss.num_blocks,
        draft_vocab_size=recipe.draft_vocab_size,
        rms_eps=shape.rms_eps,
        rank_hidden=min(256, max(16, shape.hidden_size // 2)),
        rank_topk=min(20, target.vocab_size),
    )
    return leave_out(whole, recipe.without, _PARTS)


def prepare(model: SpecBlockModel, traces: Sequence[RequestTrace], target: TargetHandle) -> None:
    """Even out the taps and choose the draft vocabulary, if it is a reduced one."""
    even_taps(model.cond_proj.weight, traces, target)
    reduce_vocab(model, traces)


def update_loss(model: SpecBlockModel, trains_backbone: bool) -> LossConfig:
    """Without the backbone a row is cheap, so every row teaches calibration; otherwise the default share does."""
    return LossConfig() if trains_backbone else LossConfig(side_share=1.0)


def held_out_loss(config: LossConfig) -> LossConfig:
    return LossConfig(
        num_blocks=config.num_blocks, rank_weight=0, calibration_weight=0, next_block_share=1.0, early_start_share=0
    )


FAMILY = TrainingFamily(
    name=SpecBlockModel.drafter_type,
    defaults={"learning_rate": 2e-3, "num_layers": 2, "num_slots": 4, "loss": LossConfig()},
    make_config=make_config,
    prepare=prepare,
    frozen=target_embedding,
    loss=training_loss,
    update_loss=update_loss,
    held_out_loss=held_out_loss,
    arms={"calibration": _CALIBRATION, "head": (*_CALIBRATION, "lm_head.", "final_norm"), "full": None},
    parts=_PARTS,
)
