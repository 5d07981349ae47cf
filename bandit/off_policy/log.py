"""Log value: what a policy would have netted on a logged service, by the log's own randomisation and a replay as reward model.

The replay follows the log (bandit/off_policy/forced.py) and asks the policy at every decision; where its probabilities differ
from the logged ones, the replay is run on from there under the policy. bandit/off_policy/sequence.py puts both together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from paceline.bandit.ledger.totals import fold_entries
from paceline.bandit.off_policy.estimate import decision_key, is_operators
from paceline.bandit.off_policy.forced import ForcedWorld, epochs_by_step, logged_orders
from paceline.bandit.off_policy.sequence import Branch, Net, Trajectory, estimate
from paceline.bandit.policies.view import recall_key
from paceline.bandit.replay.logged import MATCH_ROWS, LoggedService, logged_outcomes, logged_settings
from paceline.bandit.replay.simulate import policy_config
from paceline.contracts import Decision

DRAWS = 6
"""Runs of the replay behind every prediction."""
MAX_BRANCHES = 12
"""Decisions beyond which a policy that differs everywhere is left to the model."""
MIN_AGREEMENT = 0.5
"""Share of the log's acts below which the figure is mostly the model's word."""
MIN_EFFECTIVE = 3.0
"""Effective acts below which a policy that differs from the logged one cannot be told from chance."""
_SAME = 1e-6


class PolicyNet(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one log."""

    net: Net
    num_decisions: int
    logged_s: float
    """Net that the log itself realised, device-seconds."""
    verdict: str
    """'exact', 'measured' (all of the log bears on the policy), 'estimated' or 'cannot tell'."""
    why: str
    """One sentence."""
    num_missed: int
    """Logged actions that the replay could not do again."""


