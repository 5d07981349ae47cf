"""Epoch: what its close teaches, what versions of earlier services teach, and the beliefs that follow from both."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec

from paceline.bandit.beliefs.belief import ACTIVE_SHARE, STEADY, BucketBelief, BucketMeter, epoch_weight
from paceline.bandit.beliefs.gain_model import further_share
from paceline.bandit.beliefs.interference import Slowdown
from paceline.bandit.beliefs.observation import BucketObservation, HostContext, close
from paceline.bandit.beliefs.ratio import combined
from paceline.bandit.beliefs.recall import MANIFEST_REQUESTS, SCORE_SD
from paceline.bandit.beliefs.regime import BucketRegime, MixRegime
from paceline.bandit.controller.state import ControllerState
from paceline.bandit.ledger.savings import Booking
from paceline.bandit.policies.pricing import headroom_of
from paceline.config import PolicyConfig
from paceline.contracts import Group


def close_epoch(state: ControllerState, now: float, context: HostContext, bank_income: float) -> list[str]:
    """Fold the open windows into meters, regimes, scores, ledger and bank; returns the buckets that raised a drift alarm."""
    start = state.epoch_start if state.epoch_start is not None else now
    windows, state.windows = state.windows, {}
    state.epoch += 1
    state.latest = {name: close(name, windows[name], start, now) for name in sorted(windows)}
    served_s = sum(s.device_s for seen in state.latest.values() for s in seen.stats)
    state.income_s += bank_income * served_s
    num_requests = sum(s.time_per_token.n for seen in state.latest.values() for s in seen.stats)
    weight = epoch_weight(num_requests, now - start)
    total_load = sum(seen.load(Group.ADAPTIVE) for seen in state.latest.values())
    if total_load > 0:  # a quiet service says nothing about the height of the load when there is one
        state.total_load = _steadied(state.total_load, total_load, weight)
    if now > start and (served_s > 0 or state.busy is not None):  # from the first request on, quiet epochs count
        state.busy = _steadied(state.busy, served_s / (now - start), weight)
        state.served_s, state.watched_s = state.served_s + served_s, state.watched_s + now - start
    num_seen = int(bool(state.meters))  # the load of a bucket that joins others grows from 0, as theirs falls
    for name in sorted(set(state.meters) | set(state.latest)):
        meter = state.meters.setdefault(name, BucketMeter(num_epochs=num_seen))
        meter.update(state.latest.get(name), weight)
    written = {**context.rows, **context.rows_written}
    alarms = [name for name, seen in state.latest.items() if _has_drifted(state, seen, start)]
    for name in alarms:
        _forget_bucket(state, name, start, now)
    if state.regime is None:
        state.regime = MixRegime(start)
    if alarms:
        state.regime.begin(start)
        for name in alarms:
            state.regime.forget(name)
    if state.regime.update({name: seen.num_tokens() for name, seen in state.latest.items()}, start, weight):
        # a new mix of the load there was: one epoch tells little of its height
        scale = state.total_load / total_load if state.total_load is not None and total_load > 0 else 1.0
        for name, meter in state.meters.items():
            meter.load = scale * state.latest[name].load(Group.ADAPTIVE) if name in state.latest else 0.0
    slowdown = state.interference.close()
    undisturbed = 1.0 if slowdown is None else 1.0 - min(slowdown.share, 0.99)
    for name, seen in state.latest.items():
        state.table.observe(seen)
        for booking in state.savings.close(seen, context.first_version, undisturbed):
            _book_saving(state, booking, f"e{state.epoch}:{name}:{booking.version}", now)
    for name, by_version in context.shadow.items():
        if name in drifted_buckets(state):
            continue  # replays of a text that is gone
        for version, length in by_version.items():
            state.table.fill_shadow(name, version, length)
    _book_interference(state, slowdown, start, now)
    settle_interference(state, state.interference.settle(), now)
    state.rows_written = written
    state.epoch_start = now
    return alarms


def _steadied(before: float | None, value: float, weight: float) -> float:
    """The mean over a few minutes behind an epoch of such a weight; None = there was none."""
    return value if before is None else before + STEADY * weight * (value - before)


def _has_drifted(state: ControllerState, seen: BucketObservation, start: float) -> bool:
    return state.buckets.setdefault(seen.bucket, BucketRegime(start)).update(seen.lengths())


def drop_bucket(state: ControllerState, name: str, now: float) -> None:
    """Keep nothing of a bucket that is told apart no longer, once what its savings' windows lack is booked."""
    _end_comparison(state, name, now, "gone")
    by_bucket: tuple[dict[str, Any], ...] = (
        state.windows, state.meters, state.latest, state.buckets, state.rows_written, state.table.scores, state.round_costs.sums,
        state.memory.staleness_s, state.memory.hedges, state.savings.static, state.savings.adaptive, state.owners,
        state.rows_at_job, state.required_rows, state.learners, state.unsure, state.evidence.rows, state.evidence.deviation,
    )  # fmt: skip
    for kept in by_bucket:
        kept.pop(name, None)
    state.gains.drop_bucket(name)
    if state.regime is not None:
        state.regime.mean.pop(name, None)
        state.regime.recent.pop(name, None)
        state.regime.forget(name)


