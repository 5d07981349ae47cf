"""Claims of infra/web/metrics.py, infra/controller/traffic.py, infra/state/log.py and infra/state/redis_clients.py."""

import json
import logging
import math
import random
import re
import threading
import time

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from paceline.bandit.controller.controller import Controller
from paceline.config import PolicyConfig
from paceline.contracts import Histogram, HttpMeters, ReplicaReport, is_canary
from paceline.errors import ConfigError
from paceline.infra.controller.session import bucket_traffic
from paceline.infra.controller.snapshot import CanaryRollout, ControllerErrors, FeedbackCounts, LedgerSums, Snapshot
from paceline.infra.controller.traffic import MAX_BUCKETS, TIERS, TrafficStats
from paceline.infra.replica.exchange import ReplicaNumbers
from paceline.infra.replica.feedback import make_batch
from paceline.infra.state.log import configure_logging
from paceline.infra.state.redis_clients import Breaker, Keys, redact, stream_entries
from paceline.infra.web.metrics import (
    CONTROLLER_METRICS,
    REPLICA_METRICS,
    controller_metrics,
    render_metrics,
    speculation_rows,
)
from paceline.infra.web.state_routes import SnapshotCache
from paceline.machine import ManualClock
from tests.helpers import metrics_page
from tests.helpers.scripted import decision, row


def one_replica(counters, **numbers) -> dict[str, ReplicaNumbers]:
    return {"r1": ReplicaNumbers(model="m", counters=counters, **numbers)}


def test_histograms_are_read_by_prometheus_own_parser_as_they_were_counted():
    http = HttpMeters()
    for seconds in (0.0004, 0.02, 0.02, 5000.0):
        http.times(True).first_token.observe(seconds)
    http.count("/v1/completions", 429, False)
    text = render_metrics(one_replica({"engine": {}}, http=http))[0].decode()
    found = {f.name: f.samples for f in text_string_to_metric_families(text)}
    mine = [s for s in found["paceline_time_to_first_token_seconds"] if s.labels["stream"] == "true"]
    cells = [(float(s.labels["le"]), s.value) for s in mine if s.name.endswith("_bucket")]
    assert cells == sorted(cells) and [v for _, v in cells] == sorted(v for _, v in cells), "cumulative"
    assert (
        dict(cells)[0.0005] == 1 and dict(cells)[0.02] == 3 and dict(cells)[1000.0] == 3 and dict(cells)[math.inf] == 4
    )
    assert {s.name.rpartition("_")[2]: s.value for s in mine if "le" not in s.labels} == {
        "count": 4.0,
        "sum": pytest.approx(5000.0404),
    }
    codes = {(s.labels["route"], s.labels["code"]): s.value for s in found["paceline_responses"]}
    assert codes[("/v1/completions", "429")] == 1 and codes[("/v1/completions", "500")] == 0


def num_rows_of(stats: TrafficStats) -> int:
    return sum(s.rounds for groups in stats.totals.values() for s in groups.values())


def sample(rows) -> TrafficStats:
    stats = TrafficStats()
    stats.observe(make_batch(rows, replica_id="a", boot_epoch=1, seq=1, target_version="t", num_dropped=0))
    return stats


def test_every_metric_of_the_table_is_exposed():
    controller = Controller(PolicyConfig(), clock=ManualClock(100.0), rng=np.random.default_rng(0))
    replicas = [
        ReplicaReport(replica_id=str(gen), gen=gen, version="v", slots={}, failed_gen=None, failed_reason="", swap_pause_ms=[], ts=1.0)
        for gen in (2, 1)
    ]  # fmt: skip
    snapshot = Snapshot(
        redis_up=True, epoch=3, gen=2, errors=ControllerErrors(count=1), replicas=replicas, ts=90.0, age_s=3.0, is_paused=True,
        ledger=LedgerSums(net_s=1.5, by_kind={"training": 2.0}), decisions=[decision(1, "hold")],
        bandit=replace(controller.snapshot(), bank_s=7.0, drift_alarms={"math": 2}, num_decisions={"hold": 9000}),
        rollout=CanaryRollout(version="v2", share_percent=10, num_requests=9, num_canary_requests=2, ratio=1.1),
        buckets=bucket_traffic(sample([row(0, ts=100.0), row(1, group="static", ts=100.0)]), 101.0),
        feedback=FeedbackCounts(delivered=2, duplicates=0, missing_batches=0, lost_entries=0, lag=0),
        class_shares={"~class-1": 0.75, "default": 0.25},
    )  # fmt: skip
    text = controller_metrics(snapshot, "m").decode()
    for spec in CONTROLLER_METRICS:
        suffix = "_total" if spec.kind == "counter" else ""
        assert f"\n{spec.name}{suffix}" in text, spec.name
    assert 'paceline_acceptance_length{bucket="math",group="adaptive",model="m"} 3.0' in text
    assert 'paceline_class_share{bucket="~class-1",model="m"} 0.75' in text
    assert 'paceline_decisions_total{action="hold",model="m"} 9000.0' in text, "not of those that are kept alone"
    assert 'paceline_replicas_converged{model="m"} 1.0' in text
    assert 'paceline_controller_paused{model="m"} 1.0' in text and 'paceline_controller_pinned{model="m"} 0.0' in text
    assert 'paceline_canary_requests{model="m",role="incumbent"} 7.0' in text
    assert 'paceline_drift_alarms_total{bucket="math",model="m"} 2.0' in text


