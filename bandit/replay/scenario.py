"""Scenarios: a simulated service's traffic over time, its costs, and its drafters' room to improve."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated as A

import numpy as np

from paceline.errors import ConfigError
from paceline.records import Setting, record, require

RECURRENCES = ("steady", "cycle", "fresh", "drift")
TARGET_PASS_S = 0.020
"""Device seconds of a target pass that do not depend on its rows (weights are read once)."""
DRAFT_PASS_S = 0.005
"""The same for drafting."""
ROW_S = 0.00005
"""Device seconds of one more row in the target's pass."""
DRAFT_NODES = 8
"""Draft nodes per request and round."""
LEAD_IN_S = 600.0
"""Longest first regime, which the first drafter was trained for."""
MAX_DURATION_S, MAX_STEPS = 2e6, 200_000
"""Longest replay: 23 days, and as many steps."""
MAX_COUNT = 1_000_000
"""Most replicas, or requests in a round."""
MAX_WORLD_BYTES = 8 << 30
"""Most memory that drawing a world may take."""
DAY_S = 14_400.0
"""Length of the simulated day."""
PREVIOUS_SHARE = 0.15
"""Share of the traffic that stays with the domain of the regime before."""


@record("scenario.")
class Scenario:
    """One cell of a replay: a service whose traffic changes in regimes. Times in seconds."""

    name: str
    family: str = "custom"
    """Cells of one family form one line of the advice table."""
    duration_s: A[float, Setting(le=MAX_DURATION_S)] = 7200.0
    step_s: A[float, Setting(gt=0)] = 10.0
    """Length of a simulation step."""
    regime_s: float = 1800.0
    """Mean length of a traffic regime; the lengths are gamma distributed with shape 4."""
    recurrence: A[str, Setting(choices=RECURRENCES)] = "cycle"
    """steady: known traffic only; cycle: A B A C A B ..., known, unseen, known, ...; fresh: every regime is a new domain;
    drift: as fresh, but all in one bucket."""
    train_cost: A[float, Setting(gt=0)] = 1.0
    """Factor on the seconds that training takes."""
    load: A[float, Setting(gt=0, le=1e6)] = 1.0
    """Devices that serving with the first drafter would keep busy, on average over domains."""
    batch_size: A[int, Setting(ge=1, le=MAX_COUNT)] = 4
    """Requests in a round: the larger, the less a longer acceptance saves."""
    diurnal: A[float, Setting(ge=0, le=1)] = 0.0
    """Amplitude of the load's daily wave; the simulated day has 4 hours."""
    bad_jobs: A[float, Setting(ge=0, le=1)] = 0.0
    """Share of jobs that go wrong: half of these fail, half pass the gate although they made the drafter worse."""
    forgetting: A[float, Setting(ge=0, le=1)] = 0.1
    """Share of the acceptance length above 1 that endless training on one domain costs on the others."""
    headroom: A[float, Setting(ge=0, le=3)] = 1.0
    """Factor on the acceptance length that training can add on unseen domains; 0 = none."""
    slowdown: A[float, Setting(ge=0, le=3)] = 0.05
    """Relative slow-down of rounds while a job runs."""

    def __post_init__(self) -> None:
        require(self.duration_s >= self.step_s, "scenario.duration_s must be at least step_s", self.duration_s)
        require(self.num_steps <= MAX_STEPS, f"scenario.duration_s must be at most {MAX_STEPS} times step_s", self.duration_s)  # fmt: skip
        require(self.regime_s >= self.step_s, "scenario.regime_s must be at least step_s", self.regime_s)

    @property
    def num_steps(self) -> int:
        return max(int(self.duration_s / self.step_s), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What is asked of the service, whichever policy runs. T steps, D domains (texts of one kind)."""

    step_s: float
    labels: tuple[str, ...]
    """Domain -> bucket; a bucket may hold several domains, one after the other."""
    tokens: np.ndarray  # (T, D) float64, tokens to emit
    drafted_s: float
    """Device seconds of a round with a draft, per request."""
    plain_s: float
    """The same without a draft."""
    batch_size: int
    tokens_per_request: float = 100.0
    num_replicas: int = 1
    rows_share: float | np.ndarray = 1.0
    """Share of the tokens that become rows to train on (traced requests); (D,) where domains differ."""
    rows_before: tuple[float, ...] = ()
    """Rows of each domain written before the first step; () = none."""

    def rows_at_start(self) -> np.ndarray:
        """(D,) rows written before the first step."""
        return np.array(self.rows_before or np.zeros(len(self.labels)), dtype=float)

    def rows(self) -> np.ndarray:
        """(T, D) rows ever written at the end of each step."""
        return self.rows_at_start() + np.cumsum(self.tokens, axis=0) * self.rows_share

    @property
    def num_steps(self) -> int:
        return int(self.tokens.shape[0])

    def drafted_share(self, length: np.ndarray | float) -> np.ndarray:
        """Share of rounds with a draft: all where drafting is the cheaper way, else one in ten to keep measuring."""
        return np.where(self.drafted_s / np.maximum(length, 1.0) < self.plain_s, 1.0, 0.1)

    def token_s(self, length: np.ndarray | float) -> np.ndarray:
        """Device seconds per token at an acceptance length."""
        q = self.drafted_share(length)
        return (q * self.drafted_s + (1 - q) * self.plain_s) / (q * np.maximum(length, 1.0) + 1 - q)


def check_world(name: str, num_steps: int, num_domains: int) -> None:
    """Raise ConfigError for a world too large to draw: (T, D) tokens and what is made on the way to them, (D, D) transfers."""
    num_bytes = 8 * num_domains * (5 * num_steps + 3 * num_domains)
    if num_bytes > MAX_WORLD_BYTES:
        raise ConfigError(
            f"world {name!r} must take at most {MAX_WORLD_BYTES >> 30} GiB of memory, got about {num_bytes / 2**30:.0f} GiB for "
            f"{num_steps} steps of {num_domains} domains; longer regimes or fewer classes make fewer domains, a longer step_s "
            "or a shorter duration fewer steps"
        )


def round_seconds(batch_size: int) -> tuple[float, float]:
    """Device seconds of a round per request, (with a draft, without one): passes are shared, rows are not."""
    drafted = (TARGET_PASS_S + DRAFT_PASS_S) / batch_size + ROW_S * (DRAFT_NODES + 1)
    return drafted, TARGET_PASS_S / batch_size + ROW_S


def regimes(scenario: Scenario, rng: np.random.Generator) -> list[tuple[int, int]]:
    """(first step, domain) of every regime; domain 0 is the one that the first drafter knows."""
    starts, domains = [0], [0]
    at = min(scenario.regime_s, LEAD_IN_S)
    while at < scenario.duration_s:
        number = len(starts)
        if scenario.recurrence == "steady":
            domain = number % 2
        elif scenario.recurrence == "cycle":
            domain = 0 if number % 2 == 0 else 1 + (number // 2) % 2
        else:
            domain = number
        starts.append(int(at / scenario.step_s))
        domains.append(domain)
        at += max(float(rng.gamma(4.0, scenario.regime_s / 4.0)), 2 * scenario.step_s)
    return list(zip(starts, domains, strict=True))


def draw_traffic(scenario: Scenario, first_lengths: np.ndarray, rng: np.random.Generator) -> Traffic:
    """Tokens per step and domain, the same for every policy. first_lengths: (D,) acceptance length of the first drafter."""
    plan, steps = regimes(scenario, rng), scenario.num_steps
    num_domains = len(first_lengths)
    share = np.zeros((steps, num_domains))
    previous = 0
    for i, (start, domain) in enumerate(plan):
        stop = plan[i + 1][0] if i + 1 < len(plan) else steps
        share[start:stop, domain] += 1.0 - PREVIOUS_SHARE
        share[start:stop, previous if scenario.recurrence != "drift" else domain] += PREVIOUS_SHARE
        previous = domain
    drafted_s, plain_s = round_seconds(scenario.batch_size)
    traffic = Traffic(
        step_s=scenario.step_s, labels=labels(scenario, num_domains), tokens=share, drafted_s=drafted_s,
        plain_s=plain_s, batch_size=scenario.batch_size, num_replicas=max(1, math.ceil(scenario.load)),
    )  # fmt: skip
    per_second = scenario.load / float(traffic.token_s(first_lengths).mean())
    times = np.arange(steps) * scenario.step_s
    wave = 1.0 + scenario.diurnal * np.sin(2 * math.pi * times / DAY_S)
    expected = share * (per_second * scenario.step_s * wave)[:, None]
    requests = rng.poisson(np.maximum(expected / traffic.tokens_per_request, 0.0))
    traffic.tokens[:] = requests * traffic.tokens_per_request
    return traffic


def labels(scenario: Scenario, num_domains: int) -> tuple[str, ...]:
    """Bucket of every domain."""
    return tuple("a" if scenario.recurrence == "drift" else f"b{i}" for i in range(num_domains))


def num_domains(scenario: Scenario, rng: np.random.Generator) -> int:
    """Domains that a run's regimes use."""
    least = {"steady": 2, "cycle": 3}.get(scenario.recurrence, 1)
    return max(least, 1 + max(domain for _, domain in regimes(scenario, rng)))
