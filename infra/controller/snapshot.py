"""Snapshot: the one record of what a service knows about itself, for pages, metrics, exports and clients.

The controller fills everything but the fields of the replica; a replica adds its own (infra/web/state_routes.py) and
answers `GET /paceline/state` with `state_json`. Whoever reads that over HTTP decodes it with `parse_state`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from paceline.adapt.versions.lifecycle import DrafterStatus, Transition
from paceline.bandit.controller.view import PolicyView
from paceline.bandit.ledger.totals import LedgerCell
from paceline.contracts import Decision, LedgerEntry, ReplicaReport


class ControllerErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Passes or policy calls of the controller that failed."""

    count: int = 0
    last: str = ""


class VersionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter version of the registry: its manifest (contracts.DrafterManifest) without the model's configuration."""

    version: str
    sha256: str
    num_bytes: int
    drafter_type: str
    shapes_hash: str
    target_version: str
    parent: str | None
    arm: str
    bucket: str | None
    num_train_rows: int
    metrics: dict[str, Any]
    created: float
    delta_of: str | None = None


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """An order of the operator or a start of the controller."""

    ts: float
    text: str


class LedgerSums(msgspec.Struct, frozen=True, kw_only=True):
    """Device-seconds of everything ever booked."""

    spent_s: float = 0.0
    saved_s: float = 0.0
    net_s: float = 0.0
    by_kind: dict[str, float] = {}