def begin_bucket(state: ControllerState, name: str, now: float, num_rows: int) -> None:
    """Believe nothing of a bucket whose name is another kind of text's from now on.

    num_rows: ever written under its name; whatever manifests say of versions for it, they say of that text.
    """
    drop_bucket(state, name, now)
    for rows in state.learned.values():
        rows.pop(name, None)
    state.buckets[name] = BucketRegime(now, rows_at_start=num_rows, num_alarms=int(num_rows > 0), began=now)


def set_back(state: ControllerState, by_s: float) -> None:
    """The clock was set back by so much: what is remembered of times keeps its order among itself and with what is to come."""
    assert state.epoch_start is not None
    state.epoch_start -= by_s
    state.last_job_started -= by_s
    state.last_job_ended -= by_s
    if state.job is not None:
        state.job = msgspec.structs.replace(state.job, started=state.job.started - by_s)
    for regime in state.buckets.values():
        regime.set_back(by_s)
    if state.regime is not None:
        state.regime.set_back(by_s)


def class_began(state: ControllerState, name: str) -> float:
    """When a bucket's name went to its present kind of text; 0.0 = no other had it."""
    regime = state.buckets.get(name)
    return regime.began if regime is not None else 0.0


def text_began(state: ControllerState, name: str) -> float:
    """When a bucket's present text began, by the clock of then; 0.0 = it is the first one."""
    regime = state.buckets.get(name)
    return 0.0 if regime is None else regime.text_began


def part_bucket(state: ControllerState, name: str, whole: str, now: float, num_rows: int) -> None:
    """Let a new bucket, so far a part of another one, begin with whose its versions are and what they have learned.

    Lengths are left out: its text may be the reason why it is apart, and where drafting does not pay its own few rounds would not
    outweigh them for minutes.
    """
    begin_bucket(state, name, now, num_rows)
    if whole in state.owners:
        state.owners[name] = dict(state.owners[whole])
    for rows in state.learned.values():
        if whole in rows:
            rows[name] = rows[whole]


def _forget_bucket(state: ControllerState, name: str, start: float, now: float) -> None:
    """The text behind a bucket changed: what was learned about the old text no longer holds."""
    state.buckets[name].reset(start, state.rows_written.get(name, 0))
    state.table.reset_bucket(name)
    state.gains.reset_bucket(name)
    _end_comparison(state, name, now, "end")
    state.required_rows.pop(name, None)
    state.learners.pop(name, None)
    state.unsure.pop(name, None)
    for learned in state.learned.values():
        learned.pop(name, None)


def _end_comparison(state: ControllerState, name: str, now: float, why: str) -> None:
    for booking in state.savings.reset_bucket(name):
        _book_saving(state, booking, f"e{state.epoch}:{name}:{booking.version}:{why}", now)


