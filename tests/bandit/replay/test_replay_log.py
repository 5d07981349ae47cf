"""A log is read whole or refused in one sentence; replays of it agree with the service that wrote it."""

import json

import msgspec
import numpy as np
import pytest

from paceline.bandit.controller.decision_log import LoggedJob, parse_log, read_log
from paceline.bandit.replay.gain_fit import MIN_JOBS, fit_gains
from paceline.bandit.replay.logged import logged_outcomes, prepare, replay_logged
from paceline.bandit.replay.outcomes import FIRST, REFUSED, TrainOrder, real_truth
from paceline.bandit.replay.scenario import Scenario
from paceline.bandit.replay.simulate import draw_world, policy_config
from paceline.bandit.replay.world import World, record
from paceline.contracts import ArmSpec, ShadowScore, TrainResult
from paceline.errors import ConfigError

FULL = ArmSpec(name="full", parameters="full", num_rows=4000)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """decisions.jsonl of a simulated service under the pay-off rule, and its true result."""
    cell = Scenario(name="x", regime_s=600.0, duration_s=2400.0, recurrence="cycle", train_cost=0.3)
    traffic, outcomes = draw_world(cell, 3)
    world = World(traffic, outcomes, policy_config("payoff", {"epoch_s": 30.0}, 3), seed=3)
    path = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    path.write_bytes(record(world))
    return path, world


def test_everything_that_was_logged_is_read(served):
    path, world = served
    log = read_log(path)
    assert len(log.epochs) == pytest.approx(2400 / 30, abs=2)
    assert len(log.jobs) == world.num_jobs - (world.job is not None) >= 2
    accepted = [j for j in log.jobs if j.result.status == "accepted"]
    assert len(accepted) == world.num_accepted
    assert all(j.arm.num_rows > 0 and j.bucket in log.shadow for j in accepted)


def test_replaying_the_logged_policy_gives_about_what_the_service_got(served):
    path, world = served
    service = prepare(read_log(path), "log")
    runs = [replay_logged(service, "payoff", {}, seed) for seed in range(4)]
    assert np.mean([r.never_s for r in runs]) == pytest.approx(world.never_s, rel=0.05)
    # the log's own gain model stands in for jobs at other moments
    assert 100 * np.mean([r.net_share for r in runs]) == pytest.approx(100 * world.net_s / world.never_s, abs=6.0)
    assert replay_logged(service, "never", {}, 0).net_s == pytest.approx(0.0, abs=1e-6)


def test_an_epoch_of_a_pause_is_as_long_in_the_replay_as_it_was(served):
    log = read_log(served[0])
    usual = prepare(log, "log").traffic
    paused = log.epochs[20:40]
    line = msgspec.structs.replace(paused[0], end=paused[-1].end, cells=[c for e in paused for c in e.cells])
    found = prepare(msgspec.structs.replace(log, epochs=[*log.epochs[:20], line, *log.epochs[40:]]), "log").traffic
    assert found.tokens.sum() == pytest.approx(usual.tokens.sum())
    assert found.tokens.sum(1).max() <= usual.tokens.sum(1).max() * 1.01
    assert found.tokens[20:40].sum() == pytest.approx(usual.tokens[20:40].sum())


def test_a_job_that_the_log_holds_is_replayed_as_it_went(served):
    path, _ = served
    log = read_log(path)
    run = replay_logged(prepare(log, "log"), "payoff", {}, 0)
    ends = ("accepted", "rejected", "learning")
    first = next(e for e in run.events if e["action"] in ends)
    assert first["reason"].startswith("as logged")
    logged = next(j for j in log.jobs if j.bucket == first["bucket"])
    assert (logged.result.version or logged.result.status) in first["reason"]


def test_a_burst_of_the_log_reads_as_many_rows_as_it_did_and_leaves_its_learner_behind(served):
    service = prepare(read_log(served[0]), "log")
    whole = service.log.jobs[0]
    part = msgspec.structs.replace(
        whole.result, status="learning", version=None, num_rows=500, num_rows_before=900, log_evidence=1.5
    )
    job = msgspec.structs.replace(whole, result=part)
    outcomes = logged_outcomes(service, 0)
    order = TrainOrder(
        step=3, domain=service.traffic.labels.index(job.bucket), bucket=job.bucket, arm=job.arm, base=FIRST,
        rows=job.arm.num_rows, rows_per_request=100.0, time_limit_s=1e6, decision_id=1,
    )  # fmt: skip
    outcomes.jobs = [job]
    truth = outcomes.train(order)
    assert (truth.status, truth.num_rows, truth.num_rows_before, truth.log_evidence) == ("learning", 500, 900, 1.5)
    assert truth.version is None and order.base == job.base_version == FIRST
    assert truth.num_requests == part.num_requests and truth.seen_gain == part.candidate.gain_mean
    again = outcomes.train(order)  # the log has no other
    assert again.num_rows_before == 1400
    outcomes.jobs = [job, msgspec.structs.replace(job, result=msgspec.structs.replace(part, status="rejected"))]
    outcomes.used.clear()
    assert [outcomes.train(order).status for _ in range(2)] == ["learning", "rejected"]
    assert outcomes.train(order).num_rows_before == 0, "a rejected learner begins again"


