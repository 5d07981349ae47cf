"""Claims of infra/service/presence.py about what Serve says of replicas."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RaySystemError
from ray.serve._private.common import DeploymentID, ReplicaID, ReplicaState
from ray.serve._private.long_poll import LongPollClient, LongPollNamespace, UpdatedObject

from paceline.infra.service import presence

GONE = {ReplicaState.STARTING, ReplicaState.STOPPING, ReplicaState.STOPPED}


@pytest.mark.parametrize("state", ReplicaState)
def test_requests_are_refused_while_no_replica_may_take_one(
    state: ReplicaState,
) -> None:
    engine = SimpleNamespace(replicas=[SimpleNamespace(state=ReplicaState.STOPPING), SimpleNamespace(state=state)])
    other = SimpleNamespace(route_prefix="/other", deployments={"front": SimpleNamespace(replicas=[])})
    found = {"mine": SimpleNamespace(route_prefix="/", deployments={"engine": engine}), "other": other}
    # a controller of Serve that has just come back calls those that run RECOVERING
    assert presence.routes(SimpleNamespace(applications=found)) == {"": state in GONE, "/other": None}
    found["mine"].deployments["ingress"] = SimpleNamespace(replicas=[SimpleNamespace(state=ReplicaState.RUNNING)])
    assert presence.routes(SimpleNamespace(applications=found))[""] is False, "an ingress lets its clients wait"
    found["mine"].deployments["ingress"].replicas[0].state = state
    assert presence.routes(SimpleNamespace(applications=found))[""] == (state in GONE)


def test_it_asks_often_while_requests_come_and_at_once_behind_a_quiet_time(
    monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    looks: list[float] = []

    def routes(_: Any) -> dict[str, bool]:
        looks.append(time.monotonic())
        return {"": True}

    monkeypatch.setattr(presence, "routes", routes)
    monkeypatch.setattr(presence, "details", lambda: SimpleNamespace(applications={}))
    for name, seconds in (("EVERY_S", 0.02), ("LEAST_S", 0.01), ("QUIET_EVERY_S", 600.0), ("QUIET_AFTER_S", 0.5)):
        monkeypatch.setattr(presence, name, seconds)
    own = presence.Listening()  # begun for no other test of this process: Ray's class is everybody's
    monkeypatch.setattr(presence, "listening", lambda: own)
    found = presence.Presence().start()
    wait_until(lambda: len(looks) >= 5 and asyncio.run(found.is_gone("/v1/models")))
    wait_until(lambda: time.monotonic() - looks[-1] > 0.4)  # no request any more
    num = len(looks)
    time.sleep(0.2)
    assert len(looks) == num
    asyncio.run(found.is_gone("/v1/models"))
    wait_until(lambda: len(looks) > num + 3)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Serve's controller: what it says of one route, how often it was asked, how long it takes."""
    said = SimpleNamespace(is_gone=True, num=0, takes_s=0.0)

    def routes(_: Any) -> dict[str, bool]:
        said.num += 1
        now = said.is_gone
        time.sleep(said.takes_s)
        return {"": now, "/other": True}

    monkeypatch.setattr(presence, "routes", routes)
    monkeypatch.setattr(presence, "details", lambda: SimpleNamespace(applications={}))
    own = presence.Listening()
    monkeypatch.setattr(presence, "listening", lambda: own)
    return said


def rarely_looking(monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]) -> presence.Presence:
    """One that knows by its first look that no replica is there, and looks by itself after 5 s only."""
    monkeypatch.setattr(presence, "EVERY_S", 5.0)
    found = presence.Presence().start()
    found._wake.set()
    wait_until(lambda: found._of("/v1/models"))
    return found


def test_a_request_is_refused_by_what_is_so_and_not_by_what_was(
    monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None], looked: SimpleNamespace
) -> None:
    found = rarely_looking(monkeypatch, wait_until)
    looked.is_gone = False
    assert not asyncio.run(found.is_gone("/v1/models")) and asyncio.run(found.is_gone("/other/v1"))
    assert not asyncio.run(found.is_gone("/v1/models"))
    looked.is_gone = True  # it is told at the next look, as ever
    assert not asyncio.run(found.is_gone("/v1/models"))


def test_a_thousand_requests_at_once_want_few_looks(
    monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None], looked: SimpleNamespace
) -> None:
    found = rarely_looking(monkeypatch, wait_until)

    async def ask() -> list[bool]:
        return await asyncio.gather(*(found.is_gone("/v1") for _ in range(1000)))

    num, began_s = looked.num, time.monotonic()
    assert all(asyncio.run(ask()))
    assert looked.num - num <= 2 + (time.monotonic() - began_s) / presence.LEAST_S


