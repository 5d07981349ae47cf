"""Estimators: what another policy would have netted on the decisions that were logged.

Estimates from logged decisions with propensities (Dudik, Langford, Li 2011, arXiv 1103.4601):

| method | value of one decision | unbiased when |
|---|---|---|
| ips | w r | propensities are right |
| direct | sum over a of pi(a) q(a) | the model q is right |
| doubly_robust | sum over a of pi(a) q(a) + w (r - q(logged action)) | either is right |

with pi = probabilities of the evaluated policy, w = pi(logged action) / propensity, r = realised net in device-seconds.
The sequence of situations is taken as logged: what another action would have done to *later* situations is not estimated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from scipy.special import stdtrit

from paceline.bandit.policies.view import recall_key
from paceline.contracts import Decision
from paceline.errors import SupportError

METHODS = ("doubly_robust", "ips", "direct")
MIN_ESS = 10.0
"""Effective decisions below which an interval from the spread of the values means nothing."""
FOLDS = 5
_TOLERANCE = 1e-6


class LoggedDecision(msgspec.Struct, frozen=True, kw_only=True):
    """One finished decision of the log, as the estimators see it."""

    decision_id: int
    action: str
    """What was done, in the words of `decision_key`."""
    propensity: float
    """Probability with which the logging policy did it, in (0, 1]."""
    reward_s: float
    """Realised net: savings minus costs, device-seconds; 0 for a hold."""
    context: dict[str, Any] = {}
    """What the policy knew."""
    probabilities: dict[str, float] | None = None
    """Probabilities of all actions under the logging policy, where the log has them."""


Probabilities = Callable[[LoggedDecision], Mapping[str, float]]
"""The evaluated policy: decision -> probability of each action (keys of `decision_key`), summing to 1."""
Model = Callable[[LoggedDecision, str], float]
"""Reward model q: expected net of an action in a decision's situation, device-seconds."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Net of the evaluated policy over the log, with what to think of it."""

    method: str
    total_s: float
    """Net device-seconds over all decisions of the log."""
    low_s: float
    """95% interval of `total_s`, decisions taken as independent (Student's t)."""
    high_s: float
    mean_s: float
    """Per decision."""
    standard_error_s: float
    """Of `mean_s`."""
    num_decisions: int
    effective_decisions: float
    """(sum w)^2 / sum w^2: decisions that carry the estimate."""
    mean_weight: float
    """1 within its noise when propensities and support are right."""
    max_weight: float
    agreement: float
    """Share of decisions where the evaluated policy gives the logged action any probability."""
    logged_s: float
    """What the logged decisions netted themselves, for comparison."""


def decision_key(decision: Decision) -> str:
    """Name of a logged decision's action: 'hold', 'train:ARM:BUCKET:ROWS', 'recall:BUCKET:VERSION'.

    As in context["probabilities"]. A rollback by the policy is a recall to it; the pin of an operator is 'pin:VERSION'.
    """
    action = decision.action
    if action == "train":
        return f"train:{decision.arm}:{decision.bucket}:{decision.context['arm']['num_rows']}"
    if action in ("recall", "rollback"):
        return recall_key(decision.bucket, decision.version or "")
    return "hold" if action == "hold" else f"{action}:{decision.version}"


def is_operators(decision: Decision) -> bool:
    """Whether an operator, not the policy, gave this order."""
    by_hand = decision.action == "rollback" and "epoch" not in decision.context
    return decision.action in ("pin", "unpin") or decision.policy == "operator" or by_hand


def read_decisions(lines: Iterable[str | bytes]) -> list[LoggedDecision]:
    """Decisions of an exported `decisions.jsonl`; the operator's orders and jobs that have not ended are left out.

    Raises: ValueError on a line that is no exported decision.
    """
    out = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            d = msgspec.json.decode(line, type=Decision)
            if is_operators(d) or (d.action == "train" and d.outcome is None):
                continue
            out.append(
                LoggedDecision(
                    decision_id=d.decision_id,
                    action=decision_key(d),
                    propensity=d.propensity,
                    reward_s=(d.realised_saving_s or 0.0) - (d.realised_cost_s or 0.0),
                    context={**d.context, "bucket": d.bucket, "policy": d.policy, "ts": d.ts},
                    probabilities=d.context.get("probabilities"),
                )
            )
        except (msgspec.DecodeError, KeyError, TypeError) as e:
            raise ValueError(f"line {number} is not a decision of `paceline export`: {e}") from e
    return out