def _book_saving(state: ControllerState, booking: Booking, detail: str, now: float) -> None:
    bucket, version = booking.bucket, booking.version
    arm, owner = state.made_by.get(version), state.owner_of(bucket, version)
    state.book("saving", detail, booking.seconds, now, owner, bucket, version, arm, booking.standard_error_s)


def _book_interference(state: ControllerState, slowdown: Slowdown | None, start: float, now: float) -> None:
    if slowdown is None:
        return
    is_ours = state.job is not None or state.last_job_ended >= start
    _book_lost(state, state.last_job_id if is_ours else None, f"e{state.epoch}", slowdown.seconds, now)


def settle_interference(state: ControllerState, settled: tuple[int, Slowdown] | None, now: float) -> None:
    """Learn from all of a job and book what its epochs missed of it."""
    if settled is None:
        return
    owner, whole = settled
    state.costs.observe_slowdown(whole.relative, whole.num_rounds)
    _book_lost(state, owner, f"e{state.epoch}:after", whole.seconds, now)


def _book_lost(state: ControllerState, owner: int | None, detail: str, seconds: float, now: float) -> None:
    decision = state.actions.get(owner) if owner is not None else None
    if seconds != 0:
        bucket, arm = (decision.bucket, decision.arm) if decision is not None else ("", None)
        state.book("interference", detail, seconds, now, owner, bucket, None, arm)


def drifted_buckets(state: ControllerState) -> set[str]:
    """Buckets whose text changed since the manifests' records of it."""
    return {name for name, regime in state.buckets.items() if regime.num_alarms > 0}


def learned_rows(state: ControllerState, context: HostContext | None, version: str) -> dict[str, int]:
    """Bucket -> rows of its present text that a version has learned."""
    known = context.learned_rows.get(version, {}) if context is not None else {}
    drifted = drifted_buckets(state)
    learned = {name: rows for name, rows in known.items() if name not in drifted}
    return {**learned, **state.learned.get(version, {})}


def learner_of(state: ControllerState, bucket: str, version: str) -> tuple[int, str]:
    """Rows that the bucket's learner has learned since `version`, and its parameters; (0, '') when it began at another one."""
    base, rows, parameters = state.learners.get(bucket, (version, 0, ""))
    return (rows, parameters) if base == version else (0, "")


def bucket_beliefs(state: ControllerState, config: PolicyConfig, context: HostContext) -> dict[str, BucketBelief]:
    """Beliefs of every bucket whose rounds have a price, drafted or not; one that an operator assigned is not active."""
    total = sum(meter.load for meter in state.meters.values())
    found = {}
    for name in sorted(state.meters):
        meter = state.meters[name]
        version = context.version_of(name)
        token_s, round_s = meter.time_per_token_s(), state.round_costs.round_s(name)
        if token_s is None or round_s is None:
            continue
        seen, undrafted = state.table.estimate(name, version), _undrafted_length(round_s, meter.plain_token_s())
        # Where drafting rests, what a few rounds said is held against the engine's finding that it does not pay. Else a class that
        # had other text, or luck with its first requests, would be thought to be near the length at which it does as long as it rests.
        length = combined((seen, undrafted)) if seen and undrafted and meter.is_resting() else seen or undrafted
        if length is None:
            continue
        usable, fresh = rows_of(state, context, name)
        learner = learner_of(state, name, version)
        found[name] = BucketBelief(
            bucket=name,
            load=meter.load,
            time_per_token_s=token_s,
            round_s=round_s,
            plain_token_s=meter.plain_token_s(),
            length=max(length[0], 1.0),
            length_se=length[1],
            usable_rows=usable,
            fresh_rows=fresh,
            learned_rows=learned_rows(state, context, version).get(name, 0),
            first_rows=learned_rows(state, context, context.first_version).get(name, 0),
            learner_rows=learner[0],
            learner_parameters=learner[1],
            unsure=state.unsure.get(name) if learner[0] else None,
            is_tried=state.rows_at_job.get(name, 0) > state.buckets[name].rows_at_start
            if name in state.buckets
            else False,
            required_rows=max(min(state.required_rows.get(name, 0), usable), config.min_rows),
            is_active=0 < meter.load >= ACTIVE_SHARE * total and name not in context.assigned,
            batches=state.round_costs.batches(name),
        )
    return found


