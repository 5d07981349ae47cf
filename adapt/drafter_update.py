"""How do a drafter's weights learn from a small set of logged requests?

An arm chooses the parameters; a short warm-up and a cosine bring the learning rate up and back to zero, because a
finished drafter loses acceptance when it is warmed up too far. The schedule follows the optimizer steps or the time
budget, whichever is further, so that a slow machine still ends with a settled learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from paceline.adapt.data_split import count_rows
from paceline.adapt.specblock_loss import LossConfig, training_loss
from paceline.adapt.specblock_rows import collate
from paceline.contracts import ArmSpec
from paceline.errors import ConfigError, DrafterMismatchError
from paceline.serving.request import RequestTrace
from paceline.serving.specblock_model import SpecBlockModel

MAX_LEARNING_RATE = 2e-3
WARMUP_SHARE = 0.1
MAX_TRACE_ROWS = 1024
_STEPS, _MIN_ROWS, _MAX_ROWS = 32, 96, 1024
_BETA_FACTOR = 40.0
"""Learning rate of the 16 calibration scalars over that of the weights: log-scales of order 1, not matrices."""
_CALIBRATION = ("log_beta", "rank_in.", "rank_out.")
ARM_PARAMETERS: dict[str, tuple[str, ...] | None] = {
    "calibration": _CALIBRATION,
    "head": (*_CALIBRATION, "lm_head.", "final_norm"),
    "full": None,
}
"""Name prefixes of the parameters that an arm trains; None = all."""


class UpdateStoppedError(Exception):
    """The update ended early because its `should_stop` said so."""


def select_parameters(model: SpecBlockModel, parameters: str) -> list[str]:
    """Freeze everything but the arm's parameters; return their names. Raises ConfigError for an unknown choice."""
    if parameters not in ARM_PARAMETERS:
        raise ConfigError(f"arm.parameters must be one of {', '.join(ARM_PARAMETERS)}, got {parameters!r}")
    prefixes = ARM_PARAMETERS[parameters]
    names = []
    for name, p in model.named_parameters():
        p.requires_grad_(prefixes is None or name.startswith(prefixes))
        if p.requires_grad:
            names.append(name)
    return names


def rate_factor(share: float) -> float:
    """Learning rate over its peak when `share` in [0, 1] of the update is done: linear warm-up, then cosine to 0."""
    share = min(max(share, 0.0), 1.0)
    if share < WARMUP_SHARE:
        return share / WARMUP_SHARE
    return 0.5 * (1 + math.cos(math.pi * (share - WARMUP_SHARE) / (1 - WARMUP_SHARE)))


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
    model: SpecBlockModel,
    embed: torch.Tensor,
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
        embed: (V, E), the target's token embedding, frozen.
        time_share: used share of the time budget; at 1 the update ends, its learning rate settled.
        should_stop: polled before every step.
        progress: (steps done, steps in all, {"loss", "nll", "learning_rate"}) after every step.
    Raises: ConfigError for an arm that is not allowed; UpdateStoppedError; DrafterMismatchError when the loss or a
        gradient stops being finite (the model is then of no use).
    """
    if not 0 < arm.learning_rate <= MAX_LEARNING_RATE:
        raise ConfigError(f"arm.learning_rate must be in (0, {MAX_LEARNING_RATE:g}], got {arm.learning_rate:g}")
    chosen = set(select_parameters(model, arm.parameters))
    trains_backbone = arm.parameters == "full"
    # Without the backbone a row is cheap, so every row teaches calibration; otherwise the default share does.
    config = LossConfig() if trains_backbone else LossConfig(side_share=1.0)
    named = [(n, p) for n, p in model.named_parameters() if n in chosen]
    groups = [
        {"params": [p for n, p in named if n != "log_beta"], "peak": arm.learning_rate},
        {"params": [p for n, p in named if n == "log_beta"], "peak": arm.learning_rate * _BETA_FACTOR},
    ]
    optimizer = torch.optim.AdamW(groups, lr=arm.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    parameters = [p for _, p in named]
    device = parameters[0].device
    embed = embed.detach().to(device, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    batches = plan_batches([*fresh, *rehearsal], max(1, arm.epochs), generator)
    model.train()
    losses: list[float] = []
    for step, batch in enumerate(batches):
        if should_stop():
            raise UpdateStoppedError
        share = max((step + 0.5) / len(batches), time_share())
        if share >= 1 and step > 0:
            break
        rows = collate(batch, max_rows=MAX_TRACE_ROWS, device=device)
        loss, report = training_loss(model, rows, embed, config, generator, trains_backbone=trains_backbone)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        value = float(loss.detach())
        if not (math.isfinite(value) and math.isfinite(float(norm))):
            raise DrafterMismatchError(f"update diverged at step {step + 1}: loss {value}, gradient norm {float(norm)}")
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * rate_factor(share)
        optimizer.step()
        losses.append(float(report["nll1"]) / max(1.0, float(report["rows"])))
        info = {"loss": value, "nll": losses[-1], "learning_rate": optimizer.param_groups[0]["lr"]}
        progress(len(losses), len(batches), info)
    model.eval()
    tail = losses[-max(1, len(losses) // 4) :]
    return len(losses), sum(tail) / len(tail)
