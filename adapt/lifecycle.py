"""Which life-cycle state may a drafter version go to next?

TRAINING -> TRAINED -> SHADOWED -> CANARY -> LIVE -> RETIRED, with REJECTED, ROLLED_BACK and FAILED as ends. The canary
may be skipped (SHADOWED -> LIVE), and a retired version may be recalled (RETIRED -> LIVE).
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
    _S.SHADOWED: frozenset({_S.CANARY, _S.LIVE, _S.REJECTED, _S.FAILED}),
    _S.CANARY: frozenset({_S.LIVE, _S.ROLLED_BACK, _S.FAILED}),
    _S.LIVE: frozenset({_S.RETIRED, _S.ROLLED_BACK, _S.FAILED}),
    _S.RETIRED: frozenset({_S.LIVE, _S.FAILED}),
    _S.REJECTED: frozenset(),
    _S.ROLLED_BACK: frozenset(),
    _S.FAILED: frozenset(),
}
END_STATUSES = frozenset(status for status, following in NEXT_STATUS.items() if not following)


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the decision log: a version changed its state, and why."""

    version: str
    before: DrafterStatus
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
