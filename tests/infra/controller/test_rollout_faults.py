"""kill -9 of the controller in every state of the life cycle: nothing is lost, doubled or stuck."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from paceline.adapt.versions.lifecycle import END_STATUSES, NEXT_STATUS, DrafterStatus
from paceline.contracts import Decision, decode
from paceline.infra.state.desired import ensure_first_version, read_desired
from paceline.infra.state.redis_clients import patient_client
from tests.helpers.fake_replicas import FakeReplicas
from tests.helpers.hosts import ledger, recent_log, stored, totals

PROGRAM = Path(__file__).resolve().parents[2] / "helpers" / "rollout_process.py"
KILLS_A_STATE = 3


class Controllers:
    """The forking process and the controller it started last."""

    def __init__(self, url: str, keys, folder: Path, trial: str) -> None:
        args = [sys.executable, str(PROGRAM), url, keys.model, str(folder), trial]
        self.parent = subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.start()

    def start(self) -> None:
        assert self.parent.stdin is not None and self.parent.stdout is not None
        self.parent.stdin.write("start\n")
        self.parent.stdin.flush()
        self.pid = int(self.parent.stdout.readline())

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
        self.pid = 0

    def close(self) -> None:
        self.kill()
        self.parent.kill()
        self.parent.wait()


def is_poisoned(version: str) -> bool:
    return version.startswith("v-") and int(version[2], 16) % 2 == 0


def is_unloadable(version: str) -> bool:
    return version.startswith("v-") and int(version[2], 16) % 8 == 7


def speed(version: str) -> float:
    """Every second version of a job is three times slower than what was there first, the others are a third faster."""
    return 300.0 if version == "v1" else 100.0 if is_poisoned(version) else 400.0


def has_ended(s, outcome: str) -> bool:
    return s.rollout.canary is None and not s.rollout.guards and s.rollout.last.get("outcome") == outcome


TRAINING = {
    "training": lambda s, c, k: s.pending is not None and c.exists(k.train),
    "trained, not folded": lambda s, c, k: s.pending is not None and c.exists(k.train_result(s.pending.job.job_id)),
}
ENDS = {
    "promoted": lambda s, c, k: has_ended(s, "promoted"),
    "rolled back": lambda s, c, k: has_ended(s, "rolled_back"),
    "frozen": lambda s, c, k: bool(s.rollout.frozen_buckets(time.time())),
}
STATES = {
    "canary": {
        **TRAINING,
        "canary begun": lambda s, c, k: s.rollout.canary is not None and not s.rollout.canary.open,
        "canary served": lambda s, c, k: s.rollout.canary is not None and len(s.rollout.canary.open) > 0,
        "canary judged half": lambda s, c, k: s.rollout.canary is not None and sum(s.rollout.canary.test.num_requests) > 8,
        **ENDS,
    },
    "guard": {
        "guard served": lambda s, c, k: any(g.open for g in s.rollout.guards.values()),
        "guard judged half": lambda s, c, k: any(sum(g.test.num_requests) > 8 for g in s.rollout.guards.values()),
        **ENDS,
    },
}  # fmt: skip


def check(client, keys, num_rows: int, folder: Path, trial: str) -> Counter:
    """Everything agrees: rows, ledger, decisions, jobs, lives, the desired record. Returns what became of versions on trial."""
    state = stored(client, keys)
    assert (state.num_rows, state.num_missing_batches, state.num_lost_entries) == (num_rows, 0, 0)
    entries = ledger(client, keys).values()
    assert sum(e.seconds for e in entries if e.kind == "saving") == num_rows
    by_kind: Counter = Counter()
    for e in entries:
        by_kind[e.kind] += e.seconds
    assert totals(client, keys).by_kind() == pytest.approx(dict(by_kind))
    orders = [d for v in client.hgetall(keys.decisions).values() if (d := decode(v, Decision)).action == "train"]
    finished = [d for d in orders if d.outcome is not None]
    assert len([e for e in entries if e.kind == "training"]) == len(finished) >= len(orders) - 1
    jobs = Counter(line.split()[0] for line in (folder / "journal").read_text().splitlines())
    assert max(jobs.values()) == 1, "a job ran twice"
    log = recent_log(client, keys, 20_000)
    logged = Counter(e["entry_id"] for e in log if e["kind"] == "ledger" or "entry_id" in e)
    assert not logged or max(logged.values()) == 1, "a ledger entry was logged twice"
    at: dict[str, str | None] = {}
    for e in log:
        if "after" in e:  # a life-cycle line: follows the one before it, by the table
            before = at.get(e["version"])
            if e["before"] is None:
                assert before is None or before in END_STATUSES
            elif before is not None:
                assert before == e["before"]
            if e["before"] is not None:
                assert DrafterStatus(e["after"]) in NEXT_STATUS[DrafterStatus(e["before"])]
            at[e["version"]] = e["after"]
    lives = state.lifecycle
    serving = {state.desired.version, *state.desired.class_versions.values()}
    assert lives.with_status(DrafterStatus.LIVE) == serving
    canary = state.rollout.canary
    assert lives.with_status(DrafterStatus.CANARY) == ({canary.version} if canary is not None else set())
    desired = read_desired(client, keys)
    assert desired == state.desired and desired.canary_version == (canary.version if canary is not None else "")
    assert not any(is_poisoned(v) or is_unloadable(v) for v in serving)
    for version in lives.versions:
        ends = {t.after for t in lives.versions[version].transitions}
        if trial == "canary" and (is_poisoned(version) or is_unloadable(version)):
            assert DrafterStatus.LIVE not in ends
    before = {"canary": ("canary",), "guard": ("shadowed", "live")}[trial]
    return Counter(e["after"] for e in log if "after" in e and e["before"] in before)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trial", ["canary", "guard"])
def test_kills_in_all_states_lose_double_and_block_nothing(trial, own_redis, keys, tmp_path, wait_until):
    client = patient_client(own_redis.url)
    ensure_first_version(client, keys, "v1", 0, time.time())
    rng = random.Random(0)
    states = STATES[trial]
    num_kills = KILLS_A_STATE * len(states)
    controllers = Controllers(own_redis.url, keys, tmp_path, trial)
    fleet = FakeReplicas(
        own_redis.url, keys, speed=speed, refuses=is_unloadable, spread=0.4, holdback=0.4 if trial == "guard" else 0.0
    )
    fleet.start(every_s=0.1, batch=3)
    killed: Counter = Counter()
    epochs = set()
    try:
        for k in range(num_kills):
            due = [s for s in states if killed[s] <= k // len(states)]  # in turns, in the order in which they come up

            def met(due: list[str] = due) -> str | None:
                state = stored(client, keys)
                if state.epoch in epochs:
                    return None
                return next((s for s in due if states[s](state, client, keys)), None)

            deadline = time.monotonic() + 4.0  # a state may not come up for a while: then any other is killed
            while (name := met()) is None and time.monotonic() < deadline:
                time.sleep(0.005)
            killed[name or "any"] += 1
            time.sleep(rng.uniform(0.0, 0.05))  # and any point of a pass
            controllers.kill()
            epochs.add(stored(client, keys).epoch)
            controllers.start()
        for name in [s for s in states if not killed[s]]:  # on a slow machine some states were not met in time
            wait_until(lambda name=name: states[name](stored(client, keys), client, keys), timeout_s=90.0, what=name)
            killed[name] += 1
            controllers.kill()
            controllers.start()
        fleet.stop()
        wait_until(lambda: stored(client, keys).num_rows >= fleet.num_rows, timeout_s=60.0, what="all rows")
        fleet.start(every_s=0.1, batch=3)
        before = client.xlen(keys.log)
        wait_until(lambda: client.xlen(keys.log) > before + 20, timeout_s=60.0, what="life after the kills")

        def is_over() -> bool:
            rollout = stored(client, keys).rollout
            return rollout.canary is None and not rollout.guards

        is_last = False
        while not is_last:  # the next trial may begin before the controller is gone
            wait_until(is_over, timeout_s=60.0, what="the end of the trial")
            fleet.stop()
            wait_until(lambda: stored(client, keys).num_rows >= fleet.num_rows, timeout_s=60.0, what="all rows")
            controllers.kill()
            time.sleep(0.2)
            is_last = is_over()
            if not is_last:
                controllers.start()
                fleet.start(every_s=0.1, batch=3)
        outcomes = check(client, keys, fleet.num_rows, tmp_path, trial)
        assert outcomes["live"] > 0 and outcomes["rolled_back"] > 0
        assert len([s for s in states if killed[s] > 0]) == len(states), killed
        assert sum(killed.values()) >= num_kills
        print("killed in", dict(killed), "outcomes", dict(outcomes), "epoch", stored(client, keys).epoch)
    finally:
        fleet.stop()
        controllers.close()
