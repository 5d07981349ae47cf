"""Store: the controller's state and books in Redis, written exactly once by one fenced MULTI/EXEC per commit.

The state is a hash with a field a part. A commit writes the parts that changed since the one before, and all of them where
Redis does not hold that one: after a start, a flush, or a fail-over to a server that missed some.

A commit holds everything that one pass of the controller changed: its state, the acknowledged stream entries, decisions,
ledger entries, log entries and the desired record. It runs only while the epoch key names this owner. When a reply is
lost, the commit number inside the stored state says whether it happened.

The ledger's entries are kept once, in the log: a commit appends the new ones to the log stream, and the log's file copies
the stream. Each has its number in the ledger, and the state holds how many there are, beside the totals in the policy's
part of it. An entry with a higher number is of a commit that this state has not seen (Redis, or the snapshot file, is older
than the log): it counts for nothing, and its number is given again.
"""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import redis
from redis.exceptions import ResponseError, WatchError

from paceline.adapt.data.blob_io import write_atomic
from paceline.adapt.versions.lifecycle import Lifecycle
from paceline.bandit.controller.controller import Controller
from paceline.clock import Clock
from paceline.config import PolicyConfig, RolloutConfig, TraceConfig
from paceline.contracts import ArmSpec, Decision, DesiredState, LedgerEntry, TrainJob, decode, encode
from paceline.errors import FencedError
from paceline.infra.controller.rollout import RolloutState
from paceline.infra.controller.traffic import GroupTotals, TrafficStats
from paceline.infra.state.desired import decode_desired, queue_desired, queue_log
from paceline.infra.state.log import ErrorCount, LogFile, stream_newest_first
from paceline.infra.state.redis_clients import FEEDBACK_GROUP, OUTAGE_ERRORS, Keys

logger = logging.getLogger(__name__)

MAX_DECISIONS = 5_000
MAX_LEDGER = 5_000
"""Latest ledger entries held in memory for dashboards; the log keeps all."""
MAX_NOTES = 50
COMMIT_ENTRIES = 2000
"""Stream entries after which a commit is due: half a second of 1,000 busy replicas, a fifth of what the stream keeps."""
_MAX_TRIES = 20
_BIN = "bin:"
_BIN_DECODER = msgspec.msgpack.Decoder(dict[str, dict[str, GroupTotals]])


@dataclass(frozen=True, kw_only=True, slots=True)
class HostConfig:
    """What a controller host is told at its start."""

    redis_url: str = field(repr=False)
    model: str
    data_dir: Path | None = None
    """Snapshot file and decision log; None = Redis only."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trace: TraceConfig | None = None
    """Limits of the trace store that the controller enforces, so that they hold while no replica writes; None = none."""
    arms: tuple[ArmSpec, ...] | None = None
    target_version: str = ""
    """Only shards of this target are trained on, only its versions are used; '' = any."""
    first_version: str = ""
    """The drafter that the service was given; '' = what the desired state names."""
    lease_ttl_s: float = 10.0
    start_s: float = 60.0
    """A worker may take this long from its launch to its first heartbeat (process start, imports)."""
    stop_grace_s: float = 10.0
    commit_every_s: float = 0.5
    """Period of commits while nothing waits for them."""
    context_every_s: float = 2.0
    """Period of looking at stores and replica reports."""
    snapshot_every_s: float = 30.0
    """Period of writing the snapshot file."""


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
    """State of the bandit's Controller without its open epoch."""
    open_epoch: bytes = b""
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
    num_booked: int = 0
    """Entries of the ledger, which are numbered from 1."""
    swap: SwapInFlight | None = None
    seen_swaps: dict[str, int] = {}
    """Replica -> generation of its swap that was counted last."""
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


