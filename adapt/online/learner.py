"""Learner: a drafter's weights that learn from a class's requests, one optimizer step each, over any number of bursts.

A short warm-up, then a constant rate: nobody knows how much text is still to come. What is scored and published is the
mean of the weights after the newest steps, which settles what a constant rate leaves restless. Everything that the next
burst needs is one state: weights, their mean, optimizer, position in the text, evidence.
Shape legend: P numbers of one parameter, R requests read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from paceline.adapt.data.learning_text import request_digest
from paceline.adapt.data.trace_store import MAX_TRACE_ROWS, count_rows
from paceline.adapt.families.family import at_least
from paceline.adapt.families.low_rank import add_factors
from paceline.adapt.families.target_handle import TargetTables
from paceline.adapt.families.training import StepReport, TrainingRun, training_family, wants_autocast
from paceline.adapt.gate.gate import Evidence
from paceline.bootstrap import UNSCORED_REQUESTS
from paceline.contracts import ArmSpec
from paceline.errors import ConfigError, DrafterMismatchError
from paceline.serving.drafters.deltas import merge
from paceline.serving.drafters.network import DrafterModel
from paceline.serving.sampling.request import RequestTrace

LORA = "lora"
"""Choice of parameters that learns a delta: factors beside linear layers, which stay."""
MAX_LEARNING_RATE, MAX_DELTA_RATE = 2e-3, 1e-2
"""Of whole weights and of a delta's factors, whose products begin at zero."""
WARMUP_STEPS = 8
AVERAGED_STEPS = UNSCORED_REQUESTS
"""Steps whose weights make the mean, about: a decaying mean, plain while the learner is younger."""
MAX_SEEN = 65_536
"""Requests that a learner remembers to have read: more than an order hands over."""
_BETA_FACTOR = 40.0
"""Learning rate of the calibration scalars over that of the weights; a learner has few steps to settle them."""


def max_rate(parameters: str) -> float:
    """The largest learning rate that an arm may have."""
    return MAX_DELTA_RATE if parameters == LORA else MAX_LEARNING_RATE


def select_parameters(
    model: DrafterModel, arm: ArmSpec, *, seed: int = 0, factors: Mapping[str, torch.Tensor] | None = None
) -> list[str]:
    """Freeze everything but the arm's parameters, which `lora` gives the model; return their names.

    seed, factors: as in `add_factors`.
    Raises: ConfigError for an unknown choice; DrafterMismatchError for factors of another drafter.
    """
    arms = training_family(model.drafter_type).arms
    if arm.parameters not in (*arms, LORA):
        raise ConfigError(f"arm.parameters must be one of {', '.join((*arms, LORA))}, got {arm.parameters!r}")
    if arm.parameters == LORA:
        if arm.rank < 1:
            raise ConfigError(f"arm.rank must be >= 1 for {LORA}, got {arm.rank}")
        arms = {LORA: tuple(add_factors(model, arm.rank, seed, factors))}
    prefixes = arms[arm.parameters]
    names = []
    for name, p in model.named_parameters():
        p.requires_grad_(prefixes is None or name.startswith(prefixes))
        if p.requires_grad:
            names.append(name)
    return names


