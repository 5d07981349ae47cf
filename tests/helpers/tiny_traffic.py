"""Tiny traffic: cells small enough to search every sequence of jobs and recalls."""

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
    """Best net over every sequence of holds, jobs on either domain from any version, and recalls."""
    first = outcomes.first
    base_s = traffic.token_s(first)
    written = np.cumsum(traffic.tokens, axis=0)
    keep = 0.9

    def serve(k: int, lengths: np.ndarray, busy: float) -> float:
        per_token = 0.1 * base_s + keep * traffic.token_s(lengths)
        cost = float(traffic.tokens[k] @ per_token)
        return float(traffic.tokens[k] @ base_s) - cost - slowdown * busy * cost

    def best(k: int, versions: tuple, live: int, job) -> float:
        """Net from step k on; job = (steps left, share of each, new lengths)."""
        if k == STEPS:
            return 0.0
        busy, rest, new = 0.0, job, None
        if job is not None:
            left, lengths = job
            busy = min(left / STEP_S, 1.0)
            rest = (left - STEP_S, lengths) if left > STEP_S else None
            new = lengths if rest is None else None
        now = serve(k, np.array(versions[live]), busy)
        if new is not None:
            versions, live, now = (*versions, new), len(versions), now - outcomes.staging_s
        options = [best(k + 1, versions, live, rest)]
        options += [best(k + 1, versions, v, rest) - outcomes.staging_s for v in range(len(versions)) if v != live]
        if rest is None:
            for d in range(len(first)):
                if written[k, d] < 64 or outcomes.is_bad(k):
                    continue
                base = np.array(versions[live])
                closed = float(outcomes.closed(d, ARM, 64.0, k))
                after = 1.0 + (base - 1.0) * (1.0 - outcomes.forgetting[d] * closed)
                after += outcomes.transfer[d] * closed * np.maximum(outcomes.ceiling - after, 0.0)
                after[d] = base[d] + max(outcomes.ceiling[d] - base[d], 0.0) * closed
                train_s, shadow_s = outcomes.job_seconds(ARM, 64.0, k)
                seconds = float(train_s) + shadow_s
                options.append(best(k + 1, versions, live, (seconds, tuple(after))) - seconds)
        return now + max(options)

    return best(0, (tuple(first),), 0, None)
