"""Store: the controller's state and books in Redis, written exactly once by one fenced MULTI/EXEC per commit.

The state is a hash with a field a part. A commit writes the parts that changed since the one before, and all of them where
Redis does not hold that one: after a start, a flush, or a fail-over to a server that missed some.

A commit holds everything that one pass of the controller changed: its state, the acknowledged stream entries, decisions,
ledger entries, log entries and the desired record. It runs only while the epoch key names this owner. When a reply is
lost, the commit number inside the stored state says whether it happened.

The ledger's entries are kept once, in the log: a commit appends the new ones to the log stream, and the log's file copies
the stream. What a commit appended is remembered until the file has it, and appended again where Redis lost it. Each has its number in the ledger, and the state holds how many there are, beside the totals in the policy's
part of it. An entry with a higher number is of a commit that this state has not seen (Redis, or the snapshot file, is older
than the log): it counts for nothing, and its number is given again.
"""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import redis
from redis.client import Pipeline
from redis.exceptions import ResponseError, WatchError

from paceline.adapt.data.blob_io import open_store, write_atomic
from paceline.adapt.data.storage_calls import StorageCalls
from paceline.adapt.versions.lifecycle import Lifecycle
from paceline.bandit.beliefs.classes import ClassBook
from paceline.bandit.controller.controller import Controller
from paceline.config import PolicyConfig, RolloutConfig, TraceConfig
from paceline.contracts import ArmSpec, Decision, DesiredState, LedgerEntry, TrafficClasses, TrainJob, decode, encode
from paceline.errors import FencedError, PacelineError, StateError, StorageHangsError
from paceline.infra.controller.rollout import RolloutState
from paceline.infra.controller.traffic import GroupTotals, TrafficStats
from paceline.infra.state.desired import known_desired, queue_desired, queue_log, read_classes
from paceline.infra.state.formats import FORMAT, upgraded
from paceline.infra.state.layout import adopt_state, snapshot_name, unnamed_snapshot
from paceline.infra.state.log import ErrorCount, LogFile, stream_newest_first
from paceline.infra.state.redis_clients import FEEDBACK_GROUP, OUTAGE_ERRORS, Keys, parse_epoch
from paceline.infra.state.room import Room
from paceline.machine import Clock
from paceline.paths import DECISIONS

logger = logging.getLogger(__name__)

MAX_DECISIONS = 5_000
MAX_LEDGER = 5_000
"""Latest ledger entries held in memory for dashboards; the log keeps all."""
MAX_UNFILED = 1_000
"""Latest commits whose lines are kept where the log file cannot be written: some eight minutes."""
MAX_NOTES = 50
BEAT_S = 30.0
"""Longest time without a commit, even of nothing: a controller that another one took over from sees whether that one lives."""
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
    """Folder of this service: snapshot file and decision log (infra/state/layout.py); None = Redis only."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trace: TraceConfig | None = None
    """Limits of the trace store that the controller enforces, so that they hold while no replica writes; None = none."""
    max_classes: int = 16
    """Classes that traffic without a bucket is sorted into; 0 = none."""
    arms: tuple[ArmSpec, ...] | None = None
    target_version: str = ""
    """Only shards of this target are trained on, only its versions are used; '' = any."""
    first_version: str = ""
    """The drafter that the service was given; '' = what the desired state names."""
    lease_ttl_s: float = 10.0
    keep_rows: bool = False
    """Feedback that was read stays in the stream, for exports, until replicas trim it; else a commit deletes it."""
    start_s: float = 60.0
    """A worker may take this long from its launch to its first heartbeat (process start, imports)."""
    stop_grace_s: float = 10.0
    commit_every_s: float = 0.5
    """Period of commits while nothing waits for them."""
    context_every_s: float = 2.0
    """Period of looking at stores and replica reports."""
    snapshot_every_s: float = 30.0
    """Period of writing the snapshot file."""
    storage_patience_s: float = 5.0
    """Longest wait for a call of trace store, registry or data folder: then it hangs, and the controller goes on without.
    That is once a hang: epochs are much longer."""
    snapshots: str = ""
    """Where the snapshot file is if not in data_dir: the location of an object store."""


class Deeds(Protocol):
    """Takes note of what took long, for OpenTelemetry."""

    def record_deed(self, name: str, seconds: float, attributes: Mapping[str, Any]) -> None:
        """It is over now; attributes that are None are left out. Must not block."""


class ProcessDeeds(Protocol):
    """Deeds of one process."""

    @property
    def deeds(self) -> Deeds: ...

    def close(self) -> None:
        """Send what waits, for some seconds at most."""


class SpanSource(Protocol):
    """What a process opens its deeds by; picklable, equal where it does the same."""

    def open(self, process_id: str) -> ProcessDeeds: ...


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

    format: int = FORMAT
    """See infra/state/formats.py."""
    model: str = ""
    target_version: str = ""
    """The service whose state this is; '' = written by a release that did not say."""
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
    assigned: list[str] = []
    """Classes whose version an operator chose; the versions of the others are the policy's."""
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
    classes: ClassBook = msgspec.field(default_factory=ClassBook)


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
    mends_classes: bool = False
    """What Redis tells replicas of the classes is not what was written: it is kept aside and written again."""
    is_uncertain: bool = False
    """A reply was lost: it may have happened."""

    @property
    def is_empty(self) -> bool:
        return not (
            self.ack_ids
            or self.decisions
            or self.ledger
            or self.log
            or self.desired
            or self.delete
            or self.mends_classes
        )


