"""Controller: decides once an epoch whether to hold, train a drafter or give a bucket another version; keeps the ledger."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from paceline.bandit.beliefs.arms import default_arms
from paceline.bandit.beliefs.belief import BucketBelief
from paceline.bandit.beliefs.observation import HostContext, fold
from paceline.bandit.controller.decision_log import FeedbackLine, feedback_line
from paceline.bandit.controller.epoch import (
    begin_bucket,
    close_epoch,
    drop_bucket,
    learn_history,
    part_bucket,
    rows_of,
    set_back,
    settle_interference,
    text_began,
)
from paceline.bandit.controller.jobs import finish_job
from paceline.bandit.controller.policy_inputs import build_view, remember_epoch
from paceline.bandit.controller.state import (
    ControllerState,
    JobOutcome,
    JobRecord,
    OpenEpoch,
    pack_rng,
    unpack_rng,
)
from paceline.bandit.controller.view import PolicyView, policy_view
from paceline.bandit.ledger.ledger import Bank, contradictions
from paceline.bandit.ledger.totals import LedgerTotals
from paceline.bandit.policies.pricing import PricedJob, price_jobs, swap_gain
from paceline.bandit.policies.table import POLICIES, Choice, View, ask_policy, is_self_funded, make_policy
from paceline.bandit.policies.view import hold
from paceline.config import PolicyConfig
from paceline.contracts import ArmSpec, BurstPlan, Decision, FeedbackSums, LedgerEntry, TrainResult
from paceline.errors import ConfigError
from paceline.machine import Clock

log = logging.getLogger(__name__)

MAX_BANK_S = 1e9
BURST_MARGIN = 1.5
"""A burst may take this multiple of its expected seconds, as much as a price may be wrong before one was measured."""


class Controller:
    """Folds feedback, decides once per epoch, keeps the ledger. Pure: no I/O, no Ray; time comes from arguments or the clock.

    The host calls `observe` for every feedback batch, `tick` about once a second, `job_finished` once per train decision,
    `staged` when replicas run a published version, and persists `state()` together with what `drain()` returns in one
    transaction. Every bucket has its own version: what is decided for one changes nothing for the others.
    """

    def __init__(
        self,
        config: PolicyConfig,
        arms: tuple[ArmSpec, ...] | None = None,
        *,
        clock: Clock,
        rng: np.random.Generator,
    ) -> None:
        """`arms` are templates (num_rows = the most rows the arm may use); None = bandit.arms.default_arms()."""
        self._config = config
        self._arms = arms if arms is not None else default_arms()
        if not self._arms:
            raise ConfigError("arms must name at least one way to train, got ()")
        self._clock = clock
        self._rng = rng
        make_policy(config.policy)  # one that cannot be made is refused before anything runs
        self._state = ControllerState(policy=config.policy)

    def observe(self, feedback: FeedbackSums) -> None:
        """Fold one batch; the caller gives each batch once."""
        self._state.num_rows_dropped += feedback.num_dropped
        fold(self._state.windows, feedback)
        self._state.round_costs.fold(feedback)
        self._state.interference.fold(feedback)

    def forget_bucket(self, name: str) -> None:
        """A bucket is told apart no longer: its place went to another one."""
        drop_bucket(self._state, name, self._clock.now())

    def begin_bucket(self, name: str, now: float, num_rows: int) -> None:
        """The class behind a bucket has ended: what comes under its name, and rows behind the `num_rows` written so far, is another
        kind of text."""
        self._follow_clock(now)
        begin_bucket(self._state, name, now, num_rows)

    def part_bucket(self, name: str, whole: str, now: float, num_rows: int) -> None:
        """Who made the versions of a bucket and what they have learned holds in a part of it that is told apart from now on, too;
        num_rows: as for `begin_bucket`."""
        self._follow_clock(now)
        part_bucket(self._state, name, whole, now, num_rows)

    def _follow_clock(self, now: float) -> None:
        """A new start may read a clock that was set back."""
        if self._state.epoch_start is not None and now < self._state.epoch_start:
            set_back(self._state, self._state.epoch_start - now)

    def tick(self, now: float, context: HostContext) -> list[Decision]:
        """New decisions; [] between epoch ends. At most one of them is not 'hold'.

        train: start a job with `arm_of(decision)` on decision.bucket from decision.context["base_version"];
        decision.context["time_limit_s"] bounds its training (money for scoring and staging is set aside).
        recall / rollback: give decision.version to decision.bucket and report its cost with `staged`.
        """
        state = self._state
        state.context = context
        for version in (context.first_version, context.live_version, *context.class_versions.values()):
            if version and version not in state.lived:
                state.lived.append(version)
        self._follow_clock(now)
        if state.epoch_start is None:
            state.epoch_start = now
        if now - state.epoch_start < self._config.epoch_s:
            return []
        seconds, is_training = now - state.epoch_start, state.job is not None
        alarms = close_epoch(state, now, context, self._config.bank_income)
        learn_history(state, context)
        for name in alarms:
            log.info("drift alarm bucket=%s epoch=%d", name, state.epoch)
        view = self._view(now, context)
        remember_epoch(state, self._config, self._arms, view, seconds, is_training=is_training)
        decisions = self._emit(self._choose(view), view, now, context)
        state.round_costs.fade(seconds)
        return decisions

    def _view(self, now: float, context: HostContext, config: PolicyConfig | None = None) -> View:
        return build_view(self._state, config or self._config, self._arms, context, now, bank=self.bank())

    def _choose(self, view: View) -> Choice:
        state = self._state
        if state.pinned is not None:
            template = "Version {pinned} is pinned, and {num} other actions are allowed."
            return hold(view, "pinned", template, at="", pinned=state.pinned, num=0)
        return ask_policy(state.policy, view, self._rng)

    def _emit(self, choice: Choice, view: View, now: float, context: HostContext) -> list[Decision]:
        state = self._state
        if choice.action == "hold":
            key = f"{choice.code}|{choice.bucket}"
            if key == state.last_hold and choice.propensity >= 1.0:
                return []  # a hold that was drawn is logged every time: estimates from the log need it
            state.last_hold = key
        else:
            state.last_hold = ""
        facts = {
            **self._facts(view, choice.bucket), "compared": choice.numbers, "probabilities": choice.probabilities,
        }  # fmt: skip
        if choice.job is not None:
            decision = self._order(choice, choice.job, view, now, context, facts)
        elif choice.recall is not None:
            recall = choice.recall
            left = context.version_of(recall.bucket)
            maker = state.actions.get(state.owner_of(recall.bucket, left) or 0)
            is_regression = (
                maker is not None
                and maker.action == "train"
                and state.regime is not None
                and maker.ts >= state.regime.start
            )
            decision = self._decision(
                "rollback" if is_regression else "recall",
                now,
                {**facts, "gain_se": recall.gain_se, "left_version": left},
                choice,
                version=recall.version,
                expected_gain=recall.gain,
                expected_saving_s=recall.saving_s,
                expected_cost_s=recall.cost_s,
            )
            state.owners.setdefault(recall.bucket, {})[recall.version] = decision.decision_id
        else:
            facts["code"] = choice.code
            decision = self._decision("hold", now, facts, choice, version=context.version_of(choice.bucket) or None)
        state.remember(decision)
        log.info("decision id=%d action=%s reason=%s", decision.decision_id, decision.action, decision.reason)
        return [decision]

    def _decision(
        self, action: str, now: float, context: dict[str, Any], choice: Choice | None = None, **known: Any
    ) -> Decision:
        """A decision with the next id; `known` are fields that differ from those of an action that changes nothing."""
        self._state.next_decision_id += 1
        self._state.num_decisions[action] = self._state.num_decisions.get(action, 0) + 1
        chosen = {} if choice is None else {name: getattr(choice, name) for name in ("bucket", "propensity", "reason")}
        fields: dict[str, Any] = {
            "bucket": "", "arm": None, "version": None, "propensity": 1.0,
            "expected_gain": 0.0, "expected_saving_s": 0.0, "expected_cost_s": 0.0, **chosen, **known,
        }  # fmt: skip
        number, policy = self._state.next_decision_id - 1, self._state.policy
        return Decision(decision_id=number, ts=now, action=action, policy=policy, context=context, **fields)

    def _order(
        self, choice: Choice, job: PricedJob, view: View, now: float, context: HostContext, facts: dict[str, Any]
    ) -> Decision:
        state, belief = self._state, view.beliefs[job.bucket]
        expected_s = job.cost.training_s + job.cost.shadow_s
        limit, min_gain, plan = min(self._config.job_time_limit_s, BURST_MARGIN * expected_s), 0.0, None
        if is_self_funded(state.policy):
            min_gain = swap_gain(belief, self._config.hysteresis * job.cost.staging_s, job.left_s)
            rise = (job.length_after - belief.length) / belief.length
            pay_rise = swap_gain(belief, job.cost.total_s + job.recall_s, job.left_s + job.return_s)
            plan = BurstPlan(seconds=expected_s, rise=rise, pay_rise=pay_rise)
            busy = sum(b.busy for b in view.beliefs.values() if b.is_active)
            price = self._config.trainer_price
            after = price * job.cost.shadow_s + job.cost.staging_s
            limit = self.bank().time_limit_s(limit, price + max(state.costs.slowdown, 0.0) * busy, after)
        decision = self._decision(
            "train",
            now,
            {
                **facts,
                "arm": msgspec.to_builtins(job.arm),
                "base_version": context.version_of(job.bucket),
                "text_began": text_began(state, job.bucket),
                "time_limit_s": limit,
                "min_gain": min_gain,
                "plan": msgspec.to_builtins(plan),
                "headroom": job.headroom,
                "share": job.share,
                "length_after": job.length_after,
                "cost": msgspec.to_builtins(job.cost),
                "others": job.others,
                "usable_rows": {b: rows_of(state, context, b)[0] for b in (job.bucket, *job.others)},
            },
            choice,
            arm=job.arm.name,
            expected_gain=job.gain,
            expected_saving_s=job.saving_s,
            expected_cost_s=job.cost.total_s,
        )
        state.job = JobRecord(
            decision_id=decision.decision_id,
            bucket=job.bucket,
            arm=job.arm,
            base_version=context.version_of(job.bucket),
            headroom=job.headroom,
            share=job.share,
            new=job.new,
            length_before=belief.length,
            learned_after=max(
                belief.learned_rows + belief.learner_rows + min(job.arm.num_rows, belief.fresh_rows),
                belief.learner_rows + job.arm.num_rows,
            ),
            expected_cost=job.cost,
            started=now,
            others=job.others,
        )
        state.last_job_id, state.last_job_started = decision.decision_id, now
        settle_interference(state, state.interference.begin(decision.decision_id), now)
        state.memory.job_started(job.bucket)
        for bucket in (job.bucket, *job.others):
            state.rows_at_job[bucket] = context.rows_written.get(bucket, context.rows.get(bucket, 0))
        return decision

    def _facts(self, view: View, bucket: str) -> dict[str, Any]:
        busy = sum(b.busy for b in view.beliefs.values() if b.is_active) or 1.0
        belief = view.beliefs.get(bucket)
        return {
            "epoch": self._state.epoch,
            "horizon_s": view.horizon_s,
            "balance_s": view.balance_s,
            "mix": {n: b.busy / busy for n, b in view.beliefs.items() if b.is_active},
            "belief": msgspec.to_builtins(belief) if belief is not None else None,
            "num_jobs_priced": len(view.jobs),
            "num_recalls_priced": len(view.recalls),
        }

    def arm_of(self, decision: Decision) -> ArmSpec:
        """The ArmSpec of a train decision (num_rows = rows to use). Raises ValueError for other actions."""
        if decision.action != "train":
            raise ValueError(f"decision.action must be 'train', got {decision.action!r}")
        return msgspec.convert(decision.context["arm"], ArmSpec)

    def job_finished(self, result: TrainResult, *, decision_id: int, now: float) -> JobOutcome:
        """Book a job's costs, teach the gain model, say whether its version goes live. Idempotent by decision_id.

        Raises ValueError for a decision_id that is neither the job in flight nor one finished lately.
        """
        if decision_id in self._state.outcomes:
            return self._state.outcomes[decision_id]
        self._follow_clock(now)
        outcome = finish_job(self._state, self._config, result, decision_id, now)
        log.info("job finished decision=%d publish=%s reason=%s", decision_id, outcome.publish, outcome.reason)
        return outcome

    def staged(self, decision_id: int, seconds: float, now: float, tag: str = "swap") -> Decision | None:
        """Book what staging a decision's version cost (device-seconds over all replicas); idempotent by `tag`.

        None when the decision is unknown or too old to be kept.
        """
        decision = self._state.actions.get(decision_id)
        if decision is None:
            return None
        arm = decision.arm or self._state.made_by.get(decision.version or "")
        if self._state.book("staging", tag, seconds, now, decision_id, decision.bucket, decision.version, arm):
            context = self._state.context
            self._state.costs.update_staging(seconds, 1 if context is None else context.num_replicas)
        return self._state.actions[decision_id]

    def order_ended(self, decision_id: int, outcome: str, bucket: str = "") -> Decision | None:
        """Write into a decision what became of its version: its canary was 'promoted', 'rolled_back' or 'retired', or the host
        'refused' to give it to the class.

        bucket: the class that this is about; '' = the decision's own. That another, which learned together with it, was
        refused the version says nothing of the decision; the end of a trial is one for all.

        A version that does not serve gained nothing and is no longer what that decision gave its bucket; None when the
        decision is unknown or too old to be kept.
        """
        state, decision = self._state, self._state.actions.get(decision_id)
        if decision is None:
            return None
        if outcome != "promoted":
            bucket = bucket or decision.bucket
            for given in [state.owners.get(bucket, {})] if outcome == "refused" else state.owners.values():
                if decision.version is not None and given.get(decision.version) == decision_id:
                    del given[decision.version]
            if outcome == "refused" and bucket != decision.bucket:
                return decision
            decision = msgspec.structs.replace(decision, realised_gain=0.0, outcome=outcome)
            state.remember(decision)
        return decision

    def manual(self, action: str, version: str, now: float, reason: str, left: Iterable[str] = ()) -> Decision:
        """Log an operator's 'pin' or 'rollback'; the host commits decision.version for all buckets but those assigned.

        A pin stops every decision but hold until `unpin` or a rollback to another version; a rollback bars the versions
        that it leaves from being recalled.

        Args:
            left: versions that served and no longer do.
        Raises ValueError for another action.
        """
        state = self._state
        if action not in ("pin", "rollback"):
            raise ValueError(f"action must be 'pin' or 'rollback', got {action!r}")
        out = sorted({*left} - {version, ""})
        decision = self._decision(action, now, {"left_version": ", ".join(out)}, version=version, reason=reason)
        if action == "pin":
            state.pinned = version
        else:
            if state.pinned != version:
                state.pinned = None  # what was pinned no longer serves
            state.barred = sorted({*state.barred, *out} - {version})
        state.owners.setdefault("", {})[version] = decision.decision_id
        state.last_hold = ""
        state.remember(decision)
        return decision

    def unpin(self) -> None:
        """Let the policy decide again; barred versions may be recalled again."""
        self._state.pinned, self._state.barred, self._state.last_hold = None, [], ""

    def set_bank(self, start_s: float) -> None:
        """Set the starting balance, device-seconds; what was saved and spent stays. Raises ValueError out of range."""
        if not 0.0 <= start_s <= MAX_BANK_S:  # False for NaN too
            raise ValueError(f"bank_s must be in [0, {MAX_BANK_S:g}] device-seconds, got {start_s!r}")
        self._state.bank_start_s, self._state.last_hold = float(start_s), ""

    def train_now(self, bucket: str, arm: str, now: float, context: HostContext | None = None) -> Decision:
        """Order the named arm on a bucket; its honest price is on the decision, and the bank does not bound it.

        Args:
            arm: '' = the one that the bucket's learner goes on with, else the cheapest that learns more than calibration.
            context: what the host knows now; None = at the last tick.
        Raises: ValueError for an unknown arm or bucket, one that the bucket's learner cannot go on with, without rows, or
        while a job is in flight.
        """
        context = context or self._state.context
        if context is None:
            raise ValueError("the controller has seen no replica yet; try again in a few seconds")
        names = [a.name for a in self._arms]
        if arm and arm not in names:
            raise ValueError(f"arm must be one of {', '.join(names)}, got {arm!r}")
        # an order is carried out whenever the service ends
        view = self._view(now, context, dataclasses.replace(self._config, ends_at=""))
        belief = belief_to_train(view, bucket)
        goes_on = [a for a in self._arms if a.parameters == belief.learner_parameters]
        usual = [a for a in self._arms if a.parameters != "calibration"]
        template = next(a for a in (*goes_on, *usual, *self._arms) if arm in ("", a.name))
        if goes_on and template not in goes_on:
            raise ValueError(
                f"arm must train {belief.learner_parameters!r} as the learner of bucket {belief.bucket!r} does, whose work "
                f"would be lost, got {template.name!r}; leave arm out"
            )
        (decision,) = self._emit(price_order(view, belief, template, self._state, context), view, now, context)
        # whoever orders a burst wants it read whole, paid or not
        facts: dict[str, Any] = {**decision.context, "time_limit_s": self._config.job_time_limit_s, "plan": None}
        decision = msgspec.structs.replace(decision, policy="operator", context=facts)
        self._state.remember(decision)
        return decision

    def set_policy(self, name: str) -> None:
        """Switch policy (a name of POLICIES, or the configured one); posteriors and ledger stay. Raises ConfigError.

        The name may come over HTTP, so it never makes Python import a module that the configuration does not name.
        """
        if name not in (*POLICIES, self._config.policy):
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}")
        if name != self._state.policy:  # a restarted host names the same one: nothing new to log
            self._state.policy, self._state.last_hold = name, ""

    def bank(self) -> Bank:
        """The bank as of the latest epoch; it starts with `policy.bank_s` for every device that serving keeps busy."""
        state = self._state
        return Bank(
            start_s=self._config.bank_s * state.devices() if state.bank_start_s is None else state.bank_start_s,
            income_s=state.income_s,
            saved_s=state.ledger.totals.saved_s(),
            saved_error_s=state.ledger.totals.saved_error_s(),
            spent_s=state.ledger.totals.spent_s(),
            reserved_s=state.reserved_s(),
        )

    def drain(self) -> tuple[list[Decision], list[LedgerEntry]]:
        """Decisions (new or with new realised values: upsert by decision_id) and ledger entries since the last drain."""
        state = self._state
        decisions = [state.out_decisions[key] for key in sorted(state.out_decisions)]
        entries = state.out_entries
        state.out_decisions, state.out_entries = {}, []
        return decisions, entries

    def closed_epoch(self) -> FeedbackLine | None:
        """What the epoch measured that ended since the last call, for the decision log; None when none did."""
        state = self._state
        if state.told_epoch == state.epoch or state.context is None:
            return None
        state.told_epoch = state.epoch
        return feedback_line(state.latest, state.context, state.rows_written)

    def snapshot(self) -> PolicyView:
        """For dashboards; see bandit/controller/view.py."""
        return policy_view(
            self._state, self._config, self._clock.now(), arms=self._arms, balance_s=self.bank().balance_s
        )

    def ledger_totals(self) -> LedgerTotals:
        """Sums of all entries ever booked; not to be changed."""
        return self._state.ledger.totals

    def check(self, entries: Iterable[LedgerEntry]) -> list[str]:
        """Contradictions between totals, kept decisions and `entries`, all that was ever drained; empty when consistent."""
        return contradictions(self._state.ledger.totals, entries, self._state.actions.values())

    def state(self, *, is_whole: bool = True) -> bytes:
        """Everything learned so far, MessagePack; includes the random generator.

        is_whole: with the open epoch; without it the bytes stay the same while nothing but feedback comes.
        """
        self._state.rng = pack_rng(self._rng)
        if is_whole:
            return msgspec.msgpack.encode(self._state)
        empty = ControllerState(policy="")
        fields = {name: getattr(empty, name) for name in OpenEpoch.__struct_fields__}
        return msgspec.msgpack.encode(msgspec.structs.replace(self._state, **fields))

    def open_epoch(self) -> bytes:
        """What `state(is_whole=False)` leaves out."""
        fields = {name: getattr(self._state, name) for name in OpenEpoch.__struct_fields__}
        return msgspec.msgpack.encode(OpenEpoch(**fields))

    def reopen(self, open_epoch: bytes) -> None:
        """Go on with an open epoch. Raises msgspec.ValidationError."""
        found = msgspec.msgpack.decode(open_epoch, type=OpenEpoch)
        for name in OpenEpoch.__struct_fields__:
            setattr(self._state, name, getattr(found, name))

    @classmethod
    def restore(
        cls, data: bytes, config: PolicyConfig, arms: tuple[ArmSpec, ...] | None = None, *, clock: Clock
    ) -> Controller:
        """A controller that continues exactly where `state()` was taken. Raises msgspec.ValidationError or ValueError."""
        state = msgspec.msgpack.decode(data, type=ControllerState)
        controller = cls(config, arms, clock=clock, rng=unpack_rng(state.rng))
        controller._state = state
        return controller


def belief_to_train(view: View, bucket: str) -> BucketBelief:
    """The belief about a bucket's class, if a job on it can be ordered; raises ValueError with what to do where it cannot."""
    if view.is_job_running:
        raise ValueError("a training job is in flight; wait until it has ended")
    bucket = next((first for first, others in view.pools.items() if bucket in others), bucket)
    belief = view.beliefs.get(bucket)
    if belief is None:
        known = ", ".join(sorted(view.beliefs)) or "none yet"
        raise ValueError(f"bucket must be one with measured traffic ({known}), got {bucket!r}")
    if belief.fresh_rows < 1 or not belief.is_active:
        raise ValueError(f"bucket {bucket!r} has no fresh rows or no traffic to learn from; send it requests first")
    return belief


def price_order(view: View, belief: BucketBelief, arm: ArmSpec, state: ControllerState, context: HostContext) -> Choice:
    """The choice 'train arm on the belief's bucket' with all usable rows."""
    jobs = price_jobs(
        view.beliefs,
        (arm,),
        gains=state.gains,
        costs=state.costs,
        evidence=state.evidence,
        hysteresis=view.config.hysteresis,
        best_length=state.table.best_length(context.first_version),
        horizon_s=view.horizon_s,
        min_rows=1,
        num_replicas=context.num_replicas,
        trainer_price=view.config.trainer_price,
        recall_rates=view.recall_rates,
        pools=view.pools,
    )
    job = max((j for j in jobs if j.bucket == belief.bucket), key=lambda j: j.arm.num_rows)
    reason = (
        f"Ordered by the operator: {arm.name} on {job.arm.num_rows} rows of {belief.bucket}; "
        f"expected to save {max(job.saving_s, 0.0):.1f} s for {job.cost.total_s:.1f} s."
    )
    return Choice(action="train", bucket=belief.bucket, code="operator", reason=reason, job=job)
