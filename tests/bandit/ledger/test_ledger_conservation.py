"""The ledger is conserved: crashes, restarts and repeated delivery change no entry (commits are atomic, in memory)."""

import dataclasses

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from paceline.bandit.controller.controller import Controller
from paceline.bandit.ledger.totals import fold_entries
from paceline.config import PolicyConfig
from paceline.contracts import Decision, FeedbackSums, LedgerEntry, TrainResult
from tests.helpers.world import World

FAULTS = ("none", "crash_before_commit", "crash_before_ack", "restart", "duplicate")
SWAP_S, STEP_S = 0.1, 5.0


@dataclasses.dataclass
class Stored:
    """What survives a crash; `commit` replaces all of it at once, acknowledgements come later."""

    state: bytes = b""
    own: dict[str, str] = dataclasses.field(default_factory=dict)
    job: tuple[Decision, float] | None = None
    ledger: dict[str, LedgerEntry] = dataclasses.field(default_factory=dict)
    decisions: dict[int, Decision] = dataclasses.field(default_factory=dict)
    num_swaps: int = 0
    folded: int = 0
    """Highest seq of a batch that was given to the controller."""


class Service:
    """A simulated service whose controller may die at any point of a pass."""

    def __init__(self, seed: int, policy: str) -> None:
        config = PolicyConfig(policy=policy, epoch_s=STEP_S, bank_s=60.0, min_rows=256)
        self.world = World(
            config=config, mix=lambda t: {"a": 0.4, "c": 0.6}, lengths={"a": 2.4, "c": 1.4}, ceilings={"a": 2.5, "c": 2.4},
            round_s=0.1, batch_size=6, step_s=STEP_S, static_share=0.3, seed=seed,
        )  # fmt: skip
        self.stored = Stored()
        self.seq = 0
        self.stream: list[tuple[int, FeedbackSums]] = []  # delivered and not acknowledged
        self.results: dict[int, TrainResult] = {}  # what trainers left, folded or not
        self.restart()

    def restart(self) -> None:
        w = self.world
        if self.stored.state:
            w.controller = Controller.restore(self.stored.state, w.config, clock=w.clock)
        else:  # it died before its first commit
            w.controller = Controller(w.config, clock=w.clock, rng=np.random.default_rng(w.config.seed))
        w.own = dict(self.stored.own)
        w.job = None if self.stored.job is None else (*self.stored.job, 0.0)

    def step(self, fault: str, order: str) -> None:
        w = self.world
        self.seq += 1
        batch = w.traffic()
        w.clock.advance(STEP_S)
        self.stream += [(self.seq, batch)] * (2 if fault == "duplicate" else 1)
        if fault == "crash_before_commit":
            self.attempt(order)  # folds, decides, books, and is lost
            self.restart()
        self.stored = self.attempt(order)
        if fault == "crash_before_ack":
            self.restart()  # the batches come again in the next pass
        else:
            self.stream.clear()
        before = self.stored.ledger
        self.stored = self.attempt("")
        assert self.stored.ledger == before, "a second pass at the same time books nothing"
        self.stream.clear()
        if fault == "restart":
            self.restart()

    def attempt(self, order: str) -> Stored:
        """One pass up to its commit; nothing but the controller in memory changes."""
        w, now = self.world, self.world.clock.now()
        commit = dataclasses.replace(
            self.stored,
            ledger=dict(self.stored.ledger),
            decisions=dict(self.stored.decisions),
            own=dict(self.stored.own),
        )
        for seq, batch in self.stream:  # the host gives each batch once
            if seq > commit.folded:
                commit.folded = seq
                w.controller.observe(batch)
        if commit.job is not None and commit.job[1] <= now:
            decision, commit.job = commit.job[0], None
            if decision.decision_id not in self.results:
                self.results[decision.decision_id] = w.train(decision)
            result = self.results[decision.decision_id]
            outcome = w.controller.job_finished(result, decision_id=decision.decision_id, now=now)
            if outcome.publish is not None:
                self._swap(commit, {decision.bucket: outcome.publish}, decision.decision_id, now)
        if order == "pin":
            made = w.controller.manual("pin", "v0", now, "Operator.")
            commit.own = {}
            self._swap(commit, {}, made.decision_id, now)
        elif order == "unpin":
            w.controller.unpin()
        w.own, w.job = dict(commit.own), None if commit.job is None else (*commit.job, 0.0)
        for decision in w.controller.tick(now, w.context()):
            if decision.action == "train":
                commit.job = (decision, now + 1.5 * STEP_S)
            elif decision.version is not None and decision.action in ("recall", "rollback"):
                self._swap(commit, {decision.bucket: decision.version}, decision.decision_id, now)
        decisions, entries = w.controller.drain()
        commit.decisions.update({d.decision_id: d for d in decisions})
        for entry in entries:
            assert entry.entry_id not in commit.ledger, "an entry was drained twice"
            commit.ledger[entry.entry_id] = entry
        commit.state = w.controller.state()
        return commit

    def _swap(self, commit: Stored, given: dict[str, str], decision_id: int, now: float) -> None:
        commit.own, commit.num_swaps = {**commit.own, **given}, commit.num_swaps + 1
        self.world.controller.staged(decision_id, SWAP_S, now)