class _SnapshotFile(msgspec.Struct, frozen=True, kw_only=True):
    state: HostState
    decisions: list[Decision]


class _RawSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The same before its format is known."""

    state: dict[str, msgspec.Raw]
    decisions: msgspec.Raw


@dataclass(frozen=True, slots=True)
class _Found:
    """What a controller goes on with, and where it lay."""

    state: HostState
    decisions: dict[int, Decision]
    is_of_file: bool = False
    """From the snapshot file, since Redis holds none or a damaged one."""
    is_damaged: bool = False
    """Redis holds one that cannot be read."""


class ControllerStore:
    """Redis, snapshot file and log file of one controller. Owner = one start of the controller."""

    def __init__(self, client: redis.Redis, config: HostConfig, calls: StorageCalls) -> None:
        """calls: of the data folder."""
        self.client, self.keys, self.calls = client, Keys(config.model), calls
        self.room = Room(client, self.keys)
        self._config = config
        self._folder = folder = None if config.data_dir is None else Path(config.data_dir).expanduser()
        self._path = ""
        if folder is not None:
            self._fs, root = open_store(config.snapshots or folder)
            self._path = f"{root}/{snapshot_name(config.target_version)}"
        self._log_file = None if folder is None else LogFile(folder / DECISIONS, calls.run)
        self.room.filed = None if folder is None else "0"
        self._filed = (0, 0)
        """Stream id of the log file's last line."""
        self._unfiled: deque[_Unfiled] = deque(maxlen=MAX_UNFILED)
        """Commits whose lines the log file may not have, oldest first: what Redis loses of them is written back."""
        self.owner = uuid.uuid4().hex
        self.epoch = 0
        self.num_state_bytes = 0
        """Bytes of state written so far."""
        self._parts = self._next_parts = _Parts()
        self._made: _Unfiled | None = None
        """The commit of the last transaction, which may not have happened; None before the first."""
        self._told = TrafficClasses()
        self.decisions: dict[int, Decision] = {}
        self.ledger: deque[LedgerEntry] = deque(maxlen=MAX_LEDGER)
        """The latest entries, oldest first."""

    def acquire_epoch(self, at_least: int = 0) -> int:
        """Take over: a higher epoch under this owner's name; every controller before this one is fenced from now on."""
        return self.room.write(lambda: self._acquire_epoch(at_least))

    def _acquire_epoch(self, at_least: int, is_writing_back: bool = False) -> int:
        with self.client.pipeline(transaction=True) as pipe:
            for _ in range(_MAX_TRIES):
                try:
                    pipe.watch(self.keys.epoch, self.keys.log)
                    number, owner = parse_epoch(pipe.get(self.keys.epoch))  # type: ignore[arg-type]
                    if is_writing_back:
                        self._check_owner(number, owner)
                    epoch = max(number, at_least, self.epoch) + 1
                    pipe.multi()
                    pipe.set(self.keys.epoch, f"{epoch}:{self.owner}")
                    if is_writing_back:
                        self._queue_decisions(pipe)
                        text = "redis lost its data; restored by the controller"
                        queue_log(pipe, self.keys, "note", {"text": text}, self._next_id())
                    pipe.execute()
                except WatchError:
                    continue
                self.epoch = epoch
                logger.info("controller took over epoch=%d", epoch)
                return epoch
        raise WatchError("the controller's epoch keeps changing; run one controller per service")

    def _check_owner(self, epoch: int, owner: str | None) -> bool:
        """Whether the epoch key is this controller's; False when Redis lost what it was.

        Raises: FencedError when it is that of one which came later.
        """
        if owner is None or epoch < self.epoch:
            return False
        if owner != self.owner:
            raise FencedError(f"another controller took over (epoch {epoch}, mine is {self.epoch})")
        return True

    def find(self) -> _Found:
        """What there is to go on with, from Redis, else from the snapshot file, else a fresh state. Changes nothing.

        Raises: StateError when Redis or the file holds a state of a newer format or of another service, or none that can
        be read although there is one; redis errors.
        """
        try:
            state = read_state(self.client, self.keys)
            if state is not None:
                if (newer := self._newer_in_file(state)) is not None:
                    return newer
                stored: dict[Any, Any] = self.client.hgetall(self.keys.decisions)  # type: ignore[assignment]
                return _Found(state, dict(sorted((int(k), decode(v, Decision)) for k, v in stored.items())))
        except (msgspec.DecodeError, ValueError, ResponseError) as e:
            if isinstance(e, ResponseError) and "WRONGTYPE" not in str(e):
                raise
            found = self._in_file()
            if found is None:
                raise StateError(
                    f"the controller's state in Redis ({self.keys.state}) cannot be read and there is no snapshot file: {e}; "
                    "restore a backup, or delete that key to begin with an empty ledger"
                ) from e
            logger.error("the controller's state in Redis is damaged, using the snapshot file: %s", e)
            return replace(found, is_damaged=True)
        return self._in_file() or _Found(HostState(), {})

    def _newer_in_file(self, state: HostState) -> _Found | None:
        """The snapshot file's state where Redis came back from an older copy of its data than that; it would be overwritten."""
        try:
            found = self._in_file()
        except StateError as e:  # Redis has one, which is no older as far as anybody can tell
            logger.warning("the snapshot file is not looked at: %s", e)
            return None
        if found is None or found.state.commit <= state.commit:
            return None
        logger.error(
            "the controller's state in Redis (commit %d) is older than the snapshot file's (commit %d), as after a restore of "
            "Redis alone: the file is used, and what Redis had is kept under %s:damaged:*",
            state.commit, found.state.commit, self.keys.state,
        )  # fmt: skip
        return replace(found, is_damaged=True)

    def load(self) -> HostState:
        """The state of `find`, with its decisions and the latest ledger entries. Raises what `find` raises."""
        found, keys = self.find(), self.keys
        state, self.decisions = found.state, found.decisions
        if found.is_damaged:  # kept for whoever wants to look into it; nothing reads it again
            for key in (keys.state, keys.decisions):
                if self.client.exists(key):
                    self.client.rename(key, f"{key}:damaged:{self.epoch}")
        if found.is_of_file:
            self._note_filed()
            self._write_back(state.epoch)
            logger.info("controller state restored from %s", self._path)
        elif state.commit:
            self._parts = _Parts(bins=frozenset(number for number, _ in state.traffic.bins))
        else:
            self.begin_ledger(state)
        self._told = state.classes.published
        lines = self._log_lines(is_known=bool(state.commit) and not found.is_of_file)
        self.ledger = deque(list(held_entries(lines, state.num_booked))[::-1], maxlen=MAX_LEDGER)
        return state

    def _log_lines(self, *, is_known: bool) -> Iterable[dict[str, Any]]:
        """Lines of the log, the latest first: of its file, where that can be brought up to date, else of the stream.

        is_known: Redis knows the service, so that files of an older release are its own.
        """
        if self._log_file is not None and self._folder is not None:
            try:
                if is_known:
                    self.calls.run(adopt_state, self._folder, self._config.target_version)
                self._log_file.sync(self.client, self.keys)
                self._note_filed()
                return self._log_file.newest_first()
            except (OSError, StorageHangsError) as e:  # must not keep the controller from deciding
                logger.error("the log file %s cannot be read or written: %s", self._log_file.path, e)
        return stream_newest_first(self.client, self.keys)

    def _in_file(self) -> _Found | None:
        """The snapshot file's state; None = no file. Raises StateError when it is unreadable, newer or of another service."""
        if not self._path:
            return None
        try:
            raw = msgspec.msgpack.decode(self.calls.run(self._fs.cat_file, self._path), type=_RawSnapshot)
            fields = upgraded({name: bytes(data) for name, data in raw.state.items()}, f"snapshot file {self._path}")
            state = msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=HostState)
            decisions = msgspec.msgpack.decode(raw.decisions, type=list[Decision])
        except FileNotFoundError:
            assert self._folder is not None
            if (unnamed := self.calls.run(unnamed_snapshot, self._folder)) is not None:
                raise StateError(
                    f"{unnamed} is the state of an older release, which does not say whose it is: move it to {self._path} if "
                    "it is this service's, else away"
                ) from None
            return None
        except StorageHangsError as e:
            raise StateError(f"Redis has no state, and whether {self._path} has one cannot be told yet: {e}") from e
        except (OSError, msgspec.DecodeError, ValueError) as e:
            raise StateError(
                f"snapshot file {self._path} cannot be read: {e}; restore a backup, or move the file away to begin with an "
                "empty ledger"
            ) from e
        for name, mine in (("model", self._config.model), ("target_version", self._config.target_version)):
            if getattr(state, name) not in ("", mine):
                raise StateError(
                    f"snapshot file {self._path} must be of {name} {mine!r}, got {getattr(state, name)!r}: it is another "
                    "service's; give this one a data_dir of its own"
                )
        return _Found(state, {d.decision_id: d for d in decisions}, is_of_file=True)

    def save_file(self, state: HostState) -> None:
        """Write the snapshot file atomically: it carries the service over a loss of Redis' data."""
        if self._path:
            snapshot = _SnapshotFile(state=state, decisions=list(self.decisions.values()))
            self.calls.run(write_atomic, self._fs, self._path, encode(snapshot))

    def copy_log(self) -> None:
        """Append to the log file what the log stream has more."""
        if self._log_file is not None:
            self._log_file.sync(self.client, self.keys)
            self._note_filed()

    def _note_filed(self) -> None:
        """Look up the log file's last line and forget the commits up to it; where it cannot be read all stays as it is."""
        if self._log_file is not None:
            try:
                self.room.filed = self.calls.run(self._log_file.last_id)
                self._filed = _order(self.room.filed)
            except (OSError, StorageHangsError) as e:
                logger.error("the log file %s cannot be read: %s", self._log_file.path, e)
        while self._unfiled and self._unfiled[0].last_line <= self._filed:
            self._unfiled.popleft()

    def begin_ledger(self, state: HostState) -> None:
        """Number entries and decisions anew from 1: the policy forgot what it had decided. The log keeps them."""
        state.num_booked = 0
        self.ledger.clear()
        self.decisions.clear()
        self.client.delete(self.keys.decisions)

    def commit(self, state: HostState, commit: Commit) -> None:
        """Write everything or nothing; sets state.commit, state.epoch and, for a new desired record, its generation.

        Raises: FencedError when another controller took over; redis errors (then call again with the same arguments).
        """
        self.room.write(lambda: self._transact(state, commit))

    def _transact(self, state: HostState, commit: Commit) -> None:
        with self.client.pipeline(transaction=True) as pipe:
            for _ in range(_MAX_TRIES):
                if commit.is_uncertain and self._has_happened(state, commit):
                    return
                try:
                    self._execute(pipe, state, commit)
                except WatchError:
                    continue
                except OUTAGE_ERRORS:
                    commit.is_uncertain = True
                    raise
                self._remember(state, commit)
                return
        raise WatchError("the controller's keys keep changing under it")

    def _has_happened(self, state: HostState, commit: Commit) -> bool:
        """Whether a commit whose reply was lost is in Redis; then it is taken over as written."""
        self._check_owner(*parse_epoch(self.client.get(self.keys.epoch)))  # type: ignore[arg-type]
        written = read_state(self.client, self.keys)
        if written is None or written.commit <= state.commit:
            return False
        newest = self._newest_line()  # may fail, and nothing is changed before
        state.commit, state.desired, state.history = written.commit, written.desired, written.history
        self._remember(state, commit)
        for made in self._unfiled:
            made.last_line = newest
        return True

    def _execute(self, pipe: Pipeline, state: HostState, commit: Commit) -> None:
        keys = self.keys
        pipe.watch(keys.epoch, keys.desired, keys.log)
        epoch, owner = parse_epoch(pipe.get(keys.epoch))  # type: ignore[arg-type]
        if not self._check_owner(epoch, owner):
            pipe.unwatch()
            self._write_back(state.epoch)
            raise WatchError("redis lost its data")
        current = known_desired(pipe.get(keys.desired))
        is_aside = commit.mends_classes and bool(pipe.exists(keys.classes))
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
        num_lost = 0 if is_held else state.commit - _number(held, state.commit)
        lost = [] if is_held else self._lost()
        first_id = self._next_id() if num_lost or self._made is None else "*"
        self._next_parts, changed, gone = _parts_of(written, self._parts if is_held else None)
        pipe.multi()
        if not is_held:
            pipe.delete(keys.state)
            self._queue_decisions(pipe)
        pipe.hset(keys.state, mapping=changed)
        if gone:
            pipe.hdel(keys.state, *gone)
        if commit.ack_ids:
            pipe.xack(keys.feedback, FEEDBACK_GROUP, *commit.ack_ids)
            if not self._config.keep_rows:
                pipe.xdel(keys.feedback, *commit.ack_ids)
        if num_lost or first_id != "*":
            text = f"the log goes on; redis lost {num_lost} commits, of which {len(lost)} are written again"
            queue_log(pipe, keys, "note", {"text": text}, first_id)
        for made in lost:
            _queue_lines(pipe, keys, made.commit, made.num_booked)
            if made.commit.desired is not None:
                queue_log(pipe, keys, "desired", msgspec.to_builtins(made.commit.desired))
        _queue_lines(pipe, keys, commit, state.num_booked)
        if is_aside:  # for whoever wants to look into it; nothing reads it again
            pipe.rename(keys.classes, f"{keys.classes}:damaged:{self.epoch}")
        if ("classes" in changed or commit.mends_classes) and written.classes.published.rev:
            pipe.set(keys.classes, encode(written.classes.published))
        if commit.desired is not None:
            queue_desired(pipe, keys, commit.desired)
        elif state_desired is not None and (current is None or current.gen < state_desired.gen):
            pipe.set(keys.desired, encode(state_desired))
        for key in commit.delete:
            pipe.delete(key)
        if too_old := _too_old(self.decisions | {d.decision_id: d for d in commit.decisions}):
            pipe.hdel(keys.decisions, *[str(i) for i in too_old])
        # without what it acknowledges: that may be thousands of ids, and the lines are all that is asked for
        self._made = _Unfiled(state.num_booked, replace(commit, ack_ids=[], delete=[]))
        try:
            replies = pipe.execute()
        except Exception:  # redis-py calls a lost reply a change of what is watched, too
            commit.is_uncertain = True
            raise
        appended = [reply for reply in replies if isinstance(reply, bytes)]  # XADD alone replies with bytes
        if appended:
            for made in (*lost, self._made):
                made.last_line = _order(appended[-1])
        if num_lost:
            logger.warning("redis had lost its latest %d commits; it has them again", num_lost)
        self.num_state_bytes += sum(map(len, changed.values()))
        state.commit, state.epoch = written.commit, written.epoch
        state.desired, state.history = written.desired, written.history
        self._told = written.classes.published

    def has_classes(self) -> bool:
        """Whether Redis tells replicas the classes as the last commit has them. Raises redis errors."""
        try:
            told = read_classes(self.client, self.keys)
        except PacelineError:
            return False
        except ResponseError as e:  # not a string
            if "WRONGTYPE" not in str(e):
                raise
            return False
        return told == self._told or (told is None and self._told.rev == 0)

    def _lost(self) -> list[_Unfiled]:
        """Commits whose lines are neither in the log's file nor in its stream."""
        self._note_filed()
        return [made for made in self._unfiled if any(made.last_line) and not self._is_in_stream(made.last_line)]

    def _is_in_stream(self, line: tuple[int, int]) -> bool:
        entry_id = f"{line[0]}-{line[1]}"
        return bool(self.client.xrange(self.keys.log, min=entry_id, max=entry_id, count=1))

    def _newest_line(self) -> tuple[int, int]:
        """Id of the stream's latest line, (0, 0) where there is none."""
        newest: Any = self.client.xrevrange(self.keys.log, count=1)
        return _order(newest[0][0]) if newest else (0, 0)

    def _write_back(self, epoch: int) -> None:
        """Take over a Redis that lost its data (flush, new server); the next commit writes the rest."""
        self.room.write(lambda: self._acquire_epoch(epoch, is_writing_back=True))
        logger.warning("redis lost its data; %d decisions written back", len(self.decisions))

    def _queue_decisions(self, pipe: Pipeline) -> None:
        if self.decisions:
            pipe.hset(self.keys.decisions, mapping={str(i): encode(d) for i, d in self.decisions.items()})

    def _next_id(self) -> str:
        """Id of a line that stands behind the log file's last one: '*', the server's time, where that does.

        A server that comes instead of a lost one may have an earlier clock, and what has a lower id never reaches the file.
        """
        seconds, micros = self.client.time()  # type: ignore[misc]
        at = max((1000 * seconds + micros // 1000, 0), self._newest_line())
        return "*" if at > self._filed else f"{self._filed[0]}-{self._filed[1] + 1}"

    def _remember(self, state: HostState, commit: Commit) -> None:
        self._parts = self._next_parts
        state.traffic.touched.clear()
        self.decisions.update({d.decision_id: d for d in commit.decisions})
        self.ledger.extend(commit.ledger)
        assert self._made is not None, "a transaction made it"
        self._unfiled.append(self._made)
        for old in _too_old(self.decisions):
            del self.decisions[old]


def _too_old(decisions: Mapping[int, Any]) -> list[int]:
    """Those of the decisions that Redis does not keep."""
    return list(decisions)[: max(0, len(decisions) - MAX_DECISIONS)]


@dataclass(slots=True)
class _Unfiled:
    """A commit whose lines the log file may not have."""

    num_booked: int
    """Entries of the ledger up to its last one."""
    commit: Commit
    last_line: tuple[int, int] = (0, 0)
    """Stream id of the latest line that was appended with its own; (0, 0) = it has none."""


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
    """The state as Redis holds it; None = none.

    Raises: StateError for a newer format, msgspec.DecodeError, for another kind of key ResponseError.
    """
    found: dict[bytes, bytes] = client.hgetall(keys.state)  # type: ignore[assignment]
    if not found:
        return None
    values = {name.decode(): data for name, data in found.items()}
    bins = {int(name.removeprefix(_BIN)): values.pop(name) for name in list(values) if name.startswith(_BIN)}
    state = decode(msgspec.msgpack.encode(upgraded(values, f"the state in Redis ({keys.state})")), HostState)
    state.traffic.bins = [(number, _BIN_DECODER.decode(bins[number])) for number in sorted(bins)]
    return state


def read_progress(client: redis.Redis, keys: Keys) -> tuple[Any, Any]:
    """What changes with every take-over and every commit of whichever controller. Raises redis errors."""
    return client.get(keys.epoch), client.hget(keys.state, "commit")


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
        deeds: Deeds | None = None,
    ) -> None:
        self.config, self.store, self.state, self.policy, self.pending = config, store, state, policy, Commit()
        self.errors, self.clock, self._deeds = errors, clock, deeds
        self._commit_due = self._file_due = 0.0
        self._beat_due = clock.now() + BEAT_S
        self._file_commit = -1
        self.folder_error = ""
        """Why the data folder could not be written last; '' = it could."""

    @property
    def desired(self) -> DesiredState | None:
        """The desired record as it will be after the next commit, its generation apart."""
        return self.pending.desired or self.state.desired

    def kept_classes(self) -> set[str]:
        """Classes that give way to no others: with a version of their own, or one on trial, or a job under way."""
        state, kept = self.state, set(self.state.assigned)
        for desired in (state.desired, self.pending.desired):
            if desired is not None:
                kept |= {*desired.class_versions, desired.canary_bucket}
        if state.pending is not None:
            kept.add(state.pending.job.bucket)
        if state.rollout.canary is not None:
            kept |= {state.rollout.canary.scope, state.rollout.canary.bucket}
        return kept - {""}

    def log(self, kind: str, values: dict) -> None:
        """Put a line into the decision log."""
        self.pending.log.append((kind, values))

    def note(self, text: str) -> None:
        """Put a line into the decision log and among the latest notes that dashboards show."""
        self.log("note", {"text": text})
        self.state.notes = [*self.state.notes, (self.clock.now(), text)][-MAX_NOTES:]

    def record_deed(self, name: str, seconds: float, **attributes: Any) -> None:
        """Tell OpenTelemetry of what took so long and is over now, where somebody listens."""
        if self._deeds is not None:
            self._deeds.record_deed(name, seconds, attributes)

    def note_storage(self, text: str, error: Exception) -> None:
        """Count what a store could not do; call it inside the `except`. A store that hangs is told once, by its calls."""
        if not isinstance(error, StorageHangsError):
            self.errors.note(text, error)

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
        pending, is_beat = self.pending, now >= self._beat_due
        is_due = now >= self._commit_due or len(pending.ack_ids) >= COMMIT_ENTRIES
        if is_due or is_beat or pending.decisions or pending.desired:
            self.flush(always=is_beat)

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
        self._commit_due, self._beat_due = now + self.config.commit_every_s, now + BEAT_S
        try:
            self.store.copy_log()
            if now >= self._file_due and self.state.commit != self._file_commit:
                self._file_due, self._file_commit = now + self.config.snapshot_every_s, self.state.commit
                self.store.save_file(self.state)
            self.folder_error = ""
        except (OSError, StorageHangsError) as e:  # what was committed is committed; files are made up for later
            if isinstance(e, StorageHangsError):
                self.folder_error = ""  # `calls` says so
            else:
                if str(e) != self.folder_error:
                    self.errors.note(f"the data folder {self.config.data_dir} cannot be written", e)
                self.folder_error = str(e)
            self._file_due = now  # the snapshot that failed is due again


def held_entries(lines: Iterable[dict[str, Any]], num_booked: int, limit: int = MAX_LEDGER) -> Iterator[LedgerEntry]:
    """The latest entries of a ledger of `num_booked` among a log's lines, both the latest first."""
    due = num_booked
    for line in lines:
        if due == 0 or num_booked - due >= limit:
            return
        if "entry_id" in line and line["number"] <= due:
            due = line["number"] - 1
            yield msgspec.convert(line, LedgerEntry)


def _queue_lines(pipe: Pipeline, keys: Keys, commit: Commit, num_booked: int) -> None:
    """Append to the log what a commit says; a ledger of `num_booked` ends with its entries."""
    if commit.decisions:
        pipe.hset(keys.decisions, mapping={str(d.decision_id): encode(d) for d in commit.decisions})
        for d in commit.decisions:
            queue_log(pipe, keys, "decision", msgspec.to_builtins(d))
    for number, entry in enumerate(commit.ledger, num_booked - len(commit.ledger) + 1):
        queue_log(pipe, keys, "ledger", {**msgspec.to_builtins(entry), "number": number})
    for kind, values in commit.log:
        queue_log(pipe, keys, kind, values)


def _order(stream_id: str | bytes) -> tuple[int, int]:
    """A stream id as numbers that compare as it does."""
    time_ms, _, number = (stream_id.decode() if isinstance(stream_id, bytes) else stream_id).partition("-")
    return int(time_ms), int(number or 0)


def _number(held: bytes | None, known: int) -> int:
    """Number of the commit that Redis holds, 0 = none; `known` where it is unreadable: then the state alone is damaged."""
    try:
        return min(msgspec.msgpack.decode(held, type=int), known) if held is not None else 0
    except msgspec.DecodeError:
        return known


def _with_version(history: list[str], desired: DesiredState | None) -> list[str]:
    if desired is None or (history and history[-1] == desired.version):
        return history
    return [*history, desired.version][-200:]
