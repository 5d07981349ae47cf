"""Decision log: the format of decisions.jsonl, its line of an epoch and the reader of a whole log.

The controller makes the lines of kind 'feedback'; replays and estimates from a log read them back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from paceline.bandit.beliefs.observation import BucketObservation, HostContext
from paceline.contracts import ArmSpec, Decision, LedgerEntry, TrainResult
from paceline.errors import ConfigError

KIND = "feedback"
"""Kind of the log line that one closed epoch makes."""
MIN_EPOCHS = 4


class FeedbackCell(msgspec.Struct, frozen=True, kw_only=True):
    """One (bucket, group, version) of an epoch."""

    bucket: str
    group: str
    version: str
    num_requests: float
    num_tokens: float
    num_rounds: float
    device_s: float
    drafted_rounds: float
    drafted_s: float
    """Device seconds of rounds with a draft."""
    kept: float
    """Accepted and bonus tokens of rounds with a draft: kept / drafted_rounds = acceptance length."""


class FeedbackLine(msgspec.Struct, frozen=True, kw_only=True):
    """What one epoch measured; a line of kind 'feedback' in decisions.jsonl."""

    start: float
    end: float
    """Seconds since the epoch, as everywhere."""
    live_version: str
    first_version: str
    batch_size: float
    num_replicas: int
    rows_written: dict[str, int]
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
    epochs: list[FeedbackLine] = []
    decisions: dict[tuple[int, int], Decision] = {}
    results: list[_Finished] = []
    entries: dict[tuple[int, str], LedgerEntry] = {}
    run = 0
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            if "kind" not in value and "decision_id" in value:
                raise ConfigError(f"log {path} holds decisions only, not what each epoch measured; replay the export's replay.jsonl or DATA_DIR/decisions.jsonl")  # fmt: skip
            kind = value["kind"]
            if "entry_id" in value:  # its own kind (training, saving, ...) stands in place of the line's
                entry = msgspec.convert(value, LedgerEntry)
                entries[run, entry.entry_id] = entry
            elif kind == KIND:
                epochs.append(msgspec.convert(value, FeedbackLine))
            elif kind == "decision":
                decision = msgspec.convert(value, Decision)
                decisions[run, decision.decision_id] = decision
            elif kind == "note" and value.get("commit") == 0 and (decisions or entries):
                run += 1  # the service lost its state and numbers from 1 again
            elif kind == "job":
                results.append(
                    _Finished(
                        _log_ts(value), str(value["bucket"]), str(value["arm"]), msgspec.convert(value, TrainResult)
                    )
                )
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError) as e:  # msgspec.ValidationError is a ValueError
            reason = " ".join(str(e).split())
            raise ConfigError(f"log {path} line {number} is damaged ({reason}); delete the line or copy the log again") from e  # fmt: skip
    if len(epochs) < MIN_EPOCHS:
        raise ConfigError(
            f"log {path} must hold at least {MIN_EPOCHS} lines of kind 'feedback' (one an epoch), got {len(epochs)}; "
            "let the service run longer"
        )
    epochs.sort(key=lambda e: e.end)
    jobs = _jobs(sorted(decisions.values(), key=lambda d: d.ts), results)
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
        decisions=sorted(decisions.values(), key=lambda d: d.ts),
        jobs=jobs,
        shadow=shadow,
        entries=sorted(entries.values(), key=lambda e: e.ts),
    )


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
        if decision is None or "arm" not in decision.context:
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
