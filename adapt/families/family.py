"""Training family: what one kind of drafter says so that it can be trained, updated online and judged.

The training half of a serving DrafterFamily; `training.py` holds all of them. Shape legend: B requests of a batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from paceline.adapt.families.recipe import DrafterRecipe, TargetShape, even_taps, reduce_vocab
from paceline.adapt.families.row_batch import RowBatch
from paceline.adapt.families.target_handle import TargetHandle, TargetTables
from paceline.errors import ConfigError
from paceline.records import settings
from paceline.serving.drafters.family import DrafterFamily
from paceline.serving.drafters.network import DrafterConfig, DrafterModel
from paceline.serving.sampling.request import RequestTrace

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")
"""A dataclass of settings."""
Report = dict[str, torch.Tensor]
"""Detached sums over a batch. Every family reports "rows" (supervised rows), "nll1" (cross-entropy of the first draft
token, summed over them, in nats), "loss" (the mean loss) and "correct{b}" for its blocks b = 1, 2, ...: a histogram over
0..S of how many tokens of the block, from its first, are all right."""


class TrainingLoss(Protocol):
    """The loss of one batch."""

    def __call__(
        self,
        model: Any,
        batch: RowBatch,
        tables: TargetTables,
        config: Any,
        generator: torch.Generator,
        /,
        *,
        trains_backbone: bool = True,
    ) -> tuple[torch.Tensor, Report]:
        """Mean loss per supervised row, and a report.

        Args:
            tables: of the target, on the model's device.
            config: the family's loss settings.
            generator: of all random choices; on the CPU.
            trains_backbone: False computes hidden states without a graph (only heads and calibration learn).
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFamily:
    """How one kind of drafter learns."""

    serving: DrafterFamily
    """Its settings, network and drafter."""
    defaults: Mapping[str, Any]
    """Values of the recipe's fields that are None: learning_rate, num_layers, num_slots, loss."""
    make_config: Callable[[TargetHandle, TargetShape, DrafterRecipe], DrafterConfig]
    """The default architecture for a target and a complete recipe."""
    projection: str
    """Name of the weight (H, F) that takes the tapped features in."""
    loss: TrainingLoss
    update_loss: Callable[[Any, bool], Any]
    """Loss settings of an online update, given the model and whether its backbone learns."""
    held_out_loss: Callable[[Any], Any]
    """Loss settings for held-out numbers, given those of training: every row counts, nothing is drawn."""
    arms: Mapping[str, tuple[str, ...] | None]
    """Name prefixes of the parameters that an arm trains, by `ArmSpec.parameters`; None = all."""
    scalars: tuple[str, ...] = ("log_beta",)
    """Parameters that are log-scales of order 1, not matrices: they learn at a higher rate."""
    choose_loss: Callable[[Any, DrafterRecipe], Any] = lambda loss, recipe: loss
    """The loss settings with what the recipe's own fields say of them."""
    follow_rounds: Callable[[Any, Sequence[Sequence[int]], int], Any] = lambda loss, rounds, num_slots: loss
    """Loss settings from a validation on, given num_accepted_tokens of each text's replayed rounds, and S."""
    follow_reach: Callable[[Any, Sequence[float], Any], Any] | None = None
    """Loss settings of an online update of the backbone from a step on, given the share of rows that reach each slot (step of a
    chain) 1, 2, ..., those whose slots before it are all right, for the slots that learned and one more, and the drafter's
    configuration; None: all slots learn."""
    refused: tuple[str, ...] = ("edge_rank", "objective", "slot_decay")
    """Fields of the recipe that must stay None or False, because the family has no such thing."""
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What a recipe may leave out: name -> field of the network's or the loss's settings that becomes False."""

    @property
    def name(self) -> str:
        """The family's `drafter_type`."""
        return self.serving.name

    def complete(self, recipe: DrafterRecipe) -> DrafterRecipe:
        """The recipe with this family's defaults where it says None, and a loss without what it leaves out.

        Raises: ConfigError when it sets, or leaves out, what the family does not have.
        """
        strange = [name for name in recipe.without if name not in self.parts]
        if strange and not self.parts:
            raise ConfigError(f"without must be left out for {self.name} drafters, got {', '.join(recipe.without)!r}")
        if strange:
            raise ConfigError(
                f"without must be among {', '.join(self.parts)} for {self.name} drafters, got {strange[0]!r}"
            )
        for name in self.refused:
            if (value := getattr(recipe, name)) not in (None, False):
                option = settings(DrafterRecipe)[name][1].name(name)
                raise ConfigError(f"{option} must be left out for {self.name} drafters, got {value!r}")
        missing = {name: value for name, value in self.defaults.items() if getattr(recipe, name) is None}
        recipe = dataclasses.replace(recipe, drafter=self.name, **missing)
        loss = leave_out(recipe.loss, recipe.without, self.parts)
        return dataclasses.replace(recipe, loss=self.choose_loss(loss, recipe))

    def prepare(self, model: DrafterModel, traces: Sequence[RequestTrace], target: TargetHandle) -> None:
        """Set what a fresh model takes over from its training text: even taps, and the draft vocabulary if it is reduced."""
        even_taps(model.get_parameter(self.projection), traces, target)
        if model.config.draft_vocab_size is not None:
            reduce_vocab(model, traces)

    def split_scalars(self, model: DrafterModel) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
        """(weights, scalars) of a model among the parameters that require gradients."""
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        return [p for n, p in named if n not in self.scalars], [p for n, p in named if n in self.scalars]


MIN_REACH = 0.1
"""Share of the rows that must reach a slot so that it learns online, by the best tokens of the training's rows (trees reach more)."""
MIN_LEARNED = 2
"""Slots that learn in any case: edge corrections begin at the second."""


def num_reached(reach: Sequence[float], num_slots: int) -> int:
    """Slots that learn: those before the first one that too few rows reach. reach: as for `follow_reach`."""
    num = next((s for s, share in enumerate(reach) if share < MIN_REACH), len(reach))
    return min(max(MIN_LEARNED, num), num_slots)


def at_least(histogram: torch.Tensor) -> torch.Tensor:
    """(S + 1,) how many are 0 or more, 1 or more, ..., S or more, of a histogram over 0..S."""
    return histogram.flip(0).cumsum(0).flip(0)


def leave_out(config: Settings, names: Sequence[str], parts: Mapping[str, str]) -> Settings:
    """These settings with the fields of these parts False, where they have them. parts: as TrainingFamily.parts."""
    own = {f.name for f in dataclasses.fields(config)}
    return dataclasses.replace(config, **{parts[n]: False for n in names if parts[n] in own})


def summarise(sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Held-out numbers from summed reports: "nll" per row, and the share of a block's rows whose slots 0..s are all right."""
    out = {"nll": float(sums["nll1"] / sums["rows"].clamp_min(1))}
    block = 1
    while (histogram := sums.get(f"correct{block}")) is not None:
        reached = at_least(histogram) / histogram.sum().clamp_min(1)
        out |= {f"block{block}_slot{s}": float(reached[s + 1]) for s in range(len(reached) - 1)}
        block += 1
    return out
