"""Training loop of drafters and the table of their families: AdamW with a rate of its own for calibration, clipping.

A new family adds its module and one line here. A recipe trains from random weights, an online update a few parameters of a
served version; both are runs of this loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw

from paceline.adapt.families import eagle3, parallel_head, specblock
from paceline.adapt.families.family import TrainingFamily
from paceline.adapt.families.recipe import has_native_bf16
from paceline.adapt.families.row_batch import collate
from paceline.adapt.families.target_handle import TargetTables
from paceline.errors import ConfigError, DrafterMismatchError
from paceline.serving.drafters.network import DrafterModel
from paceline.serving.sampling.request import RequestTrace

FAMILIES: dict[str, TrainingFamily] = {
    f.name: f for f in (specblock.FAMILY, eagle3.FAMILY, parallel_head.JETSPEC, parallel_head.DFLASH)
}


def training_family(name: str) -> TrainingFamily:
    """The family of a `drafter_type`. Raises: ConfigError, naming the known ones."""
    if name not in FAMILIES:
        raise ConfigError(f"drafter must be one of {', '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def wants_autocast(hidden_size: int, device: torch.device) -> bool:
    """Whether a drafter learns faster in bfloat16: where the hardware computes it, and on a CPU if it is wide enough to gain."""
    return has_native_bf16(device) and (hidden_size >= 512 or device.type != "cpu")


def warmup_cosine(rise: float, fall: float, final_share: float = 0.0) -> float:
    """Learning rate over its peak: linear while `rise`, the share of the warm-up that is done, is below 1; then a cosine
    down to `final_share` when `fall`, the share of the rest that is done, reaches 1."""
    if rise < 1:
        return rise
    return final_share + (1 - final_share) * 0.5 * (1 + math.cos(math.pi * min(max(fall, 0.0), 1.0)))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one optimizer step says."""

    loss: float
    """The family's loss, mean per supervised row."""
    nll: float
    """Cross-entropy of the first draft token, nats per row."""
    rows: float
    """Supervised rows."""
    grad_norm: float
    learning_rate: float
    correct: torch.Tensor
    """Histogram of how many tokens of the first block, from its first, are right; see `Report`."""


