"""What kill -9 and a missing Redis do to feedback, decisions, ledger and training: real processes, under load."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.config import FeedbackConfig
from paceline.contracts import Decision, DesiredState, decode
from paceline.infra.replica.feedback import FeedbackPublisher
from paceline.infra.state.desired import ensure_first_version, read_desired
from paceline.infra.state.redis_clients import patient_client
from tests.helpers.hosts import ledger, stored, totals
from tests.helpers.scripted import row

PROGRAM = Path(__file__).resolve().parents[2] / "helpers" / "controller_process.py"


class Load:
    """Two publishers fed by a thread, about 2000 rows a second together, until `stop`."""

    def __init__(self, url: str, keys, max_rows: int = 8192) -> None:
        config = FeedbackConfig(flush_interval_s=0.02, max_rows=max_rows)
        self.publishers = [
            FeedbackPublisher(url, keys, replica_id=name, target_version="t", config=config).start() for name in "ab"
        ]
        self.recording_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        i = 0
        while not self._stop.wait(0.005):
            for pub in self.publishers:
                for _ in range(5):
                    started = time.perf_counter()
                    pub.record_rounds(row(i))
                    self.recording_s += time.perf_counter() - started
                    i += 1

    def stop(self) -> tuple[int, int]:
        """End the load; (rows delivered, rows dropped)."""
        self._stop.set()
        self._thread.join()
        for pub in self.publishers:
            pub.close(timeout_s=10.0)
        return sum(p.num_delivered for p in self.publishers), sum(p.num_dropped for p in self.publishers)


class Process:
    """A controller process that can be killed and started again."""

    def __init__(self, url: str, keys, folder: Path, seconds: float) -> None:
        self._args = [sys.executable, str(PROGRAM), url, keys.model, str(folder), str(seconds)]
        self.start()

    def start(self) -> None:
        self.popen = subprocess.Popen(self._args, stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline() == "started\n"

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()


def check_once(client, keys, delivered: int, folder: Path) -> None:
    """Every delivered row is folded once, every ledger entry exists once, every job ran once, everywhere the same."""
    state = stored(client, keys)
    assert state.num_rows == delivered
    entries = ledger(client, keys).values()
    assert sum(e.seconds for e in entries if e.kind == "saving") == delivered
    by_kind: dict[str, float] = {}
    for e in entries:
        by_kind[e.kind] = by_kind.get(e.kind, 0.0) + e.seconds
    assert totals(client, keys).by_kind() == pytest.approx(by_kind)
    orders = [decode(v, Decision) for v in client.hgetall(keys.decisions).values()]
    outcomes = [d.outcome for d in orders if d.action == "train"]
    finished = sum(o is not None for o in outcomes)
    assert len([e for e in entries if e.kind == "training"]) == finished
    lines = (folder / "journal").read_text().splitlines() if (folder / "journal").exists() else []
    assert len(lines) <= len(orders)
    desired, has_version = read_desired(client, keys), "accepted" in outcomes  # every job gives the same one
    assert (desired.gen, desired.class_versions) == ((2, {"math": "v2"}) if has_version else (1, {}))


@pytest.mark.slow
def test_kill_9_of_the_controller_loses_and_doubles_nothing(own_redis, keys, tmp_path, wait_until):
    client = patient_client(own_redis.url)
    ensure_first_version(client, keys, "v1", 10, time.time())
    rng = random.Random(0)
    process = Process(own_redis.url, keys, tmp_path, seconds=0.3)
    load = Load(own_redis.url, keys)
    try:
        for _ in range(4):
            rows = stored(client, keys).num_rows
            wait_until(lambda rows=rows: stored(client, keys).num_rows > rows, timeout_s=60.0, what="progress")
            time.sleep(rng.uniform(0.0, 0.5))  # the kill must hit any point of a pass
            process.kill()
            process.start()
        wait_until(
            lambda: any(decode(v, Decision).outcome for v in client.hgetall(keys.decisions).values()), timeout_s=60.0
        )
        delivered, dropped = load.stop()
        wait_until(lambda: stored(client, keys).num_rows >= delivered, timeout_s=60.0, what="all rows")
        wait_until(lambda: stored(client, keys).pending is None, timeout_s=60.0, what="the last job")
        check_once(client, keys, delivered, tmp_path)
        assert dropped == 0
        assert stored(client, keys).epoch == 5
    finally:
        process.kill()


@pytest.mark.slow
def test_kill_9_of_redis_loses_nothing_that_was_acknowledged(own_redis, keys, tmp_path, wait_until):
    client = patient_client(own_redis.url, retries=20)
    ensure_first_version(client, keys, "v1", 10, time.time())
    process = Process(own_redis.url, keys, tmp_path, seconds=0.3)
    load = Load(own_redis.url, keys)
    try:
        for _ in range(3):
            rows = stored(client, keys).num_rows
            wait_until(lambda rows=rows: stored(client, keys).num_rows > rows + 200, timeout_s=60.0, what="progress")
            os.kill(own_redis.pid, signal.SIGKILL)
        delivered, dropped = load.stop()
        wait_until(lambda: stored(client, keys).num_rows >= delivered, timeout_s=60.0, what="all rows")
        wait_until(lambda: stored(client, keys).pending is None, timeout_s=60.0, what="the last job")
        check_once(client, keys, delivered, tmp_path)
        assert dropped == 0
    finally:
        process.kill()


@pytest.mark.slow
def test_ten_seconds_without_redis_block_nothing(own_redis, keys, tmp_path, wait_until):
    client = patient_client(own_redis.url, retries=20)
    first = ensure_first_version(client, keys, "v1", 10, time.time())
    process = Process(own_redis.url, keys, tmp_path, seconds=0.3)
    load = Load(own_redis.url, keys, max_rows=500)
    try:
        wait_until(lambda: stored(client, keys).num_rows > 200, timeout_s=60.0)
        os.kill(own_redis.pid, signal.SIGSTOP)  # hangs: worse than a refused connection
        before = load.recording_s
        time.sleep(10.0)
        # Every flush waits 0.5 s in vain, then comes the next one: calls that waited with them would wait all the time.
        assert load.recording_s - before < 5.0
        assert not any(p.is_redis_up for p in load.publishers)
        os.kill(own_redis.pid, signal.SIGCONT)
        wait_until(lambda: all(p.is_redis_up for p in load.publishers), timeout_s=30.0, what="reconnect")
        delivered, dropped = load.stop()
        produced = sum(p.num_produced for p in load.publishers)
        assert produced == delivered + dropped
        assert dropped > 0  # the rings are smaller than ten seconds of this load
        wait_until(lambda: stored(client, keys).num_rows >= delivered, timeout_s=60.0, what="all rows")
        wait_until(lambda: stored(client, keys).pending is None, timeout_s=60.0, what="the last job")
        check_once(client, keys, delivered, tmp_path)
        assert stored(client, keys).num_dropped <= dropped
        desired = read_desired(client, keys)
        assert isinstance(desired, DesiredState) and desired.first_version == first.first_version
    finally:
        process.kill()
