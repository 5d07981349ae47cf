"""View and choice: what a policy may look at, and what it answers."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np

from paceline.bandit.beliefs.belief import BucketBelief
from paceline.bandit.beliefs.gain_model import GainModel
from paceline.bandit.policies.memory import PolicyMemory
from paceline.bandit.policies.pricing import PricedJob, PricedRecall
from paceline.config import PolicyConfig
from paceline.contracts import ArmSpec


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a policy may look at; nothing in it may be changed."""

    config: PolicyConfig
    arms: tuple[ArmSpec, ...]
    beliefs: dict[str, BucketBelief]
    jobs: tuple[PricedJob, ...]
    recalls: tuple[PricedRecall, ...]
    balance_s: float
    hope_s: float = 0.0
    """What of the balance may be spent on hopes: their credit is the income, the first hour's in advance; what was saved counts, too."""
    horizon_s: float
    since_job_s: float
    is_job_running: bool
    versions: dict[str, str] = {}
    """Bucket with traffic -> the version that it has."""
    pools: dict[str, list[str]] = {}
    """Bucket of a belief -> other buckets that learn together with it, which the belief is about, too."""
    recall_rates: dict[str, float] = {}
    """Bucket -> device-seconds per second that its best recall saves."""
    memory: PolicyMemory = msgspec.field(default_factory=PolicyMemory)
    cost_margin: float = 1.0
    """Factor by which jobs may turn out dearer than priced; one that hits its limit for that is lost."""
    gains: GainModel = msgspec.field(default_factory=GainModel)


def job_key(job: PricedJob) -> str:
    """Name of a training job among the actions of one view."""
    return f"train:{job.arm.name}:{job.bucket}:{job.arm.num_rows}"


def recall_key(bucket: str, version: str) -> str:
    """Name of giving a bucket a version among the actions of one view."""
    return f"recall:{bucket}:{version}"


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One action; `code` names the kind of reason, so that equal holds are logged once."""

    action: str
    """'train' with a `job` of the view, 'recall' with a `recall` of it, or 'hold' with neither."""
    bucket: str
    code: str
    reason: str
    """One sentence; every value of `numbers` stands in it."""
    numbers: dict[str, float] = {}
    """What was compared, by name."""
    job: PricedJob | None = None
    recall: PricedRecall | None = None
    probabilities: dict[str, float] = {}
    """Action key -> probability given the view, of everything that might have been chosen; by default this action is certain."""

    def __post_init__(self) -> None:
        wanted = "train" if self.job is not None else "recall" if self.recall is not None else "hold"
        if self.action != wanted or (self.job is not None and self.recall is not None):
            raise ValueError(
                f"a choice must be a 'train' with a job, a 'recall' with a recall or a 'hold', got {self.action!r}"
            )
        if self.probabilities and self.key not in self.probabilities:
            raise ValueError(
                f"probabilities must hold {self.key!r}, which is chosen, got {', '.join(self.probabilities)}"
            )
        if not self.probabilities:
            msgspec.structs.force_setattr(self, "probabilities", {self.key: 1.0})

    @property
    def key(self) -> str:
        """Name of the action in `probabilities`: 'hold', 'train:ARM:BUCKET:ROWS' or 'recall:BUCKET:VERSION'."""
        if self.job is not None:
            return job_key(self.job)
        return recall_key(self.recall.bucket, self.recall.version) if self.recall is not None else "hold"

    @property
    def propensity(self) -> float:
        """Probability of this action given the view."""
        return self.probabilities[self.key]


class Policy(Protocol):
    """Chooses among priced actions; pure: memory is in the view and is updated by the controller once per epoch."""

    def choose(self, view: View, rng: np.random.Generator) -> Choice: ...


def say(template: str, **values: Any) -> tuple[str, dict[str, float]]:
    """(sentence, its numbers): the template filled in, and the values in it that are numbers."""
    numbers = {k: float(v) for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return template.format(**values), numbers


def main_bucket(view: View) -> str:
    """The active bucket that costs most device time, '' without traffic."""
    active = [n for n in sorted(view.beliefs) if view.beliefs[n].is_active]
    return max(active, key=lambda n: view.beliefs[n].busy) if active else ""


def hold(view: View, code: str, template: str, *, at: str | None = None, **values: Any) -> Choice:
    """Do nothing, because of `template` filled with `values`; `at` = the bucket that it is about (default: the main one)."""
    reason, numbers = say(template, **values)
    where = main_bucket(view) if at is None else at
    return Choice(action="hold", bucket=where, code=code, reason=reason, numbers=numbers)


def train(job: PricedJob, template: str, *, probabilities: dict[str, float] | None = None, **values: Any) -> Choice:
    """Start `job`, because of `template` filled with `values`; `probabilities` None = it was certain."""
    reason, numbers = say(template, **values)
    return Choice(
        action="train", bucket=job.bucket, code="train", reason=reason, numbers=numbers, job=job,
        probabilities=probabilities or {},
    )  # fmt: skip


def recall(priced: PricedRecall, template: str, **values: Any) -> Choice:
    """Give a bucket a version that exists, because of `template` filled with `values`."""
    reason, numbers = say(template, **values)
    return Choice(action="recall", bucket=priced.bucket, code="recall", reason=reason, numbers=numbers, recall=priced)


def not_now(view: View) -> Choice | None:
    """Reasons that hold under every policy."""
    if view.is_job_running:
        return hold(
            view,
            "job_running",
            "{num} training job or trial of a version is under way, and at most {most} may be.",
            num=1,
            most=1,
        )
    active = sum(b.is_active for b in view.beliefs.values())
    if not active:
        template = "{active} of {known} known buckets have measured traffic."
        return hold(view, "no_traffic", template, at="", active=active, known=len(view.beliefs))
    return None


def largest_job(view: View, bucket: str) -> PricedJob | None:
    """The dearest job priced on a bucket, None when none is."""
    own = [j for j in view.jobs if j.bucket == bucket]
    return max(own, key=lambda j: (j.cost.training_s, j.arm.num_rows, j.arm.name)) if own else None


def fullest(view: View, *, with_job: bool = False) -> BucketBelief:
    """The active bucket with most fresh rows; ties go to the later name. with_job: of those with a job, where one has."""
    able = {j.bucket for j in view.jobs} if with_job else set()
    active = (b for b in view.beliefs.values() if b.is_active)
    return max(active, key=lambda b: (b.bucket in able, b.fresh_rows, b.bucket))


def too_few_rows(view: View, belief: BucketBelief, needed: int) -> Choice:
    """Hold until a bucket has `needed` fresh rows."""
    template = "{bucket} has {fresh} fresh rows of the {needed} that a job needs."
    return hold(view, "rows", template, at=belief.bucket, bucket=belief.bucket, fresh=belief.fresh_rows, needed=needed)
