"""Rollout: a canary or a guard from its start to its end: the requests that count, its promotion, retirement or roll-back.

Pure: no I/O, time comes from arguments. Everything lies in `RolloutState`, which the controller commits with the rest of
its state, so that a controller killed anywhere in between goes on with the same canary.

Which requests count. An adaptive request counts when its replica runs the canary's generation, its first round was seen,
and it was served by the version that the hash of its id says. A request is finished when it has been quiet for a while.

The end, in this order:
1. rolled back at once when a replica cannot load it, its drafter failed while serving (NaN, exception), or the engines of
   two replicas failed under it;
2. rolled back when the evidence that it is worse (slower, fewer tokens per round, more errors) passes 1 / alpha; retired
   instead while it has not drafted one round, unless its errors alone pass: what was slow was not the version. Evidence of
   its plain requests ends with the first request that it drafts in: the test begins anew behind it, errors excepted;
3. promoted when the evidence that it is not slower by the margin passes 1 / alpha_promote, after min_requests and
   min_drafted_rounds: requests that were decoded plainly are not slower either, and say nothing about a drafter;
4. at max_requests or max_s without a verdict: the gate found it better on logged text, so it is promoted if it has
   both minima and its estimated speed is not below 1 - margin; otherwise it is retired, which bars nothing. One that has
   drafted too little stays on trial until max_s, however many requests it has.
A rollback bars the version and freezes training on its bucket for freeze_s.

A guard is the same test of a version that serves all of its class already, because a burst's replay found it surely better:
its requests are compared with those of the hold-back, which keep the first drafter. Every class may have one. What would
retire or roll back a canary takes the class's version back; a promotion ends the guard. A guard has no time limit (its class
may be away), and without a verdict at max_requests the version stays: an estimate from some requests is less than the
evidence that made it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from paceline.bandit.canary import WEIGHTS, CanaryTest, batch_class
from paceline.config import RolloutConfig
from paceline.contracts import CellSums, DesiredState, Group, ReplicaReport, is_canary

MAX_OPEN = 4096
"""Requests in flight that are followed; more are left out, whatever served them."""
MAX_ROUNDS = 256
"""A longer request counts with its first rounds, to the end of a batch, so that it cannot hold up the verdict."""
_MAX_FROZEN = 200
_WORSE = {
    "speed": "is slower",
    "tokens_per_round": "emits fewer tokens per round",
    "errors": "fails more often",
}


class Outcome(StrEnum):
    """How a canary ends."""

    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    RETIRED = "retired"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a canary, with its numbers in a sentence."""

    outcome: Outcome
    reason: str


class OpenRequest(msgspec.Struct, array_like=True):
    """A request that still runs: sums over its rounds so far."""

    is_canary: bool
    bucket: str
    is_greedy: bool
    last: float
    """Controller's time of its latest rows, or of the end of the window that it is."""
    tokens: float = 0.0
    seconds: float = 0.0
    rounds: int = 0
    drafted_rounds: int = 0
    """Rounds in which its drafter ran, also where none of its nodes was worth verifying; the others were decoded plainly."""
    batch_sum: int = 0


class Canary(msgspec.Struct, kw_only=True):
    """One version on trial."""

    version: str
    incumbent: str
    percent: int
    since: float
    decision_id: int
    bucket: str = ""
    """Bucket whose training job made it; '' = none in particular."""
    scope: str = ""
    """Class whose requests it is tried on; '' = those that the live version serves."""
    arm: str = ""
    before: str | None = None
    """Of a guard: the version that the class had, '' = none of its own. None: a canary."""
    test: CanaryTest
    open: dict[str, OpenRequest] = {}
    errors_before: dict[str, tuple[int, int]] = {}
    """Replica -> failed requests (incumbent, canary) when it was first seen with the canary."""
    errors_now: dict[str, tuple[int, int]] = {}
    num_drafted_rounds: int = 0
    """Rounds of its finished requests in which it ran."""
    num_excluded: int = 0
    """Adaptive requests that another version served than their hash says."""

    @property
    def is_guard(self) -> bool:
        return self.before is not None

    def is_wanted(self, desired: DesiredState) -> bool:
        """Whether a desired record asks for this trial, or gives a guard's class its version."""
        if self.is_guard:
            return desired.class_versions.get(self.scope) == self.version
        asked = (desired.canary_version, desired.canary_bucket, desired.version_of(desired.canary_bucket))
        return asked == (self.version, self.scope, self.incumbent)