def evaluate(
    decisions: Sequence[LoggedDecision],
    policy: Probabilities,
    *,
    method: str = "doubly_robust",
    model: Model | None = None,
    min_effective: float = MIN_ESS,
) -> Estimate:
    """Net of `policy` on the log, with a 95% interval.

    Args:
        model: reward model of direct and doubly_robust; None = `action_means`, fitted on the other decisions.
        min_effective: refuse when fewer effective decisions carry the estimate.
    Raises:
        SupportError: one sentence, when the policy does what the log never tried, or too few decisions bear on it.
        ValueError: an unknown method, a propensity outside (0, 1], probabilities that do not sum to 1.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if len(decisions) < 2:
        raise SupportError(f"an estimate needs at least 2 finished decisions, the log has {len(decisions)}")
    chosen = [_checked(d, policy(d)) for d in decisions]
    weights = np.array([p.get(d.action, 0.0) / d.propensity for d, p in zip(decisions, chosen, strict=True)])
    rewards = np.array([d.reward_s for d in decisions])
    effective = float(weights.sum() ** 2 / (weights**2).sum()) if weights.any() else 0.0
    if method != "direct":
        _require_support(decisions, chosen, weights, effective, min_effective)
    values = weights * rewards
    if method != "ips":
        q = _predictions(decisions, chosen, model)
        direct = np.array([sum(p[a] * q[i][a] for a in p) for i, p in enumerate(chosen)])
        logged = np.array([q[i][d.action] for i, d in enumerate(decisions)])
        values = direct if method == "direct" else direct + weights * (rewards - logged)
    n = len(values)
    mean, error = float(values.mean()), float(values.std(ddof=1) / math.sqrt(n))
    half = float(stdtrit(n - 1, 0.975)) * error
    return Estimate(
        method=method,
        total_s=n * mean,
        low_s=n * (mean - half),
        high_s=n * (mean + half),
        mean_s=mean,
        standard_error_s=error,
        num_decisions=n,
        effective_decisions=effective,
        mean_weight=float(weights.mean()),
        max_weight=float(weights.max()),
        agreement=float((weights > 0).mean()),
        logged_s=float(rewards.sum()),
    )


def _checked(decision: LoggedDecision, given: Mapping[str, float]) -> dict[str, float]:
    if not 0.0 < decision.propensity <= 1.0:
        raise ValueError(f"propensity must be in (0, 1], got {decision.propensity} in decision {decision.decision_id}")
    if min(given.values(), default=-1.0) < 0 or abs(sum(given.values()) - 1.0) > _TOLERANCE:
        raise ValueError(
            f"the policy's probabilities must sum to 1, got {dict(given)} in decision {decision.decision_id}"
        )
    return {action: p for action, p in given.items() if p > 0}


def _require_support(
    decisions: Sequence[LoggedDecision],
    chosen: list[dict[str, float]],
    weights: np.ndarray,
    effective: float,
    min_effective: float,
) -> None:
    """The evaluated policy may only do what the logging policy did with positive probability."""
    missing: dict[str, int] = {}
    for d, p in zip(decisions, chosen, strict=True):
        if d.probabilities is not None:
            untried = [a for a in p if d.probabilities.get(a, 0.0) <= 0]
        else:  # all that is known: nothing else was possible where the logged action was certain
            untried = [a for a in p if a != d.action] if d.propensity >= 1.0 - 1e-12 else []
        for action in untried:
            missing[action] = missing.get(action, 0) + 1
    n = len(decisions)
    if missing:
        action = max(missing, key=lambda a: missing[a])
        raise SupportError(
            f"the log says nothing about this policy: it chooses {action} in {missing[action]} of {n} decisions where "
            "the logged policy never would; log with exploration, or use method='direct' and trust its model"
        )
    if effective < min_effective:
        raise SupportError(
            f"only {effective:.1f} of {n} decisions effectively bear on this policy, fewer than {min_effective:g}; "
            "log more decisions or evaluate a policy closer to the logged one"
        )
    # with rare exploration the sample may hold no rare weight at all; E[w] = 1 then still gives a floor for Var(w)
    spread = math.sqrt(max(float(weights.var(ddof=1)), float((weights**2).mean()) - 1.0, 0.0) / n)
    if abs(weights.mean() - 1.0) > 5.0 * spread + 1e-9:
        raise SupportError(
            f"the weights average {weights.mean():.2f} instead of 1, beyond their noise of {spread:.2f}; the policy does "
            "what the log never tried, or the logged propensities are wrong"
        )


def _predictions(
    decisions: Sequence[LoggedDecision], chosen: list[dict[str, float]], model: Model | None
) -> list[dict[str, float]]:
    needed = [{*p, d.action} for d, p in zip(decisions, chosen, strict=True)]
    if model is not None:
        return [{a: float(model(d, a)) for a in names} for d, names in zip(decisions, needed, strict=True)]
    out: list[dict[str, float]] = [{} for _ in decisions]
    for fold in range(min(FOLDS, len(decisions))):  # a decision's own reward must not enter its prediction
        means = action_means([d for i, d in enumerate(decisions) if i % FOLDS != fold])
        for i in range(fold, len(decisions), FOLDS):
            out[i] = {a: means(decisions[i], a) for a in needed[i]}
    return out


def action_means(decisions: Sequence[LoggedDecision]) -> Model:
    """The plainest reward model: mean net of each action, with one pseudo-decision at the overall mean.

    A hold nets 0 by definition of the ledger, so it is not estimated.
    """
    overall = float(np.mean([d.reward_s for d in decisions])) if decisions else 0.0
    sums: dict[str, list[float]] = {}
    for d in decisions:
        entry = sums.setdefault(d.action, [overall, 1.0])
        entry[0] += d.reward_s
        entry[1] += 1.0

    def predict(decision: LoggedDecision, action: str) -> float:
        if action == "hold":
            return 0.0
        total, count = sums.get(action, (overall, 1.0))
        return total / count

    return predict
