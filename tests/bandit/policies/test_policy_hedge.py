import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.bandit.policies.memory import HedgeWeights, PolicyMemory
from paceline.config import PolicyConfig
from tests.helpers.views import choose, make_recall
from tests.helpers.world import FIRST, World

NAMES = ["v0", "v1", "v2", "v3", "v4"]


def mean_loss(hedge: HedgeWeights, losses: dict[str, float]) -> float:
    """Loss of the weighted mixture of all versions."""
    return sum(hedge.weights[v] * x for v, x in losses.items()) / sum(hedge.weights[v] for v in losses)


def _losses(seed: int, rounds: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "uniform":
        return rng.random((rounds, len(NAMES)))
    if kind == "biased":
        return (rng.random((rounds, len(NAMES))) < rng.random(len(NAMES))).astype(float)
    lead = np.zeros((rounds, len(NAMES)))
    lead[np.arange(rounds), np.arange(rounds) % len(NAMES)] = 1.0  # whoever led is hit next
    return lead


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), rounds=st.integers(1, 200), kind=st.sampled_from(["uniform", "biased", "chasing"]))
def test_hedge_regret_is_within_its_bound(seed, rounds, kind):
    losses, hedge = _losses(seed, rounds, kind), HedgeWeights()
    hedge.keep(NAMES)
    rate = math.sqrt(8 * math.log(len(NAMES)) / rounds)
    paid = 0.0
    for row in losses.tolist():
        named = dict(zip(NAMES, row, strict=True))
        paid += np.dot(list(hedge.weights.values()), [named[v] for v in hedge.weights])
        hedge.update(named, rate=rate, share=0.0)
    assert paid - losses.sum(axis=0).min() <= math.sqrt(rounds * math.log(len(NAMES)) / 2) + 1e-9


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), segments=st.integers(1, 5), length=st.integers(5, 60))
def test_fixed_share_follows_the_best_sequence_within_its_bound(seed, segments, length):
    rng, rounds, count = np.random.default_rng(seed), segments * length, len(NAMES)
    losses, best = rng.random((rounds, count)), 0.0
    for s in range(segments):
        part = slice(s * length, (s + 1) * length)
        losses[part, s % count] *= 0.2
        best += losses[part].sum(axis=0).min()
    rate, share, hedge = 1.0, 0.05, HedgeWeights()
    hedge.keep(NAMES)
    paid = 0.0
    for row in losses.tolist():
        named = dict(zip(NAMES, row, strict=True))
        paid += np.dot(list(hedge.weights.values()), [named[v] for v in hedge.weights])
        hedge.update(named, rate=rate, share=share)
    switches = segments - 1
    code = math.log(count) + switches * math.log(count / share) + (rounds - 1 - switches) * -math.log(1 - share)
    assert paid - best <= code / rate + rate * rounds / 8 + 1e-9


def test_a_version_without_a_loss_sleeps_and_a_new_one_enters_with_the_mean_weight():
    hedge = HedgeWeights()
    hedge.keep(["a", "b", "c"])
    hedge.update({"a": 0.1, "b": 0.9}, rate=4.0, share=0.0)
    assert hedge.weights["c"] == pytest.approx(1 / 3) and hedge.weights["a"] > hedge.weights["b"]
    hedge.keep(["a", "b", "d"])
    assert set(hedge.weights) == {"a", "b", "d"} and sum(hedge.weights.values()) == pytest.approx(1.0)
    assert hedge.weights["b"] < hedge.weights["d"] < hedge.weights["a"]


@given(st.lists(st.floats(0, 1), min_size=3, max_size=3), st.integers(1, 300))
def test_weights_stay_a_distribution_and_none_dies(row, rounds):
    hedge = HedgeWeights()
    hedge.keep(NAMES[:3])
    for _ in range(rounds):
        hedge.update(dict(zip(NAMES, row, strict=False)), rate=16.0, share=0.02)
    assert sum(hedge.weights.values()) == pytest.approx(1.0)
    assert min(hedge.weights.values()) >= 0.02 / 3 - 1e-12


def _hedge(weights: dict[str, float], **changes):
    memory = PolicyMemory(hedges={"c": HedgeWeights(weights=weights)})
    return choose("hedge", memory=memory, recalls=(make_recall(),), **changes)


def test_the_leader_takes_over_only_by_clear_odds():
    assert _hedge({"v0": 0.7, "v1": 0.3}).action == "recall"
    assert _hedge({"v0": 0.6, "v1": 0.4}).code == "weights"
    assert _hedge({"v0": 0.7, "v1": 0.3}, is_job_running=True).code == "job_running"
    assert _hedge({"v1": 1.0}).code == "no_version"
    assert choose("hedge", jobs=()).action == "hold"


def test_in_a_service_it_gives_every_bucket_the_version_that_serves_it_best_and_never_trains():
    config = PolicyConfig(policy="hedge", epoch_s=5.0)
    w = World(
        config=config, mix=lambda t: {"c": 1.0} if int(t / 100) % 2 == 0 else {"a": 1.0},
        lengths={"a": 2.5, "c": 1.4}, ceilings={"a": 2.5, "c": 2.3},
    )  # fmt: skip
    w.true["v1"], w.live = {"a": 2.0, "c": 2.1}, "v1"
    w.versions.append("v1")
    w.run(95)
    assert w.version_of("c") == "v1"
    w.run(100)
    assert w.version_of("a") == FIRST
    w.run(200)
    assert (w.version_of("a"), w.version_of("c")) == (FIRST, "v1")
    assert {d.action for d in w.decisions} <= {"hold", "recall", "rollback"}
    assert [swap[1:] for swap in w.swaps] == [("a", FIRST)], "what returns has its version already"
