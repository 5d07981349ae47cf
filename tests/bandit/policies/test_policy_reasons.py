"""Every decision explains itself: one sentence that ends with a full stop and contains the numbers it compared."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.bandit.policies.memory import DualEma, HedgeWeights, PolicyMemory
from paceline.bandit.policies.table import POLICIES, Choice, make_policy
from paceline.config import PolicyConfig
from tests.helpers.views import CALIBRATION, FULL, HEAD, make_belief, make_job, make_recall, make_view
from tests.helpers.world import World

NUMBER = re.compile(r"-?\d+(?:\.\d+)?%?")
SECONDS = st.floats(-20, 200)


def assert_explained(choice: Choice) -> None:
    sentence = choice.reason
    assert sentence.endswith(".") and not sentence.endswith("..") and "{" not in sentence
    assert ". " not in sentence and len(sentence) <= 300
    assert choice.numbers, sentence
    said = []
    for text in NUMBER.findall(sentence):
        value, digits = text.rstrip("%"), text.rstrip("%").partition(".")[2]
        scale = 0.01 if text.endswith("%") else 1.0
        said.append((float(value) * scale, 0.501 * scale * 10.0 ** -len(digits)))
    for name, value in choice.numbers.items():
        assert any(abs(value - x) <= error + 1e-9 for x, error in said), f"{name}={value} is not in {sentence!r}"


@st.composite
def views(draw):
    buckets = draw(st.lists(st.sampled_from(["c", "d", "e"]), unique=True, max_size=3))
    beliefs, jobs = {}, []
    for b in buckets:
        fresh = draw(st.integers(0, 20_000))
        beliefs[b] = make_belief(
            fresh, draw(st.integers(1, 9000)), bucket=b, is_active=draw(st.booleans()), length=draw(st.floats(1, 4))
        )
        if beliefs[b].is_active and fresh >= 768:
            arms = draw(st.lists(st.sampled_from([CALIBRATION, HEAD, FULL]), min_size=1, max_size=3))
            jobs += [
                make_job(a, draw(SECONDS), draw(st.floats(0.1, 90)), bucket=b, rate=draw(st.floats(-1, 1)))
                for a in arms
            ]
    recalls = [
        make_recall(
            draw(st.floats(-1, 1)), draw(st.floats(0, 0.3)), draw(SECONDS), version=v, bucket=b, is_floor=v == "v0"
        )
        for b in buckets
        if beliefs[b].is_active
        for v in draw(st.lists(st.sampled_from(["v0", "v2", "v3"]), unique=True))
    ]
    memory = PolicyMemory(
        ema=DualEma(
            fast=draw(st.floats(1, 4)), slow=draw(st.floats(1, 4)), num_epochs=9, is_collecting=draw(st.booleans()),
            collected={b: draw(st.integers(0, 5000)) for b in buckets},
        ),
        staleness_s={b: draw(st.floats(0, 99)) for b in buckets},
        hedges={b: HedgeWeights(weights={v: draw(st.floats(0.01, 1)) for v in ["v0", "v1", "v2"]}) for b in buckets[:2]},
    )  # fmt: skip
    return make_view(
        beliefs=beliefs, jobs=tuple(jobs), recalls=tuple(recalls), memory=memory, balance_s=draw(SECONDS),
        horizon_s=draw(st.floats(0, 900)), since_job_s=draw(st.floats(0, 300)),
        is_job_running=draw(st.booleans()), config=PolicyConfig(thompson_draws=64), versions=dict.fromkeys(buckets, "v1"),
    )  # fmt: skip


@settings(max_examples=150)
@given(view=views(), name=st.sampled_from(sorted(POLICIES)), seed=st.integers(0, 5))
def test_every_choice_on_random_views_is_explained_and_consistent(view, name, seed):
    choice = make_policy(name).choose(view, np.random.default_rng(seed))
    assert_explained(choice)
    assert choice.action in ("hold", "train", "recall") and 0 < choice.propensity <= 1
    assert (choice.job is not None) == (choice.action == "train")
    assert (choice.recall is not None) == (choice.action == "recall")
    if choice.action != "hold":
        assert not view.is_job_running and any(b.is_active for b in view.beliefs.values())
    if choice.job is not None:
        assert choice.job in view.jobs and choice.bucket == choice.job.bucket
    if choice.recall is not None:
        assert choice.recall in view.recalls
    again = make_policy(name).choose(view, np.random.default_rng(seed))
    assert again == choice


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_logged_decision_of_a_service_is_explained(policy):
    w = World(
        config=PolicyConfig(policy=policy, epoch_s=5.0), mix=lambda t: {"a": 0.5, "b": 0.5} if t % 120 < 50 else {"c": 1.0},
        lengths={"a": 2.5, "b": 2.8, "c": 1.4}, ceilings={"a": 2.5, "b": 2.8, "c": 2.3}, round_s=0.05, forget=0.15,
    )  # fmt: skip
    w.run(240)
    assert w.decisions
    for d in w.decisions:
        assert d.reason.endswith(".") and d.context["compared"]
        assert_explained(Choice(action="hold", bucket="", code="", reason=d.reason, numbers=d.context["compared"]))
