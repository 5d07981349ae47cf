"""Decision log: the format of decisions.jsonl, its line of an epoch and the reader of a whole log.

The controller makes the lines of kind 'feedback'; replays and estimates from a log read them back.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from paceline.bandit.beliefs.observation import BucketObservation, HostContext
from paceline.contracts import ArmSpec, Decision, LedgerEntry, TrainResult
from paceline.errors import ConfigError

KIND = "feedback"
"""Kind of the log line that one closed epoch makes."""
MIN_EPOCHS = 4
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""A number that a log may hold; NaN is none."""
Count = Annotated[int, msgspec.Meta(ge=0, le=10**15)]


class FeedbackCell(msgspec.Struct, frozen=True, kw_only=True):
    """One (bucket, group, version) of an epoch."""

    bucket: str
    group: str
    version: str
    num_requests: Amount
    num_tokens: Amount
    num_rounds: Amount
    device_s: Amount
    drafted_rounds: Amount
    drafted_s: Amount
    """Device seconds of rounds with a draft of the version."""
    kept: Amount
    """Accepted and bonus tokens of rounds with a draft: kept / drafted_rounds = acceptance length."""
    text_rounds: Amount = 0.0
    """Others, which a text drafter beside the version had."""
    text_s: Amount = 0.0
    text_tokens: Amount = 0.0

    @property
    def own_tokens(self) -> float:
        """Those that hang on the version."""
        return max(self.num_tokens - self.text_tokens, 0.0)

    @property
    def plain_rounds(self) -> float:
        return max(self.num_rounds - self.drafted_rounds, 0.0)

    @property
    def plain_s(self) -> float:
        return max(self.device_s - self.drafted_s - self.text_s, 0.0)


class FeedbackLine(msgspec.Struct, frozen=True, kw_only=True):
    """What one epoch measured; a line of kind 'feedback' in decisions.jsonl."""

    start: Amount
    end: Amount
    """Seconds since the epoch, as everywhere."""
    live_version: str
    first_version: str
    batch_size: Amount
    num_replicas: Count
    rows_written: dict[str, Count]
    """Bucket -> supervised rows ever written to the trace store."""
    cells: list[FeedbackCell]


class LoggedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A finished training job."""

    ts: float
    bucket: str
    arm: ArmSpec
    base_version: str
    result: TrainResult

    @property
    def num_read(self) -> int:
        """Rows that the burst learned."""
        return self.arm.num_rows if self.result.num_rows is None else self.result.num_rows

    @property
    def num_learned(self) -> int:
        """Rows that its learner has learned since the base: what its gain is of."""
        return self.result.num_rows_before + self.num_read


class ServiceLog(msgspec.Struct, frozen=True, kw_only=True):
    """A whole log in order of time."""

    digest: str
    epochs: list[FeedbackLine]
    decisions: list[Decision]
    jobs: list[LoggedJob]
    shadow: dict[str, dict[str, float]]
    """Bucket -> version -> acceptance length by exact replay, the newest score."""
    entries: list[LedgerEntry] = []
    """What was booked."""
    num_before: int = 0
    """Epochs left out with all that was logged in them: the service had another first drafter, or target, then."""


class _Belief(msgspec.Struct):
    bucket: str
    learned_rows: Count


class _Context(msgspec.Struct):
    """What a replay reads of a decision's context, where it is there."""

    arm: ArmSpec | None = None
    belief: _Belief | None = None
    probabilities: dict[str, Amount] | None = None
    time_limit_s: float | None = None


class _Finished(NamedTuple):
    ts: float
    bucket: str
    arm: str
    result: TrainResult


