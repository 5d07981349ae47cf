"""Deadlines expire once, in order, and ended requests do not pile up."""

from paceline.serving.engine.running import RunningRequest
from paceline.serving.engine.scheduler import Deadlines
from paceline.serving.sampling.request import GenerationRequest, SamplingParams


def watched(deadlines: Deadlines, alive: dict, name: str, arrival: int, deadline_s: float | None) -> RunningRequest:
    request = RunningRequest(
        request=GenerationRequest(
            request_id=name, prompt_token_ids=(3,), params=SamplingParams(), deadline_s=deadline_s
        ),
        on_event=lambda e: None, arrival=arrival, seed=0, token_limit=4, stop_token_ids=frozenset(), stop_checker=None,
        counts=None, submitted_s=0.0,
    )  # fmt: skip
    alive[name] = request
    deadlines.add(request, alive)
    return request


def test_each_request_expires_once_earliest_first():
    deadlines, alive = Deadlines(), {}
    late, early = watched(deadlines, alive, "late", 0, 5.0), watched(deadlines, alive, "early", 1, 2.0)
    watched(deadlines, alive, "never", 2, None)
    assert deadlines.take_expired(1.9, alive) == []
    assert deadlines.take_expired(9.0, alive) == [early, late]
    assert deadlines.take_expired(9.0, alive) == [] and len(deadlines) == 0


def test_a_request_that_ended_does_not_expire_nor_does_the_next_user_of_its_id():
    deadlines, alive = Deadlines(), {}
    watched(deadlines, alive, "id", 0, 1.0)
    again = watched(deadlines, alive, "id", 1, 3.0)
    assert deadlines.take_expired(2.0, alive) == []
    assert deadlines.take_expired(3.0, alive) == [again]


def test_ended_requests_are_forgotten_long_before_their_deadline():
    deadlines, alive = Deadlines(), {}
    for i in range(2000):
        watched(deadlines, alive, f"r{i}", i, 1e9)
        del alive[f"r{i}"]
    assert len(deadlines) < 100