class Learner:
    """A model that learns in place, its optimizer, what it has read, and the evidence for it."""

    def __init__(
        self,
        model: DrafterModel,
        tables: TargetTables,
        arm: ArmSpec,
        *,
        seed: int,
        factors: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Begin at the model's weights.

        Args:
            tables: of the target, on the model's device.
            seed: of the random choices of every step.
            factors: of the delta that `lora` begins with; None = nothing is added yet.
        Raises: ConfigError for an arm that is not allowed; DrafterMismatchError for factors of another drafter.
        """
        most = max_rate(arm.parameters)
        if not 0 < arm.learning_rate <= most:
            raise ConfigError(f"arm.learning_rate must be in (0, {most:g}], got {arm.learning_rate:g}")
        if not 0 <= arm.rehearsal_share < 1:
            raise ConfigError(f"arm.rehearsal_share must be in [0, 1), got {arm.rehearsal_share:g}")
        self.arm, self.model = arm, model
        names = select_parameters(model, arm, seed=seed, factors=factors)
        trains_backbone = training_family(model.drafter_type).arms.get(arm.parameters) is None
        self._run = TrainingRun(
            model,
            tables,
            training_family(model.drafter_type).update_loss(model, trains_backbone),
            beta_factor=_BETA_FACTOR,
            max_rows=MAX_TRACE_ROWS,
            trains_backbone=trains_backbone,
            is_autocast=wants_autocast(model.config.hidden_size, tables.embed.device),
        )
        self._reached: list[tuple[float, float]] = []
        """Of slot 1, 2, ...: (rows whose slots before it were all right, rows in all) of the newest steps that could tell."""
        self._follow_reach = self._run.family.follow_reach if trains_backbone else None
        self._choose_slots([])
        self._seed, self._base_step = seed, 0
        self._trained = {name: model.get_parameter(name) for name in names}
        self._mean = {name: p.detach().clone() for name, p in self._trained.items()}
        self.evidence = Evidence()
        self.seen: dict[int, None] = {}
        """Digests of the requests read, oldest first, those of the versions that it descends from among them."""
        self.num_rows = self.num_rehearsed_rows = 0
        """Supervised rows learned since the base, of the class and of others."""
        self.nll = 0.0
        """First-slot cross-entropy of the newest step, nats per row."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps since the base."""
        return self._run.step - self._base_step

    @property
    def num_own_steps(self) -> float:
        """Those on requests of the class, by its share of the rows."""
        return self.num_steps * self.num_rows / max(self.num_rows + self.num_rehearsed_rows, 1)

    def rebase(self) -> None:
        """Go on from the snapshot, which has become the base: what it has read stays read, its evidence is spent."""
        self.evidence = Evidence()
        self.num_rows = self.num_rehearsed_rows = 0
        self._base_step = self._run.step

    def mark_read(self, traces: Iterable[RequestTrace]) -> None:
        """These requests have been scored: they are never scored again, learned or not."""
        self.seen |= dict.fromkeys(request_digest(t.request_id) for t in traces)
        for digest in list(self.seen)[: max(len(self.seen) - MAX_SEEN, 0)]:
            del self.seen[digest]

    def has_read(self, trace: RequestTrace) -> bool:
        return request_digest(trace.request_id) in self.seen

    def learn(self, trace: RequestTrace, *, is_rehearsal: bool = False) -> StepReport:
        """Take one step on a request that was scored.

        Raises: DrafterMismatchError when the loss or a gradient stops being finite (the learner is then of no use).
        """
        step = self._run.step
        rate = self.arm.learning_rate * min((step + 1) / WARMUP_STEPS, 1.0)
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + step) % 2**63)
        self.model.train()
        report = self._run.train_batch([trace], rate, generator)
        if not is_rehearsal:
            self._follow(report.correct)
        share = 1.0 / min(step + 1, AVERAGED_STEPS)
        with torch.no_grad():
            for name, p in self._trained.items():
                self._mean[name].lerp_(p, share)
        rows = count_rows([trace])
        self.num_rows += 0 if is_rehearsal else rows
        self.num_rehearsed_rows += rows if is_rehearsal else 0
        self.nll = report.nll
        return report

    def _follow(self, correct: torch.Tensor) -> None:
        """Have the next steps learn the slots that rows of the class reach; a slot that they hardly reach costs as much as any."""
        if self._follow_reach is None:
            return
        right = at_least(correct).tolist()
        self._reached += [(0.0, 0.0)] * (len(right) - len(self._reached))
        kept = 1.0 - 1.0 / AVERAGED_STEPS
        told = [(kept * a + new, kept * b + right[0]) for (a, b), new in zip(self._reached, right, strict=False)]
        self._choose_slots([*told, *self._reached[len(told) :]])

    def _choose_slots(self, reached: list[tuple[float, float]]) -> None:
        self._reached = reached
        if self._follow_reach is not None:
            reach = [a / max(b, 1e-9) for a, b in reached]
            self._run.loss = self._follow_reach(self._run.loss, reach, self.model.config)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """What would serve: all weights, the trained ones as the mean of the newest steps; shared, where they are not a
        delta's, not copied."""
        state = {**self.model.state_dict(), **self._mean}
        if self.arm.parameters != LORA:
            return state
        return merge({name: t for name, t in state.items() if name not in self._mean}, self._mean)

    def factors(self) -> dict[str, torch.Tensor] | None:
        """The delta that would serve; None where whole weights are learned."""
        return dict(self._mean) if self.arm.parameters == LORA else None

    # ---- state

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(tensors on the CPU, record) of everything that changes; `restore` is the inverse."""
        tensors = {"seen": torch.tensor(list(self.seen), dtype=torch.int64)}
        for name, p in self._trained.items():
            tensors |= {f"weights/{name}": p.detach().cpu(), f"mean/{name}": self._mean[name].cpu()}
        for i, values in self._run.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{i}/{name}": value.detach().cpu() for name, value in values.items()}
        record = {
            "seed": self._seed,
            "step": self._run.step,
            "base_step": self._base_step,
            "num_rows": self.num_rows,
            "num_rehearsed_rows": self.num_rehearsed_rows,
            "nll": self.nll,
            "reached": self._reached,
            "evidence": msgspec.to_builtins(self.evidence),
        }
        return tensors, record

    @torch.no_grad()
    def restore(self, tensors: dict[str, torch.Tensor], record: dict[str, Any]) -> None:
        """Go on from a state of a learner of the same base and arm.

        Raises: DrafterMismatchError when it is another's; the learner is then of no use.
        """
        try:
            evidence = msgspec.convert(record["evidence"], Evidence)
            for name, p in self._trained.items():
                weights, mean = tensors[f"weights/{name}"], tensors[f"mean/{name}"]
                if not weights.shape == mean.shape == p.shape:
                    raise ValueError(f"{name} must have shape {tuple(p.shape)}, got {tuple(weights.shape)}")
                if not bool(weights.isfinite().all() and mean.isfinite().all()):
                    raise ValueError(f"{name} must be finite")
                p.copy_(weights)
                self._mean[name].copy_(mean)
            found: dict[str, Any] = {"state": {}}
            for name, value in tensors.items():
                if name.startswith("optimizer/"):
                    _, i, field = name.split("/")
                    found["state"].setdefault(int(i), {})[field] = value
            self._run.optimizer.load_state_dict(found)
            self._run.step, self._seed = int(record["step"]), int(record["seed"])
            self._base_step = int(record.get("base_step", 0))
            self.num_rows, self.num_rehearsed_rows = int(record["num_rows"]), int(record["num_rehearsed_rows"])
            self.nll, self.evidence = float(record["nll"]), evidence
            self._choose_slots(msgspec.convert(record.get("reached", []), list[tuple[float, float]]))
            self.seen = dict.fromkeys(tensors["seen"].tolist())
        except (KeyError, ValueError, TypeError, msgspec.ValidationError) as e:
            raise DrafterMismatchError(f"learner state must be of the same drafter and arm: {e}") from e


def learn_all(learner: Learner, fresh: Sequence[RequestTrace], rehearsal: Sequence[RequestTrace]) -> list[StepReport]:
    """Learn every request in order, with rehearsal requests between them in the arm's share; nothing is scored."""
    reports, others = [], iter(rehearsal)
    for i, trace in enumerate(fresh):
        reports.append(learner.learn(trace))
        if is_rehearsed(i, learner.arm.rehearsal_share) and (other := next(others, None)) is not None:
            reports.append(learner.learn(other, is_rehearsal=True))
    return reports


def is_rehearsed(at: int, share: float) -> bool:
    """Whether a rehearsal request follows the class's request number `at`, so that `share` of all steps are rehearsal."""
    per_request = share / (1.0 - share)
    return int((at + 1) * per_request + 1e-9) > int(at * per_request + 1e-9)
