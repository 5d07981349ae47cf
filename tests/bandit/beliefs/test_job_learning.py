"""Delayed, censored and outdated results."""

import math

import msgspec
import pytest

from paceline.bandit.beliefs.arms import default_arms, sized
from paceline.bandit.beliefs.evidence import EvidenceModel
from paceline.bandit.beliefs.gain_model import GainModel, learned_share
from paceline.bandit.beliefs.job_cost import MAX_LONGER, CostModel, prior_training_s
from paceline.bandit.controller.epoch import bucket_beliefs, learner_of
from paceline.bandit.policies.pricing import MIN_HEADROOM, UNTRIED_HEADROOM, headroom, price_jobs
from paceline.config import PolicyConfig
from paceline.contracts import Decision, TrainResult
from tests.helpers.views import make_belief
from tests.helpers.world import FIRST, World

FULL = default_arms()[2]


def _world(**changes) -> World:
    return World(
        config=PolicyConfig(epoch_s=5.0, **changes), mix=lambda t: {"a": 1.0} if t < 30 else {"c": 1.0},
        lengths={"a": 2.5, "c": 1.4}, ceilings={"a": 2.5, "c": 2.3}, round_s=0.05, batch_size=6,
    )  # fmt: skip


def _ordered(w: World) -> Decision:
    for _ in range(300):
        for d in w.step():
            if d.action == "train":
                w.job = None
                return d
    raise AssertionError("no job was ordered")


def _end(w: World, d: Decision, result: TrainResult):
    return w.controller.job_finished(result, decision_id=d.decision_id, now=w.clock.now())


def _predicted(w: World) -> tuple[float, float]:
    state = w.controller._state
    gain = state.gains.predict("c", FULL, 0.8, 0.5)[0]
    return gain, state.costs.predict(sized(FULL, 4000), busy=1.0, num_replicas=1).training_s


def test_a_stopped_job_teaches_that_it_costs_at_least_that_and_nothing_of_its_gain():
    w = _world()
    d = _ordered(w)
    gain, cost = _predicted(w)
    stopped = TrainResult(job_id="j", status="stopped", version=None, reason="limit", train_s=60.0, shadow_s=0.0)
    outcome = _end(w, d, stopped)
    after = _predicted(w)
    assert outcome.publish is None and outcome.decision.outcome == "stopped"
    assert after[0] == gain and after[1] > 1.5 * cost
    assert d.bucket not in w.controller._state.required_rows  # nobody knows that more rows are needed


@pytest.mark.parametrize("train_s, factor", [(60.0, 1.5), (0.1, None)])
def test_a_killed_job_teaches_its_cost_only_where_it_was_dearer_than_expected(train_s, factor):
    w = _world()
    d = _ordered(w)
    cost = _predicted(w)[1]
    lost = TrainResult(job_id="j", status="failed", version=None, reason="killed", train_s=train_s, shadow_s=0.0)
    _end(w, d, lost)
    assert _predicted(w)[1] > factor * cost if factor else w.controller._state.costs.num_measured == 0


def test_a_short_stop_does_not_make_jobs_look_cheap():
    model = CostModel()
    arm = sized(FULL, 4000)
    before = model.predict(arm, busy=1.0, num_replicas=1)
    model.update_cut_short(arm, 0.1)
    assert model.predict(arm, busy=1.0, num_replicas=1) == before


def test_a_job_cut_by_its_limit_is_taken_to_have_learned_from_fewer_rows():
    teach = {}
    for name, limit in (("whole", 1000.0), ("cut", None)):
        w = _world()
        d = _ordered(w)
        state = w.controller._state
        result = msgspec.structs.replace(w.train(d), train_s=0.4 * d.context["cost"]["training_s"])
        result = msgspec.structs.replace(
            result, candidate=msgspec.structs.replace(result.candidate, gain_mean=0.15, gain_lower=0.1)
        )
        facts = {**d.context, "time_limit_s": limit or result.train_s}
        state.actions[d.decision_id] = msgspec.structs.replace(d, context=facts)
        before = _predicted(w)
        _end(w, d, result)
        teach[name] = (before, _predicted(w))
    assert teach["whole"][0] == teach["cut"][0]
    assert teach["cut"][1][0] > teach["whole"][1][0]  # the same gain from fewer rows is a better sign
    assert teach["whole"][1][1] < teach["whole"][0][1] and teach["cut"][1][1] == teach["cut"][0][1]


def test_a_refused_job_teaches_the_gain_that_was_measured_not_zero():
    means = {}
    for seen in (0.0, 0.04):
        w = _world()
        d = _ordered(w)
        result = w.train(d)
        candidate = msgspec.structs.replace(result.candidate, gain_mean=seen, gain_lower=-0.05)
        _end(w, d, msgspec.structs.replace(result, status="rejected", version=None, candidate=candidate))
        means[seen] = _predicted(w)[0]
        assert w.controller._state.required_rows["c"] >= 2 * w.controller.arm_of(d).num_rows
    assert means[0.0] < means[0.04]


