"""The canary's state machine: which requests count, what ends it, what a restart keeps."""

import math
import random

import msgspec
import pytest

from paceline.config import RolloutConfig
from paceline.contracts import DesiredState, ReplicaReport, is_canary
from paceline.errors import ConfigError
from paceline.infra.controller.rollout import (
    Canary,
    Outcome,
    RolloutState,
    Verdict,
    close_quiet,
    fold,
    judge,
    take_reports,
)
from paceline.infra.controller.session import rollout_view
from paceline.infra.controller.snapshot import CanaryRollout, IdleRollout
from paceline.records import build
from tests.helpers.feedback import trial_batch as batch
from tests.helpers.feedback import trial_row as row

CONFIG = RolloutConfig(canary_percent=50, quiet_s=1.0, max_requests=60, max_s=500.0, freeze_s=100.0)
SPEED = {"v1": 300.0, "v2": 300.0}
DESIRED = DesiredState(
    gen=2, version="v1", first_version="v1", holdback_percent=0, canary_version="v2", canary_percent=50
)


def begin(config: RolloutConfig = CONFIG, *, now: float = 0.0, bucket: str = "math") -> RolloutState:
    state = RolloutState()
    state.begin("v2", "v1", config, now=now, decision_id=7, bucket=bucket, arm="full")
    return state


def version_of(canary: Canary, request_id: str) -> str:
    return canary.version if is_canary(request_id, canary.version, canary.percent) else canary.incumbent


def ids(canary: Canary, version: str, num: int) -> list[str]:
    return [i for i in (f"r{k}" for k in range(100 * num)) if version_of(canary, i) == version][:num]


def serve(
    state: RolloutState, speed: dict[str, float], *, config: RolloutConfig = CONFIG, most: int = 2000, seed: int = 0,
    plain: tuple[str, ...] = (), fruitless: tuple[str, ...] = (), tokens: dict[str, int] | None = None,
):  # fmt: skip
    """Requests of three rounds at `speed` tokens per second until there is a verdict; (verdict, requests).

    Versions in `plain` have their requests, but never draft: their engines decode plainly. Those in `fruitless` draft in
    every round, and none of their nodes is worth verifying. A round emits the version's `tokens`, or 3.
    """
    canary, rng = state.canary, random.Random(seed)
    assert canary is not None
    for k in range(most):
        name, now = f"q{seed}-{k}", canary.since + 0.1 * k
        version = version_of(canary, name)
        num_tokens = (tokens or {}).get(version, 3)
        ms = num_tokens / speed[version] * 1e3 * math.exp(rng.gauss(0.0, 0.2))
        spent = {"drafts": 0 if version in (*plain, *fruitless) else 4, "draft_ms": 0.0 if version in plain else 1.0}
        fold(
            canary,
            batch(*(row(name, version, i, ms=ms, ts=now, tokens=num_tokens, **spent) for i in (1, 2, 3))).cells,
            now,
        )
        close_quiet(canary, config, now)
        verdict = judge(canary, config, now)
        if verdict is not None:
            return verdict, k + 1
    return None, most


def report(replica: str = "a", gen: int = 2, version: str = "v1", **fields) -> ReplicaReport:
    values = {"failed_gen": None, "failed_reason": "", "canary_version": "v2", **fields}
    return ReplicaReport(replica_id=replica, gen=gen, version=version, slots={}, swap_pause_ms=[], ts=1.0, **values)


# ---- which requests count -----------------------------------------------------------------------------------------
def test_a_request_enters_once_when_it_has_been_quiet():
    canary = begin().canary
    own, other = ids(canary, "v2", 1)[0], ids(canary, "v1", 1)[0]
    fold(canary, batch(row(own, "v2", 1), row(other, "v1", 1), row(own, "v2", 2)).cells, now=1.0)
    fold(canary, batch(row(own, "", 3)).cells, now=1.5)  # its drafter failed meanwhile: it still counts, at plain speed
    assert close_quiet(canary, CONFIG, now=2.0) == 1  # the other one
    assert canary.test.num_requests == (1, 0)
    assert close_quiet(canary, CONFIG, now=2.5) == 1
    assert canary.test.num_requests == (1, 1)
    fold(canary, batch(row(own, "v2", 4)).cells, now=3.0)  # a late row of a request that was counted
    assert not canary.open
    (stratum,) = canary.test.strata
    assert stratum == "math | batch 1 | greedy"
    assert canary.test.strata[stratum].tokens == [3.0, 9.0]