class RolloutState(msgspec.Struct, kw_only=True):
    """The canary in flight, the guards, what is frozen, and how the latest of them ended."""

    canary: Canary | None = None
    guards: dict[str, Canary] = {}
    """Class -> guard of its version."""
    frozen: dict[str, float] = {}
    """Bucket -> no training before this time."""
    last: dict[str, str | float | int] = {}
    """Version, outcome, reason, time and requests of the latest one that ended."""

    @property
    def trials(self) -> list[Canary]:
        """The canary in flight and the guards."""
        return [*([] if self.canary is None else [self.canary]), *self.guards.values()]

    def begin(
        self, version: str, incumbent: str, config: RolloutConfig, *, now: float, decision_id: int, bucket: str, arm: str,
        scope: str = "",
    ) -> Canary:  # fmt: skip
        """Put a version on trial; the one before must have ended."""
        assert self.canary is None, f"{self.canary} is still on trial"
        self.canary = Canary(
            version=version,
            incumbent=incumbent,
            percent=config.canary_percent,
            since=now,
            decision_id=decision_id,
            bucket=bucket,
            scope=scope,
            arm=arm,
            test=CanaryTest(share=config.canary_percent / 100, margin=config.margin),
        )
        return self.canary

    def guard(
        self, version: str, before: str, config: RolloutConfig, *, incumbent: str, holdback_percent: int, now: float,
        decision_id: int, bucket: str, arm: str,
    ) -> None:  # fmt: skip
        """Watch a version that serves all requests of a class but the hold-back.

        Args:
            before: version that the class had of its own, '' = none.
            incumbent: the hold-back's version.
        """
        percent = 100 - holdback_percent
        self.guards[bucket] = Canary(
            version=version, incumbent=incumbent, percent=percent, since=now, decision_id=decision_id, bucket=bucket,
            scope=bucket, arm=arm, before=before, test=CanaryTest(share=percent / 100, margin=config.margin),
        )  # fmt: skip

    def end(self, canary: Canary, verdict: Verdict, config: RolloutConfig, now: float) -> None:
        """Close a trial or a guard; a rollback freezes its bucket."""
        if canary.is_guard:
            del self.guards[canary.scope]
        else:
            self.canary = None
        if verdict.outcome == Outcome.ROLLED_BACK and canary.bucket and config.freeze_s > 0:
            live = {b: t for b, t in self.frozen.items() if t > now}
            self.frozen = dict(list({**live, canary.bucket: now + config.freeze_s}.items())[-_MAX_FROZEN:])
        self.last = {
            "version": canary.version,
            "outcome": verdict.outcome.value,
            "reason": verdict.reason,
            "ts": now,
            "num_requests": sum(canary.test.num_requests),
        }

    def tried_version(self, serving: set[str]) -> str:
        """The version on trial, or the one whose trial failed last: requests that it still serves are not adaptive ones.

        serving: versions that serve all or some class.
        """
        if self.canary is not None:
            return self.canary.version
        last = str(self.last.get("version", "")) if self.last.get("outcome") != Outcome.PROMOTED else ""
        return "" if last in serving else last

    def frozen_buckets(self, now: float) -> list[str]:
        return sorted(b for b, until in self.frozen.items() if until > now)


