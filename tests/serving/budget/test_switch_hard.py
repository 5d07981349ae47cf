"""The switch keeps its promises in a rough world: heavy-tailed times, drift, forecasts that are wrong, churn, rates that flip."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from paceline.config import TreeConfig
from paceline.serving.budget.controller import BudgetController
from paceline.serving.budget.cost_model import CostModel
from paceline.serving.budget.stats import DraftKey, RoundObservation

CONFIG = TreeConfig()
PLAIN_S = 8e-3


@dataclass
class Rough:
    """Drafting takes `time` plain rounds and emits on average `ratio` x `time` tokens; a part costs half of that at least.

    Tokens come in runs: every answer has its own mean and bursts. What is scored are class means, not luck.
    """

    ratio: Callable[[DraftKey, int], float]
    """Of a class in a round: tokens per second of drafting over those of plain decoding."""
    time: float = 1.6
    seed: int = 0
    drafts: dict[DraftKey, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Rounds in which a class drafted."""
    lost: list[float] = field(default_factory=list)
    """Seconds by round over what the better mode takes for the same tokens, less one."""

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        self.log_speed, self.answers = 0.0, {}
        prior = lambda rows: 2e-3 * (1 + 0.02 * rows) * np.exp(self.rng.normal(0, 0.2))  # noqa: E731
        self.switch = BudgetController(CONFIG, CostModel(prior))
        wrong = float(np.exp(self.rng.normal(0, 0.3)))
        self.switch.costs.draft.calibrate(lambda n: wrong * 2e-3 * (self.time - 1) * (0.5 + n / 32), max_size=16)

    def answer(self, slot: int, key: DraftKey) -> dict:
        """The request in a slot of the batch; another begins when it ends."""
        found = self.answers.get(slot)
        if found is None or found["left"] <= 0 or found["key"] != key:
            shape = 4.0
            found = {
                "key": key,
                "left": self.rng.geometric(1 / 60),
                "luck": self.rng.gamma(shape, 1 / shape),
                "backlog": 1,
            }
            found["burst"] = False
            self.answers[slot] = found
        return found

    def round(self, at: int, keys: list[DraftKey]) -> int:
        """Returns the requests that draft."""
        rng, size = self.rng, len(keys)
        answers = [self.answer(i, key) for i, key in enumerate(keys)]
        wants = self.switch.wants_draft(keys, 200 * size, [a["backlog"] for a in answers], [a["left"] for a in answers])
        n = sum(wants)
        drafted = (self.time - 1) * (0.5 * (n > 0) + 0.5 * n / size)
        plain_s = PLAIN_S * (1 + 0.03 * size)
        behind = sum(a["backlog"] for a, w in zip(answers, wants, strict=True) if w and a["backlog"] > 16)
        accepted, means = [], []
        for key, a, w in zip(keys, answers, wants, strict=True):
            if rng.random() < 0.1:
                a["burst"] = rng.random() < 0.4
            mean = max(self.ratio(key, at) * self.time - 1, 0.0)
            drawn = int(rng.poisson(mean * a["luck"] * (1.75 if a["burst"] else 0.5)))
            accepted.append(drawn if w else 0)
            means.append(mean if w else 0.0)
            a["left"] -= 1  # rounds: else slow answers would count more than their share
            a["backlog"] = 1 if w else a["backlog"] + 1
            if w:
                self.drafts[key].append(at)
        self.log_speed = 0.999 * self.log_speed + rng.normal(0, 0.01)
        now = np.exp(self.log_speed + 0.08 * rng.standard_t(2.5))
        verify_s, draft_s = plain_s * (0.8 + 0.5 * drafted) * now, plain_s * 0.5 * drafted * now
        catch_up_s = 1e-5 * behind * now
        self.switch.observe(
            RoundObservation(
                keys=keys, is_drafted=wants, num_nodes=[4 * w for w in wants], num_accepted_tokens=accepted,
                context_rows=200 * size, draft_s=draft_s, verify_s=verify_s, round_s=draft_s + verify_s + 0.2 * plain_s * now,
                catch_up_s=catch_up_s, num_catch_up_rows=behind,
            )
        )  # fmt: skip
        best = max(1.0, np.mean([self.ratio(k, at) for k in keys]))  # tokens a request and plain round
        self.lost.append((1 + drafted + 1e-5 * behind / plain_s) * best / (1 + np.mean(means)) - 1)
        return n


