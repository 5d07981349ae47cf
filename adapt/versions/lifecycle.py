"""Life cycle: the states of a drafter version, the moves between them, and how every version got where it stands.

TRAINING -> TRAINED -> SHADOWED -> CANARY -> LIVE -> RETIRED, with REJECTED, ROLLED_BACK and FAILED as ends. The canary
may be skipped (SHADOWED -> LIVE), and a retired version may be recalled (RETIRED -> LIVE). A version that was accepted
but is not served now, or whose canary was called off undecided, is retired too: it may have its canary later.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from paceline.errors import IllegalTransitionError


class DrafterStatus(StrEnum):
    """Where a drafter version stands."""

    TRAINING = "training"
    TRAINED = "trained"
    SHADOWED = "shadowed"
    CANARY = "canary"
    LIVE = "live"
    RETIRED = "retired"
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"
    FAILED = "failed"


_S = DrafterStatus
NEXT_STATUS: dict[DrafterStatus, frozenset[DrafterStatus]] = {
    _S.TRAINING: frozenset({_S.TRAINED, _S.FAILED}),
    _S.TRAINED: frozenset({_S.SHADOWED, _S.REJECTED, _S.FAILED}),
    _S.SHADOWED: frozenset({_S.CANARY, _S.LIVE, _S.RETIRED, _S.REJECTED, _S.FAILED}),
    _S.CANARY: frozenset({_S.LIVE, _S.RETIRED, _S.ROLLED_BACK, _S.FAILED}),
    _S.LIVE: frozenset({_S.RETIRED, _S.ROLLED_BACK, _S.FAILED}),
    _S.RETIRED: frozenset({_S.CANARY, _S.LIVE, _S.FAILED}),
    _S.REJECTED: frozenset(),
    _S.ROLLED_BACK: frozenset(),
    _S.FAILED: frozenset(),
}
END_STATUSES = frozenset(status for status, following in NEXT_STATUS.items() if not following)
ADMISSIBLE = frozenset({_S.TRAINING, _S.RETIRED, _S.LIVE})
"""A version enters the table with a training job, or because an operator or the first start says so. Ends bind the
controller; only an operator's order admits an ended version again."""
MAX_VERSIONS = 200
"""Versions remembered; those that retired longest ago are forgotten first, then those that came to an end: known, they are barred."""
MAX_JOBS = 50
"""Training jobs remembered that ended without a version; they take no version's place."""
JOB_PREFIX = "job:"
"""Begins the key of a job that has made no version (yet)."""
MAX_TRANSITIONS = 24
"""Transitions kept a version; the decision log keeps all."""


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the decision log: a version changed its state, and why."""

    version: str
    """The job's id, as `job:<id>`, until the job has made a version."""
    before: DrafterStatus | None
    """None: the version enters the table."""
    after: DrafterStatus
    reason: str
    ts: float


def advance(status: DrafterStatus, to: DrafterStatus, *, version: str, reason: str, ts: float) -> Transition:
    """Return the transition if the table allows it and it has a reason; raises IllegalTransitionError otherwise."""
    if to not in NEXT_STATUS[status]:
        raise IllegalTransitionError(f"drafter {version}: {status.value} -> {to.value} is not allowed ({reason=})")
    if not reason:
        raise IllegalTransitionError(f"drafter {version}: {status.value} -> {to.value} must have a reason, got none")
    return Transition(version=version, before=status, after=to, reason=reason, ts=ts)


class VersionLife(msgspec.Struct, kw_only=True):
    """One version's state and how it got there, oldest first."""

    status: DrafterStatus
    since: float
    bucket: str = ""
    arm: str = ""
    was_live: bool = False
    transitions: list[Transition] = []


class Lifecycle(msgspec.Struct):
    """Every version's life; encodable. Each method that changes a state returns the line for the decision log."""

    versions: dict[str, VersionLife] = {}

    def status(self, version: str) -> DrafterStatus | None:
        """Where a version stands, None when the table does not know it."""
        life = self.versions.get(version)
        return None if life is None else life.status

    def with_status(self, *statuses: DrafterStatus) -> set[str]:
        return {v for v, life in self.versions.items() if life.status in statuses}

    def barred(self) -> set[str]:
        """Versions that came to an end: never to be served again unless an operator says so."""
        return self.with_status(*END_STATUSES)

    def admit(
        self, version: str, status: DrafterStatus, *, reason: str, ts: float, bucket: str = "", arm: str = ""
    ) -> Transition:
        """Let a version enter the table; raises IllegalTransitionError for another status or one that is under way."""
        old = self.versions.get(version)
        if status not in ADMISSIBLE or not reason or (old is not None and old.status not in END_STATUSES):
            raise IllegalTransitionError(f"drafter {version} cannot be admitted as {status.value} ({reason=})")
        made = Transition(version=version, before=None, after=status, reason=reason, ts=ts)
        life = old or VersionLife(status=status, since=ts, bucket=bucket, arm=arm)
        self.versions[version] = life
        self._note(life, made)
        self._forget(version)
        return made

    def move(self, version: str, to: DrafterStatus, *, reason: str, ts: float) -> Transition:
        """Carry out one transition; raises IllegalTransitionError when the table does not allow it."""
        life = self.versions.get(version)
        if life is None:
            raise IllegalTransitionError(f"drafter {version} is unknown and cannot become {to.value} ({reason=})")
        made = advance(life.status, to, version=version, reason=reason, ts=ts)
        self._note(life, made)
        return made

    def may(self, version: str, to: DrafterStatus) -> bool:
        """Whether the table allows the transition."""
        life = self.versions.get(version)
        return life is not None and to in NEXT_STATUS[life.status]

    def name(self, job: str, version: str) -> None:
        """A job has made a version: its entry goes on under the version's id, unless that content was known before."""
        life = self.versions.pop(job)
        self.versions.setdefault(version, life)

    def _note(self, life: VersionLife, made: Transition) -> None:
        life.status, life.since = made.after, made.ts
        life.was_live = life.was_live or made.after == DrafterStatus.LIVE
        life.transitions = [*life.transitions, made][-MAX_TRANSITIONS:]

    def _forget(self, admitted: str = "") -> None:
        """Forget what is beyond the limits. admitted: the version that enters, which stays."""
        done = END_STATUSES | {DrafterStatus.RETIRED}
        for is_job, most in ((True, MAX_JOBS), (False, MAX_VERSIONS)):
            kept = [v for v in self.versions if v.startswith(JOB_PREFIX) == is_job]
            ended = [v for v in kept if self.versions[v].status in done and v != admitted]
            old = sorted((self.versions[v].status in END_STATUSES, self.versions[v].since, v) for v in ended)
            for *_, version in old[: max(0, len(kept) - most)]:
                del self.versions[version]
