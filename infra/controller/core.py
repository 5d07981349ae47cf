"""What does a controller hold and commit: restore, fold each feedback batch once, write everything in one transaction."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from redis.exceptions import ResponseError

from paceline.bandit.controller.controller import Controller
from paceline.bandit.ledger.totals import fold_entries
from paceline.clock import Clock, SystemClock
from paceline.config import PolicyConfig, RolloutConfig, TraceConfig
from paceline.contracts import (
    ArmSpec,
    DesiredState,
    DrafterManifest,
    FeedbackBatch,
    LedgerEntry,
    ReplicaReport,
)
from paceline.infra.controller.feedback import FeedbackConsumer
from paceline.infra.controller.jobs import START_S, Launcher, TrainCoordinator
from paceline.infra.controller.snapshot import Snapshot
from paceline.infra.controller.store import Commit, ControllerStore
from paceline.infra.state.desired import with_holdback
from paceline.infra.state.log import LogFile
from paceline.infra.state.redis_clients import Breaker, Keys, consumer_client

logger = logging.getLogger(__name__)

READ_COUNT = 200
COMMIT_EVERY_S = 0.5
COMMIT_ENTRIES = 500
_WATERMARK_MAX_AGE_S = 3600.0
MAX_NOTES = 50


MakeController = Callable[[bytes], Controller]


class Shards(Protocol):
    """What the host needs of the trace store."""

    def list_shards(self, bucket: str | None = None) -> list[Any]: ...

    def enforce_limits(self, max_bytes: int, max_age_s: float, now: float) -> int: ...


class Versions(Protocol):
    """What the host needs of the drafter registry."""

    def get_manifest(self, version: str, *, target_version: str | None = None) -> DrafterManifest: ...

    def list(self) -> list[DrafterManifest]: ...

    def has_weights(self, version: str) -> bool: ...

    def delete_weights(self, version: str) -> None: ...


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
    start_s: float = START_S
    """A worker may take this long from its launch to its first heartbeat."""
    stop_grace_s: float = 10.0
    context_every_s: float = 2.0
    """Period of looking at stores and replica reports."""
    snapshot_every_s: float = 30.0


class ControllerCore:
    """State, feedback and commits of a hosted Controller; single-threaded, no decision is made here."""

    def __init__(
        self,
        config: HostConfig,
        *,
        store: Shards,
        registry: Versions,
        launcher: Launcher,
        clock: Clock | None = None,
        make_controller: MakeController | None = None,
    ) -> None:
        """No I/O happens here; `connect` does it, and `start` calls it with backoff in a thread.

        Args:
            make_controller: stored state (b"" = none) -> Controller; None = the bandit's.
        """
        self._make_controller = make_controller or self._bandit_controller
        self.config = config
        self._keys = Keys(config.model)
        self._shards, self._registry, self._launcher = store, registry, launcher
        self._clock = clock or SystemClock()
        self._breaker = Breaker()
        self._commands: queue.Queue[tuple[Callable[[], Any], Future]] = queue.Queue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._snapshot = Snapshot()
        self.is_fenced = False
        self.num_errors = 0
        self.last_error = ""
        self._is_connected = False
        self._commit = Commit()
        self._commit_due = 0.0
        self._context_due = 0.0
        self._file_due = 0.0
        self._file_commit = -1
        self._rows: dict[str, int] = {}
        self._versions: list[DrafterManifest] = []
        self._foreign: set[str] = set()
        """Versions in the registry that were trained for another target."""
        self._reports: list[ReplicaReport] = []
        self._lag: int | None = None
        self._counters_seen: dict[str, dict[str, int]] = {}

    def connect(self) -> None:
        """Take over (epoch), restore everything; raises redis errors. Repeated calls start over from what is stored."""
        cfg = self.config
        self._client = consumer_client(cfg.redis_url)
        data_dir = None if cfg.data_dir is None else Path(cfg.data_dir).expanduser()
        self._store = ControllerStore(
            self._client, self._keys, snapshot_path=None if data_dir is None else data_dir / "controller.msgpack"
        )
        self._log_file = None if data_dir is None else LogFile(data_dir / "decisions.jsonl")
        self._consumer = FeedbackConsumer(self._client, self._keys)
        self._store.acquire_epoch()
        self.state = self._store.load()
        if self.state.epoch >= self._store.epoch:  # Redis lost its data and the file knows a higher epoch
            self._store.acquire_epoch(at_least=self.state.epoch)
        if not self.state.ledger_totals.cells:  # a state written before it kept them
            self.state.ledger_totals = fold_entries(self._store.ledger.values())
        self._consumer.ensure_group()
        self._consumer.restart()
        self._coordinator = TrainCoordinator(
            cfg.redis_url, self._keys, self._launcher, clock=self._clock, owner=self._store.owner,
            ttl_s=cfg.lease_ttl_s, start_s=cfg.start_s, stop_grace_s=cfg.stop_grace_s,
        )  # fmt: skip
        self.controller = self._restore_controller()
        started = {
            "text": f"controller started, epoch {self._store.epoch}",
            "epoch": self._store.epoch,
            "commit": self.state.commit,  # 0: nothing was restored, ids begin anew
        }
        self._commit = Commit(log=[("note", started)])
        self._is_connected = True
        before = self.state.desired
        self._flush()  # adopts a newer record of the set-up
        if (desired := self._configured_desired()) is not None:
            self._commit.desired = desired
            self._flush()
        if (
            before is not None
            and self.state.desired is not None
            and before.first_version != self.state.desired.first_version
        ):
            self.controller.unpin()  # a pin made for the drafters of another start holds nothing here
            self._note(f"first drafter is {self.state.desired.first_version}; pins removed")
            self._flush()
        self._breaker.succeeded()
        logger.info(
            "controller restored epoch=%d commit=%d rows=%d pending_job=%s",
            self._store.epoch, self.state.commit, self.state.num_rows, self.state.pending.job.job_id if self.state.pending else None,
        )  # fmt: skip

    def _configured_desired(self) -> DesiredState | None:
        """The record that the configuration asks for; None when the stored one agrees with it."""
        cfg, stored = self.config, self.state.desired
        holdback, now = cfg.policy.holdback_percent, self._clock.now()
        first = cfg.first_version or (stored.first_version if stored is not None else "")
        if not first:
            return None
        if stored is None or stored.first_version != first:
            return DesiredState(
                gen=0, version=first, first_version=first, holdback_percent=holdback, reason="first drafter", ts=now
            )
        return with_holdback(stored, holdback, now)

    def _restore_controller(self) -> Controller:
        policy, state = self.config.policy.policy, self.state
        try:
            controller = self._make_controller(state.controller)
        except (msgspec.DecodeError, ValueError) as e:
            self._note_error("the policy's state is unreadable, it starts afresh", e)
            controller = self._make_controller(b"")
        if state.config_policy != policy:  # the operator configured another one since
            state.config_policy = state.policy = policy
        controller.set_policy(state.policy)
        return controller

    def _bandit_controller(self, stored: bytes) -> Controller:
        cfg = self.config
        if stored:
            return Controller.restore(stored, cfg.policy, cfg.arms, clock=self._clock)
        return Controller(cfg.policy, cfg.arms, clock=self._clock, rng=np.random.default_rng(cfg.policy.seed))

    # ---- feedback -----------------------------------------------------------------------------------------------
    def _read(self, block_ms: int) -> int:
        try:
            entries = self._consumer.read(count=READ_COUNT, block_ms=block_ms)
        except ResponseError as e:
            if "NOGROUP" not in str(e):
                raise
            logger.warning("the feedback group is gone (Redis was flushed); made again")
            self._consumer.ensure_group()
            self._consumer.restart()
            self._commit.log.append(("note", {"text": "feedback group made again after a flush"}))
            self._flush()
            return 0
        for entry in entries:
            self._commit.ack_ids.append(entry.entry_id)
            if entry.batch is None:
                self.state.num_lost_entries += 1
            elif self._is_new(entry.batch):
                self._fold(entry.batch)
        return len(entries)

    def _is_new(self, batch: FeedbackBatch) -> bool:
        marks = self.state.watermarks
        key = f"{batch.replica_id}:{batch.boot_epoch}"
        seq, _ = marks.get(key, (0, 0.0))
        if batch.seq <= seq:
            self.state.num_duplicates += 1
            return False
        self.state.num_missing_batches += batch.seq - seq - 1
        now = self._clock.now()
        marks[key] = (batch.seq, now)
        for old in [k for k, (_, t) in marks.items() if now - t > _WATERMARK_MAX_AGE_S]:
            del marks[old]
        return True

    def _fold(self, batch: FeedbackBatch) -> None:
        self.state.num_rows += len(batch.request_id)
        self.state.num_dropped += batch.num_dropped
        batch = self.state.traffic.bounded(batch)  # what follows keeps state per bucket
        live = self.state.desired.version if self.state.desired is not None else ""
        rollout = self.state.rollout
        percent = rollout.canary.percent if rollout.canary is not None else 0
        self.state.traffic.observe(batch, rollout.tried_version(live), percent)
        try:
            self.controller.observe(batch)
        except Exception as e:  # one bad batch must not stop the stream; it is counted and logged
            self._note_error("the policy refused a feedback batch", e)

    # ---- commit -------------------------------------------------------------------------------------------------
    def _take_drained(self) -> None:
        decisions, ledger = self.controller.drain()
        self._commit.decisions += decisions
        for entry in ledger:
            self._book(entry)

    def _book(self, entry: LedgerEntry) -> None:
        if entry.entry_id in self._store.ledger or any(e.entry_id == entry.entry_id for e in self._commit.ledger):
            return
        self._commit.ledger.append(entry)
        self.state.ledger_totals.add(entry)

    def _flush(self, always: bool = False) -> None:
        """Commit what has come together."""
        if self._commit.is_empty and not always:
            return
        if not self._commit.is_uncertain:
            self._take_drained()
            self.state.controller = self.controller.state()
        self._store.commit(self.state, self._commit)
        self._commit = Commit()
        now = self._clock.now()
        self._commit_due = now + COMMIT_EVERY_S
        if self._log_file is not None:
            self._log_file.sync(self._client, self._keys)
        if now >= self._file_due and self.state.commit != self._file_commit:
            self._file_due, self._file_commit = now + self.config.snapshot_every_s, self.state.commit
            self._store.save_file(self.state)

    def _note(self, text: str) -> None:
        """Put a line into the decision log and among the latest notes that dashboards show."""
        self._commit.log.append(("note", {"text": text}))
        self.state.notes = [*self.state.notes, (self._clock.now(), text)][-MAX_NOTES:]

    def _note_error(self, text: str, error: Exception) -> None:
        self.num_errors += 1
        self.last_error = f"{text}: {error}"
        logger.exception("%s", text)