def check(service: Service, reference: Service) -> None:
    """Nothing lost, nothing doubled, sums right, decisions consistent."""
    stored, controller = service.stored, service.world.controller
    assert stored.ledger == reference.stored.ledger
    assert stored.decisions == reference.stored.decisions
    assert controller.check(stored.ledger.values()) == []
    assert controller.ledger_totals().rows() == fold_entries(stored.ledger.values()).rows()
    assert controller.bank().saved_error_s == pytest.approx(fold_entries(stored.ledger.values()).saved_error_s())
    finished = [service.results[d.decision_id] for d in stored.decisions.values() if d.action == "train" and d.outcome]
    by_kind = fold_entries(stored.ledger.values()).by_kind()
    assert by_kind.get("training", 0.0) == pytest.approx(sum(r.train_s for r in finished))
    assert by_kind.get("shadow", 0.0) == pytest.approx(sum(r.shadow_s for r in finished))
    assert by_kind.get("staging", 0.0) == pytest.approx(SWAP_S * stored.num_swaps)
    spent = sum(d.realised_cost_s or 0.0 for d in stored.decisions.values())
    saved = sum(d.realised_saving_s or 0.0 for d in stored.decisions.values())
    assert spent == pytest.approx(sum(s for kind, s in by_kind.items() if kind != "saving"))
    assert saved == pytest.approx(by_kind.get("saving", 0.0))


EVERY_FAULT = [(FAULTS[i % len(FAULTS)], {9: "pin", 14: "unpin"}.get(i, "")) for i in range(40)]


@settings(max_examples=8, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking takes minutes
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(FAULTS), st.sampled_from(["", "", "", "", "pin", "unpin"])), min_size=8, max_size=36
    ),
    seed=st.integers(0, 5),
    policy=st.sampled_from(["payoff", "always"]),
)
@example(steps=EVERY_FAULT, seed=0, policy="always")
def test_faults_change_nothing_in_the_ledger(steps, seed, policy):
    service, reference = Service(seed, policy), Service(seed, policy)
    for fault, order in steps:
        service.step(fault, order)
        reference.step("none", order)
    check(service, reference)


def test_the_faultless_world_books_every_kind_so_that_the_property_means_something():
    service = Service(0, "always")
    for _, order in EVERY_FAULT:
        service.step("none", order)
    assert set(fold_entries(service.stored.ledger.values()).by_kind()) == {
        "training", "shadow", "staging", "interference", "saving",
    }  # fmt: skip
    assert {e.arm for e in service.stored.ledger.values() if e.kind == "saving"} == {"full"}
    assert all(e.standard_error_s > 0 for e in service.stored.ledger.values() if e.kind == "saving")
    assert service.world.controller.bank().saved_error_s > 0
