"""Claims of infra/service/presence.py about what Serve says of replicas."""

from __future__ import annotations

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
