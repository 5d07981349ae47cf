"""Sums of rounds say what their rows said: the same traffic in one batch or a row a batch leaves the same state behind."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.bandit.beliefs.observation import MAX_REQUESTS, Window, close, fold
from paceline.bandit.controller.controller import Controller
from paceline.config import PolicyConfig, RolloutConfig
from paceline.contracts import SPAN_S, Group, ReplicaReport, RoundStats, encode, is_canary
from paceline.infra.controller import rollout
from paceline.infra.controller.rollout import RolloutState
from paceline.infra.controller.session import restore_controller
from paceline.infra.controller.traffic import CANARY, TrafficStats
from paceline.infra.replica.feedback import make_batch
from paceline.infra.state.desired import write_report
from paceline.machine import ManualClock
from tests.helpers.feedback import dicts_of, round_rows, sums_of
from tests.helpers.hosts import ledger, make_host
from tests.helpers.scripted import MemoryStore, Shard

START = 1_000_000.0
CANARY_VERSION, LIVE, FIRST_VERSION = "v2", "v1", "v1"
PERCENT = 40


def traffic(seed: int, num_requests: int, since: float) -> list[RoundStats]:
    """Rounds of a replica whose batch changes: requests begin, lose their drafter, end; some began before `since`."""
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(num_requests):
        name = f"q{seed}-{i}"
        group = str(rng.choice([Group.ADAPTIVE, Group.ADAPTIVE, Group.STATIC, Group.PLAIN]))
        drawn = CANARY_VERSION if is_canary(name, CANARY_VERSION, PERCENT) else LIVE
        requests.append(
            {
                "name": name, "bucket": str(rng.choice(["math", "code"])), "group": group, "is_greedy": bool(rng.random() < 0.5),
                "version": {"adaptive": drawn if rng.random() < 0.9 else LIVE, "static": FIRST_VERSION}.get(group, ""),
                "begins": int(rng.integers(-3, 12)), "ends": int(rng.integers(12, 30)),
                "breaks": int(rng.integers(6, 60)),
            }
        )  # fmt: skip
    rounds = []
    for k in range(30):
        running = [r for r in requests if r["begins"] <= k < r["ends"]]
        ts, is_training, size = since + 0.4 * k, bool(k % 7 > 4), len(running)
        rows: list[tuple] = []
        for r in running:
            index = k - r["begins"] + 1
            version = r["version"] if index < r["breaks"] else ""
            is_run = bool(version) and rng.random() < 0.8
            drafts = int(rng.integers(0, 9)) if is_run else 0
            accepted = int(rng.integers(0, drafts + 1))
            ms = float(rng.uniform(2.0, 20.0))
            rows.append(
                (r["name"], r["bucket"], r["group"], version, r["is_greedy"], index, drafts, accepted, accepted + 1, size,
                 0.5 * is_run, 1.0, ms, is_training, ts)
            )  # fmt: skip
        if rows:
            rounds.append(round_rows(rows))
    return rounds


def close_to(a: Any, b: Any) -> None:
    """Equal, numbers up to rounding."""
    if isinstance(a, dict) and isinstance(b, dict):
        assert set(a) == set(b)
        for key in a:
            close_to(a[key], b[key])
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            close_to(x, y)
    elif isinstance(a, float) or isinstance(b, float):
        assert a == pytest.approx(b, rel=1e-9, abs=1e-9)
    else:
        assert a == b


def plain(value: Any) -> Any:
    return msgspec.msgpack.decode(encode(value))


def batch_of(parts: list[RoundStats], seq: int = 1):
    return make_batch(parts, replica_id="a", boot_epoch=1, seq=seq, target_version="t", num_dropped=0)


def one_by_one(parts: list[RoundStats]) -> list[RoundStats]:
    """A part a row."""
    return [RoundStats(**{k: [v] for k, v in row.items()}) for part in parts for row in dicts_of(part)]


SEEDS = st.integers(0, 10_000)


@given(seed=SEEDS, flush=st.integers(1, 30), percent=st.sampled_from([0, PERCENT]))
@settings(max_examples=25)
def test_traffic_of_sums_is_that_of_rows(seed, flush, percent):
    """Against a count row by row."""
    parts = traffic(seed, 8, START)
    expected: dict[tuple, list[float]] = {}
    for part in parts:
        for row in dicts_of(part):
            group = row["group"]
            if group == Group.ADAPTIVE:
                is_off = not row["drafter_version"] and is_canary(row["request_id"], CANARY_VERSION, percent)
                group = CANARY if is_off or row["drafter_version"] == CANARY_VERSION else group
            for where in ("all", int(row["ts"] // SPAN_S)):
                sums = expected.setdefault((where, row["bucket"], str(group)), [0, 0, 0, 0, 0.0])
                for i, value in enumerate(
                    (1, row["num_accepted_tokens"], row["num_draft_tokens"], row["num_emitted_tokens"], row["share_ms"])
                ):
                    sums[i] += value
    stats = TrafficStats()
    for i in range(0, len(parts), flush):
        stats.observe(stats.bounded(batch_of(parts[i : i + flush]))[0], CANARY_VERSION, percent)
    found = {}
    for where, cells in [("all", stats.totals), *stats.bins]:
        for bucket, groups in cells.items():
            for group, t in groups.items():
                found[where, bucket, group] = [t.rounds, t.accepted, t.drafted, t.emitted, t.device_ms]
    assert [n for n, _ in stats.bins] == sorted({k[0] for k in expected if k[0] != "all"})
    close_to({str(k): v for k, v in found.items()}, {str(k): v for k, v in expected.items()})


@given(seed=SEEDS, flush=st.integers(1, 30))
@settings(max_examples=25)
def test_the_evidence_of_a_canary_is_that_of_rows(seed, flush):
    """However rounds are cut into batches, the same requests end in the same strata with the same evidence."""
    parts = traffic(seed, 40, START)
    config = RolloutConfig(canary_percent=PERCENT)
    found = []
    for pieces in (one_by_one(parts), [parts[i : i + flush] for i in range(0, len(parts), flush)]):
        canary = RolloutState().begin(
            CANARY_VERSION, LIVE, config, now=START + 2.0, decision_id=1, bucket="math", arm="full"
        )
        for piece in pieces:
            rollout.fold(canary, batch_of(piece if isinstance(piece, list) else [piece]).cells, START + 20.0)
        open_before = {name: plain(r) for name, r in sorted(canary.open.items())}
        rollout.close_quiet(canary, config, START + 20.0 + config.quiet_s)
        assert open_before and not canary.open
        found.append((open_before, plain(canary), rollout.judge(canary, config, START + 21.0)))
    close_to(*[f[0] for f in found])
    close_to(*[f[1] for f in found])
    assert (found[0][2] is None) == (found[1][2] is None)


@given(seed=SEEDS, flush=st.integers(1, 30))
@settings(max_examples=15)
def test_the_policy_learns_from_sums_what_it_learns_from_rows(seed, flush):
    """Meters, regimes, scores, savings and the ledger of a few epochs."""
    found = []
    for is_row_by_row in (True, False):
        clock = ManualClock(START)
        controller = Controller(PolicyConfig(policy="payoff", epoch_s=4.0), clock=clock, rng=np.random.default_rng(0))
        entries = []
        for epoch in range(4):
            parts = traffic(seed + epoch, 12, clock.now())
            pieces = [[p] for p in one_by_one(parts)]
            if not is_row_by_row:
                pieces = [parts[i : i + flush] for i in range(0, len(parts), flush)]
            for piece in pieces:
                controller.observe(batch_of(piece))
            clock.advance(5.0)
            context = rollout_context(epoch)
            controller.tick(clock.now(), context)
            entries += [plain(e) for e in controller.drain()[1]]
        found.append((plain(controller._state), entries))
    close_to(found[0][0], found[1][0])
    close_to(found[0][1], found[1][1])


def rollout_context(epoch: int):
    from paceline.bandit.beliefs.observation import HostContext

    rows = {"math": 4000 * (epoch + 1), "code": 4000 * (epoch + 1)}
    return HostContext(
        live_version=CANARY_VERSION, first_version=FIRST_VERSION, rows=rows, rows_written=rows,
        versions=[FIRST_VERSION, CANARY_VERSION],
    )  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
def test_a_host_books_and_commits_from_sums_what_it_does_from_rows(shared_redis, client, tmp_path, request, seed):
    """Real policy, real stream: a batch a row against a batch a flush; counters, ledger and evidence agree."""
    from paceline.infra.state.desired import ensure_first_version
    from paceline.infra.state.redis_clients import Keys

    found = []
    for name in ("rows", "sums"):
        keys = Keys(f"{request.node.name}-{name}".replace("[", "-").replace("]", ""))
        ensure_first_version(client, keys, "v1", 25, START)
        clock = ManualClock(START)
        host = make_host(
            shared_redis.url, keys, tmp_path / name, clock=clock, rollout=RolloutConfig(canary_percent=PERCENT),
            store=MemoryStore([Shard("s1"), Shard("s2")]), policy=PolicyConfig(policy="never", epoch_s=4.0),
            make=lambda stored: restore_controller(host.config, stored, clock),  # noqa: B023
        )  # fmt: skip
        host.connect()
        host.session.orders.canary("v2")
        host.step(block_ms=0)
        gen = host.session.state.desired.gen
        seq = 0
        for epoch in range(4):
            parts = traffic(10 * seed + epoch, 12, clock.now())
            pieces = [[p] for p in one_by_one(parts)] if name == "rows" else [parts[i : i + 4] for i in range(0, 30, 4)]
            report = ReplicaReport(
                replica_id="a", gen=gen, version="v1", slots={}, failed_gen=None, failed_reason="", swap_pause_ms=[],
                ts=clock.now(), canary_version="v2",
            )  # fmt: skip
            write_report(client, keys, report, ttl_s=600)
            host.step(block_ms=0)
            for piece in pieces:
                if piece:
                    seq += 1
                    client.xadd(keys.feedback, {"v": encode(batch_of(piece, seq))})
            while host.step(block_ms=0):
                pass
            clock.advance(5.0)
            host.step(block_ms=0)
        state = host.session.state
        assert state.num_duplicates == state.num_missing_batches == state.num_lost_entries == 0
        assert state.rollout.canary is not None and sum(state.rollout.canary.test.num_requests) > 10
        counters = (state.num_rows, state.num_dropped, state.num_booked)
        controller = plain(host.session.controller._state)
        entries = {i: plain(e) for i, e in ledger(client, keys).items()}
        canary = plain(state.rollout.canary)
        canary["open"] = dict(sorted(canary["open"].items()))
        found.append([counters, controller, entries, canary, plain(state.traffic)])
    for rows, sums in zip(*found, strict=True):
        close_to(rows, sums)


def test_more_requests_than_a_cell_tells_apart_share_pools_and_keep_their_standard_error():
    """Sums are exact; the standard error is that of telling all apart, up to its own error of 1 / sqrt(2 x MAX_REQUESTS)."""
    rng = np.random.default_rng(3)
    num = 40 * MAX_REQUESTS
    level = rng.lognormal(0.0, 0.4, num)  # of a request: its rounds resemble each other
    pooled = {"a": Window()}
    exact = {"y": 0.0, "x": 0.0, "yy": 0.0, "xx": 0.0, "xy": 0.0}
    for flush in range(3):
        rows = [
            {"request_id": f"q{i}", "share_ms": 10.0 * level[i], "num_emitted_tokens": 2 + (i + flush) % 3}
            for i in range(num)
        ]
        fold(pooled, sums_of(rows))
    for i in range(num):
        y, x = 0.03 * level[i], sum(2 + (i + flush) % 3 for flush in range(3))
        for key, value in (("y", y), ("x", x), ("yy", y * y), ("xx", x * x), ("xy", x * y)):
            exact[key] += value
    ratio = exact["y"] / exact["x"]
    residual = exact["yy"] - 2 * ratio * exact["xy"] + ratio * ratio * exact["xx"]
    error = math.sqrt(residual * num / (num - 1)) / exact["x"]
    cell = pooled["a"].cells["adaptive"]["v0"]
    assert len(cell.requests) == 2 * MAX_REQUESTS
    (stats,) = close("a", pooled["a"], 0.0, 10.0).stats
    assert stats.num_rounds == 3 * num and stats.num_tokens == exact["x"]
    assert stats.time_per_token.ratio() == pytest.approx(ratio)
    assert stats.time_per_token.standard_error() == pytest.approx(error, rel=3 / math.sqrt(2 * MAX_REQUESTS))
