"""Words: is adaptation paying, what was decided last and why, who is served by what, in sentences for operators.

Sentences and verdicts are made here, from the snapshot, so that they can be tested; pages only show them. Text from
clients (bucket names) and from policies (reasons) stays plain text everywhere.
"""

from __future__ import annotations

from typing import Any

from paceline.contracts import Decision, ReplicaReport
from paceline.infra.controller.snapshot import Snapshot, Trial, TrialEnd

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


def net_interval(state: Snapshot) -> tuple[float, float, float]:
    """(net, low, high) device-seconds, 95% interval: spending is metered, saving is estimated with an error."""
    net, saved, (low, high) = state.ledger.net_s, state.ledger.saved_s, state.saved_interval_s
    return net, net + low - saved, net + high - saved


def answers(state: Snapshot) -> list[dict[str, Any]]:
    """Three questions, each with a verdict (a few words), a sentence and what the page colours it by (tone)."""
    return [_is_it_paying(state), _last_decision(state), _who_serves(state)]


def _is_it_paying(state: Snapshot) -> dict[str, Any]:
    out: dict[str, Any] = {"id": "paying", "question": "Is adaptation paying?", "tone": "flat"}
    if not state.is_adaptive:
        text = "This service does not adapt: its drafter cannot be trained, or it has no Redis."
        return {**out, "verdict": "No adaptation", "text": text}
    if state.ts is None:
        return {**out, "verdict": "Not known yet", "text": "The controller has not answered yet."}
    spent, saved = state.ledger.spent_s, state.ledger.saved_s
    net, low, high = net_interval(state)
    half = (high - low) / 2
    if spent == 0 and saved == 0:
        text = "Nothing was spent and nothing was saved yet: no training job has ended."
        return {**out, "verdict": "Nothing spent yet", "text": text}
    spread = f" ± {half:,.1f} s" if half >= 0.05 else ""
    text = (
        f"Adapted drafters saved {seconds(saved)}{spread} of device time and cost {seconds(spent)}; "
        f"net {seconds(net, sign=True)} (95% interval {low:+,.1f} to {high:+,.1f} s)."
    )
    if not state.holdback_percent:
        text += " The hold-back share is 0%, so savings are not measured."
    verdict, tone = "Not proven yet", "flat"
    if low > 0:
        verdict, tone = "Yes", "good"
    elif high < 0:
        verdict, tone = "No, so far", "bad"
    return {**out, "verdict": f"{verdict}: net {seconds(net, sign=True)}", "tone": tone, "text": text}


def decision_title(d: Decision) -> str:
    """'Train head on math', 'Hold', 'Recall 3f2a... for math'."""
    if d.action == "train":
        return f"Train {d.arm} on {d.bucket}"
    if d.action == "hold":
        return "Hold"
    return f"{d.action.capitalize()} {short(d.version)}{f' for {d.bucket}' if d.bucket else ''}"


def within(title: str) -> str:
    """A title within a sentence; names keep their capitals."""
    return f"{title[:1].lower()}{title[1:]}"


def _last_decision(state: Snapshot) -> dict[str, Any]:
    question = "What was decided last, and why?"
    decisions = state.decisions
    out: dict[str, Any] = {"id": "decided", "question": question, "tone": "flat"}
    if state.is_paused:
        out["note"] = "Decisions are paused by an operator."
    if not state.is_adaptive:
        return {**out, "verdict": "Nothing to decide", "text": "There is no controller where nothing adapts."}
    if not decisions:
        waiting = "The controller decides at the end of every epoch, from measured traffic."
        return {**out, "verdict": "Nothing decided yet", "text": waiting}
    last = decisions[-1]
    out |= {"verdict": decision_title(last), "text": last.reason, "ts": last.ts, "decision_id": last.decision_id}
    acted = next((d for d in reversed(decisions) if d.action in ACTED), None)
    if acted is not None and acted is last:
        if ended := _outcome(acted):
            out["text"] = f"{out['text'].rstrip('.')}{ended}."
    elif acted is not None:
        out["before"] = {
            "text": f"Before that: {within(decision_title(acted))}{_outcome(acted)}.",
            "decision_id": acted.decision_id,
        }
    trial = state.rollout.last if state.rollout is not None else TrialEnd()
    if trial.ts > (acted.ts if acted is not None else 0.0):
        out["trial"] = {"text": _trial_end(trial), "ts": trial.ts}
    if state.job is not None:
        out["tone"] = "busy"
        out["job"] = {"text": f"Training {state.job.arm} on {state.job.bucket} now", "since": state.job.since}
    return out