def test_requests_that_were_not_drawn_for_the_trial_do_not_count():
    canary = begin(now=10.0).canary
    own, other, third = *ids(canary, "v2", 2), ids(canary, "v1", 1)[0]
    fold(canary, batch(row(own, "v2", 1, ts=9.0)).cells, now=11.0)  # began before the trial
    fold(canary, batch(row(other, "v2", 5, ts=12.0)).cells, now=12.0)  # its beginning was not seen
    served_otherwise = batch(row(own, "v1", 1, ts=12.0))  # by another version than drawn
    fold(canary, served_otherwise.cells, now=12.0)
    for group in ("static", "plain"):
        fold(canary, batch(row(third, "v1", 1, group=group, ts=12.0)).cells, now=12.0)
    assert not canary.open and canary.num_excluded == 1


# ---- what ends a canary -------------------------------------------------------------------------------------------
def test_a_slow_canary_is_rolled_back_and_its_bucket_frozen():
    state = begin()
    verdict, num_requests = serve(state, {"v1": 300.0, "v2": 150.0})
    assert verdict.outcome == Outcome.ROLLED_BACK and num_requests < 60
    assert "is slower than v1" in verdict.reason and "% tokens per second" in verdict.reason
    canary = state.canary
    state.end(canary, verdict, CONFIG, now=50.0)
    assert (canary.version, state.canary, state.last["outcome"]) == ("v2", None, "rolled_back")
    assert state.frozen_buckets(149.0) == ["math"] and state.frozen_buckets(151.0) == []


def test_a_fast_canary_is_promoted_and_nothing_is_frozen():
    state = begin()
    verdict, num_requests = serve(state, {"v1": 300.0, "v2": 400.0})
    assert verdict.outcome == Outcome.PROMOTED and num_requests < 150
    state.end(state.canary, verdict, CONFIG, now=50.0)
    assert state.frozen == {}


@pytest.mark.parametrize(("ratio", "outcome"), [(0.99, Outcome.PROMOTED), (0.90, Outcome.RETIRED)])
def test_an_undecided_canary_ends_at_its_size_by_its_estimate(ratio, outcome):
    """Alphas so small that evidence never decides."""
    config = RolloutConfig(
        canary_percent=50, quiet_s=1.0, max_requests=60, max_s=500.0, alpha=1e-12, alpha_promote=1e-12
    )  # fmt: skip
    state = begin(config)
    verdict, _ = serve(state, {"v1": 300.0, "v2": 300.0 * ratio}, config=config, seed=3)
    assert verdict.outcome == outcome and "no verdict after" in verdict.reason
    assert sum(state.canary.test.num_requests) >= 60
    state.end(state.canary, verdict, config, now=50.0)
    assert state.frozen == {}


def test_a_canary_without_traffic_is_retired_when_its_time_is_over():
    state = begin()
    assert judge(state.canary, CONFIG, now=499.0) is None
    verdict = judge(state.canary, CONFIG, now=500.0)
    assert verdict.outcome == Outcome.RETIRED and "0 requests of it" in verdict.reason


def test_a_canary_that_never_drafted_is_not_promoted_and_ends_at_its_time_without_a_penalty():
    """Its requests, decoded plainly, are not slower than the incumbent's, which were decoded plainly too."""
    state = begin()
    verdict, num_requests = serve(state, SPEED, plain=("v1", "v2"), most=6000)
    assert state.canary.test.evidence_fast_enough() > math.log(1 / CONFIG.alpha_promote), "it would have been promoted"
    assert state.canary.test.num_requests[1] > CONFIG.max_requests and num_requests >= 5000, "its time was not used"
    assert verdict.outcome == Outcome.RETIRED
    assert "it drafted in 0 rounds, and a promotion needs 16" in verdict.reason
    state.end(state.canary, verdict, CONFIG, now=500.0)
    assert state.frozen == {} and state.last["reason"] == verdict.reason


