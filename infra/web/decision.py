"""Decision page: what is known about one decision, in plain words first, then every number behind it."""

from __future__ import annotations

import time
from typing import Any

from paceline.bandit.off_policy.estimate import is_operators
from paceline.contracts import Decision, LedgerEntry
from paceline.infra.controller.snapshot import Snapshot
from paceline.infra.web.words import decision_title, seconds, short, within

_MEANING = {
    "hold": "It changed nothing: the live drafter stayed.",
    "train": "It ordered a training job; its result goes through the gate before any request sees it.",
    "recall": "It brought an older drafter version back without training.",
    "rollback": "It took a version away from those that it served and gave them an older one.",
    "pin": "An operator fixed the live drafter; the policy holds until the pin is removed.",
}


_ENDED = {
    None: "The training job has not ended yet.",
    "accepted": "The job made version {made}; the gate accepted it, and it serves unless its guard or canary fails.",
    "rolled_back": "The job made version {made}; the gate accepted it, but it was rolled back.",
    "retired": "The job made version {made}; the gate accepted it, but its trial ended without a promotion.",
    "kept": "The job made version {made}; the gate accepted it, but it was not made live then.",
    "refused": "The job made version {made}; the gate accepted it, but its class could not be given it.",
    "rejected": "The gate refused what the job made: no request ever saw it.",
    "learning": "The learner is not surely better yet; the next burst goes on from here.",
    "failed": "The job failed; the live drafter was not touched.",
    "stopped": "The job was stopped; the live drafter was not touched.",
}
"""Outcome of a training job -> sentence."""


def decision_page(state: Snapshot, decision_id: int) -> dict[str, Any] | None:
    """Words, expected against realised, what was believed, ledger entries, versions and the raw record; None: unknown id."""
    ids = [d.decision_id for d in state.decisions]
    if decision_id not in ids:
        return None
    at = ids.index(decision_id)
    d = state.decisions[at]
    entries = [e for e in state.ledger_entries if e.entry_id.startswith(f"d{decision_id}:")]
    return {
        "decision_id": decision_id,
        "title": decision_title(d),
        "words": words(d, entries),
        "compare": compare(d),
        "belief": d.context.get("belief"),
        "cost": d.context.get("cost"),
        "mix": d.context.get("mix"),
        "entries": entries[-500:],
        "versions": [v for v in state.versions if v.version in (d.version, d.context.get("base_version"))],
        "previous": ids[at - 1] if at > 0 else None,
        "next": ids[at + 1] if at + 1 < len(ids) else None,
        "raw": d,
    }


def words(d: Decision, entries: list[LedgerEntry]) -> list[str]:
    """Sentences for somebody who has never seen the service: what, why, what was expected, what came of it."""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(d.ts))
    who = f"the policy '{d.policy}' decided"
    if d.action == "rollback" and "epoch" not in d.context:
        # an operator's, or for a replica's refusal; the reason says which
        who = "it was decided, whatever the policy thinks"
    elif is_operators(d):
        who = "an operator decided"
    about = f" for traffic bucket '{d.bucket}'" if d.bucket and d.action == "hold" else ""
    out = [f"On {when} {who}: {within(decision_title(d))}{about}."]
    if d.action in _MEANING:
        out.append(_MEANING[d.action])
    if d.reason:
        out.append(f"Why: {d.reason}")
    if d.action in ("train", "recall", "rollback") and (d.expected_saving_s or d.expected_cost_s):
        saving, cost, horizon = d.expected_saving_s, d.expected_cost_s, d.context.get("horizon_s")
        over = f" over the next {horizon:.0f} s, the expected remaining life of this traffic" if horizon else ""
        out.append(
            f"It was expected to save {seconds(saving)} of device time for {seconds(cost)}, net {seconds(saving - cost, sign=True)}{over}; "
            f"device time per token was expected to fall by {100 * d.expected_gain:.0f}%."
        )
    return out if d.action == "hold" else [*out, *_result(d, entries)]


def _result(d: Decision, entries: list[LedgerEntry]) -> list[str]:
    out = []
    if d.action == "train":
        known = _ENDED.get(d.outcome)
        out.append(known.format(made=short(d.version)) if known is not None else f"The job ended: {d.outcome}.")
    saved, cost = d.realised_saving_s, d.realised_cost_s
    if cost:
        out.append(f"So far it cost {seconds(cost)} of device time.")
    if saved is not None:
        net = saved - (cost or 0.0)
        verdict = "it has paid for itself" if net > 0 else "it has not paid for itself"
        out.append(f"So far it saved {seconds(saved)}, measured against the hold-back group: {verdict} (net {seconds(net, sign=True)}).")  # fmt: skip
    elif entries and d.action == "train" and d.outcome == "accepted":
        out.append("No saving is booked yet: both groups need a few more requests to compare.")
    return out


def compare(d: Decision) -> list[dict[str, Any]]:
    """Rows 'what: expected, realised' of a decision; None where nothing is known."""
    saved, paid = d.realised_saving_s, d.realised_cost_s
    net = None if saved is None and not paid else (saved or 0.0) - (paid or 0.0)
    rows = (
        ("saving, device-seconds", d.expected_saving_s, saved),
        ("cost, device-seconds", d.expected_cost_s, paid),
        ("net, device-seconds", d.expected_saving_s - d.expected_cost_s, net),
        ("fall of device time per token", d.expected_gain, d.realised_gain),
    )
    return [{"what": what, "expected": expected, "realised": realised} for what, expected, realised in rows]
