"""What would an operator want to read first: is adaptation paying, what was decided last and why, who is served by what?

Sentences and verdicts are made here, from a snapshot of the controller, so that they can be tested; pages only show them.
Text from clients (bucket names) and from policies (reasons) stays plain text everywhere.
"""

from __future__ import annotations

from typing import Any

Z95 = 1.959964
"""Half-width of a 95% interval in standard errors."""
ACTED = ("train", "recall", "rollback", "pin")
"""Actions of decisions other than hold."""


def seconds(value: float | None, *, sign: bool = False) -> str:
    """'12.3 s', '1,240 s'; '-' for None."""
    if value is None:
        return "-"
    form = f"{'+' if sign else ''},.{0 if abs(value) >= 1000 else 1}f"
    return f"{format(value, form)} s"


def short(version: str | None) -> str:
    """A drafter version as shown: its first 12 characters, or 'none'."""
    return (version or "none")[:12]


def net_interval(state: dict[str, Any]) -> tuple[float, float, float]:
    """(net, low, high) device-seconds, 95% interval: spending is metered, saving is estimated with an error."""
    ledger = state.get("ledger") or {}
    net, saved = float(ledger.get("net_s") or 0.0), float(ledger.get("saved_s") or 0.0)
    found = state.get("saved_interval_s")
    if found:
        return net, net + float(found[0]) - saved, net + float(found[1]) - saved
    half = Z95 * float(((state.get("bandit") or {}).get("ledger") or {}).get("saved_error_s") or 0.0)
    return net, net - half, net + half


def canary_of(state: dict[str, Any]) -> dict[str, Any] | None:
    """The canary in flight as the controller's roll-out tells it; None when there is none."""
    rollout = state.get("rollout") or {}
    return rollout if rollout.get("status") == "canary" and rollout.get("version") else None


