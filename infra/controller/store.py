"""Where does the controller's state live, and how is it written exactly once: one fenced MULTI/EXEC per commit.

A commit holds everything that one pass of the controller changed: its state, the acknowledged stream entries, decisions,
ledger entries, log entries and the desired record. It runs only while the epoch key names this owner. When a reply is
lost, the commit number inside the stored state says whether it happened.
"""

from __future__ import annotations

import logging
import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import redis
from redis.exceptions import WatchError

from paceline.adapt.versions.lifecycle import Lifecycle
from paceline.bandit.ledger.totals import LedgerTotals
from paceline.contracts import Decision, DesiredState, LedgerEntry, TrainJob, decode, encode
from paceline.errors import FencedError
from paceline.infra.controller.feedback import GROUP
from paceline.infra.controller.rollout import RolloutState
from paceline.infra.controller.traffic import TrafficStats
from paceline.infra.state.desired import decode_desired, queue_desired, queue_log
from paceline.infra.state.redis_clients import OUTAGE_ERRORS, Keys

logger = logging.getLogger(__name__)

MAX_DECISIONS = 5_000
MAX_LEDGER = 20_000
_MAX_TRIES = 20


class PendingJob(msgspec.Struct, frozen=True, kw_only=True):
    """The training job in flight and the decision that ordered it."""

    job: TrainJob
    decision_id: int
    since: float


class SwapInFlight(msgspec.Struct, frozen=True, kw_only=True):
    """A desired version that replicas are staging, and the decision whose cost that is."""

    decision_id: int
    since: float


class HostState(msgspec.Struct, kw_only=True):
    """Everything that a restarted controller needs."""

    commit: int = 0
    epoch: int = 0
    controller: bytes = b""
    """State of the bandit's Controller."""
    config_policy: str = ""
    policy: str = ""
    """Policy in force; differs from config_policy after set_policy."""
    is_paused: bool = False
    notes: list[tuple[float, str]] = []
    """Latest orders of the operator and restarts: (time, what happened); the log stream keeps all."""
    watermarks: dict[str, tuple[int, float]] = {}
    """'replica:boot' -> (highest seq folded, time)."""
    pending: PendingJob | None = None
    desired: DesiredState | None = None
    history: list[str] = []
    """Versions that were live, oldest first, without repeats in a row."""
    num_rows: int = 0
    num_dropped: int = 0
    num_missing_batches: int = 0
    """Gaps in seq: batches that never reached the controller."""
    num_duplicates: int = 0
    num_lost_entries: int = 0
    """Entries trimmed while pending or unreadable."""
    rows_written: dict[str, int] = {}
    seen_shards: list[str] = []
    ledger_totals: LedgerTotals = msgspec.field(default_factory=LedgerTotals)
    """Sums of all entries ever, also of those trimmed since."""
    swap: SwapInFlight | None = None
    seen_swaps: list[str] = []
    """Swaps counted already: 'replica:gen'."""
    swap_times: list[float] = []
    swap_pauses_ms: list[float] = []
    traffic: TrafficStats = msgspec.field(default_factory=TrafficStats)
    lifecycle: Lifecycle = msgspec.field(default_factory=Lifecycle)
    rollout: RolloutState = msgspec.field(default_factory=RolloutState)
    evicted: list[str] = []
    """Versions whose weights were given up; their manifests stay."""


@dataclass(kw_only=True, slots=True)
class Commit:
    """What one transaction writes besides the state."""

    ack_ids: list[bytes] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    ledger: list[LedgerEntry] = field(default_factory=list)
    log: list[tuple[str, dict]] = field(default_factory=list)
    desired: DesiredState | None = None
    """New record; its generation is set in the transaction."""
    delete: list[str] = field(default_factory=list)
    is_uncertain: bool = False
    """A reply was lost: it may have happened."""

    @property
    def is_empty(self) -> bool:
        return not (self.ack_ids or self.decisions or self.ledger or self.log or self.desired or self.delete)


class _SnapshotFile(msgspec.Struct, frozen=True, kw_only=True):
    state: HostState
    decisions: list[Decision]
    ledger: list[LedgerEntry]


