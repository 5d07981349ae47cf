"""Tiny traffic: cells small enough to search every sequence of jobs and versions."""

import functools
import itertools

import numpy as np

from paceline.bandit.replay.outcomes import SimulatedOutcomes
from paceline.bandit.replay.scenario import Scenario, Traffic
from paceline.bandit.replay.simulate import policy_config
from paceline.contracts import ArmSpec

ARM = ArmSpec(name="full", parameters="full", num_rows=64)
STEPS, STEP_S = 7, 20.0
CONFIG = policy_config("never", {"holdback_percent": 10}, 0)


def tiny(seed: int, num_domains: int, forgetting: float, train_cost: float = 3.0):
    rng = np.random.default_rng(seed)
    cell = Scenario(name="tiny", duration_s=STEPS * STEP_S, step_s=STEP_S, regime_s=STEP_S, train_cost=train_cost, forgetting=forgetting)  # fmt: skip
    outcomes = SimulatedOutcomes.draw(cell, num_domains, rng)
    outcomes.curves.tau[:] = 40.0
    tokens = rng.uniform(0, 6000, (STEPS, num_domains)) * (rng.random((STEPS, num_domains)) < 0.8)
    traffic = Traffic(step_s=STEP_S, labels=tuple(f"b{i}" for i in range(num_domains)), tokens=tokens, drafted_s=0.0067, plain_s=0.005, batch_size=4)  # fmt: skip
    return traffic, outcomes


def exhaustive(traffic: Traffic, outcomes: SimulatedOutcomes, slowdown: float) -> float:
    """Best net over every sequence of versions of either domain, and of holds and jobs on one of them from its version or
    the first."""
    first = outcomes.first
    base_s = traffic.token_s(first)
    written = np.cumsum(traffic.tokens, axis=0)
    keep, domains = 0.9, range(len(first))

    def serve(k: int, lengths: np.ndarray, busy: float) -> float:
        per_token = 0.1 * base_s + keep * traffic.token_s(lengths)
        cost = float(traffic.tokens[k] @ per_token)
        return float(traffic.tokens[k] @ base_s) - cost - slowdown * busy * cost

    @functools.cache
    def trained(domain: int, base: tuple, is_harmful: bool) -> tuple:
        lengths = np.array(base)
        share = outcomes.share(domain, lengths[domain : domain + 1])
        closed = float(outcomes.closed(domain, ARM, np.array([64.0]), share)[0, 0])
        return tuple(outcomes.trained(domain, lengths, closed, is_harmful=is_harmful))

    @functools.cache
    def best(k: int, versions: tuple, own: tuple, job) -> float:
        """Net from step k on; own = the version of each domain, job = (seconds left, lengths of its version)."""
        if traffic.tokens[k:].sum() == 0:
            return 0.0
        busy, rest, new = 0.0, job, None
        if job is not None:
            left, lengths = job
            busy = min(left / STEP_S, 1.0)
            rest = (left - STEP_S, lengths) if left > STEP_S else None
            new = lengths if rest is None else None
        now = serve(k, np.array([versions[v][d] for d, v in enumerate(own)]), busy)
        known = versions if new is None else (*versions, new)
        options = []
        for chosen in itertools.product(range(len(known)), repeat=len(first)):
            staging_s = outcomes.staging_s * sum(a != b for a, b in zip(chosen, own, strict=True))
            options.append(best(k + 1, known, chosen, rest) - staging_s)
            for d in domains:
                if rest is not None or written[k, d] < 64 or outcomes.is_failed(k):
                    continue
                seconds = float(sum(outcomes.job_seconds(ARM, 64.0, k)))
                for v in {chosen[d], 0}:
                    ordered = (seconds, trained(d, known[v], outcomes.is_harmful(k)))
                    options.append(best(k + 1, known, chosen, ordered) - seconds - staging_s)
        return now + max(options)

    return best(0, (tuple(first),), (0,) * len(first), None)
