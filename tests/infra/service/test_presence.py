"""Claims of infra/service/presence.py about what Serve says of replicas."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from ray.serve._private.common import ReplicaState

from paceline.infra.service import presence

GONE = {ReplicaState.STARTING, ReplicaState.STOPPING, ReplicaState.STOPPED}


@pytest.mark.parametrize("state", ReplicaState)
def test_requests_are_refused_while_no_replica_may_take_one(
    monkeypatch: pytest.MonkeyPatch, state: ReplicaState
) -> None:
    engine = SimpleNamespace(replicas=[SimpleNamespace(state=ReplicaState.STOPPING), SimpleNamespace(state=state)])
    other = SimpleNamespace(route_prefix="/other", deployments={"front": SimpleNamespace(replicas=[])})
    found = {"mine": SimpleNamespace(route_prefix="/", deployments={"engine": engine}), "other": other}
    monkeypatch.setattr(presence.ray, "is_initialized", lambda: True)
    client = SimpleNamespace(get_serve_details=dict)
    monkeypatch.setattr(presence, "_get_global_client", lambda **_: client)
    monkeypatch.setattr(presence, "ServeInstanceDetails", lambda **_: SimpleNamespace(applications=found))
    # a controller of Serve that has just come back calls those that run RECOVERING
    assert presence.routes() == {"": state in GONE, "/other": False}


def test_it_asks_often_while_requests_come_and_at_once_behind_a_quiet_time(
    monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    looks: list[float] = []

    def routes() -> dict[str, bool]:
        looks.append(time.monotonic())
        return {"": True}

    monkeypatch.setattr(presence, "routes", routes)
    for name, seconds in (("EVERY_S", 0.02), ("QUIET_EVERY_S", 600.0), ("QUIET_AFTER_S", 0.5)):
        monkeypatch.setattr(presence, name, seconds)
    found = presence.Presence().start()
    wait_until(lambda: len(looks) >= 5 and found.is_gone("/v1/models"))
    wait_until(lambda: time.monotonic() - looks[-1] > 0.4)  # no request any more
    num = len(looks)
    time.sleep(0.2)
    assert len(looks) == num
    found.is_gone("/v1/models")
    wait_until(lambda: len(looks) > num + 3)