def fold(canary: Canary, sums_of_cells: Iterable[CellSums], now: float, hold_s: float = 0.0) -> None:
    """Add a replica's sums; the caller leaves out replicas that do not run the canary's generation.

    hold_s: for so long a unit that begins is not finished, however quiet it is: the rest of a window of time.
    """
    groups = (Group.ADAPTIVE, Group.STATIC) if canary.is_guard else (Group.ADAPTIVE,)
    cells = [cell for cell in sums_of_cells if cell.group in groups and canary.scope in ("", cell.bucket)]
    for cell in cells:
        for request_id, sums in cell.requests.items():
            if sums.first_ts is not None and sums.first_ts >= canary.since:  # not admitted before the trial
                _open(canary, request_id, cell, is_greedy=sums.is_greedy, until=now + hold_s)
    for cell in cells:
        for request_id, sums in cell.requests.items():
            known = canary.open.get(request_id)
            if known is None or known.rounds >= MAX_ROUNDS:
                continue
            known.tokens += sums.num_tokens
            known.seconds += sums.seconds
            known.rounds += sums.num_rounds
            known.drafted_rounds += sums.num_run
            known.batch_sum += sums.batch_sum
            known.last = max(known.last, now)


def _open(canary: Canary, request_id: str, cell: CellSums, *, is_greedy: bool, until: float) -> None:
    """Follow a request that begins, where the version that serves it is the one that the hash of its id says."""
    if canary.is_guard:
        arm = cell.group == Group.ADAPTIVE
    else:
        arm = is_canary(request_id, canary.version, canary.percent)
    if cell.version != (canary.version if arm else canary.incumbent):
        canary.num_excluded += 1
    elif len(canary.open) < MAX_OPEN:
        canary.open[request_id] = OpenRequest(is_canary=arm, bucket=cell.bucket, is_greedy=is_greedy, last=until)


def close_quiet(canary: Canary, config: RolloutConfig, now: float) -> int:
    """Enter the requests that are finished into the test, in the order of their ids; returns how many."""
    done = sorted(
        (request_id, r)
        for request_id, r in canary.open.items()
        if now - r.last >= config.quiet_s or r.rounds >= MAX_ROUNDS
    )
    for request_id, r in done:
        del canary.open[request_id]
        if r.seconds > 0:
            mode = "greedy" if r.is_greedy else "sampled"
            stratum = f"{r.bucket} | batch {batch_class(r.batch_sum / r.rounds)} | {mode}"
            num_before, had_drafted = canary.test.num_requests[1], canary.num_drafted_rounds > 0
            canary.test.add(stratum, r.is_canary, r.tokens, r.seconds, r.rounds)
            canary.num_drafted_rounds += r.drafted_rounds if r.is_canary else 0
            if num_before > 0 and not had_drafted and canary.num_drafted_rounds > 0:
                # Begins behind this request: its arm, which is what told us to stop here, was no draw of the new test.
                old = canary.test
                canary.test = CanaryTest(share=old.share, margin=old.margin, errors=old.errors)
    return len(done)


def refuses_canary(report: ReplicaReport, desired: DesiredState) -> bool:
    """Whether a replica could not take the canary's generation because of the canary, not of the live version."""
    is_live_well = report.version == desired.version and desired.version not in report.failures
    return report.failed_gen == desired.gen and is_live_well


