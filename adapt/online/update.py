"""Online update: a drafter's weights learn from a small set of logged requests.

An arm chooses the parameters; a short warm-up and a cosine bring the learning rate up and back to zero, because a
finished drafter loses acceptance when it is warmed up too far. The schedule follows the optimizer steps or the time
budget, whichever is further, so that a slow machine still ends with a settled learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from paceline.adapt.data.split import count_rows
from paceline.adapt.families.target_handle import TargetTables
from paceline.adapt.families.training import TrainingRun, training_family, warmup_cosine
from paceline.contracts import ArmSpec
from paceline.errors import ConfigError
from paceline.serving.drafters.network import DrafterModel
from paceline.serving.sampling.request import RequestTrace

MAX_LEARNING_RATE = 2e-3
WARMUP_SHARE = 0.1
MAX_TRACE_ROWS = 1024
_STEPS, _MIN_ROWS, _MAX_ROWS = 32, 96, 1024
_BETA_FACTOR = 40.0
"""Learning rate of the calibration scalars over that of the weights; an update has few steps to settle them."""


class UpdateStoppedError(Exception):
    """The update ended early because its `should_stop` said so."""


def select_parameters(model: DrafterModel, parameters: str) -> list[str]:
    """Freeze everything but the arm's parameters; return their names. Raises ConfigError for an unknown choice."""
    arms = training_family(model.drafter_type).arms
    if parameters not in arms:
        raise ConfigError(f"arm.parameters must be one of {', '.join(arms)}, got {parameters!r}")
    prefixes = arms[parameters]
    names = []
    for name, p in model.named_parameters():
        p.requires_grad_(prefixes is None or name.startswith(prefixes))
        if p.requires_grad:
            names.append(name)
    return names


def rate_factor(share: float) -> float:
    """Learning rate over its peak when `share` in [0, 1] of the update is done: linear warm-up, then cosine to 0."""
    share = min(max(share, 0.0), 1.0)
    return warmup_cosine(share / WARMUP_SHARE, (share - WARMUP_SHARE) / (1 - WARMUP_SHARE))


def rows_per_step(num_rows: int) -> int:
    """Supervised rows of one optimizer step: small jobs still get about 32 steps an epoch."""
    return min(max(num_rows // _STEPS, _MIN_ROWS), _MAX_ROWS)


def plan_batches(traces: Sequence[RequestTrace], epochs: int, generator: torch.Generator) -> list[list[RequestTrace]]:
    """Shuffle per epoch and fill batches of about rows_per_step supervised rows; fresh and rehearsal rows mix."""
    wanted = rows_per_step(count_rows(traces))

    def fill() -> Iterator[list[RequestTrace]]:
        batch: list[RequestTrace] = []
        for i in torch.randperm(len(traces), generator=generator).tolist():
            batch.append(traces[i])
            if count_rows(batch) >= wanted:
                yield batch
                batch = []
        if batch:
            yield batch

    return [batch for _ in range(epochs) for batch in fill()]


def update_drafter(
    model: DrafterModel,
    tables: TargetTables,
    fresh: Sequence[RequestTrace],
    rehearsal: Sequence[RequestTrace],
    arm: ArmSpec,
    *,
    seed: int,
    time_share: Callable[[], float],
    should_stop: Callable[[], bool],
    progress: Callable[[int, int, dict], None],
) -> tuple[int, float]:
    """Train `model` in place on the arm's parameters; return (optimizer steps, first-slot cross-entropy).

    The cross-entropy is the mean over the last quarter of the steps, in nats per row. The loss itself is no measure of
    progress: a better drafter reaches later slots, which then count.

    Args:
        tables: of the target, on the model's device.
        time_share: used share of the time budget; at 1 the update ends, its learning rate settled.
        should_stop: polled before every step.
        progress: (steps done, steps in all, {"loss", "nll", "learning_rate"}) after every step.
    Raises: ConfigError for an arm that is not allowed; UpdateStoppedError; DrafterMismatchError when the loss or a
        gradient stops being finite (the model is then of no use).
    """
    if not 0 < arm.learning_rate <= MAX_LEARNING_RATE:
        raise ConfigError(f"arm.learning_rate must be in (0, {MAX_LEARNING_RATE:g}], got {arm.learning_rate:g}")
    family = training_family(model.drafter_type)
    select_parameters(model, arm.parameters)
    trains_backbone = family.arms[arm.parameters] is None
    config = family.update_loss(model, trains_backbone)
    generator = torch.Generator().manual_seed(seed)
    batches = plan_batches([*fresh, *rehearsal], max(1, arm.epochs), generator)

    def rate_of(step: int) -> float | None:
        if should_stop():
            raise UpdateStoppedError
        share = max((step + 0.5) / len(batches), time_share())
        return None if share >= 1 and step > 0 else arm.learning_rate * rate_factor(share)

    run = TrainingRun(
        model, tables, config, beta_factor=_BETA_FACTOR, max_rows=MAX_TRACE_ROWS, trains_backbone=trains_backbone
    )
    losses: list[float] = []
    for report in run.train(batches, rate_of=rate_of, generator_of=lambda step: generator):
        losses.append(report.nll)
        info = {"loss": report.loss, "nll": report.nll, "learning_rate": report.learning_rate}
        progress(run.step, len(batches), info)
    tail = losses[-max(1, len(losses) // 4) :]
    return len(losses), sum(tail) / len(tail)