def value_policy(
    service: LoggedService, policy: str, settings: Mapping[str, Any], *, draws: int = DRAWS, seed: int = 0,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> PolicyNet:  # fmt: skip
    """Net of a policy over a prepared log. `report` is told (steps done, steps).

    Raises: ValueError when `draws` is below 2; ConfigError for settings that are not allowed.
    """
    if draws < 2:
        raise ValueError(f"draws must be >= 2, got {draws}")
    if policy == "never":
        return PolicyNet(
            net=Net(), num_decisions=service.traffic.num_steps, logged_s=sum(realised_steps(service)), verdict="exact",
            why="nothing is ever trained, so the net is 0 by definition", num_missed=0,
        )  # fmt: skip
    trajectory, missed = trace(service, policy, settings, draws=draws, seed=seed, report=report)
    net = estimate(trajectory)
    verdict, why = judge(net, is_same=not trajectory.branches)
    if len(trajectory.branches) == MAX_BRANCHES:
        why += f"; {MAX_BRANCHES} decisions differ, and after so many the model alone speaks in any case"
    return PolicyNet(
        net=net, num_decisions=service.traffic.num_steps, logged_s=sum(trajectory.realised_s), verdict=verdict,
        why=why, num_missed=missed,
    )  # fmt: skip


def judge(net: Net, *, is_same: bool) -> tuple[str, str]:
    """(verdict, sentence): whether the log bears on the policy at all; `is_same`: both were certain of the same throughout."""
    if is_same:
        return "measured", f"the policy would have done what the log did in each of {net.num_acts} acts"
    share, acts = f"{net.agreement:.0%} of {net.num_acts} acts", f"{net.effective_decisions:.1f} effective acts"
    if net.agreement >= 1.0:
        why = f"the log may have been this policy's to its end, with {acts} of {net.num_acts}"
    elif net.untried > _SAME:
        why = f"after {share} the policy does what the logged one never would have; from there on the replay's model alone speaks"
    else:
        why = f"the log parts from the policy after {share}; from there on the replay's model alone speaks"
    if net.agreement < MIN_AGREEMENT or net.effective_decisions < MIN_EFFECTIVE:
        return "cannot tell", f"overlap is too thin: {why} ({acts})"
    return "estimated", why


def trace(
    service: LoggedService, policy: str, settings: Mapping[str, Any], *, draws: int, seed: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Trajectory, int]:  # fmt: skip
    """(what the estimate needs, logged actions that could not be done again)."""
    steps, realised = service.traffic.num_steps, realised_steps(service)
    orders = logged_orders(service)
    config = policy_config(policy, logged_settings(service, settings), seed)
    world = ForcedWorld(
        service.traffic, logged_outcomes(service, seed), config, seed=seed, slowdown=service.slowdown, epochs=epochs_by_step(service), orders=orders,
    )  # fmt: skip
    start = [world.rest(0, 0, draw) for draw in range(draws)]
    branches: list[Branch] = []
    is_act = [k in orders and orders[k].action != "hold" and not is_operators(orders[k]) for k in range(steps)]
    is_pinned = False
    for k in range(steps):
        report(k, steps)
        before = world.snapshot()
        asked = world.forced_step(k)
        order = orders.get(k)
        if order is not None:
            is_pinned = order.action == "pin" or (is_pinned and order.context.get("code") == "pinned")
        if not asked or is_pinned or (order is not None and is_operators(order)):
            continue  # nobody could decide here
        logged, taken = logged_probabilities(order)
        is_act[k] = is_act[k] or any(a != "hold" for a in {*asked, *logged})
        ours = world.controller.names
        mine = translate(asked, list(logged), {v: k for k, v in ours.items()})
        if all(abs(mine.get(a, 0.0) - logged.get(a, 0.0)) <= _SAME for a in {*mine, *logged}):
            continue
        is_last = len(branches) + 1 == MAX_BRANCHES
        weight = 0.0 if is_last else mine.get(taken, 0.0) / logged[taken]
        branches.append(
            Branch(
                step=k,
                weight=weight,
                values_s=[before.rest(k, k, draw) for draw in range(draws)],
                taken_s=[before.rest(k, k + 1, draw) for draw in range(draws)] if weight > 0 else [],
                untried=sum(p for a, p in mine.items() if logged.get(a, 0.0) <= 0),
            )
        )
        if weight == 0.0:
            break
    report(steps, steps)
    error = fold_entries(service.log.entries).saved_error_s()
    found = Trajectory(realised_s=realised, branches=branches, start_s=start, is_act=is_act, realised_error_s=error)
    return found, world.controller.num_missed


def realised_steps(service: LoggedService) -> list[float]:
    """Net that the log booked in every step of the replay, device-seconds."""
    out = [0.0] * service.traffic.num_steps
    for e in service.log.entries:
        out[service.step_of(e.ts)] += e.seconds if e.kind == "saving" else -e.seconds
    return out


def logged_probabilities(order: Decision | None) -> tuple[dict[str, float], str]:
    """(action key -> probability under the logging policy, key of what was done); a step without a line is a certain hold."""
    if order is None:
        return {"hold": 1.0}, "hold"
    taken = decision_key(order)
    known = {str(k): float(v) for k, v in dict(order.context.get("probabilities") or {}).items()}
    return (known if known.get(taken, 0.0) > 0 else {taken: order.propensity}), taken


def translate(asked: Mapping[str, float], logged: list[str], names: Mapping[str, str]) -> dict[str, float]:
    """Probabilities under the log's names: versions by `names`; a job is the logged one of its arm and bucket with nearly its rows."""
    out: dict[str, float] = {}
    for key, p in asked.items():
        kind, _, rest = key.partition(":")
        if kind == "recall":
            bucket, _, version = rest.rpartition(":")
            key = recall_key(bucket, names.get(version, version))
        elif kind == "train":
            same = [a for a in logged if a.rpartition(":")[0] == key.rpartition(":")[0]]
            close = [a for a in same if abs(_rows(a) - _rows(key)) <= MATCH_ROWS * _rows(a)]
            key = min(close, key=lambda a: abs(_rows(a) - _rows(key)), default=key)
        out[key] = out.get(key, 0.0) + p
    return out


def _rows(key: str) -> int:
    return int(key.rpartition(":")[2])
