"""Controller state: everything that the controller remembers between ticks."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import numpy as np

from paceline.bandit.beliefs.belief import BucketMeter
from paceline.bandit.beliefs.evidence import EvidenceModel, Unsure
from paceline.bandit.beliefs.gain_model import GainModel
from paceline.bandit.beliefs.interference import Interference
from paceline.bandit.beliefs.job_cost import CostModel, JobCost
from paceline.bandit.beliefs.observation import BucketObservation, HostContext, Window
from paceline.bandit.beliefs.recall import ScoreTable
from paceline.bandit.beliefs.regime import BucketRegime, MixRegime
from paceline.bandit.beliefs.round_cost import RoundCosts
from paceline.bandit.ledger.ledger import Ledger, entry_id
from paceline.bandit.ledger.savings import Savings
from paceline.bandit.policies.memory import PolicyMemory
from paceline.contracts import ArmSpec, Decision, LedgerEntry

SPIKE_S = 60.0
"""Seconds that a service's life counts for at least: how many devices it keeps busy is not told by its first seconds."""
MAX_ACTIONS = 400
"""Train, recall, pin and rollback decisions kept for late updates; holds are not kept."""


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the host should do after a job."""

    decision: Decision
    """The train decision with realised_gain, realised_cost_s and outcome filled in (same decision_id: overwrite it).

    outcome is the job's status, or 'kept' for an accepted version that serves nothing now.
    """
    publish: str | None
    """Version to give to the decision's bucket now; None: it keeps the one that it has."""
    reason: str
    others: list[str] = []
    """Buckets that learned together with the decision's and may be given it, too."""


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The job in flight, with what was believed when it was ordered."""

    decision_id: int
    bucket: str
    arm: ArmSpec
    base_version: str
    headroom: float
    share: float
    length_before: float
    learned_after: int
    expected_cost: JobCost
    started: float
    new: float = 1.0
    others: list[str] = []
    """Buckets whose text it learns, too, and that get its version."""


class OpenEpoch(msgspec.Struct):
    """What feedback changes in a ControllerState; the rest changes with ticks, jobs and orders only."""

    windows: dict[str, Window]
    round_costs: RoundCosts
    interference: Interference
    num_rows_dropped: int


class ControllerState(msgspec.Struct):
    """All mutable state; MessagePack in, MessagePack out."""

    policy: str
    rng: str = ""
    """JSON of the bit generator's state."""
    epoch: int = 0
    told_epoch: int = 0
    """Newest epoch that went to the decision log."""
    epoch_start: float | None = None
    next_decision_id: int = 1
    num_decisions: dict[str, int] = {}
    """Action -> decisions."""
    num_rows_dropped: int = 0
    context: HostContext | None = None

    windows: dict[str, Window] = {}
    meters: dict[str, BucketMeter] = {}
    latest: dict[str, BucketObservation] = {}
    total_load: float | None = None
    """Exponential mean of the adaptive group's tokens per second while there is traffic, all buckets; None before any."""
    regime: MixRegime | None = None
    buckets: dict[str, BucketRegime] = {}
    rows_written: dict[str, int] = {}
    table: ScoreTable = msgspec.field(default_factory=ScoreTable)
    gains: GainModel = msgspec.field(default_factory=GainModel)
    evidence: EvidenceModel = msgspec.field(default_factory=EvidenceModel)
    costs: CostModel = msgspec.field(default_factory=CostModel)
    round_costs: RoundCosts = msgspec.field(default_factory=RoundCosts)
    memory: PolicyMemory = msgspec.field(default_factory=PolicyMemory)
    history: list[str] = []
    """'bucket|version' of earlier services that taught the gain model."""
    interference: Interference = msgspec.field(default_factory=Interference)
    savings: Savings = msgspec.field(default_factory=Savings)
    ledger: Ledger = msgspec.field(default_factory=Ledger)

    job: JobRecord | None = None
    last_job_id: int | None = None
    last_job_started: float = float("-inf")
    last_job_ended: float = float("-inf")
    owners: dict[str, dict[str, int]] = {}
    """Bucket -> version -> decision that last gave it to the bucket; '' = to all."""
    made_by: dict[str, str] = {}
    """Version -> arm of the job that made it."""
    learned: dict[str, dict[str, int]] = {}
    """Version -> bucket -> rows it was trained on."""
    rows_at_job: dict[str, int] = {}
    required_rows: dict[str, int] = {}
    learners: dict[str, tuple[str, int, str]] = {}
    """Bucket -> (version that its learner began at, rows learned since, what of the drafter learns)."""
    unsure: dict[str, Unsure] = {}
    """Bucket -> what is known of the gain of such a learner that goes on."""
    lived: list[str] = []
    """Versions that served or came out of an accepted job."""
    barred: list[str] = []
    pinned: str | None = None
    bank_start_s: float | None = None
    """Starting balance that an operator set; None = the configured one."""
    income_s: float = 0.0
    """What the bank got of the time that was served."""
    busy: float | None = None
    """Devices that serving has kept busy for some minutes; None before the first request."""
    served_s: float = 0.0
    """Device-seconds that serving took."""
    watched_s: float = 0.0
    """Seconds since the first request."""

    actions: dict[int, Decision] = {}
    outcomes: dict[int, JobOutcome] = {}
    last_hold: str = ""
    out_decisions: dict[int, Decision] = {}
    out_entries: list[LedgerEntry] = []
    """Booked since the last drain; empty in what a host stores, since it drains before."""

    def remember(self, decision: Decision) -> None:
        """Keep (or overwrite) an action and put it in the outbox."""
        self.out_decisions[decision.decision_id] = decision
        if decision.action != "hold":
            self.actions[decision.decision_id] = decision
            for key in sorted(self.actions)[:-MAX_ACTIONS]:
                del self.actions[key]

    def book(
        self,
        kind: str,
        detail: str,
        seconds: float,
        now: float,
        owner: int | None,
        bucket: str,
        version: str | None,
        arm: str | None,
        standard_error_s: float = 0.0,
    ) -> bool:
        """Add a ledger entry, once for each (owner, kind, detail), and carry it into its decision's realised sums.

        Returns: whether it was not booked before.
        """
        entry = LedgerEntry(
            entry_id=entry_id(owner, kind, detail), ts=now, kind=kind, bucket=bucket, version=version, seconds=seconds,
            arm=arm, standard_error_s=standard_error_s,
        )  # fmt: skip
        if not self.ledger.add(entry):
            return False
        self.out_entries.append(entry)
        decision = self.actions.get(owner) if owner is not None else None
        if decision is not None:
            name = "realised_saving_s" if kind == "saving" else "realised_cost_s"
            total = (getattr(decision, name) or 0.0) + seconds
            self.remember(msgspec.structs.replace(decision, **{name: total}))
        return True

    def owner_of(self, bucket: str, version: str) -> int | None:
        """The decision that last gave a version to a bucket, None when none did."""
        own, whole = (self.owners.get(b, {}).get(version) for b in (bucket, ""))
        return max((o for o in (own, whole) if o is not None), default=None)

    def devices(self) -> float:
        """Devices that serving keeps busy: a part of one as for some minutes, more than one as over the service's life, of which
        a spike is little."""
        if self.busy is None:
            return 1.0
        whole = math.floor(self.served_s / max(self.watched_s, SPIKE_S))
        there = 1 if self.context is None else self.context.num_replicas
        return min(self.busy, float(max(min(whole, there), 1)))

    def reserved_s(self) -> float:
        """What the job in flight is still expected to cost, beyond what is booked for it already."""
        if self.job is None:
            return 0.0
        decision = self.actions.get(self.job.decision_id)
        booked = decision.realised_cost_s if decision is not None and decision.realised_cost_s is not None else 0.0
        return max(self.job.expected_cost.total_s - booked, 0.0)


def pack_rng(rng: np.random.Generator) -> str:
    """The generator's state as JSON (its integers exceed 64 bits)."""
    return json.dumps(rng.bit_generator.state, default=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def unpack_rng(text: str) -> np.random.Generator:
    """The generator that `pack_rng` saw. Raises ValueError for an unknown bit generator."""
    state = json.loads(text)
    kind = getattr(np.random, str(state.get("bit_generator")), None)
    if kind is None:
        raise ValueError(f"state.rng must name a numpy bit generator, got {state.get('bit_generator')!r}")
    bits = kind()
    bits.state = state
    return np.random.Generator(bits)