def test_a_canary_waits_for_the_rounds_that_it_drafts():
    """It drafts nothing in its first 600 requests, and in all of them from then on."""
    state = begin()
    assert serve(state, SPEED, plain=("v2",), most=600)[0] is None
    verdict, num_requests = serve(state, SPEED, seed=1)
    assert verdict.outcome == Outcome.PROMOTED and state.canary.num_drafted_rounds >= CONFIG.min_drafted_rounds
    assert 40 < num_requests <= 200, "the evidence of its plain requests is not what promotes it"


def test_a_canary_that_is_slower_without_having_drafted_is_retired_and_not_barred():
    state = begin()
    verdict, num_requests = serve(state, {"v1": 300.0, "v2": 150.0}, plain=("v2",))
    assert verdict.outcome == Outcome.RETIRED and num_requests < 60
    assert "it is slower than v1, but it drafted in none of its requests" in verdict.reason


def test_a_plain_canary_beside_an_incumbent_that_drafts_is_retired_for_its_tokens_per_round_not_its_speed():
    state = begin()
    verdict, _ = serve(state, {"v1": 300.0, "v2": 400.0}, plain=("v2",), tokens={"v2": 1})
    assert verdict.outcome == Outcome.RETIRED and state.canary.test.ratio() > 1
    assert "it emits fewer tokens per round than v1, but it drafted in none" in verdict.reason


def test_errors_roll_a_canary_back_that_never_drafted_though_slowness_weighs_more():
    config = RolloutConfig(canary_percent=50, quiet_s=1.0, alpha=1e-12)
    state = begin(config)
    assert serve(state, {"v1": 300.0, "v2": 150.0}, config=config, plain=("v2",), most=60)[0] is None
    canary = state.canary
    take_reports(canary, [report()], DESIRED)
    take_reports(canary, [report(errors={"v2": 12})], DESIRED)
    against, config = canary.test.evidence_against(), RolloutConfig(canary_percent=50)
    assert against["speed"] > against["errors"] > math.log(1 / config.alpha / 0.1)
    verdict = judge(canary, config, now=5.0)
    assert verdict.outcome == Outcome.ROLLED_BACK and "it fails more often than v1: " in verdict.reason
    canary.test.errors = [0, 2]  # too few to say that it fails
    assert judge(canary, config, now=5.0).outcome == Outcome.RETIRED


def test_the_evidence_of_plain_requests_ends_with_the_first_request_that_is_drafted_in():
    """Slow while it decoded plainly, and as fast as the incumbent once it drafts: nothing is held against it."""
    state = begin()
    patient = RolloutConfig(canary_percent=50, quiet_s=1.0, max_requests=400, max_s=500.0, alpha=1e-12)
    assert serve(state, {"v1": 300.0, "v2": 150.0}, config=patient, plain=("v2",), most=60)[0] is None
    assert state.canary.test.evidence_worse() > math.log(1 / CONFIG.alpha), "it would have been rolled back"
    take_reports(state.canary, [report()], DESIRED)
    take_reports(state.canary, [report(errors={"v1": 1})], DESIRED)
    own = ids(state.canary, "v2", 1)[0]
    fold(state.canary, batch(row(own, "v2", ms=20.0, ts=7.0)).cells, now=7.0)
    close_quiet(state.canary, CONFIG, now=20.0)
    assert state.canary.num_drafted_rounds == 1 and state.canary.test.num_requests == (0, 0)
    assert state.canary.test.evidence_against() | {"errors": 0.0} == dict.fromkeys(
        ("speed", "tokens_per_round", "errors"), 0.0
    )
    assert state.canary.test.errors == [1, 0], "a failed request is one, drafted or not"
    verdict, _ = serve(state, SPEED, seed=1)
    assert verdict.outcome == Outcome.PROMOTED