def _undrafted_length(round_s: float, plain_token_s: float | None) -> tuple[float, float] | None:
    """(acceptance length, standard error) where none was seen since drafting is off: anything from 1 to the length at which
    it would pay."""
    if plain_token_s is None:
        return None
    spread = max(round_s / plain_token_s - 1.0, 0.0)
    return 1.0 + spread / 2, max(spread / math.sqrt(12.0), 0.01)


APART_Z = 2.0
"""Standard errors by which the acceptance lengths of two kinds of text differ surely."""


def _is_apart(a: BucketBelief, b: BucketBelief) -> bool:
    return abs(a.length - b.length) > APART_Z * math.hypot(a.length_se, b.length_se)


def pooled_beliefs(
    state: ControllerState, context: HostContext, beliefs: dict[str, BucketBelief]
) -> tuple[dict[str, BucketBelief], dict[str, list[str]]]:
    """Beliefs with one for all buckets that learn together, and who else is meant by each: bucket -> the others' buckets.

    A pool goes by the bucket that has a learner already, else by the one with most rows; one that its version drafts surely
    better or worse for is another kind of text.
    """
    pools: dict[tuple[str, str], list[str]] = {}
    for name in beliefs:
        if name in context.pools and name not in context.assigned and name not in context.frozen:
            pools.setdefault((context.pools[name], context.version_of(name)), []).append(name)
    others: dict[str, list[str]] = {}
    found = dict(beliefs)
    for (_, version), names in pools.items():

        def precedence(name: str, version: str = version) -> tuple[bool, int, str]:
            return state.learners.get(name, ("",))[0] == version, beliefs[name].usable_rows, name

        first = max(names, key=precedence)
        names = [n for n in names if not _is_apart(beliefs[n], beliefs[first])]
        if len(names) < 2:
            continue
        others[first] = sorted(set(names) - {first})
        for name in names:
            del found[name]
        found[first] = BucketBelief.pooled(beliefs[first], [beliefs[name] for name in names])
    return found, others


def rows_of(state: ControllerState, context: HostContext, name: str) -> tuple[int, int]:
    """(usable, fresh) rows of a bucket: usable describe its text as it is now, fresh came after its last job."""
    stored = context.rows.get(name, 0)
    written = context.rows_written.get(name, stored)
    regime = state.buckets.get(name)
    usable = min(stored, max(written - (regime.rows_at_start if regime is not None else 0), 0))
    return usable, min(usable, max(written - state.rows_at_job.get(name, 0), 0))


PAIR_ERROR = SCORE_SD * math.sqrt(2.0 / MANIFEST_REQUESTS)
"""Relative standard error of the difference of two replay scores that were not taken on the same rows."""


def learn_history(state: ControllerState, context: HostContext) -> int:
    """Teach the gain model every pair (version, the version with next fewer rows of the bucket) once; how many were new.

    The manifests tell rows learned and replayed acceptance length, not the arm. Versions of this controller's own jobs
    are left out (they taught directly), and so are buckets whose text changed since.
    """
    drifted, taught = drifted_buckets(state), set(state.history)
    trained = (x for scores in context.shadow.values() for v, x in scores.items() if v != context.first_version)
    best = max(trained, default=0.0)
    added = 0
    for bucket in sorted(context.shadow):
        if bucket in drifted:
            continue
        scores = context.shadow[bucket]
        rows = {v: context.learned_rows[v].get(bucket, 0) for v in scores if v in context.learned_rows}
        ordered = sorted(rows, key=lambda v: (rows[v], v))
        for before, after in itertools.pairwise(ordered):
            key = f"{bucket}|{after}"
            if key in taught or after in state.learned or rows[after] <= rows[before]:
                continue
            low, gain = scores[before], scores[after] - scores[before]
            room = headroom_of(low, best, 0.1)
            share = further_share(rows[before], rows[after])
            state.gains.update_from_history(bucket, room, share, gain, PAIR_ERROR * low)
            state.history.append(key)
            added += 1
    return added
