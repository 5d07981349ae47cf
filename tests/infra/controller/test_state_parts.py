"""A commit writes what changed, and Redis holds the whole state all the same."""

from __future__ import annotations

import random

import msgspec
import pytest

from paceline.config import PolicyConfig
from paceline.contracts import SPAN_S, encode
from paceline.infra.controller.store import HostState
from paceline.infra.controller.traffic import TIERS
from paceline.infra.replica.feedback import make_batch
from paceline.machine import ManualClock
from tests.helpers.feedback import round_rows
from tests.helpers.hosts import make_host, send, settle, stored

START = 1_000_000.0


class Served:
    """A host with the real policy whose replicas send a batch a step."""

    def __init__(self, url, client, keys, tmp_path, policy: str = "payoff") -> None:
        self.clock, self.client, self.keys, self.seq = ManualClock(START), client, keys, 0
        self.host = make_host(
            url, keys, tmp_path, clock=self.clock, make=None, policy=PolicyConfig(policy=policy, epoch_s=7.0)
        )
        self.host.connect()

    @property
    def state(self) -> HostState:
        return self.host.session.state

    def step(self, seconds: float = 1.0, num_requests: int = 6, buckets: tuple[str, ...] = ("math", "code")) -> int:
        """Serve so long, make a pass with its commit; returns the bytes of state that it wrote."""
        self.seq += 1
        self.clock.advance(seconds)
        rng, store = random.Random(self.seq), self.host.session.books.store
        rows = [
            (f"q{self.seq}-{i}", rng.choice(buckets), "static" if i % 3 == 0 else "adaptive", "v1", True, 1, 4, 2, 3, 1,
             1.0, 6.0, 10.0 + rng.random(), False, self.clock.now())
            for i in range(num_requests)
        ]  # fmt: skip
        batch = make_batch(
            [round_rows(rows)], replica_id="a", boot_epoch=1, seq=self.seq, target_version="t", num_dropped=0
        )
        self.client.xadd(self.keys.feedback, {"v": encode(batch)})
        before = store.num_state_bytes
        self.host.step(block_ms=0)
        return store.num_state_bytes - before

    def check(self) -> None:
        """Redis holds what the controller knows."""
        assert not self.state.traffic.touched
        assert msgspec.to_builtins(stored(self.client, self.keys)) == msgspec.to_builtins(self.state)


@pytest.fixture
def served(shared_redis, client, keys, tmp_path, seeded) -> Served:
    return Served(shared_redis.url, client, keys, tmp_path)


def test_redis_holds_the_whole_state_after_every_commit(served):
    for k in range(40):
        served.step(seconds=0.5 + (k % 4))
        served.check()
    assert len(served.state.traffic.bins) > 5 and served.host.session.controller._state.epoch > 5


def test_bins_that_are_over_are_written_once_and_forgotten_in_time(served, client, keys):
    num_steps = TIERS[0][1] + 3 * TIERS[1][0]
    for _ in range(num_steps):
        served.step(seconds=SPAN_S)
    num_fine, width = TIERS[0][1], TIERS[1][0]
    assert num_fine + (num_steps - num_fine) // width - 1 <= len(served.state.traffic.bins) < num_fine + width + 3
    served.check()
    numbers = {int(name[4:]) for name in client.hkeys(keys.state) if name.startswith(b"bin:")}
    assert numbers == {n for n, _ in served.state.traffic.bins}
    whole = len(encode(served.state))
    assert served.step(seconds=0.1) < whole / 3


def test_what_a_commit_writes_is_bounded_however_many_requests_an_epoch_has(served):
    few = [served.step(seconds=0.01, num_requests=2000) for _ in range(2)][-1]
    many = [served.step(seconds=0.01, num_requests=2000) for _ in range(8)][-1]
    assert served.host.session.controller._state.epoch == 0
    assert many < 1.3 * few


def test_a_server_that_missed_commits_gets_the_whole_state_again(served, client, keys):
    for _ in range(12):
        served.step()
    old = client.hgetall(keys.state)
    for _ in range(12):
        served.step(seconds=2.0)
    client.delete(keys.state)
    client.hset(keys.state, mapping=old)  # a fail-over to a replica that lags
    served.step()
    served.check()
    client.delete(keys.state)
    served.step()
    served.check()


def test_a_controller_that_comes_back_goes_on_in_the_open_epoch(served, shared_redis, client, keys, tmp_path):
    for _ in range(10):
        served.step()
    again = Served(shared_redis.url, client, keys, tmp_path)
    again.seq, again.clock = served.seq, served.clock
    assert again.host.session.controller.state() == served.host.session.controller.state()
    assert again.state.traffic == served.state.traffic
    for _ in range(3):
        again.step()
        again.check()


@pytest.mark.parametrize("spoil", ["field", "kind"])
def test_a_damaged_state_is_replaced_by_the_file(served, shared_redis, client, keys, tmp_path, spoil):
    for _ in range(10):
        served.step()
    served.host.stop()
    if spoil == "field":
        client.hset(keys.state, "traffic", b"junk")
    else:
        client.delete(keys.state)
        client.set(keys.state, b"junk")
    again = Served(shared_redis.url, client, keys, tmp_path)
    again.seq = served.seq
    assert again.state.num_rows == served.state.num_rows == 60
    send(client, keys, 99, replica="b")
    settle(again.host)
    again.check()