@pytest.mark.parametrize("later_s", [0.0, 5.0])
def test_scores_of_a_text_that_changed_while_the_job_ran_are_not_believed(later_s):
    w = _world()
    d = _ordered(w)
    state = w.controller._state
    gain, _ = _predicted(w)
    # an alarm says when its epoch began: behind the order, that is the moment of the order
    state.buckets["c"].reset(state.job.started + later_s, 0)
    state.table.reset_bucket("c")
    result = w.train(d)
    outcome = _end(w, d, result)
    assert _predicted(w)[0] == gain
    assert state.table.estimate("c", result.candidate.version) is None
    assert "c" not in state.learned.get(result.version, {"c": 0}) and outcome.decision.realised_cost_s > 0


def test_a_learner_that_one_request_was_scored_of_is_priced_like_one_without_scores():
    """One request tells a gain, and nothing of how sure it is."""
    w = _world()
    d = _ordered(w)
    result = w.train(d)
    score = msgspec.structs.replace(result.candidate, num_requests=1, gain_lower=-math.inf)
    _end(w, d, msgspec.structs.replace(result, status="learning", version=None, candidate=score, num_rows=2000))
    belief = bucket_beliefs(w.controller._state, w.controller._config, w.controller._state.context)["c"]
    assert belief.learner_rows == 2000 and belief.unsure is None
    belief = msgspec.structs.replace(belief, usable_rows=4000, fresh_rows=4000, required_rows=2000)
    jobs = price_jobs(
        {"c": belief}, [sized(FULL, 2000)], gains=GainModel(), costs=CostModel(), evidence=EvidenceModel(), hysteresis=1.25,
        best_length=2.5, horizon_s=600.0, min_rows=2000, num_replicas=1,
    )  # fmt: skip
    assert jobs and all(math.isfinite(j.saving_s) and j.saving_s > 0 for j in jobs)


def test_a_class_that_refused_is_hoped_for_no_more_until_its_text_changes():
    w = _world()
    d = _ordered(w)
    state, config = w.controller._state, w.controller._config
    result = w.train(d)
    _end(w, d, msgspec.structs.replace(result, status="rejected", version=None))
    belief = bucket_beliefs(state, config, state.context)["c"]
    assert belief.is_tried and belief.learner_rows == 0 and belief.learned_rows == belief.first_rows
    far = msgspec.structs.replace(belief, length=3.0)
    assert headroom(far, 3.0) == pytest.approx(MIN_HEADROOM * 3.0)
    assert headroom(msgspec.structs.replace(far, is_tried=False), 3.0) == pytest.approx(UNTRIED_HEADROOM * 3.0)
    state.buckets["c"].reset(w.clock.now(), state.rows_at_job["c"])
    assert not bucket_beliefs(state, config, state.context)["c"].is_tried


def test_a_class_that_refused_waits_for_no_more_rows_than_are_kept():
    """Four doublings of what a job needs would lock out a class whose text goes before so much has come."""
    w = _world()
    _ordered(w)
    state = w.controller._state
    state.required_rows["c"] = 1 << 20
    belief = bucket_beliefs(state, w.controller._config, state.context)["c"]
    assert belief.required_rows == max(belief.usable_rows, w.controller._config.min_rows) < 1 << 20


def test_a_controller_that_was_away_while_a_job_ended_believes_in_no_job_of_minutes():
    costs = CostModel()
    costs.update_duration(3600.0, 10.0)
    assert costs.duration.value() == pytest.approx((0.8 + MAX_LONGER) / 1.8)
    w = _world()
    d = _ordered(w)
    stopped = TrainResult(job_id="j", status="stopped", version=None, reason="lost", train_s=1.0, shadow_s=0.0)
    w.clock.advance(30.0)
    _end(w, d, stopped)
    assert w.controller._state.costs.duration.value() == 1.0, "that is how long it took to find out"


@pytest.mark.parametrize("policy", ["always", "payoff", "cara"])
def test_a_version_trained_from_a_base_that_its_bucket_lost_serves_only_if_it_beats_the_one_that_took_over(policy):
    for better in (True, False):
        w = _world(policy=policy)
        w.mix = lambda t: {"c": 1.0}
        d = _ordered(w)
        result = w.train(d)
        if result.version is None:
            result = msgspec.structs.replace(result, status="accepted", version="vx")
        # while the job ran an operator let another version serve; it is known on 'c'
        w.true["other"] = {"a": 2.5, "c": 1.3 if better else 3.5}
        w.versions.append("other")
        w.controller.manual("rollback", "other", w.clock.now(), "Operator.", [FIRST])
        w.live = "other"
        for _ in range(12):
            w.step()
        outcome = _end(w, d, result)
        assert d.context["base_version"] == FIRST
        assert (outcome.publish is not None) == better, outcome.reason