def _outcome(d: Decision) -> str:
    saved, cost = d.realised_saving_s, d.realised_cost_s
    parts = [_plain(d.outcome)] if d.outcome else []
    if saved is not None or cost:
        parts.append(f"so far saved {seconds(saved or 0.0)} for {seconds(cost or 0.0)}")
    return f" ({', '.join(parts)})" if parts else ""


def _plain(outcome: str) -> str:
    return outcome.replace("_", " ")


def _trial_end(trial: TrialEnd) -> str:
    return f"The last trial, of {short(trial.version)}, was {_plain(trial.outcome)}: {trial.reason}"


def shares(state: Snapshot) -> list[dict[str, Any]]:
    """[{role, version, percent, label}] of requests that name no group, by the latest traffic, or all where there is none now;
    percentages sum to 100.

    Roles: live (classes without a version of their own), class (`label` names it), canary, hold-back.
    """
    held, canary = float(state.holdback_percent), state.canary
    tokens = {name: sum(sums.tokens for sums in traffic.recent.values()) for name, traffic in state.buckets.items()}
    if not any(tokens.values()):
        tokens = {
            name: sum(sums.tokens for sums in traffic.groups().values()) for name, traffic in state.buckets.items()
        }
    part = {name: (100.0 - held) * n / (sum(tokens.values()) or 1) for name, n in tokens.items()}
    own = {name: part[name] for name in sorted(state.class_versions) if part.get(name)}
    live, tried = 100.0 - held - sum(own.values()), 0.0
    if canary is not None:
        whole = own.get(canary.scope, part.get(canary.scope, 0.0)) if canary.scope else live
        tried = whole * canary.share_percent / 100.0
        if canary.scope in own:
            own[canary.scope] -= tried
        else:
            live -= tried
    rows = [{"role": "live", "version": state.version, "percent": max(0.0, live), "label": "live"}]
    rows += [{"role": "class", "version": state.class_versions[b], "percent": p, "label": b} for b, p in own.items()]
    if canary is not None and tried > 0:
        rows.append({"role": "canary", "version": canary.version, "percent": tried, "label": "canary"})
    if held:
        rows.append({"role": "hold-back", "version": state.first_version, "percent": held, "label": "hold-back"})
    return rows


def rollout_words(state: Snapshot) -> str:
    """How canary and guards stand, or how the last of them ended."""
    canary, rollout = state.canary, state.rollout
    if rollout is None:
        return "No version is on trial, and none was yet."
    guards = [
        f"{short(g.version)} serves {g.scope} under guard: {_speed(g)} against the hold-back's {short(g.incumbent)} on "
        f"{g.num_canary_requests} requests against {g.num_requests - g.num_canary_requests}."
        for g in rollout.guards
    ]
    if canary is None:
        ended = _trial_end(rollout.last) if rollout.last.version else ""
        idle = f"No version is on trial{', and none was yet' if not ended and not guards else ''}."
        return " ".join([*guards, idle, ended]).rstrip()
    text = (
        f"{short(canary.version)} is on trial against {short(canary.incumbent)} with {canary.share_percent}% of "
        f"adaptive requests{f' of {canary.scope}' if canary.scope else ''}: {_speed(canary)} on "
        f"{canary.num_canary_requests} requests against {canary.num_requests - canary.num_canary_requests}."
    )
    drafted, needed = canary.num_drafted_rounds, canary.min_drafted_rounds
    if drafted < needed:
        text += f" It drafted in {drafted} rounds so far, and is not promoted before {needed}."
    return " ".join([*guards, text])


def _speed(trial: Trial) -> str:
    return (
        f"{100 * (trial.ratio - 1):+.1f}% tokens per second"
        if trial.ratio is not None
        else "no comparable requests yet"
    )


