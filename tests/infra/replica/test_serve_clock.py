"""Serve's controller measures by a time that does not step with the computer's clock."""

import time

from ray._common.utils import Timer
from ray.serve._private import deployment_state

from paceline.infra.replica import serve_clock


def test_looks_at_replicas_and_proxies_are_reckoned_without_the_clocks_steps(monkeypatch):
    monkeypatch.setattr(deployment_state, "time", time)
    monkeypatch.setattr(Timer, "time", Timer.time)
    module, name = serve_clock.CONTROLLER_CALLBACK.rsplit(".", 1)
    assert module == serve_clock.__name__
    getattr(serve_clock, name)()
    before = time.time()
    monkeypatch.setattr(time, "time", lambda: before - 3600.0)
    for now in (deployment_state.time.time(), Timer().time()):
        assert abs(now - before) < 60.0
    assert deployment_state.time.sleep is time.sleep