def test_age_of_the_controllers_values_is_by_the_controllers_clock():
    text = controller_metrics(Snapshot(ts=time.time() + 5000.0, age_s=40.0), "m").decode()
    (age,) = [
        float(line.split()[1]) for line in text.splitlines() if line.startswith("paceline_controller_snapshot_age")
    ]
    assert age == 40.0


def test_speculation_is_told_by_role_and_never_by_version():
    states = [
        (("v2", "math", True), "on"),
        (("v2", "math", False), "off"),
        (("v1", "math", True), "probe"),
        (("gone", "math", True), "on"),
    ]
    rows = speculation_rows(states, {"live": "v2", "canary": "", "first": "v1"}, {"law": "v3"})
    text = render_metrics(one_replica({"engine": {}, "speculation": rows}))[0].decode()
    assert 'paceline_speculation_on{bucket="math",mode="greedy",model="m",replica="r1",role="live"} 1.0' in text
    assert 'paceline_speculation_on{bucket="math",mode="sampled",model="m",replica="r1",role="live"} 0.0' in text
    assert 'paceline_speculation_on{bucket="math",mode="greedy",model="m",replica="r1",role="first"} 0.0' in text
    assert len(rows) == 3 and "gone" not in text


def test_buckets_are_bounded_and_later_names_count_under_other():
    stats = TrafficStats()
    for start in range(0, 3 * MAX_BUCKETS, 50):
        rows = [row(i, bucket=f"b{start + i}", ts=100.0) for i in range(50)]
        batch = make_batch(rows, replica_id="a", boot_epoch=1, seq=1, target_version="t", num_dropped=0)
        stats.observe(stats.bounded(batch)[0])
    num_rows = num_rows_of(stats)
    assert set(stats.totals) == {*(f"b{i}" for i in range(MAX_BUCKETS - 1)), "other"}
    assert all(set(cells) <= set(stats.totals) for _, cells in stats.bins)
    assert num_rows % 50 == 0 and stats.totals["other"]["adaptive"].rounds == num_rows - (MAX_BUCKETS - 1)
    again = make_batch([row(0, bucket="b0"), row(1, bucket="new")], replica_id="a", boot_epoch=1, seq=2, target_version="t", num_dropped=0)  # fmt: skip
    assert [cell.bucket for cell in stats.bounded(again)[0].cells] == ["b0", "other"]
    assert [cell.bucket for cell in again.cells] == ["b0", "new"]


def test_page_agrees_with_the_tables():
    assert metrics_page.PAGE.read_text(encoding="utf-8") == metrics_page.page(), (
        "run `python tests/helpers/metrics_page.py`"
    )


def test_every_metric_is_in_the_docs():
    page = metrics_page.page()
    names = [
        n
        for path in (metrics_page.PAGE.parent.parent / "infra").rglob("*.py")
        for n in re.findall(r"(?:metric|replica|controller)_spec\(\s*\"(\w+)\"", path.read_text())
    ]
    assert len(names) > 50 and [n for n in names if not re.search(rf"`paceline_{n}(_total)?`", page)] == []


def test_names_are_unique_over_replica_and_controller():
    names = [spec.name for spec in (*REPLICA_METRICS, *CONTROLLER_METRICS)]
    assert len(set(names)) == len(names)