def feedback_line(
    latest: Mapping[str, BucketObservation], context: HostContext, rows_written: Mapping[str, int]
) -> FeedbackLine | None:
    """The line of a closed epoch; None when it saw no traffic."""
    if not latest:
        return None
    cells = [
        FeedbackCell(
            bucket=name,
            group=s.group,
            version=s.version,
            num_requests=s.time_per_token.n,
            num_tokens=s.num_tokens,
            num_rounds=s.num_rounds,
            device_s=s.device_s,
            drafted_rounds=s.drafted_rounds,
            drafted_s=s.drafted_s,
            kept=s.acceptance_length.y,
            text_rounds=s.text_rounds,
            text_s=s.text_s,
            text_tokens=s.text_tokens,
        )
        for name, seen in latest.items()
        for s in seen.stats
    ]
    rounds = sum(c.num_rounds for c in cells)
    sizes = sum(latest[c.bucket].batch_size * c.num_rounds for c in cells)
    return FeedbackLine(
        start=min(seen.start for seen in latest.values()),
        end=max(seen.end for seen in latest.values()),
        live_version=context.live_version,
        first_version=context.first_version,
        batch_size=sizes / rounds if rounds else 1.0,
        num_replicas=context.num_replicas,
        rows_written=dict(rows_written),
        cells=cells,
    )


def read_log(path: Path) -> ServiceLog:
    """Read decisions.jsonl. A torn last line is left out; lines of other kinds are passed over.

    Raises: ConfigError, in one sentence, for a file that cannot be read, a damaged line or too few epochs.
    """
    try:
        data = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"log {path} must be a readable file: {e.strerror}") from e
    return parse_log(data, str(path))


def parse_log(data: bytes, path: str) -> ServiceLog:
    """The log in `data`; `path` names it in errors. Raises: ConfigError, see `read_log`."""
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    # all by what makes them one: exports that overlap may stand behind each other, the oldest first
    measured: dict[tuple[float, float], FeedbackLine] = {}
    decisions: dict[tuple[bytes, int], Decision] = {}
    finished: dict[tuple[bytes, str], _Finished] = {}
    entries: dict[tuple[bytes, str], LedgerEntry] = {}
    run = b""  # the note that it began with
    booked: list[tuple[int, tuple[bytes, str]]] = []  # numbers of the run's entries, and where they are

    def go_back(num_booked: int) -> None:
        """Entries of a state that is lost count for nothing: the one before it gives their numbers again."""
        while booked and booked[-1][0] > num_booked:
            entries.pop(booked.pop()[1], None)

    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            has_kind = isinstance(value, dict) and "kind" in value
            if not has_kind and isinstance(value, dict) and "decision_id" in value:
                raise ConfigError(f"log {path} holds decisions only, not what each epoch measured; replay the export's replay.jsonl or DATA_DIR/services/NAME/decisions.jsonl")  # fmt: skip
            if number == 1 and not has_kind:
                raise ConfigError(f"log {path} is no decision log: its first line says no kind; replay an export's replay.jsonl or DATA_DIR/services/NAME/decisions.jsonl")  # fmt: skip
            kind = value["kind"]
            if "entry_id" in value:  # its own kind (training, saving, ...) stands in place of the line's
                entry = msgspec.convert(value, LedgerEntry)
                _require_finite(entry)
                if type(entry_number := value.get("number")) is int:
                    go_back(entry_number - 1)
                    booked.append((entry_number, (run, entry.entry_id)))
                entries[run, entry.entry_id] = entry
            elif kind == KIND:
                epoch = _checked_epoch(msgspec.convert(value, FeedbackLine))
                measured[epoch.start, epoch.end] = epoch
            elif kind == "decision":
                decision = msgspec.convert(value, Decision)
                _require_finite(decision)
                if msgspec.convert(decision.context, _Context).arm is None and decision.action == "train":
                    raise ValueError("context must name the arm of a job")
                decisions[run, decision.decision_id] = decision
            elif kind == "note" and value.get("commit") == 0:
                run = line  # the service lost its state and numbers from 1 again
                booked.clear()
            elif kind == "note" and type(held := value.get("num_booked")) is int:  # the controller started
                go_back(held)
            elif kind == "job":
                result = _checked_result(msgspec.convert(value, TrainResult))
                done = _Finished(_log_ts(value), str(value["bucket"]), str(value["arm"]), result)
                finished[run, result.job_id] = done
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as e:  # msgspec.ValidationError is a ValueError
            reason = " ".join(str(e).split())
            raise ConfigError(f"log {path} line {number} is damaged ({reason}); delete the line or copy the log again") from e  # fmt: skip
    everything = sorted(measured.values(), key=lambda e: e.end)
    before = [e for e in everything if e.first_version != everything[-1].first_version]
    begin = before[-1].end if before else -math.inf
    epochs = [e for e in everything if e.end > begin]
    results = [done for done in finished.values() if done.ts == 0.0 or done.ts > begin]
    orders = sorted((d for d in decisions.values() if d.ts > begin), key=lambda d: d.ts)
    if len(epochs) < MIN_EPOCHS:
        since = " since it has the first drafter that it has now" if before else ""
        raise ConfigError(
            f"log {path} must hold at least {MIN_EPOCHS} lines of kind 'feedback' (one an epoch){since}, got {len(epochs)}; "
            "let the service run longer"
        )
    jobs = _jobs(orders, results)
    shadow: dict[str, dict[str, float]] = {}
    for done in results:
        own = [s for s in (done.result.incumbent, done.result.first, done.result.candidate) if s is not None]
        for bucket, scores in [(done.bucket, own), *done.result.elsewhere.items()]:
            for score in scores:
                if score.acceptance_length > 0:
                    shadow.setdefault(bucket, {})[score.version] = score.acceptance_length
    return ServiceLog(
        digest=hashlib.sha256(data).hexdigest()[:12],
        epochs=epochs,
        decisions=orders,
        jobs=jobs,
        shadow=shadow,
        entries=sorted((e for e in entries.values() if e.ts > begin), key=lambda e: e.ts),
        num_before=len(everything) - len(epochs),
    )


