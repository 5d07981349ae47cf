"""Forced replay: the situations of a log's decisions, and what another policy would have done in each, and after it.

A replay of the log that is made to do what the log did: traffic, measured feedback, training jobs with their results and
swaps are those of the log, while the asked policy says at every decision what it would have done. At any step the replay
can be copied and handed over to that policy; from there on jobs follow the gain model.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import numpy as np

from paceline.bandit.beliefs.observation import HostContext
from paceline.bandit.controller.controller import Controller, belief_to_train, price_order
from paceline.bandit.controller.decision_log import FeedbackLine
from paceline.bandit.controller.state import JobOutcome
from paceline.bandit.policies.pricing import PricedRecall
from paceline.bandit.policies.table import Choice, View, ask_policy
from paceline.bandit.policies.view import hold
from paceline.bandit.replay.logged import LoggedService, logged_outcomes, logged_settings
from paceline.bandit.replay.simulate import policy_config
from paceline.bandit.replay.world import RunResult, World
from paceline.contracts import ArmSpec, CellSums, Decision, FeedbackSums, RequestSums, SizeSums, TrainResult
from paceline.errors import ConfigError

UNIT_SD = 0.12
"""Relative spread between the requests of a rebuilt cell: the log keeps their sums only."""
MAX_UNITS = 16


class ForcedController(Controller):
    """Asks its policy, then does what the log did."""

    orders: dict[int, Decision]
    """Step -> logged decision; a step without one is a hold that was certain."""
    names: dict[str, str]
    """Version of the log -> version of the replay."""
    step = 0
    until = 0
    """First step at which the policy decides itself."""
    asked: dict[str, float]
    """What the policy would have done at the latest forced decision: action key -> probability."""
    num_missed = 0
    """Logged actions that could not be done again."""
    again: dict[int, Decision]
    """Decision of the replay -> the logged one that it does again."""

    def begin(self, now: float) -> None:
        """The first epoch begins, as the log's did."""
        self._state.epoch_start = now

    def _choose(self, view: View) -> Choice:
        if self.step >= self.until:
            return super()._choose(view)
        # asked with a generator of its own: the forced run must not depend on who is asked
        self.asked = ask_policy(self._state.policy, view, np.random.default_rng(self.step)).probabilities
        logged = self.orders.get(self.step)
        forced = self._again(logged, view) if logged is not None else None
        return forced or hold(view, "logged", "The log held, whatever {num} policies say.", num=1)

    def _again(self, logged: Decision, view: View) -> Choice | None:
        if logged.action == "train" and self._state.context is not None:
            try:
                arm = msgspec.convert(logged.context["arm"], ArmSpec)
                belief = belief_to_train(view, logged.bucket)
                choice = price_order(view, belief, arm, self._state, self._state.context)
            except (ValueError, KeyError):
                self.num_missed += 1
                return None
            assert choice.job is not None
            return msgspec.structs.replace(
                choice, probabilities={}, job=msgspec.structs.replace(choice.job, arm=arm)
            )  # fmt: skip
        if logged.action in ("recall", "rollback", "pin"):
            version = self.names.get(logged.version or "")
            if version is None or version == view.versions.get(logged.bucket):
                self.num_missed += 1
                return None
            recall = PricedRecall(
                version=version, gain=logged.expected_gain, gain_se=0.0, saving_s=logged.expected_saving_s,
                cost_s=logged.expected_cost_s, length_now=1.0, length_after=1.0, bucket=logged.bucket,
            )  # fmt: skip
            return Choice(action="recall", bucket=logged.bucket, code="recall", reason=logged.reason, recall=recall)
        return None

    def tick(self, now: float, context: HostContext) -> list[Decision]:
        forced, logged = self.step < self.until, self.orders.get(self.step)
        decisions = super().tick(now, context)
        if not forced or logged is None:
            return decisions
        self.again |= {d.decision_id: logged for d in decisions if d.action == logged.action}
        if "time_limit_s" not in logged.context:
            return decisions
        limit = {"time_limit_s": logged.context["time_limit_s"]}  # the log's bank set it, not the asked policy's
        return [msgspec.structs.replace(d, context={**d.context, **limit}) for d in decisions]

    def job_finished(self, result: TrainResult, *, decision_id: int, now: float) -> JobOutcome:
        """Books the job; its version goes live when that of the logged job did, whatever the asked policy thinks of it."""
        outcome = super().job_finished(result, decision_id=decision_id, now=now)
        logged = self.again.get(decision_id)
        if self.step >= self.until or logged is None or logged.outcome is None or result.version is None:
            return outcome
        publish = result.version if logged.outcome in ("accepted", "promoted") else None
        if publish == outcome.publish:
            return outcome
        state = self._state
        given = state.owners.setdefault(outcome.decision.bucket, {})
        if publish is None:
            given.pop(result.version, None)
        else:
            given[publish] = decision_id
        state.outcomes[decision_id] = msgspec.structs.replace(outcome, publish=publish)
        return state.outcomes[decision_id]