def test_scrape_holds_the_replica_and_the_controller():
    speculation = [{"bucket": "b", "role": "live", "mode": "greedy", "is_on": True}]
    counters = {
        "speculation": speculation,
        "engine": {"num_rounds": 7, "forward": "native-avx2"},
        "feedback": {"redis_up": True},
        "traces": {},
        "spans": {"exported": 5, "dropped": 1},
        "logs": {"lines_dropped": 3},
        "process": {"rss_bytes": 2**30, "num_files": 70, "host_kv_bytes": 2**20},
        "training": True,
    }
    text = render_metrics(
        one_replica(counters, swap_pause_ms=1.5, queue=Histogram(), http=HttpMeters()), Snapshot(ts=1.0, gen=4)
    )[0].decode()
    for spec in REPLICA_METRICS:
        suffix = {"counter": "_total", "gauge": "", "histogram": "_bucket"}[spec.kind]
        assert re.search(rf"\n{spec.name}{suffix}[ {{]", text), spec.name
    assert 'paceline_spans_dropped_total{model="m",replica="r1"} 1.0' in text
    assert (
        'paceline_rounds_total{model="m",replica="r1"} 7.0' in text
        and 'paceline_desired_generation{model="m"} 4.0' in text
    )
    families = list(text_string_to_metric_families(text))
    assert len({f.name for f in families}) == len(families), "one family, one place"
    alone = render_metrics(one_replica({"engine": {}}))[0].decode()
    for absent in (
        "paceline_desired_generation",
        "paceline_redis_up",
        "paceline_request_seconds",
        "paceline_queue_seconds",
    ):
        assert absent not in alone


def test_a_replica_whose_drafter_failed_does_not_run_what_is_wanted():
    well = ReplicaReport(replica_id="r1", gen=3, version="v2", slots={}, failed_gen=None, failed_reason="", swap_pause_ms=[], ts=1.0)  # fmt: skip
    broken = replace(well, replica_id="r2", failed_gen=3, failed_reason="failed while serving: NaN")
    text = render_metrics({}, Snapshot(ts=1.0, gen=3, replicas=[well, broken]))[0].decode()
    assert '\npaceline_replicas_alive{model=""} 2.0' in text and '\npaceline_replicas_converged{model=""} 1.0' in text


def test_scrape_does_not_wait_for_a_controller_that_hangs():
    gate, calls = threading.Event(), []

    def fetch():
        calls.append(1)
        gate.wait(30)
        return Snapshot(gen=1)

    cache = SnapshotCache(fetch)
    assert cache.recent(0.01) is None and cache.recent(0.01) is None
    assert len(calls) == 1, "one fetch at a time"
    gate.set()
    assert cache.recent(30) == Snapshot(gen=1)


def test_controller_that_is_away_is_absent_from_the_scrape():
    def fetch():
        raise RuntimeError("no actor")

    assert SnapshotCache(fetch).recent(30) is None


def test_a_controller_that_has_restored_nothing_tells_only_that_it_is_there():
    text = controller_metrics(Snapshot(errors=ControllerErrors(count=2)), "m")
    assert (
        b'paceline_replicas_alive{model="m"} 0.0' in text and b'paceline_controller_errors_total{model="m"} 2.0' in text
    )
    assert b"\npaceline_ledger_net_seconds" not in text and b"\npaceline_controller_epoch" not in text


def test_a_snapshot_asked_for_before_a_change_is_not_shown_after_it():
    gate, answers = threading.Event(), iter([Snapshot(gen=1), Snapshot(gen=2)])

    def fetch():
        value = next(answers)
        if value.gen == 1:
            gate.wait(30)
        return value

    cache = SnapshotCache(fetch)
    assert cache.recent(0.01) is None
    cache.forget()
    assert cache.recent(30) == Snapshot(gen=2)
    gate.set()
    time.sleep(0.05)
    assert cache.recent(30) != Snapshot(gen=1)


def test_no_label_can_hold_a_version_or_request():
    labels = {label for spec in (*CONTROLLER_METRICS, *REPLICA_METRICS) for label in spec.labels}
    assert labels <= {
        "action",
        "kind",
        "bucket",
        "group",
        "bound",
        "role",
        "mode",
        "forward",
        "model",
        "replica",
        "stream",
        "route",
        "code",
    }


def test_traffic_is_summed_per_bucket_and_group_and_recent_is_recent():
    stats = sample([row(i, ts=100.0) for i in range(4)] + [row(9, bucket="code", ts=200.0)])
    view = bucket_traffic(stats, 205.0)
    assert view["math"].groups()["adaptive"].rounds == 4
    assert view["math"].recent == {}
    assert view["code"].recent["adaptive"].tokens_per_s == pytest.approx(300.0)
    assert [b.ts for b in stats.series()] == [100.0, 200.0]
    assert num_rows_of(stats) == 5