class ControllerStore:
    """Redis and snapshot file of one controller. Owner = one start of the controller."""

    def __init__(self, client: redis.Redis, keys: Keys, *, snapshot_path: Path | None) -> None:
        self._client, self._keys = client, keys
        self._path = snapshot_path
        self.owner = uuid.uuid4().hex
        self.epoch = 0
        self.decisions: dict[int, Decision] = {}
        self.ledger: dict[str, LedgerEntry] = {}

    def acquire_epoch(self, at_least: int = 0) -> int:
        """Take over: a higher epoch under this owner's name; every controller before this one is fenced from now on."""
        with self._client.pipeline(transaction=True) as pipe:
            for _ in range(_MAX_TRIES):
                try:
                    pipe.watch(self._keys.epoch)
                    number, _ = _parse_epoch(pipe.get(self._keys.epoch))  # type: ignore[arg-type]
                    epoch = max(number, at_least, self.epoch) + 1
                    pipe.multi()
                    pipe.set(self._keys.epoch, f"{epoch}:{self.owner}")
                    pipe.execute()
                except WatchError:
                    continue
                self.epoch = epoch
                logger.info("controller took over epoch=%d", epoch)
                return epoch
        raise FencedError("other controllers keep taking over; run one controller per service")

    def load(self) -> HostState:
        """State from Redis, else from the snapshot file, else a fresh one; loads decisions and ledger too."""
        data = self._client.get(self._keys.state)
        if data is not None:
            try:
                state = decode(data, HostState)  # type: ignore[arg-type]
                decisions: dict[Any, Any] = self._client.hgetall(self._decisions_key)  # type: ignore[assignment]
                ledger: dict[Any, Any] = self._client.hgetall(self._keys.ledger)  # type: ignore[assignment]
                self.decisions = {int(k): decode(v, Decision) for k, v in decisions.items()}
                self.ledger = {k.decode(): decode(v, LedgerEntry) for k, v in ledger.items()}
                self.decisions = dict(sorted(self.decisions.items()))
                self.ledger = dict(sorted(self.ledger.items(), key=lambda e: (e[1].ts, e[0])))
                return state
            except msgspec.DecodeError as e:
                logger.error("the controller's state in Redis is damaged, using the snapshot file: %s", e)
        return self._load_file()

    def _load_file(self) -> HostState:
        if self._path is None or not self._path.is_file():
            return HostState()
        try:
            snapshot = msgspec.msgpack.decode(self._path.read_bytes(), type=_SnapshotFile)
        except (OSError, msgspec.DecodeError) as e:
            logger.error("snapshot file %s is unreadable, the controller starts afresh: %s", self._path, e)
            return HostState()
        self.decisions = {d.decision_id: d for d in snapshot.decisions}
        self.ledger = {e.entry_id: e for e in snapshot.ledger}
        self._write_back()
        logger.info("controller state restored from %s", self._path)
        return snapshot.state

    def save_file(self, state: HostState) -> None:
        """Write the snapshot file atomically: it carries the service over a loss of Redis' data."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        snapshot = _SnapshotFile(
            state=state, decisions=list(self.decisions.values()), ledger=list(self.ledger.values())
        )
        tmp = self._path.with_suffix(f".{os.getpid()}.tmp")
        with tmp.open("wb") as f:
            f.write(encode(snapshot))
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, self._path)

    def commit(self, state: HostState, commit: Commit) -> None:
        """Write everything or nothing; sets state.commit, state.epoch and, for a new desired record, its generation.

        Raises: FencedError when another controller took over; redis errors (then call again with the same arguments).
        """
        if commit.is_uncertain and (written := self._written(state.commit + 1)) is not None:
            state.commit, state.desired, state.history = written.commit, written.desired, written.history
            self._remember(commit)
            return
        with self._client.pipeline(transaction=True) as pipe:
            for _ in range(_MAX_TRIES):
                try:
                    self._execute(pipe, state, commit)
                except WatchError:
                    continue
                except OUTAGE_ERRORS:
                    commit.is_uncertain = True
                    raise
                self._remember(commit)
                return
        raise FencedError("the controller's keys keep changing under it; run one controller per service")

    def _execute(self, pipe: redis.client.Pipeline, state: HostState, commit: Commit) -> None:
        keys = self._keys
        pipe.watch(keys.epoch, keys.desired)
        epoch, owner = _parse_epoch(pipe.get(keys.epoch))  # type: ignore[arg-type]
        if owner is None:
            pipe.unwatch()
            self._rebuild(state)
            raise WatchError("redis lost its data")
        if owner != self.owner:
            pipe.unwatch()
            raise FencedError(f"another controller took over (epoch {epoch}, mine is {self.epoch}); this one stops")
        current = decode_desired(pipe.get(keys.desired))
        known = state.desired
        if commit.desired is not None:
            gen = max(current.gen if current else 0, known.gen if known else 0) + 1
            state_desired: DesiredState | None = msgspec.structs.replace(commit.desired, gen=gen)
            commit.desired = state_desired
        elif current is not None and (known is None or current.gen > known.gen):
            state_desired = current  # the command line or the set-up wrote it
        else:
            state_desired = known
        written = msgspec.structs.replace(
            state, commit=state.commit + 1, epoch=self.epoch, desired=state_desired,
            history=_with_version(state.history, state_desired),
        )  # fmt: skip
        pipe.multi()
        pipe.set(keys.state, encode(written))
        if commit.ack_ids:
            pipe.xack(keys.feedback, GROUP, *commit.ack_ids)
        if commit.decisions:
            pipe.hset(self._decisions_key, mapping={str(d.decision_id): encode(d) for d in commit.decisions})
            for d in commit.decisions:
                queue_log(pipe, keys, "decision", msgspec.to_builtins(d))
        for e in commit.ledger:
            pipe.hsetnx(keys.ledger, e.entry_id, encode(e))  # type: ignore[arg-type]
            queue_log(pipe, keys, "ledger", msgspec.to_builtins(e))
        for kind, values in commit.log:
            queue_log(pipe, keys, kind, values)
        if commit.desired is not None:
            queue_desired(pipe, keys, commit.desired)
        elif state_desired is not None and (current is None or current.gen < state_desired.gen):
            pipe.set(keys.desired, encode(state_desired))
        for key in commit.delete:
            pipe.delete(key)
        self._queue_trim(pipe, commit)
        pipe.execute()
        state.commit, state.epoch = written.commit, written.epoch
        state.desired, state.history = written.desired, written.history

    def _written(self, number: int) -> HostState | None:
        """The stored state if commit `number` happened although its reply was lost."""
        epoch, owner = _parse_epoch(self._client.get(self._keys.epoch))  # type: ignore[arg-type]
        if owner is not None and owner != self.owner:
            raise FencedError(f"another controller took over (epoch {epoch}, mine is {self.epoch}); this one stops")
        data = self._client.get(self._keys.state)
        stored = None if data is None else decode(data, HostState)  # type: ignore[arg-type]
        return stored if stored is not None and stored.commit >= number else None

    def _rebuild(self, state: HostState) -> None:
        """Redis lost its data (flush, new server): write back what this controller knows."""
        self.acquire_epoch(at_least=state.epoch)
        self._write_back()

    def _write_back(self) -> None:
        with self._client.pipeline(transaction=True) as pipe:
            if self.decisions:
                pipe.hset(self._decisions_key, mapping={str(i): encode(d) for i, d in self.decisions.items()})
            if self.ledger:
                pipe.hset(self._keys.ledger, mapping={i: encode(e) for i, e in self.ledger.items()})
            queue_log(pipe, self._keys, "note", {"text": "redis lost its data; restored by the controller"})
            pipe.execute()
        logger.warning(
            "redis lost its data; decisions=%d ledger=%d written back", len(self.decisions), len(self.ledger)
        )

    def _queue_trim(self, pipe: redis.client.Pipeline, commit: Commit) -> None:
        excess = len(self.decisions) + len(commit.decisions) - MAX_DECISIONS
        if excess > 0:
            pipe.hdel(self._decisions_key, *[str(i) for i in list(self.decisions)[:excess]])
        excess = len(self.ledger) + len(commit.ledger) - MAX_LEDGER
        if excess > 0:
            pipe.hdel(self._keys.ledger, *list(self.ledger)[:excess])

    def _remember(self, commit: Commit) -> None:
        self.decisions.update({d.decision_id: d for d in commit.decisions})
        for e in commit.ledger:
            self.ledger.setdefault(e.entry_id, e)
        for old in list(self.decisions)[: max(0, len(self.decisions) - MAX_DECISIONS)]:
            del self.decisions[old]
        for entry in list(self.ledger)[: max(0, len(self.ledger) - MAX_LEDGER)]:
            del self.ledger[entry]

    @property
    def _decisions_key(self) -> str:
        return self._keys.decisions


def _parse_epoch(value: bytes | None) -> tuple[int, str | None]:
    if value is None:
        return 0, None
    number, _, owner = value.decode().partition(":")
    return int(number), owner


def _with_version(history: list[str], desired: DesiredState | None) -> list[str]:
    if desired is None or (history and history[-1] == desired.version):
        return history
    return [*history, desired.version][-200:]
