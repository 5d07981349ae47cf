"""Claims of infra/web/words.py, ledger.py, decision.py and export.py."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from paceline.bandit.ledger.totals import fold_entries
from paceline.contracts import Decision, LedgerEntry, ReplicaReport
from paceline.infra.controller.snapshot import (
    BucketTraffic,
    CanaryRollout,
    GroupSums,
    IdleRollout,
    LedgerSums,
    Snapshot,
    TrialEnd,
    VersionInfo,
)
from paceline.infra.web.decision import compare, decision_page, words
from paceline.infra.web.export import as_csv
from paceline.infra.web.sections import breakdown, over_time, sections
from paceline.infra.web.words import answers, decision_title, net_interval, rollout_words, shares


def state(**values) -> Snapshot:
    base = {"ts": 1.0, "has_controller": True, "version": "v2", "first_version": "v1", "holdback_percent": 10}
    return Snapshot(**{**base, **values})


def decision(decision_id: int, action: str, **values) -> Decision:
    base = {
        "ts": 1.0, "bucket": "math", "arm": None, "version": None, "policy": "payoff", "context": {}, "reason": "pays",
        "expected_gain": 0.0, "expected_saving_s": 0.0, "expected_cost_s": 0.0, "propensity": 1.0,
    }  # fmt: skip
    return Decision(decision_id=decision_id, action=action, **{**base, **values})


def train(**values) -> Decision:
    return decision(4, "train", arm="head", **values)


HOLD = decision(5, "hold", reason="no rows", ts=30.0)


def idle(**last) -> IdleRollout:
    return IdleRollout(frozen_until={}, last=TrialEnd(**last), alpha=0.05, margin=0.05)


def version(name: str) -> VersionInfo:
    return VersionInfo(
        version=name, sha256="", num_bytes=1, drafter_type="specblock", shapes_hash="", target_version="t", parent=None,
        arm="head", bucket=None, num_train_rows=1, metrics={}, created=0.0,
    )  # fmt: skip


def ledger(spent: float, saved: float, half: float):
    totals = LedgerSums(spent_s=spent, saved_s=saved, net_s=saved - spent)
    return {"ledger": totals, "saved_interval_s": (saved - half, saved + half)}


@pytest.mark.parametrize(
    ("spent", "saved", "half", "verdict", "tone"),
    [
        (0.0, 0.0, 0.0, "Nothing spent yet", "flat"),
        (10.0, 30.0, 5.0, "Yes", "good"),
        (10.0, 12.0, 5.0, "Not proven yet", "flat"),
        (10.0, 2.0, 1.0, "No, so far", "bad"),
        (10.0, -8.0, 1.0, "No, so far", "bad"),
    ],
)
def test_verdict_is_yes_or_no_only_when_the_whole_interval_is_above_or_below_zero(spent, saved, half, verdict, tone):
    paying = answers(state(**ledger(spent, saved, half)))[0]
    assert paying["verdict"].partition(":")[0] == verdict
    assert paying["tone"] == tone
    if spent:
        assert f"{saved - spent:+.1f} s" in paying["text"] and f"{saved:.1f} s" in paying["text"].replace(
            " ± ", " s ± "
        )


@given(spent=st.floats(0, 1e6), saved=st.floats(-1e6, 1e6), half=st.floats(0, 1e5))
def test_interval_of_the_net_is_that_of_the_saving_moved_by_the_spending(spent, saved, half):
    net, low, high = net_interval(state(**ledger(spent, saved, half)))
    assert low <= net + 1e-6 and net <= high + 1e-6
    assert high - low == pytest.approx(2 * half, abs=1e-3)


def test_without_a_holdback_share_the_answer_says_that_savings_are_not_measured():
    assert "not measured" in answers(state(holdback_percent=0, **ledger(3.0, 1.0, 1.0)))[0]["text"]


def test_service_without_controller_says_that_it_does_not_adapt():
    found = answers(Snapshot(version="lookup", first_version="lookup", is_adaptive=False))
    assert [a["verdict"] for a in found[:2]] == ["No adaptation", "Nothing to decide"]
    assert "first drafter" in found[2]["verdict"]
    away = answers(Snapshot(version="v1", first_version="v1"))
    assert [a["verdict"] for a in away[:2]] == ["Not known yet", "Nothing decided yet"]


@pytest.mark.parametrize("num_classes", [0, 57, 58, 59, 80])
def test_versions_with_a_role_are_all_shown_and_the_newest_others_as_far_as_there_is_room(num_classes):
    every = [replace(version(f"v{i}"), created=float(i)) for i in range(500)]
    own = {f"class {i}": f"v{i + 100}" for i in range(num_classes)}
    found = [row["version"] for row in sections(state(versions=every, class_versions=own))["versions"]]
    roles = {"v1", "v2", *own.values()}
    assert (
        roles <= set(found) and len(found) == max(60, len(roles)) and found == sorted(found, key=lambda v: int(v[1:]))
    )
    assert set(found) - roles == {f"v{i}" for i in range(500 - max(0, 60 - len(roles)), 500)}


def test_the_policy_in_force_can_be_chosen_whoever_wrote_it():
    assert "own.rules:Thrifty" in sections(state(policy="own.rules:Thrifty"))["head"]["policies"]
    assert None not in sections(state(policy=None))["head"]["policies"]


@given(held=st.integers(0, 100), percent=st.integers(0, 90), has_canary=st.booleans())
def test_shares_sum_to_all_requests(held, percent, has_canary):
    rollout = CanaryRollout(version="v3", share_percent=percent) if has_canary else idle()
    rows = shares(state(holdback_percent=held, rollout=rollout))
    assert sum(r["percent"] for r in rows) == pytest.approx(100.0)
    assert all(r["percent"] >= 0 for r in rows)
    tried = [r for r in rows if r["role"] == "canary"]
    assert bool(tried) == (has_canary and percent > 0 and held < 100)


TRAFFIC = st.dictionaries(st.sampled_from(["math", "code", "tools"]), st.integers(0, 1000))


@given(held=st.integers(0, 100), tokens=TRAFFIC, own=st.sets(st.sampled_from(["math", "code", "gone"])), scope=st.sampled_from(["", "math", "code"]))  # fmt: skip
def test_classes_with_versions_of_their_own_share_by_their_latest_traffic(held, tokens, own, scope):
    rest = {"rounds": 1, "acceptance_length": None, "acceptance_rate": None, "tokens_per_s": None}
    buckets = {b: BucketTraffic(recent={"adaptive": GroupSums(tokens=n, **rest)}) for b, n in tokens.items()}
    rollout = CanaryRollout(version="v9", share_percent=10, scope=scope)
    values = {"class_versions": {b: f"v-{b}" for b in own}, "buckets": buckets, "rollout": rollout}
    rows = shares(state(holdback_percent=held, **values))
    assert sum(r["percent"] for r in rows) == pytest.approx(100.0) and min(r["percent"] for r in rows) >= -1e-9
    whole, total = (100.0 - held) / 100.0, sum(tokens.values())
    by_class = {r["label"]: r["percent"] for r in rows if r["role"] == "class"}
    for bucket in own:
        tried = 0.9 if bucket == scope else 1.0
        expected = 100.0 * whole * tokens.get(bucket, 0) / total * tried if total else 0.0
        assert by_class.get(bucket, 0.0) == pytest.approx(expected)


def test_a_pause_of_traffic_changes_no_shares():
    sums = {b: GroupSums(tokens=n, rounds=1, acceptance_length=None, acceptance_rate=None, tokens_per_s=None) for b, n in (("math", 300), ("code", 100))}  # fmt: skip
    for is_idle in (False, True):
        buckets = {b: BucketTraffic(adaptive=s, recent={} if is_idle else {"adaptive": s}) for b, s in sums.items()}
        rows = shares(state(holdback_percent=20, class_versions={"math": "v-math"}, buckets=buckets))
        assert [(r["label"], r["percent"]) for r in rows] == [("live", 20.0), ("math", 60.0), ("hold-back", 20.0)]


def test_canary_is_told_with_its_evidence_and_its_end():
    trial = CanaryRollout(version="v3", incumbent="v2", share_percent=10, ratio=1.12, num_requests=60, num_canary_requests=8)  # fmt: skip
    text = rollout_words(state(rollout=trial))
    assert "+12.0% tokens per second on 8 requests against 52" in text and "drafted" not in text
    waiting = replace(trial, num_drafted_rounds=3, min_drafted_rounds=16)
    assert "drafted in 3 rounds so far, and is not promoted before 16" in rollout_words(state(rollout=waiting))
    assert rollout_words(state(rollout=replace(waiting, num_drafted_rounds=16))) == text
    ended = idle(version="v3", outcome="rolled_back", reason="it is slower")
    assert "rolled back: it is slower" in rollout_words(state(rollout=ended))
    assert "v3" in answers(state(rollout=trial))[2]["text"]


def test_last_decision_is_shown_with_its_reason_and_a_hold_names_the_action_before():
    ended = train(outcome="accepted", realised_saving_s=9.0, realised_cost_s=3.0)
    found = answers(state(decisions=[ended, HOLD]))[1]
    assert (found["verdict"], found["text"], found["decision_id"]) == ("Hold", "no rows", 5)
    assert "train head on math (accepted, so far saved 9.0 s for 3.0 s)" in found["before"]["text"]
    assert found["before"]["decision_id"] == 4
    assert decision_title(ended) == "Train head on math"
    named = answers(state(decisions=[replace(ended, bucket="SQL", arm="LoRA"), HOLD]))[1]
    assert "Before that: train LoRA on SQL (" in named["before"]["text"], "names keep their capitals"
    assert "decided: train LoRA on SQL." in words(replace(ended, bucket="SQL", arm="LoRA"), [])[0]


def test_an_action_that_is_the_last_decision_is_shown_with_its_outcome():
    assert answers(state(decisions=[train(reason="It pays.")]))[1]["text"] == "It pays."
    found = answers(state(decisions=[train(reason="It pays.", outcome="rolled_back", realised_cost_s=3.0)]))[1]
    assert found["text"] == "It pays (rolled back, so far saved 0.0 s for 3.0 s)." and "before" not in found


@pytest.mark.parametrize("has_hold", [False, True])
def test_a_trial_that_ended_after_the_last_action_is_told(has_hold):
    decisions = [train(ts=10.0), HOLD] if has_hold else [train(ts=10.0)]
    last = {"version": "v3", "outcome": "rolled_back", "reason": "it is slower", "ts": 20.0}
    found = answers(state(decisions=decisions, rollout=idle(**last)))[1]
    assert found["trial"] == {"text": "The last trial, of v3, was rolled back: it is slower", "ts": 20.0}
    for stale in ({**last, "ts": 9.0}, {}):
        assert "trial" not in answers(state(decisions=decisions, rollout=idle(**stale)))[1]


def replica(name: str, gen: int, version: str, failed_gen: int | None = None, reason: str = "") -> ReplicaReport:
    return ReplicaReport(
        replica_id=name, gen=gen, version=version, slots={}, failed_gen=failed_gen, failed_reason=reason, swap_pause_ms=[], ts=1.0,
    )  # fmt: skip


def test_who_serves_counts_the_replicas_that_run_what_is_wanted():
    done, late = replica("a", 3, "v2"), replica("b", 2, "v1")
    whole = answers(state(gen=3, replicas=[done, replace(done, replica_id="b")]))[2]
    assert whole["verdict"] == "v2 serves 90%" and whole["tone"] == "flat" and "replicas" not in whole["text"]
    staging = answers(state(gen=3, replicas=[done, late]))[2]
    assert (staging["verdict"], staging["tone"]) == ("v2 runs on 1 of 2 replicas", "busy")
    assert "v2 is to serve 90%" in staging["text"]
    assert staging["text"].endswith(" 1 of 2 replicas run it; 1 is staging it.")
    none = answers(state(gen=3, version="v1", replicas=[late]))[2]
    assert (none["verdict"], none["tone"]) == ("v1 runs on 0 of 1 replicas", "busy"), "the first drafter, another share"
    assert "v1 serves everybody" in none["text"]


def test_who_serves_names_the_replica_that_refused_and_its_reason():
    refused = replica("b", 2, "v1", failed_gen=3, reason="weights must be finite")
    found = answers(state(gen=3, replicas=[replica("a", 3, "v2"), refused, replica("c", 2, "v1", failed_gen=2)]))[2]
    assert (found["verdict"], found["tone"]) == ("v2 runs on 1 of 3 replicas", "bad")
    assert found["text"].endswith(
        " 1 of 3 replicas run it; replica b refused it: weights must be finite; 1 is staging it."
    )
    nan = replica("a", 3, "v2", failed_gen=3, reason="failed while serving: NaN")
    broken = answers(state(gen=3, replicas=[nan]))[2]
    assert broken["tone"] == "bad" and "0 of 1 replicas" in broken["verdict"]
    trial = CanaryRollout(version="v3", share_percent=10)
    both = answers(state(gen=3, rollout=trial, replicas=[replica("b", 2, "v2", failed_gen=3, reason="NaN.")]))[2]
    assert both["verdict"] == "The trial runs on 0 of 1 replicas"
    assert "v2 serves 81%" in both["text"] and both["text"].endswith("run the trial; replica b refused it: NaN.")


def test_who_serves_names_the_classes_with_their_own_version_and_where_it_does_not_serve():
    refused = replace(replica("b", 3, "v2"), refused={"v5": "weights must be finite."})
    own = {"class_versions": {"math": "v5", "~class-2": "v1"}}
    found = answers(state(gen=3, replicas=[replica("a", 3, "v2"), refused], **own))[2]
    assert "Classes with a version of their own: math by v5, ~class-2 by v1." in found["text"]
    assert (
        answers(state(gen=3, replicas=[replica("a", 3, "v2")], **own))[2]["verdict"] == "2 classes: their own drafter"
    )
    assert found["text"].endswith("Replica b does not serve v5: weights must be finite.")
    trial = CanaryRollout(version="v3", share_percent=10, scope="math")
    assert "v3" not in answers(state(gen=3, rollout=trial))[2]["text"], "its share is one of a class, not of all"
    assert "10% of adaptive requests of math" in rollout_words(state(gen=3, rollout=trial))


ENTRIES = st.lists(
    st.tuples(st.floats(0, 1e4), st.sampled_from(["training", "shadow", "saving"]), st.floats(-50, 50), st.sampled_from(["a", "b"])),
    max_size=60,
)  # fmt: skip


@given(ENTRIES, st.floats(0, 100), st.floats(0, 100), st.integers(1, 20))
def test_ledger_lines_end_at_the_totals_whatever_was_trimmed(rows, spent_before, saved_before, num_points):
    entries = [
        LedgerEntry(entry_id=str(i), ts=ts, kind=k, seconds=s, bucket=b, version=None)
        for i, (ts, k, s, b) in enumerate(rows)
    ]
    spent = spent_before + sum(e.seconds for e in entries if e.kind != "saving")
    saved = saved_before + sum(e.seconds for e in entries if e.kind == "saving")
    lines = over_time(entries, LedgerSums(spent_s=spent, saved_s=saved), num_points)
    assert len(lines["ts"]) <= num_points + 1
    assert lines["ts"] == sorted(lines["ts"])
    if entries:
        assert lines["spent_s"][-1] == pytest.approx(spent, abs=1e-3)
        assert lines["net_s"][-1] == pytest.approx(saved - spent, abs=1e-3)
    split = {r["name"]: r for r in breakdown(fold_entries(entries).rows(), "bucket")}
    assert set(split) == {e.bucket for e in entries}
    for bucket, r in split.items():
        own = sum(e.seconds for e in entries if e.kind == "saving" and e.bucket == bucket)
        assert r["saved_s"] == pytest.approx(own, abs=1e-6)


def test_decision_page_knows_its_entries_and_neighbours_and_nothing_of_unknown_ids():
    d = decision(
        7, "train", ts=100.0, arm="head", version="v2", expected_saving_s=10.0, expected_cost_s=4.0, expected_gain=0.2,
        realised_saving_s=1.0, realised_cost_s=3.5, realised_gain=0.1, outcome="accepted", context={"horizon_s": 60.0, "base_version": "v1"},
    )  # fmt: skip
    mine = LedgerEntry(entry_id="d7:training:x", ts=1.0, kind="training", seconds=3.5, bucket="math", version=None)
    entries = [mine, replace(mine, entry_id="d70:training:x")]
    versions = [version(v) for v in ("v1", "v2", "v3")]
    full = state(decisions=[replace(d, decision_id=6), d], ledger_entries=entries, versions=versions)
    page = decision_page(full, 7)
    assert page is not None
    assert page["entries"] == [mine] and (page["previous"], page["next"]) == (6, None)
    assert [v.version for v in page["versions"]] == ["v1", "v2"]
    text = " ".join(page["words"])
    assert "pays" in text and "net +6.0 s" in text and "over the next 60 s" in text
    assert "has not paid for itself (net -2.5 s)" in text
    assert decision_page(full, 99) is None
    assert compare(d)[2] == {"what": "net, device-seconds", "expected": 6.0, "realised": -2.5}


def test_a_decisions_page_says_who_decided_and_names_the_class_once():
    def said(action: str, **values) -> str:
        return words(decision(8, action, version="v2", **values), [])[0].split(" UTC ")[1]

    ticked = {"epoch": 3}
    assert said("recall", context=ticked) == "the policy 'payoff' decided: recall v2 for math."
    assert said("rollback", context=ticked) == "the policy 'payoff' decided: rollback v2 for math."
    assert said("hold", context=ticked) == "the policy 'payoff' decided: hold for traffic bucket 'math'."
    assert said("pin", bucket="") == "an operator decided: pin v2."
    assert said("rollback", bucket="", reason="rolled back from v3 to v2 by the operator") == "it was decided, whatever the policy thinks: rollback v2."  # fmt: skip


@pytest.mark.parametrize(
    "outcome", [None, "accepted", "kept", "rejected", "learning", "failed", "stopped", "something {new}"]
)
def test_every_outcome_of_a_job_has_a_sentence(outcome):
    said = words(train(outcome=outcome), [])
    assert said[-1].endswith(".") and ("None" not in said[-1])


@given(st.text(max_size=30))
def test_csv_holds_every_text_and_runs_none_as_a_formula(text):
    body = as_csv([{"a": text, "b": -1.5}]).decode()
    (row,) = csv.DictReader(io.StringIO(body, newline=""))
    assert row["a"].removeprefix("'") == text.removeprefix("'")
    assert row["a"][:1] not in ("=", "+", "-", "@")
    assert row["b"] == "-1.5"
