"""Oracle bound: the most that a policy which knows the future could have saved.

Dynamic programming with the world's true outcomes, domain by domain: each has a version of its own. Relaxations make it a
bound from above: versions change free and at once, need no evidence, bursts on different domains may overlap and read rows
again, those that fail are avoided, of those that harm only what they do for other domains counts, their rows are rounded up and their cost down, and resulting lengths are rounded up to
the grid. Where training on one domain
helps others, each of these may order that job for itself, at an equal share of its cost. Hold-back traffic stays on the first drafter, as for every policy.
"""

from __future__ import annotations

import numpy as np

from paceline.bandit.replay.outcomes import FIRST, SimulatedOutcomes
from paceline.bandit.replay.scenario import Traffic
from paceline.bandit.replay.world import RunResult, planned_result
from paceline.config import PolicyConfig
from paceline.contracts import ArmSpec

NUM_LEVELS = 64
ROW_GRID = tuple(np.concatenate([np.geomspace(64, 2**14, 36), np.geomspace(2**14, 2**30, 71)[1:]]).tolist())
"""Row counts between which a job's size is bracketed."""


def hindsight(
    traffic: Traffic,
    outcomes: SimulatedOutcomes,
    config: PolicyConfig,
    *,
    slowdown: float,
    arms: tuple[ArmSpec, ...] | None = None,
    num_levels: int = NUM_LEVELS,
    has_transfer: bool = True,
) -> RunResult:
    """The bound as a RunResult; `curve` adds up what its plan saves and spends over time.

    has_transfer: False leaves out what training on one domain does for others: fewer jobs, at their full cost, to begin a
    plan with.
    """
    arms = arms or outcomes.arms
    first = outcomes.lengths(FIRST)
    never = traffic.tokens @ traffic.token_s(first)  # (T,)
    # interference is charged at the least that serving can cost meanwhile
    least_s = traffic.tokens @ traffic.token_s(np.maximum(outcomes.ceiling, first)) * slowdown
    flow = np.zeros(traffic.num_steps)
    spent, events = 0.0, []
    for d in range(len(first)):
        if traffic.tokens[:, d].sum() > 0:
            sources = _sources(outcomes, d) if has_transfer else ([(d, 1.0)], 1.0)
            plan = _domain(traffic, outcomes, config, arms, d, least_s, num_levels, *sources)
            flow += plan[0]
            spent += plan[1]
            events += plan[2]
    events.sort(key=lambda e: e["t"])
    return planned_result(traffic, never, flow, {"training": spent}, events, num_accepted=len(events))


def _domain(
    traffic: Traffic,
    outcomes: SimulatedOutcomes,
    config: PolicyConfig,
    arms: tuple[ArmSpec, ...],
    d: int,
    least_s: np.ndarray,
    num_levels: int,
    sources: list[tuple[int, float]],
    cost_share: float,
) -> tuple[np.ndarray, float, list[dict]]:
    """(net per step (T,), spend, jobs) of the best plan for one domain."""
    steps = traffic.num_steps
    low = float(outcomes.lengths(FIRST)[d])
    high = max(float(outcomes.ceiling[d]), low)
    levels = np.linspace(low, high, num_levels) if high > low else np.array([low])
    saved = (1 - config.holdback_percent / 100.0) * (traffic.token_s(low) - traffic.token_s(levels))  # (J,) per token
    saved = np.maximum.accumulate(saved)  # the probe rounds of undrafted traffic must not make progress a loss
    tokens = traffic.tokens[:, d]
    ahead = np.concatenate([[0.0], np.cumsum(tokens)])
    rows_of = traffic.rows()[:, [i for i, _ in sources]]  # (T, S) after step k
    written = rows_of.max(axis=1)
    slow = np.concatenate([[0.0], np.cumsum(least_s)])
    value = np.zeros((steps + 1, levels.size))  # what steps k, k + 1, ... bring
    decided = np.zeros((steps, levels.size))  # the same behind the decision at the end of step k
    choice = np.full((steps, levels.size), -1, dtype=np.int32)
    options, shares = _options(arms), outcomes.share(d, levels)
    targets: dict[int, np.ndarray] = {}  # (2, J) level and trained domain
    at_all = np.arange(levels.size)
    for k in range(int(np.flatnonzero(tokens)[-1]), -1, -1):
        decided[k] = value[k + 1]
        value[k] = tokens[k] * saved + decided[k]
        useful = [s for s, (i, _) in enumerate(sources) if i != d or not outcomes.is_harmful(k)]
        if written[k] < ROW_GRID[0] or not useful or outcomes.is_failed(k) or k == steps - 1:
            continue
        # decided at the end of step k: training runs during the steps after it
        now, seconds, closed, which = k + 1, [], [], []
        for arm, rows, above, first_option in options:
            fits = int(np.searchsorted(rows, written[k], side="right"))
            train_s, shadow_s = outcomes.job_seconds(arm, rows[:fits], k)
            seconds.append(train_s + shadow_s)
            at_k = [sources[s] for s in useful], rows_of[k, useful]
            closed.append(_closed(outcomes, d, arm, above[:fits], shares, *at_k))
            which.append(np.arange(first_option, first_option + fits))
        job_s, picked = np.concatenate(seconds), np.concatenate(which)
        end = np.minimum(now + np.maximum(np.ceil(job_s / traffic.step_s).astype(int), 1), steps)
        full = np.minimum(now + (job_s / traffic.step_s).astype(int), steps)
        cost = cost_share * (config.trainer_price * job_s + slow[full] - slow[now])
        by_source = np.concatenate(closed, axis=1)  # (S, O, J)
        reached = levels + (high - levels) * by_source.max(axis=0)  # (O, J)
        after = np.ceil((reached - low) / max(high - low, 1e-12) * (levels.size - 1) - 1e-9).astype(int)
        after = np.minimum(after, levels.size - 1)
        # whatever follows may be decided as soon as the job ends, which is the end of step end - 1
        worth = (ahead[end] - ahead[now])[:, None] * saved + decided[end[:, None] - 1, after] - cost[:, None]
        top = worth.argmax(axis=0)
        gain = worth[top, at_all]
        is_better = gain > value[now]
        choice[k] = np.where(is_better, picked[top], -1)
        trained = np.array([sources[s][0] for s in useful])[by_source[:, top, at_all].argmax(axis=0)]
        targets[k] = np.stack([after[top, at_all], trained])
        decided[k] = np.maximum(gain, value[now])
        value[k] = tokens[k] * saved + decided[k]
    return _walk(traffic, outcomes, d, tokens, saved, slow, choice, targets, options, cost_share, config.trainer_price)