class ControllerStore:
    """Redis, snapshot file and log file of one controller. Owner = one start of the controller."""

    def __init__(self, client: redis.Redis, config: HostConfig) -> None:
        self.client, self.keys = client, Keys(config.model)
        folder = None if config.data_dir is None else Path(config.data_dir).expanduser()
        self._path = None if folder is None else folder / "controller.msgpack"
        self._log_file = None if folder is None else LogFile(folder / "decisions.jsonl")
        self._num_filed = 0
        """Ledger entries that the log file has; the others are written back when Redis loses its data."""
        self.owner = uuid.uuid4().hex
        self.epoch = 0
        self.num_state_bytes = 0
        """Bytes of state written so far."""
        self._parts = self._next_parts = _Parts()
        self.decisions: dict[int, Decision] = {}
        self.ledger: deque[LedgerEntry] = deque(maxlen=MAX_LEDGER)
        """The latest entries, oldest first."""

    def acquire_epoch(self, at_least: int = 0) -> int:
        """Take over: a higher epoch under this owner's name; every controller before this one is fenced from now on."""
        with self.client.pipeline(transaction=True) as pipe:
            for _ in range(_MAX_TRIES):
                try:
                    pipe.watch(self.keys.epoch)
                    number, _ = _parse_epoch(pipe.get(self.keys.epoch))  # type: ignore[arg-type]
                    epoch = max(number, at_least, self.epoch) + 1
                    pipe.multi()
                    pipe.set(self.keys.epoch, f"{epoch}:{self.owner}")
                    pipe.execute()
                except WatchError:
                    continue
                self.epoch = epoch
                logger.info("controller took over epoch=%d", epoch)
                return epoch
        raise FencedError("other controllers keep taking over; run one controller per service")

    def load(self) -> HostState:
        """State from Redis, else from the snapshot file, else a fresh one; loads decisions and the latest ledger entries."""
        state = None
        try:
            state = read_state(self.client, self.keys)
            if state is not None:
                self._parts = _Parts(bins=frozenset(number for number, _ in state.traffic.bins))
                decisions: dict[Any, Any] = self.client.hgetall(self.keys.decisions)  # type: ignore[assignment]
                self.decisions = dict(sorted((int(k), decode(v, Decision)) for k, v in decisions.items()))
        except (msgspec.DecodeError, ResponseError) as e:
            if isinstance(e, ResponseError) and "WRONGTYPE" not in str(e):
                raise
            logger.error("the controller's state in Redis is damaged, using the snapshot file: %s", e)
            state = None
            self.client.delete(self.keys.state)
        if state is None:
            state = self._load_file()
        if state is None:
            state = HostState()
            self.begin_ledger(state)
        if self._log_file is not None:
            self._log_file.sync(self.client, self.keys)
            lines: Iterable[dict[str, Any]] = self._log_file.newest_first()
        else:
            lines = stream_newest_first(self.client, self.keys)
        self._num_filed = state.num_booked
        self.ledger = deque(list(held_entries(lines, state.num_booked))[::-1], maxlen=MAX_LEDGER)
        return state

    def _load_file(self) -> HostState | None:
        if self._path is None or not self._path.is_file():
            return None
        try:
            snapshot = msgspec.msgpack.decode(self._path.read_bytes(), type=_SnapshotFile)
        except (OSError, msgspec.DecodeError) as e:
            logger.error("snapshot file %s is unreadable, the controller starts afresh: %s", self._path, e)
            return None
        self.decisions = {d.decision_id: d for d in snapshot.decisions}
        self._write_back()
        logger.info("controller state restored from %s", self._path)
        return snapshot.state

    def save_file(self, state: HostState) -> None:
        """Write the snapshot file atomically: it carries the service over a loss of Redis' data."""
        if self._path is not None:
            snapshot = _SnapshotFile(state=state, decisions=list(self.decisions.values()))
            write_atomic(fsspec.filesystem("file"), str(self._path), encode(snapshot))

    def copy_log(self, state: HostState) -> None:
        """Append to the log file what the log stream has more."""
        if self._log_file is not None:
            self._log_file.sync(self.client, self.keys)
            self._num_filed = state.num_booked

    def begin_ledger(self, state: HostState) -> None:
        """Number entries and decisions anew from 1: the policy forgot what it had decided. The log keeps them."""
        state.num_booked = self._num_filed = 0
        self.ledger.clear()
        self.decisions.clear()
        self.client.delete(self.keys.decisions)

    def commit(self, state: HostState, commit: Commit) -> None:
        """Write everything or nothing; sets state.commit, state.epoch and, for a new desired record, its generation.

        Raises: FencedError when another controller took over; redis errors (then call again with the same arguments).
        """
        if commit.is_uncertain and (written := self._written(state.commit + 1)) is not None:
            state.commit, state.desired, state.history = written.commit, written.desired, written.history
            self._remember(state, commit)
            return
        with self.client.pipeline(transaction=True) as pipe:
            for _ in range(_MAX_TRIES):
                try:
                    self._execute(pipe, state, commit)
                except WatchError:
                    continue
                except OUTAGE_ERRORS:
                    commit.is_uncertain = True
                    raise
                self._remember(state, commit)
                return
        raise FencedError("the controller's keys keep changing under it; run one controller per service")

    def _execute(self, pipe: redis.client.Pipeline, state: HostState, commit: Commit) -> None:
        keys = self.keys
        pipe.watch(keys.epoch, keys.desired)
        epoch, owner = _parse_epoch(pipe.get(keys.epoch))  # type: ignore[arg-type]
        if owner is None:
            pipe.unwatch()
            self._rebuild(state, commit)
            raise WatchError("redis lost its data")
        if owner != self.owner:
            pipe.unwatch()
            raise FencedError(f"another controller took over (epoch {epoch}, mine is {self.epoch}); this one stops")
        current = decode_desired(pipe.get(keys.desired))
        held: Any = pipe.hget(keys.state, "commit")
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
        is_held = held == msgspec.msgpack.encode(state.commit)
        self._next_parts, changed, gone = _parts_of(written, self._parts if is_held else None)
        pipe.multi()
        if not is_held:
            pipe.delete(keys.state)
        pipe.hset(keys.state, mapping=changed)
        if gone:
            pipe.hdel(keys.state, *gone)
        if commit.ack_ids:
            pipe.xack(keys.feedback, FEEDBACK_GROUP, *commit.ack_ids)
        if commit.decisions:
            pipe.hset(keys.decisions, mapping={str(d.decision_id): encode(d) for d in commit.decisions})
            for d in commit.decisions:
                queue_log(pipe, keys, "decision", msgspec.to_builtins(d))
        _queue_ledger(pipe, keys, commit.ledger, state.num_booked)
        for kind, values in commit.log:
            queue_log(pipe, keys, kind, values)
        if commit.desired is not None:
            queue_desired(pipe, keys, commit.desired)
        elif state_desired is not None and (current is None or current.gen < state_desired.gen):
            pipe.set(keys.desired, encode(state_desired))
        for key in commit.delete:
            pipe.delete(key)
        excess = len(self.decisions) + len(commit.decisions) - MAX_DECISIONS
        if excess > 0:
            pipe.hdel(keys.decisions, *[str(i) for i in list(self.decisions)[:excess]])
        pipe.execute()
        self.num_state_bytes += sum(map(len, changed.values()))
        state.commit, state.epoch = written.commit, written.epoch
        state.desired, state.history = written.desired, written.history

    def _written(self, number: int) -> HostState | None:
        """The stored state if commit `number` happened although its reply was lost."""
        epoch, owner = _parse_epoch(self.client.get(self.keys.epoch))  # type: ignore[arg-type]
        if owner is not None and owner != self.owner:
            raise FencedError(f"another controller took over (epoch {epoch}, mine is {self.epoch}); this one stops")
        stored = read_state(self.client, self.keys)
        return stored if stored is not None and stored.commit >= number else None

    def _rebuild(self, state: HostState, commit: Commit) -> None:
        """Redis lost its data (flush, new server): write back what this controller knows and the log file does not."""
        self.acquire_epoch(at_least=state.epoch)
        num_committed = state.num_booked - len(commit.ledger)
        num_unfiled = min(max(num_committed - self._num_filed, 0), len(self.ledger))
        self._write_back(list(self.ledger)[len(self.ledger) - num_unfiled :], num_committed)

    def _write_back(self, entries: list[LedgerEntry] | None = None, num_booked: int = 0) -> None:
        with self.client.pipeline(transaction=True) as pipe:
            if self.decisions:
                pipe.hset(self.keys.decisions, mapping={str(i): encode(d) for i, d in self.decisions.items()})
            _queue_ledger(pipe, self.keys, entries or [], num_booked)
            queue_log(pipe, self.keys, "note", {"text": "redis lost its data; restored by the controller"})
            pipe.execute()
        logger.warning("redis lost its data; %d decisions written back", len(self.decisions))

    def _remember(self, state: HostState, commit: Commit) -> None:
        self._parts = self._next_parts
        state.traffic.touched.clear()
        self.decisions.update({d.decision_id: d for d in commit.decisions})
        self.ledger.extend(commit.ledger)
        for old in list(self.decisions)[: max(0, len(self.decisions) - MAX_DECISIONS)]:
            del self.decisions[old]