def test_scores_of_a_snapshot_that_is_no_version_are_of_no_version():
    def scores(version):
        score = ShadowScore(
            version=version, acceptance_length=2.0, num_requests=9, num_tokens=90, gain_mean=0.1, gain_lower=0.0
        )
        return score, {"code": [score, msgspec.structs.replace(score, version="base")]}

    for status, names in (("learning", [REFUSED, "v0"]), ("accepted", ["v7", "v0"])):
        candidate, elsewhere = scores("snapshot")
        result = TrainResult(
            job_id="1", status=status, version="snapshot", reason="", train_s=1.0, shadow_s=0.0, candidate=candidate,
            elsewhere=elsewhere,
        )  # fmt: skip
        truth = real_truth(result, {"snapshot": "v7", "base": "v0"})
        assert [s.version for s in truth.elsewhere["code"]] == names
        assert truth.version == ("v7" if status == "accepted" else None)


def test_replays_of_a_log_repeat_by_seed_and_have_a_plan_that_pays(served):
    service = prepare(read_log(served[0]), "log")
    one, two = (replay_logged(service, "payoff", {}, 7) for _ in range(2))
    assert msgspec.to_builtins(one) == msgspec.to_builtins(two)
    assert replay_logged(service, "oracle", {}, 7).net_s > 0


def test_a_torn_last_line_is_left_out_and_a_damaged_one_is_named(served, tmp_path):
    data = served[0].read_bytes()
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(data + b'{"kind": "feedback", "sta')
    assert len(read_log(torn).epochs) == len(read_log(served[0]).epochs)
    lines = data.splitlines(keepends=True)
    damaged = tmp_path / "damaged.jsonl"
    for line in (b'{"kind": "feedback", "start": "soon"}\n', b'{"kind": "note", "a": ' + b"[" * 200_000 + b"\n"):
        damaged.write_bytes(b"".join([*lines[:2], line, *lines[2:]]))
        with pytest.raises(ConfigError, match="line 3 is damaged"):
            read_log(damaged)


@pytest.mark.parametrize("first", [b'{"prompt": "a"}', b"[1]", b"7"])
def test_lines_of_another_kind_are_no_decision_log(served, tmp_path, first):
    other = tmp_path / "prompts.jsonl"
    other.write_bytes(first + b"\n" + served[0].read_bytes())
    with pytest.raises(ConfigError, match=r"prompts\.jsonl is no decision log: its first line says no kind"):
        read_log(other)


def _lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def _log_of(lines):
    return parse_log("".join(json.dumps(line) + "\n" for line in lines).encode(), "log")


