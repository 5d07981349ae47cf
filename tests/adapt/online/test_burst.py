"""A burst scores every request once and before it is learned, keeps what it has whatever ends it, and stops when it is sure."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from paceline.adapt.data.learning_text import request_digest
from paceline.adapt.families.target_handle import TargetTables
from paceline.adapt.gate.gate import Finding
from paceline.adapt.online import burst as burst_module
from paceline.adapt.online.burst import Burst
from paceline.adapt.online.learner import AVERAGED_STEPS, Learner
from paceline.bootstrap import SCORED_TOGETHER
from paceline.contracts import ArmSpec, BurstPlan
from paceline.machine import ManualClock
from paceline.serving.loading.families import build_drafter
from paceline.serving.specblock.model import SpecBlockConfig, SpecBlockModel
from tests.helpers.training import EMBED, FEATURES, TARGET, VOCAB, learnable_trace

CONFIG = SpecBlockConfig(
    hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1, head_dim=16, vocab_size=VOCAB,
    feature_size=FEATURES, embed_size=EMBED,
)  # fmt: skip
ARM = ArmSpec(name="full", parameters="full", num_rows=10_000, learning_rate=2e-3, rehearsal_share=1 / 3)
OWN = [learnable_trace(f"m{i}", num_outputs=12) for i in range(30)]
OTHERS = [learnable_trace(f"c{i}", num_outputs=12, bucket="code") for i in range(5)]


class Told(Learner):
    """Keeps what was read and learned, in order."""

    def __init__(self, events, arm=ARM):
        torch.manual_seed(0)
        super().__init__(SpecBlockModel(CONFIG), TargetTables.of(TARGET, torch.device("cpu")), arm, seed=3)
        self.events = events

    def mark_read(self, traces):
        super().mark_read(traces)
        self.events += [("read", t.request_id) for t in traces]

    def learn(self, trace, *, is_rehearsal=False):
        self.events.append(("learned", trace.request_id))
        return super().learn(trace, is_rehearsal=is_rehearsal)


def drafter(learner):
    values = {**CONFIG.to_dict(), "drafter_type": "specblock"}
    return build_drafter(values, learner.model.state_dict(), TARGET, target_version=TARGET.version)


def make_burst(learner, *, should_stop=lambda: False, save=lambda: None, clock=lambda: 0.0, min_gain=0.0, plan=None):
    return Burst(
        learner, drafter(learner), drafter(Told([])), num_nodes=4, max_frontier=2, min_gain=min_gain, plan=plan,
        device="cpu", clock=clock, should_stop=should_stop, save=save,
    )  # fmt: skip


def num_elsewhere(learner):
    """Requests of other classes in the evidence."""
    return sum(len(pairs) for pairs in learner.evidence.elsewhere.values())


def unread(learner, text=OWN):
    return [t for t in text if not learner.has_read(t)]


@settings(max_examples=8)
@given(st.lists(st.integers(0, 60), max_size=3), st.booleans())
def test_every_request_is_read_once_and_never_scored_after_it_was_learned(stops, is_lost):
    """Bursts stopped after any number of looks; with `is_lost` the state of the last save is all that the next one has."""
    events, learner, saved, text = [], Told([]), [], OWN[:24]
    learner.events = events
    for stop in [*stops, 10**9]:
        looks = iter(range(10**9))
        burst = make_burst(
            learner, should_stop=lambda stop=stop, looks=looks: next(looks) >= stop,
            save=lambda learner=learner: saved.append((learner.state(), list(learner.events))), min_gain=5.0,
        )  # fmt: skip
        list(burst.run(unread(learner, text), OTHERS))
        if is_lost:
            state, before = saved[-1]
            learner = Told(list(before))
            learner.restore(*state)
    read = [name for what, name in learner.events if what == "read"]
    assert len(read) == len(set(read)) and {t.request_id for t in text} <= set(read)
    num_unscored = len(read) - learner.evidence.test.num_requests - num_elsewhere(learner)
    assert AVERAGED_STEPS <= num_unscored < AVERAGED_STEPS + SCORED_TOGETHER, (
        "whole chunks, begun while its mean was young"
    )
    for name in {name for _, name in learner.events}:
        assert learner.events.index(("read", name)) < min(
            [i for i, e in enumerate(learner.events) if e == ("learned", name)], default=math.inf
        )
    own = [name for what, name in learner.events if what == "learned" and name.startswith("m")]
    assert len(own) == len(set(own)) and learner.num_rows == 12 * len(own)
    assert set(learner.seen) == {request_digest(name) for name in read}


def test_two_bursts_are_one_long_burst_cut_at_a_chunk():
    whole, first, second = (Told([]) for _ in range(3))
    list(make_burst(whole, min_gain=5.0).run(OWN, OTHERS[:0]))
    list(make_burst(first, min_gain=5.0).run(OWN[: 2 * SCORED_TOGETHER], []))
    second.restore(*first.state())
    list(make_burst(second, min_gain=5.0).run(unread(second), []))
    a, b = whole.snapshot(), second.snapshot()
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert second.evidence.test.num_requests == whole.evidence.test.num_requests == len(OWN) - AVERAGED_STEPS


def test_a_stop_keeps_what_was_learned_before_it():
    learner, saved = Told([]), []
    looks = iter(range(10**9))
    burst = make_burst(learner, should_stop=lambda: next(looks) > 40, save=lambda: saved.append(learner.state()))
    done = list(burst.run(OWN, OTHERS))
    assert len(saved) == 1 and 0 < len(done) < len(OWN)
    assert saved[0][1]["step"] == learner.num_steps > 0 and burst.num_learned in (len(done), len(done) + 1)


def test_a_request_that_nobody_can_score_is_read_all_the_same(monkeypatch):
    learner, saved = Told([]), []

    def fail(*args, **kwargs):
        raise RuntimeError("no such token")

    monkeypatch.setattr("paceline.adapt.online.burst.replay_rounds", fail)
    burst = make_burst(learner, save=lambda: saved.append(learner.state()))
    with pytest.raises(RuntimeError, match="no such token"):
        list(burst.run(OWN, OTHERS))
    after = Told([])
    after.restore(*saved[-1])
    assert len(unread(after)) < len(OWN) - burst.num_learned and len(saved) == 1


@pytest.mark.parametrize("save_s", [0.0, 0.15])
def test_a_burst_saves_at_intervals_of_which_saving_takes_a_tenth(monkeypatch, save_s):
    monkeypatch.setattr(burst_module, "SAVE_S", 1.0)
    clock, learner, saved, at = ManualClock(0.0), Told([]), [], []

    def look():
        clock.advance(0.05)
        return False

    def save():
        at.append(clock.now())
        clock.advance(save_s)
        saved.append(learner.num_steps)

    burst = make_burst(learner, should_stop=look, clock=clock.now, save=save, min_gain=5.0)
    list(burst.run([learnable_trace(f"m{i}") for i in range(80)], []))
    assert len(saved) > 2 and saved == sorted(saved)
    assert all(b - a >= max(1.0, 11 * save_s) for a, b in itertools.pairwise(at[:-1])), "the last is that of the end"
    assert burst.train_s + burst.shadow_s == pytest.approx(clock.now() - save_s * len(saved), abs=1e-6)


def test_a_burst_ends_when_it_surely_gains_too_little():
    text = [learnable_trace(f"m{i}") for i in range(400)]
    learner = Told([])
    done = list(make_burst(learner, min_gain=5.0).run(text, []))
    assert learner.evidence.finding(5.0) is Finding.SHORT and len(done) < len(text)


def test_what_surely_gains_reads_on_and_is_scored_in_every_second_chunk_only():
    text = [learnable_trace(f"m{i}") for i in range(200)]
    learner = Told([])
    assert len(list(make_burst(learner).run(text, []))) == len(text)
    assert learner.evidence.finding(0.0) is Finding.BETTER
    half = (len(text) - AVERAGED_STEPS) // (2 * SCORED_TOGETHER)
    assert half <= learner.evidence.test.num_requests // SCORED_TOGETHER <= half + 6, "sure within a few chunks"
    new, old = (sum(s.num_rounds for s in side) for side in zip(*learner.evidence.own, strict=True))
    assert new < old


@pytest.mark.parametrize(("step_s", "is_dear"), [(0.05, False), (1.0, True)])
def test_a_burst_that_turns_out_dearer_than_it_is_worth_ends_before_it_is_scored(step_s, is_dear):
    """Planned at 0.1 s a request with a rise of 20%, of which 10% would pay."""
    clock, learner = ManualClock(0.0), Told([])

    def look():
        clock.advance(step_s)
        return False

    plan = BurstPlan(seconds=0.1 * len(OWN), rise=0.2, pay_rise=0.1)
    burst = make_burst(learner, should_stop=look, clock=clock.now, plan=plan)
    list(burst.run(OWN, []))
    assert burst.is_given_up is is_dear
    assert burst.num_learned == (2 * SCORED_TOGETHER if is_dear else len(OWN)), "the first chunk's pace says nothing"
    assert bool(burst.scored) is not is_dear


def test_a_burst_that_gains_nothing_ends_when_the_rest_would_not_pay_and_one_that_gains_reads_on():
    text = [learnable_trace(f"m{i}", num_outputs=24) for i in range(200)]
    clock = ManualClock(0.0)

    def look():
        clock.advance(0.01)
        return False

    def run(learner):
        burst = make_burst(learner, should_stop=look, clock=clock.now, min_gain=0.02, plan=plan)
        list(burst.run(text, []))
        return burst

    plan = BurstPlan(seconds=8.0, rise=2.0, pay_rise=1.0)
    gaining = run(Told([]))
    assert gaining.evidence.finding(0.02) is Finding.BETTER and gaining.num_learned == len(text)
    idle = run(Told([], replace(ARM, learning_rate=1e-9)))
    assert idle.is_given_up and idle.num_learned < len(text) // 2 and idle.evidence.finding(0.02) is Finding.OPEN


def test_rehearsal_comes_round_again_but_is_scored_once():
    learner = Told([])
    list(make_burst(learner, min_gain=5.0).run(OWN, OTHERS))
    learned = [name for what, name in learner.events if what == "learned" and name.startswith("c")]
    rehearsed = (len(OWN) - AVERAGED_STEPS) / 2  # none between the first, which are not scored
    assert len(learned) == pytest.approx(rehearsed, abs=1) and set(learned) == {t.request_id for t in OTHERS}
    assert num_elsewhere(learner) == len(OTHERS)