def _burst(result: TrainResult, status: str, num_rows: int, before: int = 0) -> TrainResult:
    return msgspec.structs.replace(
        result, status=status, num_rows=num_rows, num_rows_before=before,
        version=(result.version or "vx") if status == "accepted" else None,
    )  # fmt: skip


def test_a_burst_that_is_not_sure_keeps_its_rows_and_frees_what_it_did_not_read():
    w = _world(policy="always")
    d = _ordered(w)
    state, ordered = w.controller._state, w.controller.arm_of(d).num_rows
    state.required_rows[d.bucket] = 50_000
    read = ordered // 4
    _end(w, d, _burst(w.train(d), "learning", read))
    belief = bucket_beliefs(state, w.config, w.context())[d.bucket]
    assert belief.learner_rows == read and belief.fresh_rows >= ordered - read
    assert belief.required_rows == w.config.min_rows, "it may go on at once"
    assert learner_of(state, d.bucket, "other") == (0, ""), "a learner of another base begins anew"
    w.controller._state = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=type(state))
    assert learner_of(w.controller._state, d.bucket, FIRST) == (read, w.controller.arm_of(d).parameters)


def test_the_price_of_a_burst_counts_what_the_learner_has_learned_before():
    beliefs = {n: make_belief(learner_rows=n) for n in (0, 3000)}
    priced = {}
    for n, belief in beliefs.items():
        (job,) = price_jobs(
            {"c": belief}, [sized(FULL, 2000)], gains=GainModel(), costs=CostModel(), evidence=EvidenceModel(), hysteresis=1.25,
            best_length=2.5, horizon_s=300.0, min_rows=2000, num_replicas=1,
        )  # fmt: skip
        priced[n] = job
    assert priced[3000].length_after > priced[0].length_after and priced[3000].cost == priced[0].cost
    assert priced[3000].share == pytest.approx(learned_share(5000))


def test_what_a_burst_saves_begins_when_it_has_ended_however_long_its_worker_waits():
    costs, left = CostModel(), []
    for _ in range(3):
        (job,) = price_jobs(
            {"c": make_belief()}, [sized(FULL, 2000)], gains=GainModel(), costs=costs, evidence=EvidenceModel(), hysteresis=1.25,
            best_length=2.5, horizon_s=60.0, min_rows=2000, num_replicas=1,
        )  # fmt: skip
        assert job.left_s == max(60.0 - job.cost.wait_s, 0.0)
        assert job.saving_s == pytest.approx(job.left_s * job.rate)
        left.append(job.left_s)
        costs.update_duration(40.0, 4.0)  # a busy core leaves a niced worker a tenth
    assert left[0] > left[1] + 10.0 > left[2] + 10.0


def test_a_learner_goes_on_with_what_it_has_learned_so_far():
    """A burst on other parameters would begin anew and throw the seconds before it away."""
    head = msgspec.structs.replace(FULL, name="head", parameters="head")
    for parameters, offered in (("", {"full", "head"}), ("full", {"full"}), ("head", {"head"})):
        belief = make_belief(learner_rows=700 if parameters else 0, learner_parameters=parameters)
        found = price_jobs(
            {"c": belief}, [FULL, head], gains=GainModel(), costs=CostModel(), evidence=EvidenceModel(), hysteresis=1.25,
            best_length=2.5, horizon_s=300.0, min_rows=1000, num_replicas=1,
        )  # fmt: skip
        assert {job.arm.parameters for job in found} == offered


@pytest.mark.parametrize("status", ["accepted", "rejected"])
def test_a_sure_burst_ends_what_its_learner_had(status):
    w = _world(policy="always")
    d = _ordered(w)
    state, ordered = w.controller._state, w.controller.arm_of(d).num_rows
    state.learners[d.bucket] = (FIRST, 700, "full")
    outcome = _end(w, d, _burst(w.train(d), status, ordered // 2, 700))
    assert learner_of(state, d.bucket, FIRST) == (0, "")
    if status == "accepted":
        assert state.learned[outcome.decision.version][d.bucket] == 700 + ordered // 2
        assert learner_of(state, d.bucket, outcome.decision.version) == (0, w.controller.arm_of(d).parameters)
    else:
        assert state.required_rows[d.bucket] >= 2 * ordered


def test_a_burst_teaches_the_gain_of_all_rows_and_the_cost_of_its_own():
    taught = {}
    for before in (0, 6000):
        w = _world()
        d = _ordered(w)
        ordered = w.controller.arm_of(d).num_rows
        result = msgspec.structs.replace(w.train(d), train_s=2.0 * prior_training_s(w.controller.arm_of(d)))
        candidate = msgspec.structs.replace(result.candidate, gain_mean=0.2, gain_lower=0.15)
        _end(w, d, _burst(msgspec.structs.replace(result, candidate=candidate), "learning", ordered, before))
        taught[before] = _predicted(w)
    assert taught[6000][0] < taught[0][0], "the same gain from more rows is a worse sign"
    assert taught[6000][1] == taught[0][1]