def answers(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Three questions, each with a verdict (a few words), a sentence and what the page colours it by (tone)."""
    return [_is_it_paying(state), _last_decision(state), _who_serves(state)]


def _is_it_paying(state: dict[str, Any]) -> dict[str, Any]:
    question = "Is adaptation paying?"
    if not state.get("has_controller") and "ledger" not in state:
        reason = "This service does not adapt: it has no controller, or the controller has not answered yet."
        return {"id": "paying", "question": question, "verdict": "No adaptation", "tone": "flat", "text": reason}
    ledger = state.get("ledger") or {}
    spent, saved = float(ledger.get("spent_s") or 0.0), float(ledger.get("saved_s") or 0.0)
    net, low, high = net_interval(state)
    half = (high - low) / 2
    if spent == 0 and saved == 0:
        text = "Nothing was spent and nothing was saved yet: no training job has run."
        return {"id": "paying", "question": question, "verdict": "Nothing spent yet", "tone": "flat", "text": text}
    spread = f" ± {half:,.1f}" if half >= 0.05 else ""
    text = (
        f"Adapted drafters saved {seconds(saved)}{spread and spread + ' s'} of device time and cost {seconds(spent)}; "
        f"net {seconds(net, sign=True)} (95% interval {low:+,.1f} to {high:+,.1f} s)."
    )
    if not state.get("holdback_percent"):
        text += " The hold-back share is 0%, so savings are not measured."
    if low > 0:
        verdict, tone = "Yes", "good"
    elif high < 0:
        verdict, tone = "No, so far", "bad"
    else:
        verdict, tone = "Not proven yet", "flat"
    verdict = f"{verdict}: net {seconds(net, sign=True)}"
    return {"id": "paying", "question": question, "verdict": verdict, "tone": tone, "text": text}


def decision_title(d: dict[str, Any]) -> str:
    """'Train head on math', 'Hold', 'Recall 3f2a...'."""
    action = str(d.get("action") or "?")
    if action == "train":
        return f"Train {d.get('arm')} on {d.get('bucket')}"
    if action == "hold":
        return "Hold"
    return f"{action.capitalize()} {short(d.get('version'))}"


def _last_decision(state: dict[str, Any]) -> dict[str, Any]:
    question = "What was decided last, and why?"
    decisions = state.get("decisions") or []
    out: dict[str, Any] = {"id": "decided", "question": question, "tone": "flat"}
    if state.get("is_paused"):
        out["note"] = "Decisions are paused by an operator."
    if not decisions:
        waiting = "The controller decides at the end of every epoch, from measured traffic."
        return {**out, "verdict": "Nothing decided yet", "text": waiting}
    last = decisions[-1]
    out |= {"verdict": decision_title(last), "text": str(last.get("reason") or ""), "ts": last.get("ts")}
    out["decision_id"] = last.get("decision_id")
    acted = next((d for d in reversed(decisions) if d.get("action") in ACTED), None)
    if acted is not None and acted is last:
        if ended := _outcome(acted):
            out["text"] = f"{out['text'].rstrip('.')}{ended}."
    elif acted is not None:
        title = decision_title(acted)
        out["before"] = {
            "text": f"Before that: {title[:1].lower()}{title[1:]}{_outcome(acted)}.",
            "decision_id": acted.get("decision_id"),
        }
    trial = (state.get("rollout") or {}).get("last") or {}
    if float(trial.get("ts") or 0.0) > float((acted or {}).get("ts") or 0.0):
        out["trial"] = {"text": _trial_end(trial), "ts": trial.get("ts")}
    job = state.get("job")
    if job:
        out["tone"] = "busy"
        out["job"] = {"text": f"Training {job.get('arm')} on {job.get('bucket')} now", "since": job.get("since")}
    return out


def _outcome(d: dict[str, Any]) -> str:
    saved, cost = d.get("realised_saving_s"), d.get("realised_cost_s")
    parts = [_plain(d["outcome"])] if d.get("outcome") else []
    if saved is not None or cost:
        parts.append(f"so far saved {seconds(saved or 0.0)} for {seconds(cost or 0.0)}")
    return f" ({', '.join(parts)})" if parts else ""


def _plain(outcome: Any) -> str:
    return str(outcome).replace("_", " ")


def _trial_end(trial: dict[str, Any]) -> str:
    return (
        f"The last trial, of {short(trial.get('version'))}, was {_plain(trial.get('outcome'))}: {trial.get('reason')}"
    )


def shares(state: dict[str, Any]) -> list[dict[str, Any]]:
    """[{role, version, percent}] of requests that name no group: live, canary, hold-back; percentages sum to 100."""
    held = float(state.get("holdback_percent") or 0)
    canary = canary_of(state)
    tried = (100.0 - held) * float(canary.get("share_percent") or 0) / 100.0 if canary else 0.0
    rows = [{"role": "live", "version": state.get("version") or "", "percent": 100.0 - held - tried}]
    if canary and tried > 0:
        rows.append({"role": "canary", "version": canary["version"], "percent": tried})
    if held:
        rows.append({"role": "hold-back", "version": state.get("first_version") or "", "percent": held})
    return rows


def rollout_words(state: dict[str, Any]) -> str:
    """How the canary stands, or how the last one ended."""
    rollout = state.get("rollout") or {}
    canary = canary_of(state)
    if canary is None:
        last = rollout.get("last") or {}
        if not last:
            return "No version is on trial, and none was yet."
        return f"No version is on trial. {_trial_end(last)}"
    ratio = canary.get("ratio")
    speed = f"{100 * (ratio - 1):+.1f}% tokens per second" if ratio is not None else "no comparable requests yet"
    own, other = int(canary.get("num_canary_requests") or 0), int(canary.get("num_requests") or 0)
    drafted, needed = int(canary.get("num_drafted_rounds") or 0), int(canary.get("min_drafted_rounds") or 0)
    text = (
        f"{short(canary['version'])} is on trial against {short(canary.get('incumbent'))} with "
        f"{canary.get('share_percent')}% of adaptive requests: {speed} on {own} requests against {other - own}."
    )
    if drafted < needed:
        text += f" It drafted in {drafted} rounds so far, and is not promoted before {needed}."
    return text


def _who_serves(state: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"id": "serves", "question": "Which version serves whom?", "tone": "flat"}
    live, first = state.get("version") or "", state.get("first_version") or ""
    if not live:
        return {
            **out,
            "verdict": "No drafter",
            "text": "Requests are decoded plainly: no drafter is loaded.",
            "shares": [],
        }
    rows = shares(state)
    behind = _replicas_behind(state)
    reports = state.get("replicas") or []
    serves = "serves" if all(r.get("version") == live for r in reports) else "is to serve"
    made: dict[str, Any] = next((v for v in state.get("versions") or [] if v.get("version") == live), {})
    origin = f" ({made['arm']} on {made['bucket']})" if made.get("bucket") else ""
    percent = f"{rows[0]['percent']:.0f}%"
    tried = next((r for r in rows if r["role"] == "canary"), None)
    if live == first:
        text = f"The first drafter {short(first)} {serves} {'all but the trial' if tried else 'everybody'}; no adapted version is live."
        text += f" {short(tried['version'])} is on trial with {tried['percent']:.0f}% of requests." if tried else ""
        out["verdict"] = "The first drafter, and a trial" if tried else "The first drafter serves all"
    else:
        text = f"Adapted version {short(live)}{origin} {serves} {percent} of requests"
        out["verdict"] = f"{short(live)} serves {percent}"
        if tried:
            text += f", {short(tried['version'])} is on trial with {tried['percent']:.0f}%"
        held = next((r for r in rows if r["role"] == "hold-back"), None)
        text += f"; {held['percent']:.0f}% keep the first drafter for comparison." if held else "; nobody is held back."
    pinned = (state.get("bandit") or {}).get("pinned")
    if pinned:
        text += f" {short(pinned)} is pinned by an operator."
    if behind is not None:
        out |= {"verdict": behind["verdict"], "tone": behind["tone"]}
        text += f" {behind['text']}"
    return {**out, "text": text, "shares": rows}


def _replicas_behind(state: dict[str, Any]) -> dict[str, Any] | None:
    """How many replicas run the generation that is wanted and which refused it; None when all run it or none reports."""
    gen, reports = state.get("gen"), state.get("replicas") or []
    if gen is None:
        return None
    refused = [r for r in reports if r.get("failed_gen") == gen]
    running = [r for r in reports if r.get("gen") == gen and r not in refused]
    if len(running) == len(reports):
        return None
    tried = canary_of(state) is not None
    what = "The trial" if tried else short(state.get("version"))
    words = [f"{len(running)} of {len(reports)} replicas run {'the trial' if tried else 'it'}"]
    for r in refused:
        reason = str(r.get("failed_reason") or "no reason given").rstrip(".")
        words.append(f"replica {short(r.get('replica_id'))} refused it: {reason}")
    if (waiting := len(reports) - len(running) - len(refused)) > 0:
        words.append(f"{waiting} {'is' if waiting == 1 else 'are'} staging it")
    return {
        "verdict": f"{what} runs on {len(running)} of {len(reports)} replicas",
        "tone": "bad" if refused else "busy",
        "text": f"{'; '.join(words)}.",
    }