@dataclass(frozen=True, slots=True)
class _Parts:
    """What Redis holds of a state."""

    fields: dict[str, bytes] = field(default_factory=dict)
    """Field -> its bytes, the bins of the traffic apart."""
    bins: frozenset[int] = frozenset()


def _parts_of(state: HostState, held: _Parts | None) -> tuple[_Parts, dict[Any, Any], list[str]]:
    """The state's parts, the fields to write and those to delete where Redis holds `held`; None = nothing."""
    bins = dict(state.traffic.bins)
    bare = msgspec.structs.replace(state, traffic=msgspec.structs.replace(state.traffic, bins=[], touched=set()))
    fields = {name: msgspec.msgpack.encode(getattr(bare, name)) for name in HostState.__struct_fields__}
    parts = _Parts(fields, frozenset(bins))
    if held is None:
        held, touched = _Parts(), set(bins)
    else:
        touched = state.traffic.touched & set(bins)
    changed: dict[Any, Any] = {name: data for name, data in fields.items() if held.fields.get(name) != data}
    changed |= {f"{_BIN}{number}": msgspec.msgpack.encode(bins[number]) for number in touched}
    return parts, changed, [f"{_BIN}{number}" for number in held.bins - parts.bins]


def read_state(client: redis.Redis, keys: Keys) -> HostState | None:
    """The state as Redis holds it; None = none. Raises msgspec.DecodeError and, for another kind of key, ResponseError."""
    found: dict[bytes, bytes] = client.hgetall(keys.state)  # type: ignore[assignment]
    if not found:
        return None
    values = {name.decode(): data for name, data in found.items()}
    bins = {int(name.removeprefix(_BIN)): values.pop(name) for name in list(values) if name.startswith(_BIN)}
    whole = msgspec.msgpack.encode({name: msgspec.Raw(data) for name, data in values.items()})
    state = decode(whole, HostState)
    state.traffic.bins = [(number, _BIN_DECODER.decode(bins[number])) for number in sorted(bins)]
    return state