def test_a_controller_that_does_not_answer_refuses_nobody(
    monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None], looked: SimpleNamespace
) -> None:
    monkeypatch.setattr(presence, "EVERY_S", 0.05)
    found = presence.Presence().start()
    wait_until(lambda: found._of("/"))
    looked.takes_s = 30.0
    num = looked.num
    wait_until(lambda: looked.num > num)
    began_s = time.monotonic()
    assert not asyncio.run(found.is_gone("/v1")) and time.monotonic() - began_s < 5.0, "it waits for a replica, as ever"
    time.sleep(0.2)
    monkeypatch.setattr(presence.asyncio, "sleep", None)
    assert not asyncio.run(found.is_gone("/v1")), "and not for the look that gets no answer"


class Host:
    """Serve's controller, as a client of it sees it: calls that wait until they are answered."""

    def __init__(self) -> None:
        self.calls: list[dict[Any, int]] = []
        self.answers: list[Callable[[Any], None]] = []
        self.listen_for_change = self

    def remote(self, snapshot_ids: dict[Any, int]) -> Any:
        self.calls.append(dict(snapshot_ids))
        return SimpleNamespace(_on_completed=self.answers.append)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> presence.Listening:
    for name in ("_poll_next", "_process_update"):
        monkeypatch.setattr(LongPollClient, name, getattr(LongPollClient, name))  # put back behind the test
    return presence.Listening().start()


MINE = DeploymentID(name="engine", app_name="mine")
KEY = (LongPollNamespace.DEPLOYMENT_TARGETS, MINE)


def news(*names: str, number: int = 7) -> dict[Any, UpdatedObject]:
    replicas = [SimpleNamespace(replica_id=ReplicaID(name, deployment_id=MINE)) for name in names]
    return {KEY: UpdatedObject(SimpleNamespace(running_replicas=replicas), number, time.time())}


def runs(*names: str) -> Any:
    replicas = [SimpleNamespace(replica_id=name, state=ReplicaState.RUNNING) for name in names]
    deployments = {"engine": SimpleNamespace(replicas=replicas)}
    return SimpleNamespace(applications={"mine": SimpleNamespace(deployments=deployments)})


@pytest.mark.parametrize(
    "lost", [ActorUnavailableError("away", b"0" * 16), ActorDiedError(), ConnectionError(), RaySystemError("?")]
)
def test_a_process_asks_again_whatever_becomes_of_a_call(
    listening: presence.Listening, loop: Any, lost: Exception, monkeypatch: pytest.MonkeyPatch,
    wait_until: Callable[..., None],
) -> None:  # fmt: skip
    monkeypatch.setattr(presence, "_RETRY_S", 0.01)
    host, told = Host(), []
    client = LongPollClient(host, {KEY: told.append}, loop, "test")
    wait_until(lambda: len(host.answers) == 1)
    host.answers[0](news("a"))
    wait_until(lambda: len(host.answers) == 2)
    assert host.calls[1] == {KEY: 7}
    host.answers[1](lost)
    wait_until(lambda: len(host.answers) == 3)
    assert host.calls[2] == {KEY: -1}, "another controller may count from anywhere"
    host.answers[2](news("b"))
    wait_until(lambda: len(told) == 2 and len(host.answers) == 4)
    client.stop()
    host.answers[3](lost)
    time.sleep(0.1)
    assert len(host.answers) == 4


def test_what_a_stopped_client_is_told_counts_for_nobody(
    listening: presence.Listening, loop: Any, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    """A router's own client is stopped for one that all routers share, while its last call is on its way."""
    monkeypatch.setattr(presence, "UNTOLD_S", 0.1)
    stopped, shared = Host(), Host()
    first = LongPollClient(stopped, {KEY: print}, loop, "own")
    second = LongPollClient(shared, {KEY: print}, loop, "shared")
    wait_until(lambda: stopped.answers and shared.answers)
    shared.answers[0](news("a"))
    wait_until(lambda: len(shared.answers) == 2)  # the call that never ends
    first.stop()
    stopped.answers[0](news("a", "b"))
    wait_until(lambda: listening.look(runs("a", "b")) or len(shared.answers) == 3)
    assert len(stopped.answers) == 1 and second.is_running


def test_a_process_that_was_not_told_of_a_replica_asks_anew(
    listening: presence.Listening, loop: Any, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    monkeypatch.setattr(presence, "UNTOLD_S", 0.2)
    host, told = Host(), []
    client = LongPollClient(host, {KEY: told.append}, loop, "test")
    wait_until(lambda: len(host.answers) == 1)
    listening.look(runs("a"))
    host.answers[0](news("a"))
    wait_until(lambda: len(host.answers) == 2)  # the call that never ends
    for _ in range(4):
        listening.look(runs("a"))
        time.sleep(0.1)
    assert len(host.answers) == 2
    wait_until(lambda: listening.look(runs("a", "b")) or len(host.answers) == 3)
    assert host.calls[2] == {KEY: -1}
    host.answers[2](news("a", "b"))
    wait_until(lambda: len(host.answers) == 4)
    host.answers[1](news("a", number=9))  # late, and of before
    listening.look(runs("a", "b"))
    time.sleep(0.3)
    listening.look(runs("a", "b"))
    assert len(host.answers) == 4 and len(told) == 2 and client.is_running