class AdamW:
    """torch.optim.AdamW with the fused step and the state of it that changes, by its functional form.

    The class itself imports torch._dynamo: 1.6 to 2.4 s of a CPU, as long as a burst of training may take.
    """

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float], weight_decay: float) -> None:
        """groups: each with its `params`; `weight_decay` of a group takes precedence, and `lr` is set before a step."""
        self.param_groups = [{"lr": 0.0, "weight_decay": weight_decay} | group for group in groups]
        self._betas = betas
        self.state: dict[int, dict[str, torch.Tensor]] = {}
        """Index of a parameter, over all groups -> what is remembered of it: step, exp_avg, exp_avg_sq."""

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Change every parameter with a gradient."""
        first = 0
        for group in self.param_groups:
            own = [(first + i, p) for i, p in enumerate(group["params"]) if p.grad is not None]
            first += len(group["params"])
            for i, p in own:
                if i not in self.state:
                    step = torch.zeros((), device=p.device)
                    self.state[i] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            states = [self.state[i] for i, _ in own]
            means, squares, steps = ([s[name] for s in states] for name in ("exp_avg", "exp_avg_sq", "step"))
            adamw(
                [p for _, p in own], [p.grad for _, p in own], means, squares, [], steps, fused=True, amsgrad=False,
                beta1=self._betas[0], beta2=self._betas[1], lr=group["lr"], weight_decay=group["weight_decay"], eps=1e-8,
                maximize=False,
            )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's, without the groups."""
        return {"state": {i: dict(values) for i, values in sorted(self.state.items())}}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        """Go on from a state of the same groups, of this class or of torch.optim.AdamW.

        Raises: ValueError where it is of others, KeyError where it lacks something.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        state: dict[int, dict[str, torch.Tensor]] = {}
        for i, values in found["state"].items():
            if not 0 <= i < len(parameters):
                raise ValueError(f"optimizer state must be of {len(parameters)} parameters, got one of number {i}")
            p, state[i] = parameters[i], {}
            for name in ("exp_avg", "exp_avg_sq"):
                if values[name].shape != p.shape:
                    raise ValueError(f"{name} must have shape {tuple(p.shape)}, got {tuple(values[name].shape)}")
                state[i][name] = values[name].to(p, copy=True)
            state[i]["step"] = values["step"].to(p.device, torch.float32, copy=True)
        self.state = state


class TrainingRun:
    """A model whose parameters that require gradients learn, its optimizer, and how many steps it took."""

    def __init__(
        self,
        model: DrafterModel,
        tables: TargetTables,
        loss: Any,
        *,
        beta_factor: float,
        weight_decay: float = 0.0,
        max_rows: int,
        trains_backbone: bool = True,
        is_autocast: bool = False,
    ) -> None:
        """Bind the model where it is.

        Args:
            tables: of the target, on the model's device.
            loss: the family's loss settings.
            beta_factor: learning rate of the calibration scalars over that of the weights: log-scales of order 1.
            max_rows: longer requests are cut, as `collate` says.
            trains_backbone: False computes hidden states without a graph.
            is_autocast: compute in bfloat16 where torch holds it safe.
        """
        self.family = training_family(model.drafter_type)
        self.model, self.tables, self.loss = model, tables, loss
        self.step = 0
        self._max_rows, self._trains_backbone, self._is_autocast = max_rows, trains_backbone, is_autocast
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._device = self._parameters[0].device
        weights, scalars = self.family.split_scalars(model)
        groups = [
            {"params": weights, "factor": 1.0},
            {"params": scalars, "factor": beta_factor, "weight_decay": 0.0},
        ]
        self.optimizer = AdamW(groups, betas=(0.9, 0.95), weight_decay=weight_decay)

    def train(
        self,
        plan: Sequence[Sequence[RequestTrace]],
        *,
        rate_of: Callable[[int], float | None],
        generator_of: Callable[[int], torch.Generator],
    ) -> Iterator[StepReport]:
        """Take the steps of a plan from where the run stands, one for each report that is asked for.

        Args:
            plan: the batches of the whole run.
            rate_of: learning rate of a step (counted from 0); None ends the run.
            generator_of: of the step's random choices; on the CPU.
        Raises: as train_batch.
        """
        self.model.train()
        while self.step < len(plan) and (rate := rate_of(self.step)) is not None:
            yield self.train_batch(plan[self.step], rate, generator_of(self.step))
        self.model.eval()

    def train_batch(self, traces: Sequence[RequestTrace], rate: float, generator: torch.Generator) -> StepReport:
        """Take one step on a batch, the model being in training mode.

        Raises: DrafterMismatchError when the loss or a gradient stops being finite (the model is then of no use).
        """
        batch = collate(traces, max_rows=self._max_rows, device=self._device)
        with self._autocast():
            loss, report = self.family.loss(
                self.model, batch, self.tables, self.loss, generator, trains_backbone=self._trains_backbone
            )
        self.optimizer.zero_grad()
        # a batch without a token of the draft vocabulary may teach none of these parameters
        if loss.requires_grad:
            loss.backward()
        norm, value = float(torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)), float(report["loss"])
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise DrafterMismatchError(
                f"training diverged at step {self.step + 1}: loss {value}, gradient norm {norm}; lower learning_rate"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        self.optimizer.step()
        self.step += 1
        rows = max(1.0, float(report["rows"]))
        return StepReport(
            loss=value, nll=float(report["nll1"]) / rows, rows=rows, grad_norm=norm, learning_rate=rate, correct=report["correct1"]
        )  # fmt: skip

    def _autocast(self) -> AbstractContextManager:
        return torch.autocast(self._device.type, torch.bfloat16) if self._is_autocast else nullcontext()
