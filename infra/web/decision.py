"""What is known about one decision: in plain words first, then every number behind it?"""

from __future__ import annotations

import time
from typing import Any

from paceline.infra.web.words import decision_title, seconds, short

_MEANING = {
    "hold": "It changed nothing: the live drafter stayed.",
    "train": "It ordered a training job; its result goes through the gate before any request sees it.",
    "recall": "It brought an older drafter version back without training.",
    "rollback": "It took the live drafter away and brought an older one back.",
    "pin": "An operator fixed the live drafter; the policy holds until the pin is removed.",
}


def decision_page(state: dict[str, Any], decision_id: int) -> dict[str, Any] | None:
    """Words, expected against realised, what was believed, ledger entries, versions and the raw record; None: unknown id."""
    rows = state.get("decisions") or []
    d = next((d for d in rows if d.get("decision_id") == decision_id), None)
    if d is None:
        return None
    ids = [r["decision_id"] for r in rows]
    at = ids.index(decision_id)
    prefix = f"d{decision_id}:"
    entries = [e for e in state.get("ledger_entries") or [] if str(e.get("entry_id", "")).startswith(prefix)]
    context = d.get("context") or {}
    made = [
        v for v in state.get("versions") or [] if v.get("version") in (d.get("version"), context.get("base_version"))
    ]
    return {
        "decision_id": decision_id,
        "title": decision_title(d),
        "words": words(d, entries),
        "compare": compare(d),
        "belief": context.get("belief"),
        "cost": context.get("cost"),
        "mix": context.get("mix"),
        "entries": entries[-500:],
        "versions": made,
        "previous": ids[at - 1] if at > 0 else None,
        "next": ids[at + 1] if at + 1 < len(ids) else None,
        "raw": d,
    }


def words(d: dict[str, Any], entries: list[dict[str, Any]]) -> list[str]:
    """Sentences for somebody who has never seen the service: what, why, what was expected, what came of it."""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(float(d.get("ts") or 0.0)))
    action = str(d.get("action"))
    context = d.get("context") or {}
    who = "an operator" if d.get("policy") == "operator" or action == "pin" else f"the policy '{d.get('policy')}'"
    about = f" for traffic bucket '{d['bucket']}'" if d.get("bucket") else ""
    out = [f"On {when} {who} decided: {decision_title(d).lower()}{about if action != 'train' else ''}."]
    if action in _MEANING:
        out.append(_MEANING[action])
    if d.get("reason"):
        out.append(f"Why: {d['reason']}")
    if action in ("train", "recall", "rollback") and (d.get("expected_saving_s") or d.get("expected_cost_s")):
        saving, cost = float(d.get("expected_saving_s") or 0.0), float(d.get("expected_cost_s") or 0.0)
        horizon = context.get("horizon_s")
        over = f" over the next {horizon:.0f} s, the expected remaining life of this traffic" if horizon else ""
        out.append(
            f"It was expected to save {seconds(saving)} of device time for {seconds(cost)}, net {seconds(saving - cost, sign=True)}{over}; "
            f"device time per token was expected to fall by {100 * float(d.get('expected_gain') or 0.0):.0f}%."
        )
    return [*out, *_result(d, entries)]


def _result(d: dict[str, Any], entries: list[dict[str, Any]]) -> list[str]:
    action, outcome = d.get("action"), d.get("outcome")
    if action == "hold":
        return []
    out = []
    if action == "train":
        made = short(d.get("version"))
        out.append(
            {
                None: "The training job has not ended yet.",
                "accepted": f"The job made version {made}; the gate accepted it, and it goes live unless its canary fails.",
                "rolled_back": f"The job made version {made}; the gate accepted it, but its canary was rolled back.",
                "retired": f"The job made version {made}; the gate accepted it, but its canary ended without a promotion.",
                "kept": f"The job made version {made}; the gate accepted it, but it was not made live then.",
                "rejected": "The gate refused what the job made: no request ever saw it.",
                "failed": "The job failed; the live drafter was not touched.",
                "stopped": "The job was stopped; the live drafter was not touched.",
            }.get(outcome, f"The job ended: {outcome}.")
        )
    saved, cost = d.get("realised_saving_s"), d.get("realised_cost_s")
    if cost:
        out.append(f"So far it cost {seconds(cost)} of device time.")
    if saved is not None:
        net = saved - (cost or 0.0)
        verdict = "it has paid for itself" if net > 0 else "it has not paid for itself"
        out.append(f"So far it saved {seconds(saved)}, measured against the hold-back group: {verdict} (net {seconds(net, sign=True)}).")  # fmt: skip
    elif entries and action == "train" and outcome == "accepted":
        out.append("No saving is booked yet: both groups need a few more requests to compare.")
    return out


def compare(d: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows 'what: expected, realised' of a decision; None where nothing is known."""
    saving, cost = d.get("expected_saving_s"), d.get("expected_cost_s")
    saved, paid = d.get("realised_saving_s"), d.get("realised_cost_s")
    net = None if saved is None and not paid else (saved or 0.0) - (paid or 0.0)
    return [
        {"what": "saving, device-seconds", "expected": saving, "realised": saved},
        {"what": "cost, device-seconds", "expected": cost, "realised": paid},
        {"what": "net, device-seconds", "expected": (saving or 0.0) - (cost or 0.0), "realised": net},
        {
            "what": "fall of device time per token",
            "expected": d.get("expected_gain"),
            "realised": d.get("realised_gain"),
        },
    ]