def test_a_day_of_traffic_is_kept_in_bins_that_widen_with_age_and_lose_nothing():
    stats, count, rng = TrafficStats(), 0, np.random.default_rng(3)
    for span in range(20_000):
        if rng.random() < 0.3:  # gaps, and rows that come late
            late = int(rng.integers(0, 5)) if rng.random() < 0.9 else int(rng.integers(0, 4000))
            stats.observe(
                make_batch(
                    [row(0, ts=5.0 * max(span - late, 0))],
                    replica_id="a",
                    boot_epoch=1,
                    seq=1,
                    target_version="t",
                    num_dropped=0,
                )
            )
            count += 1
        if span == 3000:
            assert sum(b.buckets["math"]["adaptive"].rounds for b in stats.series()) == count, "nothing is too old yet"
    bins = stats.series()
    ends = [b.ts + b.seconds for b in bins]
    assert all(end <= b.ts for end, b in zip(ends, bins[1:], strict=False)), "in order, none in another"
    assert len(bins) <= sum(n for _, n in TIERS) + 24
    newest = bins[-1].ts
    for b in bins:
        age = newest - b.ts
        assert (
            b.seconds == (5.0 if age < 1200 else 60.0 if age < 10_800 else 720.0)
            or min(abs(age - 1200), abs(age - 10_800)) < 720
        )
    assert newest - 86_400 <= bins[0].ts <= newest - 86_400 + 2 * 720
    assert [b for b in stats.series(newest - 600) if b.ts + b.seconds <= newest - 600] == []
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=TrafficStats)
    assert again.series() == bins


def test_adaptive_rows_of_the_version_on_trial_are_a_group_of_their_own():
    rows = [row(0, version="v1"), row(1, version="v2"), row(2, version="v2", group="static"), row(3, version="v3")]
    own = next(i for i in range(1000) if is_canary(f"r{i}", "v2", 30))
    other = next(i for i in range(1000) if not is_canary(f"r{i}", "v2", 30))
    rows += [row(own, version=""), row(other, version="")]  # their drafters were switched off
    rows += [row(own, version="", group="plain")]
    batch = make_batch(rows, replica_id="a", boot_epoch=1, seq=1, target_version="t", num_dropped=0)
    stats = TrafficStats()
    stats.observe(batch, "v2", 30)
    assert {group: sums.rounds for group, sums in stats.totals["math"].items()} == {
        "adaptive": 3,
        "canary": 2,
        "static": 1,
        "plain": 1,
    }
    stats.observe(batch, "v2")  # its trial is over: whose an unnamed row was is not known
    assert stats.totals["math"]["adaptive"].rounds == 3 + 4 and stats.totals["math"]["canary"].rounds == 2 + 1
    stats.observe(batch)
    assert stats.totals["math"]["adaptive"].rounds == 7 + 5


def test_late_rows_land_in_their_own_bin():
    stats = sample([row(0, ts=200.0), row(1, ts=100.0), row(2, ts=200.0)])
    assert [n for n, _ in stats.bins] == [20, 40]


def test_key_prefix_has_literal_braces_and_refuses_others():
    assert Keys("m").feedback == "paceline:{m}:fb"
    with pytest.raises(ConfigError, match="model id"):
        Keys("a{b}")


def test_url_is_redacted():
    assert redact("rediss://user:secret@host:6380/0?ssl_ca_certs=x") == "rediss://***@host:6380/0"
    assert redact("redis://host/0") == "redis://host/0"


def test_entries_of_a_stream_reply_are_read_also_without_fields_or_any():
    assert stream_entries([[b"s", [(b"1-0", {b"v": b"x"}), (b"2-0", None)]]]) == [
        (b"1-0", {b"v": b"x"}),
        (b"2-0", None),
    ]
    assert stream_entries(None) == stream_entries([]) == []


def test_breaker_backs_off_to_its_cap_and_recovers():
    breaker = Breaker(rng=random.Random(0))
    waits = [breaker.failed() for _ in range(8)]
    assert 0.1 <= waits[0] <= 0.2 and 2.5 <= waits[-1] <= 5.0
    assert breaker.succeeded() is True
    assert breaker.succeeded() is False
    assert breaker.failed() <= 0.2


def test_log_file_holds_json_lines_and_a_second_call_replaces_the_first(tmp_path):
    for _ in range(2):
        configure_logging(file=tmp_path / "x.log", to_stderr=False)
    logging.getLogger("paceline.test").info("drafter promoted version=%s", "v2")
    for handler in logging.getLogger("paceline").handlers:
        handler.flush()
    lines = [json.loads(line) for line in (tmp_path / "x.log").read_text().splitlines()]
    assert [x["message"] for x in lines] == ["drafter promoted version=v2"]
    logger = logging.getLogger("paceline")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


def test_the_version_of_a_class_has_a_role_in_that_class_alone():
    states = [(("v3", "law", True), "on"), (("v3", "math", True), "on"), (("v2", "law", True), "off")]
    rows = speculation_rows(states, {"live": "v2"}, {"law": "v3", "math": "v9"})
    assert [(r["bucket"], r["role"], r["is_on"]) for r in rows] == [("law", "class", True), ("law", "live", False)]