class GroupSums(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one bucket and group. acceptance_length counts the bonus token; tokens_per_s is of device time."""

    rounds: int
    tokens: int
    acceptance_length: float | None
    acceptance_rate: float | None
    tokens_per_s: float | None


class BucketTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic of one bucket: sums of each group since the beginning, and of the latest 30 s."""

    adaptive: GroupSums | UnsetType = UNSET
    static: GroupSums | UnsetType = UNSET
    plain: GroupSums | UnsetType = UNSET
    canary: GroupSums | UnsetType = UNSET
    """Adaptive requests that a version on trial served."""
    asked: GroupSums | UnsetType = UNSET
    """Requests whose client chose the group; they count in no comparison."""
    recent: dict[str, GroupSums]
    """Group -> sums of the latest 30 s."""

    def groups(self) -> dict[str, GroupSums]:
        """Group -> sums since the beginning, of the groups that had traffic."""
        found = {"adaptive": self.adaptive, "static": self.static, "plain": self.plain, "canary": self.canary}
        found["asked"] = self.asked
        return {group: sums for group, sums in found.items() if sums is not UNSET}


class TrafficBin(msgspec.Struct, frozen=True, kw_only=True):
    """Some seconds of traffic that begin at `ts`: bucket -> group -> sums."""

    ts: float
    seconds: float
    buckets: dict[str, dict[str, GroupSums]]


class RunningJob(msgspec.Struct, frozen=True, kw_only=True):
    """The training job in flight."""

    job_id: str
    bucket: str
    arm: str
    since: float
    decision_id: int


class Swaps(msgspec.Struct, frozen=True, kw_only=True):
    """Versions that replicas have swapped in: how many, how long engines stood still, when."""

    count: int = 0
    pause_ms: list[float] = []
    times: list[float] = []


class TrialEnd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a canary or a guard ended; nothing but defaults: none ended yet."""

    version: str = ""
    outcome: str = ""
    reason: str = ""
    ts: float = 0.0
    num_requests: int | None = None


class Stratum(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one stratum of a canary test and the ratio of their speeds."""

    num_incumbent: int
    num_canary: int
    ratio: float | None


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Logarithms of evidence, or of the evidence that a verdict needs."""

    slower: float
    fast_enough: float


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A version under test: its share, its requests and the evidence so far; see infra/controller/rollout.py."""

    version: str
    incumbent: str = ""
    share_percent: int
    """Of the requests that are compared."""
    since: float = 0.0
    bucket: str = ""
    scope: str = ""
    """Class that it is tried on or serves; '' = those that the live version serves."""
    arm: str = ""
    decision_id: int = 0
    num_requests: int = 0
    """Finished ones of both sides."""
    num_canary_requests: int = 0
    """Of the version."""
    num_drafted_rounds: int = 0
    min_drafted_rounds: int = 0
    ratio: float | None = None
    """Tokens per second over the incumbent's."""
    log_evidence: Evidence = Evidence(slower=0.0, fast_enough=0.0)


class Guard(Trial, frozen=True, kw_only=True):
    """A version serves its class, and the hold-back is compared with it."""


class IdleRollout(msgspec.Struct, frozen=True, kw_only=True, tag_field="status", tag="idle"):
    """No version is on trial."""

    frozen_until: dict[str, float]
    """Bucket -> no training before this time."""
    guards: list[Guard] = []
    last: TrialEnd
    alpha: float
    margin: float
    version: None = None
    incumbent: None = None
    share_percent: int = 0
    since: None = None
    num_requests: int = 0
    strata: dict[str, Stratum] = {}
    reason: str = ""


class CanaryRollout(Trial, frozen=True, kw_only=True, tag_field="status", tag="canary"):
    """A version is on trial with a share of the adaptive requests."""

    frozen_until: dict[str, float] = {}
    guards: list[Guard] = []
    last: TrialEnd = TrialEnd()
    alpha: float = 0.0
    margin: float = 0.0
    num_open: int = 0
    num_excluded: int = 0
    """Adaptive requests that another version served than their hash says."""
    num_errors: list[int] = []
    """Incumbent's, canary's."""
    evidence_against: dict[str, float] = {}
    thresholds: Evidence = Evidence(slower=0.0, fast_enough=0.0)
    strata: dict[str, Stratum] = {}
    reason: str = "on trial"


class VersionStage(msgspec.Struct, frozen=True, kw_only=True):
    """A version's life-cycle state and how it got there, oldest first."""

    state: DrafterStatus
    since: float
    bucket: str
    arm: str
    was_live: bool
    transitions: list[Transition]


class FeedbackCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Rows on their way from replicas to the controller; what only a controller knows is unset without one."""

    produced: int = 0
    delivered: int = 0
    dropped: int = 0
    duplicates: int | UnsetType = UNSET
    missing_batches: int | UnsetType = UNSET
    lost_entries: int | UnsetType = UNSET
    lag: int | UnsetType | None = UNSET
    """Entries not read yet."""


class SpeculationState(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the tree policy drafts for a bucket; see metrics.speculation_rows."""

    bucket: str
    role: str
    mode: str
    is_on: bool


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of times in seconds; None: there were none."""

    p50_s: float | None
    p99_s: float | None


class LatencyState(msgspec.Struct, frozen=True, kw_only=True):
    """How long clients waited in the past minute, over all processes that speak HTTP."""

    num_answers: int
    """Complete ones."""
    num_failed: int
    """Responses with a status of 500 or more, and answers that broke off."""
    first_token: Quantiles
    per_token: Quantiles
    """Between tokens."""
    whole: Quantiles


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """The replica that was asked: drafter slots, swaps and counters."""

    replica_id: str | None = None
    pid: int = 0
    gen: int = 0
    version: str = ""
    first_version: str = ""
    slots: dict[str, str] = {}
    pins: dict[str, int] = {}
    waiting: str | None = None
    failures: dict[str, str] = {}
    class_versions: dict[str, str] = {}
    """Class -> its own version, where it is resident."""
    failed_gen: int | None = None
    failed_reason: str = ""
    num_swaps: int = 0
    pause_ms: list[float] = []
    engine: dict[str, Any] = {}
    """Engine.stats()."""
    training: bool = False
    speculation: list[SpeculationState] = []
    feedback: dict[str, Any] | UnsetType = UNSET
    """Counters of what it produced; unset where it sends none."""
    traces: dict[str, Any] | UnsetType = UNSET


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a service knows about itself. Defaults say what is known of a service whose controller is away."""

    ts: float | None = None
    """When the controller made it; None: no controller, or one that has restored nothing yet."""
    age_s: float | None = None
    """How long ago that was when it was handed out, by the controller's clock."""
    model: str = ""
    target_version: str = ""
    epoch: int | None = None
    commit: int = 0
    gen: int = 0
    version: str = ""
    """The drafter version that is live, or is to be."""
    first_version: str = ""
    holdback_percent: int = 0
    class_versions: dict[str, str] = {}
    """Class -> the version of its own that serves it, or is to."""
    history: list[str] = []
    """Versions that were live, oldest first."""
    versions: list[VersionInfo] = []
    policy: str | None = None
    is_paused: bool = False
    notes: list[Note] = []
    decisions: list[Decision] = []
    ledger: LedgerSums = LedgerSums()
    ledger_cells: list[LedgerCell] = []
    saved_interval_s: tuple[float, float] = (0.0, 0.0)
    """95% interval of ledger.saved_s."""
    ledger_entries: list[LedgerEntry] = []
    """The newest ones."""
    buckets: dict[str, BucketTraffic] = {}
    rows: dict[str, int] = {}
    """Bucket -> rows in the trace store."""
    class_shares: dict[str, float] = {}
    """Bucket -> its share of the latest requests that named none; `default` has those of no class."""
    job: RunningJob | None = None
    swaps: Swaps = Swaps()
    rollout: IdleRollout | CanaryRollout | None = None
    lifecycle: dict[str, VersionStage] = {}
    evicted: list[str] = []
    """Versions whose weights were given up."""
    replicas: list[ReplicaReport] = []
    feedback: FeedbackCounts = FeedbackCounts()
    bandit: PolicyView | None = None
    """None: the policy could not be shown."""
    redis_up: bool = False
    is_redis_full: bool = False
    """Redis has no memory for the controller's commits, which has nothing left to free, or no disk for its own files."""
    folder_error: str = ""
    """Why the data folder cannot be written or does not answer; what the controller decides lies in Redis meanwhile. '' = it
    can."""
    folder_hung_s: float = 0.0
    """For how long a call of the data folder has not been answered, seconds; 0 = it answers."""
    folder_hangs: int = 0
    """Calls of the data folder that were not answered in time, since the controller's start."""
    read_only: str = ""
    """Why the stored state cannot be used, so that nothing is decided or written; '' = it is used."""
    is_fenced: bool = False
    """A newer controller took over."""
    errors: ControllerErrors = ControllerErrors()
    replica: ReplicaState | None = None
    """Of the replica that was asked, like `latency`, `target`, `has_controller` and `is_adaptive`; a controller by itself sets none
    of them."""
    latency: LatencyState | None = None
    """Of all replicas; None where nothing speaks HTTP yet."""
    target: str = ""
    has_controller: bool = False
    is_adaptive: bool = True
    """False: the service has no controller, since its drafter cannot be trained or there is no Redis."""

    @property
    def pinned(self) -> str | None:
        """Version that an operator has pinned; while it is, the policy decides nothing."""
        return self.bandit.pinned if self.bandit is not None else None

    @property
    def canary(self) -> CanaryRollout | None:
        """The version on trial with its numbers, None when there is none."""
        return self.rollout if isinstance(self.rollout, CanaryRollout) else None


_WITHOUT_CONTROLLER = (
    "gen", "version", "first_version", "replica", "target", "target_version", "model", "has_controller", "is_adaptive", "redis_up",
    "read_only", "feedback", "latency",
)  # fmt: skip


def state_json(snapshot: Snapshot) -> dict[str, Any]:
    """Plain values for `GET /paceline/state`; without a controller only what a replica knows by itself."""
    values = msgspec.to_builtins(snapshot)
    return values if snapshot.has_controller else {name: values[name] for name in _WITHOUT_CONTROLLER}


_DECODER = msgspec.json.Decoder(Snapshot)


def parse_state(body: bytes) -> Snapshot:
    """The record behind a body of `GET /paceline/state`; raises msgspec.DecodeError."""
    return _DECODER.decode(body)


class VersionList(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `GET /paceline/versions`."""

    gen: int
    version: str
    first_version: str
    pinned: str | None = None
    """Version that an operator has pinned."""
    class_versions: dict[str, str] = {}
    versions: list[VersionInfo]


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """Body of an answer to `POST /paceline/<command>`."""

    gen: int
    version: str
    policy: str | None
    is_paused: bool