def _closed(
    outcomes: SimulatedOutcomes,
    d: int,
    arm: ArmSpec,
    rows: np.ndarray,
    shares: np.ndarray,
    sources: list[tuple[int, float]],
    written: np.ndarray,
) -> np.ndarray:
    """(S, R, J) share of what is left of domain d's gap that rows (R,) of each source close, where it began with `shares` (J,)."""
    found = np.zeros((len(sources), len(rows), len(shares)))
    for s, ((i, arrives), own) in enumerate(zip(sources, written, strict=True)):
        read = np.minimum(rows, own)
        closed = outcomes.closed(d, arm, read, shares) if i == d else outcomes.most_closed(i, arm, read)[:, None]
        found[s] = arrives * closed
    return found


def _sources(outcomes: SimulatedOutcomes, d: int) -> tuple[list[tuple[int, float]], float]:
    """(domains whose training helps domain d, with the share that arrives; the least share of a job's cost that d bears)."""
    arrives = outcomes.transfer + np.eye(len(outcomes.first))
    found = np.flatnonzero(arrives[:, d] > 0).tolist()
    return [(i, float(arrives[i, d])) for i in found], 1.0 / max(int((arrives[i] > 0).sum()) for i in found)


_Option = tuple[ArmSpec, np.ndarray, np.ndarray, int]
"""(arm, row counts to pay for, row counts to learn from: the upper ends of the brackets, number of the first one)."""


def _options(arms: tuple[ArmSpec, ...]) -> list[_Option]:
    out: list[_Option] = []
    number = 0
    for arm in arms:
        rows = np.array([r for r in ROW_GRID if r < arm.num_rows] + [float(arm.num_rows)])
        out.append((arm, rows, np.append(rows[1:], rows[-1]), number))
        number += rows.size
    return out


def _walk(
    traffic: Traffic,
    outcomes: SimulatedOutcomes,
    d: int,
    tokens: np.ndarray,
    saved: np.ndarray,
    slow: np.ndarray,
    choice: np.ndarray,
    targets: dict[int, np.ndarray],
    options: list[_Option],
    cost_share: float,
    price: float,
) -> tuple[np.ndarray, float, list[dict]]:
    """Follow the plan from the start."""
    steps = traffic.num_steps
    flow, spent, jobs = np.zeros(steps), 0.0, []
    known = [(arm, float(r)) for arm, rows, _, _ in options for r in rows]
    k = level = 0
    flow[0] += tokens[0] * saved[0]
    while k < steps:
        picked = int(choice[k, level])
        if picked < 0:
            k += 1
            if k < steps:
                flow[k] += tokens[k] * saved[level]
            continue
        arm, rows = known[picked]
        train_s, shadow_s = outcomes.job_seconds(arm, rows, k)
        seconds, now = float(train_s + shadow_s), k + 1
        end = min(now + max(int(np.ceil(seconds / traffic.step_s)), 1), steps)
        full = min(now + int(seconds / traffic.step_s), steps)
        cost = cost_share * (price * seconds + float(slow[full] - slow[now]))
        flow[k] -= cost
        spent += cost
        flow[now:end] += tokens[now:end] * saved[level]
        (after, trained), k = targets[k][:, level].tolist(), end - 1
        jobs.append({"t": now * traffic.step_s, "action": "train", "bucket": traffic.labels[trained], "what": arm.name, "reason": f"{rows:.0f} rows or more, known to pay", "domain": trained, "rows": rows})  # fmt: skip
        level = after
    return flow, spent, jobs