class Books:
    """The state, and what has come together for its next commit; every part of the controller works on it.

    `policy` decides and is committed with the state; `errors` are those that a pass survives.
    """

    def __init__(
        self,
        config: HostConfig,
        store: ControllerStore,
        state: HostState,
        policy: Controller,
        *,
        errors: ErrorCount,
        clock: Clock,
    ) -> None:
        self.config, self.store, self.state, self.policy, self.pending = config, store, state, policy, Commit()
        self.errors, self.clock = errors, clock
        self._commit_due = self._file_due = 0.0
        self._file_commit = -1

    @property
    def desired(self) -> DesiredState | None:
        """The desired record as it will be after the next commit, its generation apart."""
        return self.pending.desired or self.state.desired

    def log(self, kind: str, values: dict) -> None:
        """Put a line into the decision log."""
        self.pending.log.append((kind, values))

    def note(self, text: str) -> None:
        """Put a line into the decision log and among the latest notes that dashboards show."""
        self.log("note", {"text": text})
        self.state.notes = [*self.state.notes, (self.clock.now(), text)][-MAX_NOTES:]

    def take_drained(self) -> None:
        """Take over what the policy decided and booked since the last time."""
        decisions, entries = self.policy.drain()
        self.pending.decisions += decisions
        self.pending.ledger += entries
        self.state.num_booked += len(entries)

    def settle(self) -> None:
        """Find out first whether a commit whose reply was lost has happened; nothing may be changed before."""
        if self.pending.is_uncertain:
            self.flush()

    def flush_due(self, now: float) -> None:
        """Commit what waits when it is time, or when others wait for it: decisions and the desired record."""
        pending = self.pending
        is_due = now >= self._commit_due or len(pending.ack_ids) >= COMMIT_ENTRIES
        if is_due or pending.decisions or pending.desired:
            self.flush()

    def flush(self, always: bool = False) -> None:
        """Commit what has come together; `always`: also when that is nothing but the state.

        Crash before the commit: nothing happened. After it: the log file gets the missing lines at the next start.
        Raises: FencedError; redis errors (then call `settle` before anything else).
        """
        if self.pending.is_empty and not always and not self.pending.is_uncertain:
            return
        if not self.pending.is_uncertain:
            self.take_drained()
            self.state.controller = self.policy.state(is_whole=False)
            self.state.open_epoch = self.policy.open_epoch()
        self.store.commit(self.state, self.pending)
        self.pending = Commit()
        now = self.clock.now()
        self._commit_due = now + self.config.commit_every_s
        try:
            self.store.copy_log(self.state)
            if now >= self._file_due and self.state.commit != self._file_commit:
                self._file_due, self._file_commit = now + self.config.snapshot_every_s, self.state.commit
                self.store.save_file(self.state)
        except OSError as e:  # what was committed is committed; files are made up for with the next commit that can
            self.errors.note(f"the data folder {self.config.data_dir} cannot be written", e)


def held_entries(lines: Iterable[dict[str, Any]], num_booked: int, limit: int = MAX_LEDGER) -> Iterator[LedgerEntry]:
    """The latest entries of a ledger of `num_booked` among a log's lines, both the latest first."""
    due = num_booked
    for line in lines:
        if due == 0 or num_booked - due >= limit:
            return
        if "entry_id" in line and line["number"] <= due:
            due = line["number"] - 1
            yield msgspec.convert(line, LedgerEntry)


def _queue_ledger(pipe: redis.client.Pipeline, keys: Keys, entries: list[LedgerEntry], num_booked: int) -> None:
    """Append the last entries of a ledger of `num_booked` to the log."""
    for number, entry in enumerate(entries, num_booked - len(entries) + 1):
        queue_log(pipe, keys, "ledger", {**msgspec.to_builtins(entry), "number": number})


def _parse_epoch(value: bytes | None) -> tuple[int, str | None]:
    if value is None:
        return 0, None
    number, _, owner = value.decode().partition(":")
    return int(number), owner


def _with_version(history: list[str], desired: DesiredState | None) -> list[str]:
    if desired is None or (history and history[-1] == desired.version):
        return history
    return [*history, desired.version][-200:]