def take_reports(canary: Canary, reports: Sequence[ReplicaReport], desired: DesiredState) -> Verdict | None:
    """Look at what replicas say about the canary: failures end it at once, failed requests are counted."""
    for r in reports:
        if (canary.is_guard or r.canary_version == canary.version) and canary.version in r.failures:
            reason = f"replica {r.replica_id} switched it off: {r.failures[canary.version]}"
            return Verdict(outcome=Outcome.ROLLED_BACK, reason=reason)
        refused = r.refused.get(canary.version, "") if canary.is_guard else r.failed_reason
        if refused if canary.is_guard else refuses_canary(r, desired):
            return Verdict(outcome=Outcome.ROLLED_BACK, reason=f"replica {r.replica_id} refused it: {refused}")
        if r.gen >= desired.gen or r.replica_id in canary.errors_before:
            now = (r.errors.get(canary.incumbent, 0), r.errors.get(canary.version, 0))
            canary.errors_before.setdefault(r.replica_id, now)
            canary.errors_now[r.replica_id] = now
    before, after = canary.errors_before, canary.errors_now
    if canary.is_guard:  # which may last, while replicas come and go
        for gone in set(after) - {r.replica_id for r in reports}:
            del before[gone], after[gone]
    new = {i: [b - a for a, b in zip(before[i], after[i], strict=True)] for i in after}
    if not canary.is_guard:  # the hold-back's version serves other classes, too
        canary.test.errors = [sum(n[0] for n in new.values()), sum(n[1] for n in new.values())]
    # a guard's version serves other classes for long: what breaks the incumbent's requests as well is not the version's
    broken = sorted(i for i, n in new.items() if n[1] > 0 and not (canary.is_guard and n[0] > 0))
    if len(broken) >= 2:
        reason = f"requests on it ended in errors on {len(broken)} replicas ({', '.join(broken)})"
        return Verdict(outcome=Outcome.ROLLED_BACK, reason=reason)
    return None


def judge(canary: Canary, config: RolloutConfig, now: float) -> Verdict | None:
    """The verdict that the evidence and the limits allow now; None = the trial goes on."""
    test = canary.test
    incumbent, own = test.num_requests
    ratio = test.ratio()
    speed = f"{100 * (ratio - 1):+.1f}% tokens per second" if ratio is not None else "no comparable requests"
    numbers = f"{speed} on {own} requests against {incumbent}"
    drafted = canary.num_drafted_rounds
    has_drafted = drafted >= config.min_drafted_rounds
    may_promote = has_drafted and own >= config.min_requests
    limit = math.log(1 / config.alpha)
    if test.evidence_worse() >= limit:
        against = {kind: math.log(WEIGHTS[kind]) + e for kind, e in test.evidence_against().items()}
        if drafted == 0 and against["errors"] < limit:
            worse = _WORSE["speed" if against["speed"] >= against["tokens_per_round"] else "tokens_per_round"]
            reason = f"it {worse} than {canary.incumbent}, but it drafted in none of its requests: {numbers}"
            return Verdict(outcome=Outcome.RETIRED, reason=reason)
        worse = _WORSE["errors" if drafted == 0 else max(against, key=against.__getitem__)]
        reason = f"it {worse} than {canary.incumbent}: {numbers}, evidence {_odds(test.evidence_worse())}"
        return Verdict(outcome=Outcome.ROLLED_BACK, reason=reason)
    if may_promote and test.evidence_fast_enough() >= math.log(1 / config.alpha_promote):
        evidence = _odds(test.evidence_fast_enough())
        reason = f"not slower than {canary.incumbent} by {config.margin:.0%} or more: {numbers}, evidence {evidence}"
        return Verdict(outcome=Outcome.PROMOTED, reason=reason)
    is_full = own >= config.max_requests and (has_drafted or canary.is_guard)
    if not is_full and (canary.is_guard or now - canary.since < config.max_s):
        return None
    ended = f"no verdict after {own} requests of it and {now - canary.since:.0f} s"
    if not has_drafted:
        ended += f": it drafted in {drafted} rounds, and a promotion needs {config.min_drafted_rounds}"
    is_promoted = may_promote and ratio is not None and ratio >= 1 - config.margin
    if is_promoted or canary.is_guard:
        return Verdict(outcome=Outcome.PROMOTED, reason=f"{ended}; the gate's word stands: {numbers}")
    return Verdict(outcome=Outcome.RETIRED, reason=f"{ended}; {numbers}")


def _odds(log_evidence: float) -> str:
    return f"{math.exp(min(log_evidence, 50.0)):.3g} to 1"