def _who_serves(state: Snapshot) -> dict[str, Any]:
    out: dict[str, Any] = {"id": "serves", "question": "Which version serves whom?", "tone": "flat"}
    if not state.version:
        text = "Requests are decoded plainly: no drafter is loaded."
        return {**out, "verdict": "No drafter", "text": text, "shares": []}
    rows = shares(state)
    own = sorted(state.class_versions)
    if own:
        out["verdict"] = (
            f"{own[0] if len(own) == 1 else f'{len(own)} classes'}: {'its' if len(own) == 1 else 'their'} own drafter"
        )
        text = f"{short(state.version)} {_serves(state)} every class without a version of its own."
        if (tried := _share_of(rows, "canary")) is not None:
            text += f" {short(tried['version'])} is on trial with {tried['percent']:.0f}% of requests."
    elif state.version == state.first_version:
        out["verdict"], text = _first_serves(state, rows)
    else:
        out["verdict"], text = _adapted_serves(state, rows)
    if state.bandit is not None and state.bandit.pinned:
        text += f" {short(state.bandit.pinned)} is pinned by an operator."
    if state.class_versions:
        text += f" {_classes(state)}"
    if (behind := _replicas_behind(state)) is not None:
        out |= {"verdict": behind["verdict"], "tone": behind["tone"]}
        text += f" {behind['text']}"
    return {**out, "text": text, "shares": rows}


def _classes(state: Snapshot) -> str:
    """Which classes have versions of their own, and where these do not serve."""
    own = ", ".join(f"{bucket} by {short(version)}" for bucket, version in sorted(state.class_versions.items()))
    text = f"Classes with a version of their own: {own}."
    for r in sorted(state.replicas, key=lambda r: r.replica_id):
        for version, reason in sorted(r.refused.items()):
            text += f" Replica {short(r.replica_id)} does not serve {short(version)}: {reason.rstrip('.')}."
    return text


def _serves(state: Snapshot) -> str:
    return "serves" if all(r.version == state.version for r in state.replicas) else "is to serve"


def _share_of(rows: list[dict[str, Any]], role: str) -> dict[str, Any] | None:
    return next((r for r in rows if r["role"] == role), None)


def _first_serves(state: Snapshot, rows: list[dict[str, Any]]) -> tuple[str, str]:
    """(verdict, text) while the first drafter is live."""
    start = f"The first drafter {short(state.version)} {_serves(state)}"
    tried = _share_of(rows, "canary")
    if tried is None:
        return "The first drafter serves all", f"{start} everybody; no adapted version is live."
    trial = f"{short(tried['version'])} is on trial with {tried['percent']:.0f}% of requests."
    return "The first drafter, and a trial", f"{start} all but the trial; no adapted version is live. {trial}"


def _adapted_serves(state: Snapshot, rows: list[dict[str, Any]]) -> tuple[str, str]:
    """(verdict, text) while an adapted version is live."""
    live, percent = short(state.version), f"{rows[0]['percent']:.0f}%"
    made = next((v for v in state.versions if v.version == state.version), None)
    origin = f" ({made.arm} on {made.bucket})" if made is not None and made.bucket else ""
    text = f"Adapted version {live}{origin} {_serves(state)} {percent} of requests"
    if (tried := _share_of(rows, "canary")) is not None:
        text += f", {short(tried['version'])} is on trial with {tried['percent']:.0f}%"
    held = _share_of(rows, "hold-back")
    text += f"; {held['percent']:.0f}% keep the first drafter for comparison." if held else "; nobody is held back."
    return f"{live} serves {percent}", text


def _replicas_behind(state: Snapshot) -> dict[str, Any] | None:
    """How many replicas run the generation that is wanted and which refused it; None when all run it or none reports."""
    gen, reports = state.gen, state.replicas
    refused = [r for r in reports if r.failed_gen == gen]
    num_running = sum(r.runs(gen) for r in reports)
    if num_running == len(reports):
        return None
    tried = state.canary is not None
    words = [f"{num_running} of {len(reports)} replicas run {'the trial' if tried else 'it'}", *map(_refusal, refused)]
    if (waiting := len(reports) - num_running - len(refused)) > 0:
        words.append(f"{waiting} {'is' if waiting == 1 else 'are'} staging it")
    what = "The trial" if tried else short(state.version)
    return {
        "verdict": f"{what} runs on {num_running} of {len(reports)} replicas",
        "tone": "bad" if refused else "busy",
        "text": f"{'; '.join(words)}.",
    }


def _refusal(report: ReplicaReport) -> str:
    return f"replica {short(report.replica_id)} refused it: {(report.failed_reason or 'no reason given').rstrip('.')}"
