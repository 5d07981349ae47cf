"""Shared set-up of the infra tests: one real Redis child process, a fresh key prefix for each test."""

import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from paceline.infra.redis_clients import Keys, patient_client
from paceline.infra.redis_server import EmbeddedRedis


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
def client(shared_redis: EmbeddedRedis):
    made = patient_client(shared_redis.url)
    yield made
    made.close()


@pytest.fixture
def wait_until() -> Callable[..., None]:
    def wait(condition: Callable[[], bool], timeout_s: float = 20.0, what: str = "condition") -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s} s"
            time.sleep(0.02)

    return wait