def test_lines_that_stand_in_the_log_twice_count_once(served):
    lines = _lines(served[0])
    once, overlapping = _log_of(lines), _log_of([*lines, *lines[len(lines) // 2 :]])
    begun = {"kind": "note", "text": "controller started", "commit": 0}
    for twice in (overlapping, _log_of([begun, *lines, begun, *lines])):
        assert msgspec.structs.replace(twice, digest="") == msgspec.structs.replace(once, digest="")


def test_a_service_that_lost_its_state_and_numbers_anew_overwrites_nothing(served):
    lines = _lines(served[0])
    begun = {"kind": "note", "text": "controller started", "commit": 0}
    both = _log_of([begun | {"log_id": "1-0"}, *lines, begun | {"log_id": "2-0"}, *lines])
    assert len(both.decisions) == 2 * len(_log_of(lines).decisions)


def test_entries_of_a_state_that_is_lost_count_for_nothing(served):
    """A service that goes back to an older state gives their numbers again; its first word says how many entries that has."""
    lines = _lines(served[0])
    entries = [i for i, line in enumerate(lines) if "entry_id" in line]
    for number, i in enumerate(entries, 1):
        lines[i]["number"] = number
    at = entries[len(entries) // 2]
    lost = [
        line | {"entry_id": f"lost-{i}", "number": len(entries) // 2 + 1 + i, "seconds": 1e6}
        for i, line in enumerate([lines[at]] * 3)
    ]
    back = {"kind": "note", "text": "controller started", "commit": 7, "num_booked": len(entries) // 2}
    whole = _log_of(lines).entries
    for told in ([], [back]):
        found = _log_of([*lines[:at], *lost, *told, *lines[at:]]).entries
        assert found == whole
    assert _log_of([*lines[:at], *lost, back]).entries == whole[: len(entries) // 2]


NAN = float("nan")


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("feedback", {"end": 0.0}, "end must be after start"),
        ("feedback", {"batch_size": NAN}, r"\$\.batch_size"),
        ("feedback", {"num_replicas": -1}, r"\$\.num_replicas"),
        ("cell", {"device_s": NAN}, r"\$\.cells\[0\]\.device_s"),
        ("cell", {"num_tokens": -5.0}, r"\$\.cells\[0\]\.num_tokens"),
        ("cell", {"kept": float("inf")}, r"\$\.cells\[0\]\.kept"),
        ("cell", {"drafted_rounds": 5.0, "kept": 0.0}, "kept must be > 0 in 5 rounds with a draft"),
        ("decision", {"ts": NAN}, "ts must be a finite number"),
        ("decision", {"action": "train", "context": {}}, "context must name the arm of a job"),
        ("decision", {"context": {"belief": "x"}}, r"\$\.belief"),
        ("decision", {"context": {"belief": {"bucket": "b"}}}, "`learned_rows`"),
        ("ledger", {"seconds": NAN}, "seconds must be a finite number"),
        ("job", {"train_s": -5.0}, "seconds and acceptance lengths of a job"),
    ],
)
def test_a_line_with_what_cannot_be_is_named_with_what_is_wrong(served, kind, change, message):
    lines = _lines(served[0])
    wanted = {"cell": "feedback"}.get(kind, kind)
    number = next(i for i, x in enumerate(lines) if x["kind"] == wanted or (kind == "ledger" and "entry_id" in x))
    (lines[number]["cells"][0] if kind == "cell" else lines[number]).update(change)
    with pytest.raises(ConfigError, match=rf"line {number + 1} is damaged \(.*{message}") as caught:
        _log_of(lines)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("gap_s", [3e6, 1e12])
def test_a_log_that_is_too_long_says_what_to_do(served, gap_s):
    log = read_log(served[0])
    late = msgspec.structs.replace(log.epochs[-1], start=log.epochs[-1].start + gap_s, end=log.epochs[-1].end + gap_s)
    with pytest.raises(ConfigError, match=r"log must span at most 23\.1 days, got .*; keep its newest lines"):
        prepare(msgspec.structs.replace(log, epochs=[*log.epochs, late]), "log")


def test_a_log_that_served_nothing_is_refused(served):
    log = read_log(served[0])

    def without(**change):
        cells = [[msgspec.structs.replace(c, **change) for c in e.cells] for e in log.epochs]
        return [msgspec.structs.replace(e, cells=own) for e, own in zip(log.epochs, cells, strict=True)]

    nothing = [msgspec.structs.replace(e, cells=[]) for e in log.epochs]
    for epochs in (nothing, without(num_tokens=0.0), without(device_s=0.0, drafted_s=0.0)):
        with pytest.raises(ConfigError, match="log must hold tokens and the device-seconds that they took"):
            prepare(msgspec.structs.replace(log, epochs=epochs), "log")


PLAIN_S = 0.004
"""Device-seconds of a round without a draft."""


def _undrafted(epoch):
    """The epoch as the engine serves it where drafting does not pay: a token a round."""
    return msgspec.structs.replace(
        epoch,
        cells=[
            msgspec.structs.replace(
                c, num_rounds=c.num_tokens, device_s=PLAIN_S * c.num_tokens, drafted_rounds=0.0, drafted_s=0.0, kept=0.0
            )
            for c in epoch.cells
        ],
    )


def test_the_price_of_plain_rounds_is_known_from_epochs_without_a_draft(served):
    log = read_log(served[0])
    epochs = [*log.epochs[:40], *(_undrafted(e) for e in log.epochs[40:])]
    calm = msgspec.structs.replace(log, epochs=epochs, entries=[])
    assert prepare(calm, "log").traffic.plain_s == pytest.approx(PLAIN_S)
    before = prepare(msgspec.structs.replace(log, entries=[]), "log").traffic
    assert prepare(calm, "log").traffic.drafted_s == pytest.approx(before.drafted_s, rel=0.05)


def test_a_log_without_any_draft_is_refused(served):
    log = read_log(served[0])
    with pytest.raises(ConfigError, match="log must hold rounds with a draft, got none"):
        prepare(msgspec.structs.replace(log, epochs=[_undrafted(e) for e in log.epochs]), "log")


def test_a_log_begins_where_its_first_drafter_is_the_one_that_it_is_now(served):
    lines = [json.loads(line) for line in served[0].read_bytes().splitlines()]
    epochs = [line for line in lines if line["kind"] == "feedback"]
    for line in epochs[:40]:
        line["first_version"] = "of-another-target"
        for cell in line["cells"]:
            cell["version"], cell["kept"] = f"{cell['version']}-before", 9.0 * cell["drafted_rounds"]
    log = parse_log("".join(json.dumps(line) + "\n" for line in lines).encode(), "log")
    begin = epochs[39]["end"]
    assert (len(log.epochs), log.num_before) == (len(epochs) - 40, 40)
    assert log.jobs and log.entries and all(x.ts > begin for x in (*log.decisions, *log.jobs, *log.entries))
    service = prepare(log, "log")
    assert (
        service.first.max() < 4.0
        and "40 epochs with another first drafter before them are left out" in service.notes()[0]
    )


def test_a_log_without_feedback_says_what_is_missing(tmp_path):
    path = tmp_path / "decisions.jsonl"
    path.write_text('{"kind": "note", "text": "hello"}\n')
    with pytest.raises(ConfigError, match="at least 4 lines of kind 'feedback'"):
        read_log(path)
    with pytest.raises(ConfigError, match="readable file"):
        read_log(tmp_path / "absent.jsonl")


def _jobs(count: int, share: float, noise: float = 0.0) -> list[LoggedJob]:
    """Jobs whose gain is `share` of what the prior's curve says without limit."""
    from paceline.bandit.beliefs.gain_model import learned_share
    from paceline.bandit.policies.pricing import headroom_of

    def score(version: str, length: float, gain: float) -> ShadowScore:
        return ShadowScore(
            version=version, acceptance_length=length, num_requests=20, num_tokens=800, gain_mean=gain,
            gain_lower=gain - 0.033,
        )  # fmt: skip

    rng = np.random.default_rng(0)
    out = []
    for i in range(count):
        rows = int(rng.integers(1000, 12_000))
        before = int(rng.integers(rows))  # by the learner, in earlier bursts
        gain = share * headroom_of(1.5, 2.5) * learned_share(rows) + noise * rng.standard_normal()
        out.append(
            LoggedJob(
                ts=float(i), bucket="ab"[i % 2], arm=msgspec.structs.replace(FULL, num_rows=rows - before), base_version="v0",
                result=TrainResult(
                    job_id=f"{i}", status="accepted", version=f"v{i}", reason="", train_s=5.0, shadow_s=1.0,
                    candidate=score(f"v{i}", 1.5 + gain, gain), incumbent=score("v0", 1.5, 0.0),
                    num_rows=rows - before, num_rows_before=before,
                ),
            )
        )  # fmt: skip
    return out


def test_the_fit_learns_what_the_jobs_say_and_reports_its_error():
    fit = fit_gains(_jobs(12, share=1.0), best_length=2.5)
    assert not fit.is_prior and fit.error < 0.5 * fit.prior_error
    assert "fitted on 12 jobs" in fit.sentence()


def test_too_few_jobs_leave_the_prior_and_say_so():
    fit = fit_gains(_jobs(MIN_JOBS - 1, share=1.0), best_length=2.5)
    assert fit.is_prior and f"holds {MIN_JOBS - 1} scored jobs (at least {MIN_JOBS}" in fit.sentence()
    assert fit.model.num_jobs == 0
    assert "0 scored jobs" in fit_gains([], best_length=2.0).sentence()


def test_jobs_that_do_not_predict_each_other_leave_the_prior():
    fit = fit_gains(_jobs(12, share=0.65, noise=0.6), best_length=2.5)
    assert fit.is_prior and "does not predict them better" in fit.sentence()


def test_an_export_of_decisions_alone_is_refused_with_what_to_replay_instead(tmp_path):
    path = tmp_path / "decisions.jsonl"
    path.write_text(json.dumps({"decision_id": 1, "action": "hold"}) + "\n")
    with pytest.raises(
        ConfigError, match=r"replay the export's replay\.jsonl or DATA_DIR/services/NAME/decisions\.jsonl"
    ):
        read_log(path)
