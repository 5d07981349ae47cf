"""Session: one take-over of a service: the controller's parts put together from what is stored, driven pass by pass.

A controller that comes back after a crash is a new session. Single-threaded; no part knows Ray or threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import redis

from paceline.bandit.controller.controller import Controller
from paceline.clock import Clock
from paceline.config import PolicyConfig, RolloutConfig, TraceConfig
from paceline.contracts import ArmSpec
from paceline.errors import PacelineError
from paceline.infra.controller.feedback import READ_COUNT, Feedback, FeedbackConsumer
from paceline.infra.controller.jobs import START_S, Jobs, Launcher, TrainCoordinator
from paceline.infra.controller.lives import Lives, WeightPool
from paceline.infra.controller.orders import Orders
from paceline.infra.controller.store import Books, ControllerStore
from paceline.infra.controller.surroundings import Shards, Surroundings, Versions
from paceline.infra.state.desired import configured_desired
from paceline.infra.state.log import ErrorCount, LogFile
from paceline.infra.state.redis_clients import Keys

logger = logging.getLogger(__name__)

MakeController = Callable[[bytes], Controller]


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
    commit_every_s: float = 0.5
    """Period of commits while nothing waits for them."""
    context_every_s: float = 2.0
    """Period of looking at stores and replica reports."""
    snapshot_every_s: float = 30.0


def restore_controller(config: HostConfig, stored: bytes, clock: Clock) -> Controller:
    """The policy's controller, restored where there is something. Raises ValueError on what is unreadable."""
    if stored:
        return Controller.restore(stored, config.policy, config.arms, clock=clock)
    return Controller(config.policy, config.arms, clock=clock, rng=np.random.default_rng(config.policy.seed))


class Session:
    """The parts and their pass. What reads and writes is public: state, controller, books, surroundings, lives, ..."""

    def __init__(
        self,
        config: HostConfig,
        client: redis.Redis,
        *,
        shards: Shards,
        registry: Versions,
        launcher: Launcher,
        make_controller: MakeController,
        errors: ErrorCount,
        clock: Clock,
    ) -> None:
        """Take over (epoch), restore everything, put the configuration into force. Raises redis errors."""
        self.config, self._errors, self._clock = config, errors, clock
        self._context_due = 0.0
        keys, folder = Keys(config.model), None if config.data_dir is None else Path(config.data_dir).expanduser()
        store = ControllerStore(
            client,
            keys,
            snapshot_path=None if folder is None else folder / "controller.msgpack",
            log_file=None if folder is None else LogFile(folder / "decisions.jsonl"),
        )
        store.acquire_epoch()
        self.state = state = store.load()
        if state.epoch >= store.epoch:  # Redis lost its data and the file knows a higher epoch
            store.acquire_epoch(at_least=state.epoch)
        consumer = FeedbackConsumer(client, keys)
        consumer.ensure_group()
        is_restored = state.commit > 0
        try:
            self.controller = make_controller(state.controller)
        except (msgspec.DecodeError, ValueError) as e:
            errors.note("the policy's state is unreadable, it starts afresh and so does its ledger", e)
            self.controller, is_restored = make_controller(b""), False
            store.begin_ledger(state)
        if state.config_policy != config.policy.policy:  # the operator configured another one since
            state.config_policy = state.policy = config.policy.policy
        self.controller.set_policy(state.policy)
        coordinator = TrainCoordinator(
            config.redis_url,
            keys,
            launcher,
            clock=clock,
            owner=store.owner,
            ttl_s=config.lease_ttl_s,
            start_s=config.start_s,
            stop_grace_s=config.stop_grace_s,
        )
        self.books = books = Books(
            store,
            state,
            self.controller,
            clock=clock,
            commit_every_s=config.commit_every_s,
            file_every_s=config.snapshot_every_s,
        )
        self.surroundings = around = Surroundings(
            shards,
            registry,
            client,
            keys,
            state,
            target_version=config.target_version,
            trace=config.trace,
            errors=errors,
            clock=clock,
        )
        self.pool = WeightPool(books, around, max_bytes=config.rollout.pool_bytes)
        holdback = config.policy.holdback_percent
        self.lives = Lives(
            config.rollout, books, around, self.controller, holdback_percent=holdback, errors=errors, clock=clock
        )
        self.feedback = Feedback(consumer, books, lives=self.lives, policy=self.controller, errors=errors, clock=clock)
        self.jobs = Jobs(
            config.policy, coordinator, client, books, around, self.lives, self.controller, errors=errors, clock=clock
        )
        self.orders = Orders(
            self.controller, books, around, self.pool, self.lives, self.jobs, errors=errors, clock=clock
        )
        self._begin(is_restored)
        self._refresh()

    def _begin(self, is_restored: bool) -> None:
        """The first commits: adopt a newer record of the set-up, then put the configuration into force."""
        config, books, state, now = self.config, self.books, self.state, self._clock.now()
        before, epoch = state.desired, books.store.epoch
        started = {
            "text": f"controller started, epoch {epoch}",
            "epoch": epoch,
            "commit": state.commit if is_restored else 0,  # 0: nothing was restored, ids begin anew
            "num_booked": state.num_booked,
        }
        books.log("note", started)
        books.flush()
        first = config.first_version or (state.desired.first_version if state.desired is not None else "")
        if first:
            books.pending.desired = configured_desired(state.desired, first, config.policy.holdback_percent, now)
            books.flush()
        if before is not None and state.desired is not None and before.first_version != state.desired.first_version:
            self.controller.unpin()  # a pin made for the drafters of another start holds nothing here
            books.note(f"first drafter is {state.desired.first_version}; pins removed")
            books.flush()
        self.lives.reconcile(now)
        logger.info(
            "controller restored epoch=%d commit=%d rows=%d pending_job=%s",
            epoch, state.commit, state.num_rows, state.pending.job.job_id if state.pending else None,
        )  # fmt: skip

    def _refresh(self) -> None:
        self.surroundings.refresh()
        try:
            self.pool.tend()
        except (OSError, PacelineError) as e:
            self._errors.note("limits of the version pool could not be enforced", e)
        self.lives.follow_reports(self._clock.now())
        self.feedback.look_at_lag()

    def step(self, block_ms: int = 250) -> int:
        """One pass: feedback, surroundings, canary, job, decisions, commit. Returns the entries read.

        Raises: redis errors (call again later, nothing is lost), FencedError (stop).
        """
        self.books.settle()
        num_entries = self.feedback.read(block_ms)
        now = self._clock.now()
        if now >= self._context_due:
            self._context_due = now + self.config.context_every_s
            self._refresh()
        self.lives.judge_canary(now, is_read_up=num_entries < READ_COUNT)
        self.jobs.poll(now)
        self.orders.tick(now)
        self.books.take_drained()
        self.books.flush_due(now)
        return num_entries
