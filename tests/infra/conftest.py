"""Shared set-up of the infra tests: one real Redis child process, a fresh key prefix for each test."""

import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from paceline.config import RolloutConfig
from paceline.contracts import DesiredState
from paceline.infra.controller.host import ControllerHost
from paceline.infra.state.desired import ensure_first_version
from paceline.infra.state.redis_clients import Keys, patient_client
from paceline.infra.state.redis_server import EmbeddedRedis
from tests.helpers.hosts import make_host


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_redis(tmp_path) -> Iterator[EmbeddedRedis]:
    """A server that the test may kill or flush."""
    server = EmbeddedRedis(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def keys() -> Keys:
    return Keys(uuid.uuid4().hex[:8])


@pytest.fixture
def client(shared_redis: EmbeddedRedis, keys: Keys):
    made = patient_client(shared_redis.url)
    yield made
    for name in made.scan_iter(f"{keys.base}*", count=1000):  # else what tests leave fills the server that they share
        made.unlink(name)
    made.close()


@pytest.fixture
def seeded(client, keys) -> DesiredState:
    """The first desired record: v1 is live."""
    return ensure_first_version(client, keys, "v1", 10, 1.0)


@pytest.fixture
def rollout() -> RolloutConfig:
    """Of `host`; versions go live at once."""
    return RolloutConfig(canary_percent=0)


@pytest.fixture
def host(shared_redis, keys, tmp_path, seeded, rollout) -> Iterator[ControllerHost]:
    """A connected host of tests/helpers/hosts.py."""
    made = make_host(shared_redis.url, keys, tmp_path, rollout=rollout)
    made.connect()
    yield made
    if made.session.state.pending is not None:
        made.session.jobs.kill()


@pytest.fixture
def wait_until() -> Callable[..., None]:
    def wait(condition: Callable[[], bool], timeout_s: float = 20.0, what: str = "condition") -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s} s"
            time.sleep(0.02)

    return wait