def key(name: str, version: str = "v") -> DraftKey:
    return (version, name, True)


def longest_gap(drafts: list[int], rounds: list[int]) -> int:
    """Most rounds of a class in a row without a draft; rounds: those in which it had requests."""
    place = {at: i for i, at in enumerate(rounds)}
    return int(np.diff([-1, *(place[at] for at in sorted(set(drafts))), len(rounds)]).max())


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("time", [1.1, 1.6])
@pytest.mark.parametrize("ratio", [0.6, 0.9, 0.96, 1.15, 1.5, 2.5])
def test_rates_that_stay_cost_little_against_the_better_mode(ratio, time, size):
    lost = []
    for seed in range(3):
        world = Rough(lambda *_: max(ratio, 1 / time), time, seed)
        for at in range(3000):
            world.round(at, [key("a")] * size)
        lost.append(np.mean(world.lost))
    assert np.mean(lost) < 0.03


@pytest.mark.parametrize("size", [1, 8])
def test_a_flip_is_noticed_within_a_bounded_number_of_rounds(size):
    world = Rough(lambda _, at: 0.6 if 1000 <= at < 3500 else 2.0)
    drafting = np.array([world.round(at, [key("a")] * size) for at in range(6000)]) > 0
    assert drafting[900:1000].mean() > 0.9
    assert drafting[1400:3500].mean() < 0.1
    assert drafting[3500 + 3 * CONFIG.max_probe_rounds :].mean() > 0.9


@pytest.mark.parametrize("size", [1, 8, 32])
def test_a_class_that_pays_is_drafted_for_from_its_first_rounds_on_whatever_the_others_have_shown(size):
    for seed in range(3):
        world = Rough(lambda k, _: {"bad": 0.65, "good": 1.8}[k[1]], seed=seed)
        for at in range(600):
            world.round(at, [key("bad")] * size)
        drafting = [world.round(at, [key("good")] * size) for at in range(600, 700)]
        assert np.mean(np.array(drafting) > 0) > 0.9 and np.mean(drafting[20:]) > 0.8 * size


def test_cheap_drafting_that_finds_nothing_at_first_is_not_given_up_before_it_does():
    world = Rough(lambda _, at: 0.0 if at < 60 else 1.4, time=1.06)
    drafting = np.array([world.round(at, [key("a")]) for at in range(600)]) > 0
    assert drafting[3:].mean() > 0.9


@pytest.mark.parametrize("seed", range(4))
def test_every_class_with_traffic_is_probed_within_bounded_rounds_whatever_comes_and_goes(seed):
    rng = np.random.default_rng(seed)
    world = Rough(lambda k, at: 0.65 if at // 700 % 2 else 1.02 + 0.1 * (len(k[1]) % 3 - 1), seed=seed)
    rounds, size, version = defaultdict(list), 4, 0
    for at in range(8000):
        size = int(np.clip(size + rng.integers(-1, 2), 1, 7)) if rng.random() < 0.1 else size
        if rng.random() < 0.0005:
            world.switch.forget(f"v{version}")
            version += 1
        keys = [key("steady", f"v{version}")] + [key(f"b{(at // 40 + i) % 6}", f"v{version}") for i in range(size - 1)]
        world.round(at, keys)
        for k in set(keys):
            rounds[k, size.bit_length()].append(at)
    for (k, bits), own in rounds.items():
        of_size = [at for at in world.drafts[k] if at in set(own)]
        assert longest_gap(of_size, own) <= CONFIG.max_probe_rounds + 8, (k, bits)


def test_probes_come_in_seconds_too_where_rounds_are_long():
    config = TreeConfig(max_probe_s=2.0)
    switch = BudgetController(config, CostModel(lambda rows: 0.1))
    gaps, gap = [], 0
    for _ in range(2000):
        wants = switch.wants_draft([key("a")], 100)
        switch.observe(
            RoundObservation(
                keys=[key("a")], is_drafted=wants, num_nodes=[4 * w for w in wants], num_accepted_tokens=[0],
                context_rows=100, draft_s=0.2 * wants[0], verify_s=0.1, round_s=0.1 + 0.2 * wants[0],
            )
        )  # fmt: skip
        gap = 0 if wants[0] else gap + 1
        gaps.append(gap)
    assert 10 <= max(gaps) <= 21