def follow_log(service: LoggedService) -> RunResult:
    """What a replay makes of a log when it does all that the log did: to compare with the log's own ledger."""
    config = policy_config("never", logged_settings(service, {}), 0)
    return ForcedWorld(
        service.traffic, logged_outcomes(service, 0), config, seed=0, slowdown=service.slowdown,
        epochs=epochs_by_step(service), orders=logged_orders(service),
    ).follow()  # fmt: skip


def logged_orders(service: LoggedService) -> dict[int, Decision]:
    """Step -> what was decided in it; of several decisions the one that acted."""
    out: dict[int, Decision] = {}
    for d in service.log.decisions:
        k = service.step_of(d.ts)
        if k not in out or out[k].action == "hold":
            out[k] = d
    return out


def epochs_by_step(service: LoggedService) -> dict[int, FeedbackLine]:
    """Step -> what the log measured in it; lines of one step are put together, and one of several steps is left out."""
    found: dict[int, FeedbackLine] = {}
    for line in service.log.epochs:
        if line.end - line.start > 1.5 * service.traffic.step_s:
            continue
        k = service.step_of(line.end)
        before = found.get(k)
        found[k] = line if before is None else msgspec.structs.replace(line, cells=[*before.cells, *line.cells])
    return found


class ForcedWorld(World):
    """A World that follows a log up to a step. `outcomes` must know the log's jobs (bandit/replay/logged.py)."""

    def __init__(self, *args: Any, epochs: dict[int, FeedbackLine], orders: dict[int, Decision], **kwargs: Any) -> None:
        """`epochs`, `orders`: step -> what the log measured, and decided, in it."""
        super().__init__(*args, **kwargs)
        if not hasattr(self.outcomes, "names") or not hasattr(self.outcomes, "jobs"):
            raise ConfigError("outcomes must be those of a log to follow it")
        self.epochs = epochs
        controller = ForcedController(
            self.config, self.outcomes.arms, clock=self.clock, rng=np.random.default_rng(self.config.seed)
        )
        controller.orders, controller.names, controller.asked, controller.again = orders, {}, {}, {}
        controller.until = self.measured_until = self.traffic.num_steps
        controller.begin(self.clock.now())
        self.controller: ForcedController = controller

    def forced_step(self, k: int) -> dict[str, float]:
        """Do step k as logged; returns what the policy would have done: action key -> probability."""
        self.controller.asked = {}
        self.step(k)
        return self.controller.asked

    def snapshot(self) -> ForcedWorld:
        """A copy as of now; what never changes is shared."""
        orders = self.controller.orders
        shared = {id(x): x for x in (self.traffic, self.epochs, orders, self.outcomes.curves)}  # type: ignore[attr-defined]
        return copy.deepcopy(self, shared)

    def rest(self, k: int, forced: int, draw: int) -> float:
        """Net from step k to the end when the log decides before step `forced` and the policy from then on.

        The copy knows no result of a logged job that begins now or later, so that a prediction does not use what it is
        compared with; `draw` chooses what the gain model leaves open.
        """
        world = self.snapshot()
        rng = np.random.default_rng([draw, 17])
        world.outcomes.redraw(rng)  # type: ignore[attr-defined]
        world._noise = np.random.default_rng([draw, 19])
        world.controller._rng = np.random.default_rng([draw, 23])
        world.controller.until = forced
        world.measured_until = k  # what was measured after the decision must not enter its prediction
        before = world.net_s
        for step in range(k, world.traffic.num_steps):
            world.step(step)
        world.stop_job()
        return world.net_s - before

    def step(self, k: int) -> None:
        self.controller.step = k
        self.controller.names = self._names()
        booked_s = self.serving_s
        super().step(k)
        line = self.epochs.get(k)
        # what is predicted from a step on begins as what was done in it, whatever is decided there
        if line is not None and k <= self.measured_until and k <= self.controller.until:
            more_s = self._served_s(line) - (self.serving_s - booked_s)
            self.serving_s += more_s
            self.spent["interference"] += self.slowdown * float(self._busy[k]) * more_s

    def _names(self) -> dict[str, str]:
        return {theirs: ours for ours, theirs in self.outcomes.names.items()}  # type: ignore[attr-defined]

    def _served_s(self, line: FeedbackLine) -> float:
        """Device-seconds of an epoch's tokens by the versions that the log says: swaps fall within epochs, and groups vary."""
        names, seconds = self._names(), 0.0
        for c in line.cells:
            if c.own_tokens > 0:
                lengths = self.outcomes.lengths(names.get(c.version, self.version_of(c.bucket)))
                seconds += c.own_tokens * float(self.traffic.token_s(lengths)[self.traffic.labels.index(c.bucket)])
        return seconds

    def follow(self) -> RunResult:
        """Do all that the log did; the result is what the replay makes of it."""
        for k in range(self.traffic.num_steps):
            self.forced_step(k)
        self.stop_job()
        return self.result([], [])

    def _serve(self, k: int) -> FeedbackSums:
        simulated = super()._serve(k)  # also books the step's true cost
        line = self.epochs.get(k)
        if line is None or k > self.measured_until:
            return simulated
        for label, rows in line.rows_written.items():
            mine = [d for d, name in enumerate(self.traffic.labels) if name == label]
            if len(mine) == 1:
                self.written[mine[0]] = rows
        cells = [cell for i, c in enumerate(line.cells) if (cell := self._measured(k, i, c)) is not None]
        return msgspec.structs.replace(simulated, cells=cells)

    def _measured(self, k: int, i: int, c: Any) -> CellSums | None:
        version = self.controller.names.get(c.version)
        if version is None or c.num_rounds + c.text_rounds < 1 or c.num_requests <= 0:
            return None
        units = int(min(max(c.num_requests, 1), MAX_UNITS))
        pool = c.num_requests / units
        factor = np.ones(units)
        if units > 1:  # evenly spread, with the mean of the log
            factor += UNIT_SD / np.sqrt(pool) * np.linspace(-1.7, 1.7, units)
        share = np.full(units, 1.0 / units)
        table = np.stack(
            [c.device_s * share, c.num_tokens * share, c.drafted_rounds * share, c.kept * share * factor], axis=1
        )
        rounds = SizeSums(
            num_rounds=round(c.num_rounds), drafted_rounds=round(c.drafted_rounds), drafted_s=c.drafted_s,
            plain_s=c.plain_s, num_tokens=c.num_tokens, plain_tokens=round(c.plain_rounds),
            text_rounds=round(c.text_rounds), text_s=c.text_s, text_tokens=c.text_tokens,
        )  # fmt: skip
        requests = {f"{k}.{i}.{u}": RequestSums(*row) for u, row in enumerate(table.tolist())}
        sizes = {self.traffic.batch_size: rounds}
        return CellSums(bucket=c.bucket, group=c.group, version=version, sizes=sizes, requests=requests)