def test_a_canary_whose_drafts_are_paid_for_and_never_verified_is_rolled_back():
    """The time of its passes is what slows its requests down."""
    state = begin()
    verdict, _ = serve(state, {"v1": 300.0, "v2": 150.0}, fruitless=("v2",))
    assert verdict.outcome == Outcome.ROLLED_BACK and "is slower than v1" in verdict.reason
    assert state.canary.num_drafted_rounds == 3 * state.canary.test.num_requests[1] > 0


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (
            [report(gen=1, canary_version="", failed_gen=2, failed_reason="must be finite")],
            "refused it: must be finite",
        ),
        ([report(), report("b", failures={"v2": "non-finite scores"})], "replica b switched it off: non-finite"),
    ],
)
def test_a_replica_that_cannot_load_or_run_it_ends_it_at_once(made, reason):
    verdict = take_reports(begin().canary, made, DESIRED)
    assert verdict.outcome == Outcome.ROLLED_BACK and reason in verdict.reason


def test_other_failures_do_not_touch_the_canary():
    canary = begin().canary
    others = [
        report(failures={"v1": "NaN"}),
        report("b", gen=1, version="v0", canary_version="", failed_gen=2, failed_reason="the live version"),
        report("c", gen=1, canary_version="", failures={"v2": "of an earlier trial"}),
        report("d", failed_gen=2, failed_reason="failed while serving: NaN", failures={"v1": "NaN"}),
    ]
    assert take_reports(canary, others, DESIRED) is None


def test_engines_that_fail_under_the_canary_end_it_but_one_alone_does_not():
    canary = begin().canary
    assert take_reports(canary, [report(errors={"v2": 5}), report("b")], DESIRED) is None, (
        "counts from before the trial"
    )
    assert take_reports(canary, [report(errors={"v2": 6}), report("b")], DESIRED) is None
    verdict = take_reports(canary, [report(errors={"v2": 6}), report("b", errors={"v1": 1, "v2": 1})], DESIRED)
    assert verdict.outcome == Outcome.ROLLED_BACK and "2 replicas (a, b)" in verdict.reason
    assert canary.test.errors == [1, 2]


def test_failed_requests_are_evidence_like_slow_ones():
    config = RolloutConfig(canary_percent=10)
    canary = begin(config).canary
    take_reports(canary, [report()], DESIRED)
    take_reports(canary, [report(errors={"v2": 5})], DESIRED)
    verdict = judge(canary, config, now=1.0)
    assert verdict.outcome == Outcome.ROLLED_BACK and "fails more often" in verdict.reason


# ---- the rest -----------------------------------------------------------------------------------------------------
def test_a_restart_between_any_two_passes_changes_nothing():
    one, other = begin(), begin()
    a, b = one.canary, other.canary
    for k in range(40):
        name = f"r{k}"
        version = version_of(a, name)
        for canary in (a, b):
            fold(canary, batch(row(name, version, 1, ms=10.0 + k % 7)).cells, now=0.5 * k)
            close_quiet(canary, CONFIG, now=0.5 * k)
        other = msgspec.msgpack.decode(msgspec.msgpack.encode(other), type=RolloutState)
        b = other.canary
    assert other == one and sum(a.test.num_requests) > 30


def test_one_canary_at_a_time():
    with pytest.raises(AssertionError, match="on trial"):
        begin().begin("v3", "v1", CONFIG, now=0.0, decision_id=1, bucket="", arm="")


def test_the_view_tells_both_sides_of_the_evidence():
    state = begin()
    serve(state, SPEED, most=40)
    view = rollout_view(state, CONFIG, now=5.0)
    assert isinstance(view, CanaryRollout)
    assert (view.version, view.incumbent, view.share_percent) == ("v2", "v1", 50)
    assert view.num_requests == sum(s.num_incumbent + s.num_canary for s in view.strata.values())
    state.end(state.canary, Verdict(outcome=Outcome.ROLLED_BACK, reason="slow"), CONFIG, now=5.0)
    idle = rollout_view(state, CONFIG, now=6.0)
    assert isinstance(idle, IdleRollout) and idle.reason == "slow"
    assert idle.frozen_until == {"math": 105.0} and idle.last.outcome == "rolled_back"
    assert rollout_view(state, CONFIG, now=200.0).frozen_until == {}


@pytest.mark.parametrize(
    "values",
    [
        {"canary_percent": 91},
        {"margin": 0.0},
        {"alpha": 1.0},
        {"min_requests": 0},
        {"min_drafted_rounds": 0},
        {"max_s": 0.0},
        {"pool_bytes": -1},
    ],
)
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(ConfigError, match=f"rollout.{next(iter(values))}"):
        build(RolloutConfig, values)