def _checked_epoch(epoch: FeedbackLine) -> FeedbackLine:
    if epoch.end <= epoch.start:
        raise ValueError(f"end must be after start, got {epoch.end} after {epoch.start}")
    for c in epoch.cells:
        if c.drafted_rounds > 0 and c.kept <= 0:  # each keeps its bonus token at least
            raise ValueError(f"kept must be > 0 in {c.drafted_rounds:g} rounds with a draft, got {c.kept:g}")
    return epoch


def _checked_result(result: TrainResult) -> TrainResult:
    scores = [result.candidate, result.incumbent, result.first, *(s for v in result.elsewhere.values() for s in v)]
    numbers = [
        result.train_s,
        result.shadow_s,
        result.start_s or 0.0,
        *(s.acceptance_length for s in scores if s is not None),
    ]
    if not all(0 <= x < math.inf for x in numbers):  # the lower end of a gain may be -inf
        raise ValueError("seconds and acceptance lengths of a job must be >= 0 and finite")
    return result


def _require_finite(record: Decision | LedgerEntry) -> None:
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value}")


def _log_ts(value: dict[str, Any]) -> float:
    """Time of a line from its stream id (milliseconds before the dash), 0 without one."""
    head = str(value.get("log_id", "0")).split("-", 1)[0]
    return int(head) / 1000.0 if head.isdigit() else 0.0


def _order_of(done: _Finished, decisions: list[Decision]) -> Decision | None:
    """The train decision of a result: by its version, else the newest one of its bucket and arm before it."""
    trains = [d for d in decisions if d.action == "train" and d.bucket == done.bucket and d.arm == done.arm]
    if done.result.version is not None:
        for d in trains:
            if d.version == done.result.version:
                return d
    return max((d for d in trains if done.ts == 0.0 or d.ts < done.ts), key=lambda d: d.ts, default=None)


def _jobs(decisions: list[Decision], results: list[_Finished]) -> list[LoggedJob]:
    out = []
    for done in results:
        decision, result = _order_of(done, decisions), done.result
        if decision is None:
            continue
        out.append(
            LoggedJob(
                ts=decision.ts,
                bucket=done.bucket,
                arm=msgspec.convert(decision.context["arm"], ArmSpec),
                base_version=str(decision.context.get("base_version", "")),
                result=result,
            )
        )
    return sorted(out, key=lambda j: j.ts)
