"""How is a JetSpec or a DFlash drafter made for a target, trained, updated and judged?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.adapt.drafter_family import TrainingFamily
from paceline.adapt.drafter_recipe import DrafterRecipe, TargetShape
from paceline.adapt.new_drafter import even_taps
from paceline.adapt.parallel_head_loss import (
    DFLASH_DECAY_SHARE,
    ParallelLossConfig,
    TargetTables,
    parallel_training_loss,
)
from paceline.adapt.target_handle import TargetHandle
from paceline.serving.parallel_head_model import DRAFTER_TYPES, ParallelHeadConfig, ParallelHeadModel
from paceline.serving.request import RequestTrace


def prepare(model: ParallelHeadModel, traces: Sequence[RequestTrace], target: TargetHandle) -> None:
    """Even out the taps."""
    even_taps(model.cond_proj.weight, traces, target)


def held_out_loss(config: ParallelLossConfig) -> ParallelLossConfig:
    return dataclasses.replace(config, num_anchors=None, edge_share=1.0, calibration_weight=0.0)


def _family(name: str, loss: ParallelLossConfig) -> TrainingFamily:
    def make_config(target: TargetHandle, shape: TargetShape, recipe: DrafterRecipe) -> ParallelHeadConfig:
        assert recipe.num_layers is not None and recipe.num_slots is not None
        return ParallelHeadConfig(
            is_causal=DRAFTER_TYPES[name],
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            vocab_size=target.vocab_size,
            feature_size=target.feature_size,
            num_layers=recipe.num_layers,
            num_slots=recipe.num_slots,
            edge_rank=recipe.edge_rank or 0,
            rms_eps=shape.rms_eps,
        )

    def update_loss(model: ParallelHeadModel, trains_backbone: bool) -> ParallelLossConfig:
        """Logged rows are few, so every one of them is an anchor; without the backbone, all teach the calibration."""
        share = loss.calibration_share if trains_backbone else 1.0
        return dataclasses.replace(loss, num_anchors=None, calibration_share=share)

    return TrainingFamily(
        name=name,
        defaults={"learning_rate": 2e-3, "num_layers": 2, "num_slots": 8, "loss": loss},
        make_config=make_config,
        prepare=prepare,
        frozen=TargetTables.of,
        loss=parallel_training_loss,
        update_loss=update_loss,
        held_out_loss=held_out_loss,
        arms={"calibration": ("log_beta",), "head": ("log_beta", "final_norm", "edge_"), "full": None},
        refused=("draft_vocab_size",),
    )


JETSPEC = _family("jetspec", ParallelLossConfig())
DFLASH = _family("dflash", ParallelLossConfig(objective="cross_entropy", decay_share=DFLASH_DECAY_SHARE))
