"""One tenant's flood costs another tenant next to nothing: counted in rounds, not in seconds."""

import itertools

import numpy as np
import pytest

from paceline.errors import CapacityError, RequestError
from paceline.serving.engine.engine import Engine
from paceline.serving.engine.inbox import QUEUE_SHARE, EngineInbox
from paceline.serving.engine.scheduler import RequestQueue, RowCounter
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from tests.helpers.engines import greedy, make_engine
from tests.helpers.running_requests import make_request
from tests.helpers.scripted_drafters import RepeatDrafter

NUM_ASKED = 100


def engine_with(**options) -> Engine:
    values = {"num_pages": 512, "max_running": 8, "prefill_chunk_tokens": 64, "max_classes": 0, **options}
    return make_engine(RepeatDrafter(), **values)


def prompt_of(i: int, num_tokens: int) -> tuple[int, ...]:
    rng = np.random.default_rng(i)
    return tuple(int(t) for t in rng.integers(8, 60, num_tokens))


def ask(engine: Engine, name: str, prompt: tuple[int, ...], num_tokens: int, tenant: str, priority: int = 0) -> list:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    events: list = []
    request = GenerationRequest(
        request_id=name, prompt_token_ids=prompt, params=params, tenant=tenant, priority=priority
    )
    engine.submit(request, events.append)
    return events


def rounds_of_a_quiet_tenant(flood: int, **options) -> tuple[np.ndarray, Engine]:
    """Rounds from each request of the quiet tenant to its end, while another keeps `flood` requests unfinished."""
    engine, numbers = engine_with(**options), itertools.count()
    noisy: list[list] = []
    waited: list[int] = []
    for i in range(NUM_ASKED):
        prompt = prompt_of(i % 7, 20)
        mine = ask(engine, f"quiet-{i}", prompt, 48, "quiet")
        num_rounds = 0
        while not (mine and mine[-1].finish_reason):
            noisy = [e for e in noisy if not (e and e[-1].finish_reason)]
            while len(noisy) < flood:
                k = next(numbers)
                noisy.append(ask(engine, f"noisy-{k}", prompt_of(1000 + k, 60), 40, "noisy", priority=-1000))
            assert engine.step()
            num_rounds += 1
        waited.append(num_rounds)
        assert sum((e.token_ids for e in mine), ()) == greedy(prompt, 48)
    return np.array(waited), engine


@pytest.mark.parametrize("options", [{}, {"num_pages": 96}], ids=["places are short", "pages are short"])
@pytest.mark.slow
def test_a_flood_leaves_the_p99_of_another_tenant_within_a_fifth(options):
    alone, _ = rounds_of_a_quiet_tenant(0, **options)
    flooded, engine = rounds_of_a_quiet_tenant(40, **options)
    assert np.quantile(flooded, 0.99) <= 1.2 * np.quantile(alone, 0.99), (flooded.max(), alone.max())
    assert engine.output.num_finished > 2 * NUM_ASKED, "the flood is served too"
    engine.check_integrity()


def test_a_tenant_that_floods_does_not_starve_itself_and_gets_what_others_leave():
    engine = engine_with()
    events = [ask(engine, f"a{i}", prompt_of(i, 30), 8, "a") for i in range(30)]
    for _ in range(400):
        engine.step()
    assert all(e[-1].finish_reason == "length" for e in events)
    assert engine.scheduler.num_preemptions == 0, "alone it has every place"


def test_more_tenants_than_places_are_served_in_turn():
    engine = engine_with(max_running=2)
    events = [ask(engine, f"{t}{i}", prompt_of(i, 10), 4, f"t{t}") for i in range(3) for t in range(6)]
    for _ in range(400):
        engine.step()
    assert all(e and e[-1].finish_reason == "length" for e in events)
    engine.check_integrity()


def test_the_queue_keeps_places_for_a_tenant_that_comes_anew_and_is_whole_for_those_without_one():
    engine = engine_with(max_waiting=20)
    sent = {"x": 0, "y": 0, "": 0}
    for tenant in ("x", "y"):
        with pytest.raises(CapacityError, match="of one tenant"):
            for k in itertools.count():
                ask(engine, f"{tenant}{k}", prompt_of(k, 4), 2, tenant)
                sent[tenant] += 1
    assert sent["x"] == 20 * QUEUE_SHARE // (QUEUE_SHARE + 1) and sent["y"] >= 2
    assert ask(engine, "z", prompt_of(0, 4), 2, "z") == []
    engine = engine_with(max_waiting=20)
    for k in range(20):
        ask(engine, f"n{k}", prompt_of(k, 4), 2, "")
    with pytest.raises(CapacityError, match="room for 0"):
        ask(engine, "n20", prompt_of(0, 4), 2, "")


@pytest.mark.parametrize("size", [1, 2, 5, 32, 256])
def test_a_tenants_body_is_taken_by_an_empty_queue_or_never_to_be_sent_again(size):
    """None is told to try again for ever."""
    for num, tenant in itertools.product(range(1, size + 1), ("", "x")):
        inbox = EngineInbox(size, RequestQueue(), np.random.default_rng(0))
        requests = [make_request(i, 3, tenant=tenant) for i in range(num)]
        most = size if not tenant else (QUEUE_SHARE * size + 1) // (QUEUE_SHARE + 1)
        if num <= most:
            inbox.put_all(requests)
            continue
        with pytest.raises(RequestError, match=f"at most {most}, got {num}"):
            inbox.put_all(requests)


def test_leaving_for_a_moment_brings_a_tenant_nothing():
    given = RowCounter()
    given.enter("a", ())
    given.add("a", 100)
    given.enter("b", {"a"})
    assert given["b"] == 100, "who was away saves nothing up"
    given.add("b", 50)
    given.enter("b", {"a"})
    assert given["b"] == 150
    given.enter("c", ())
    assert given["b"] == given["c"] == 0, "nobody is there whom it would be unfair to"


def test_among_tenants_given_alike_the_rank_decides():
    queue = RequestQueue()
    for i, rank in enumerate((3.0, 1.0, 2.0)):
        request = make_request(i, 3, tenant=f"t{i}")
        request.rank = (rank, i)
        queue.push(request)
    first = queue.first(lambda tenant: (0.0,))
    assert first is not None and first.request_id == "r1"
    assert queue.num_of("t1") == 1 and queue.num_of("nobody") == 0
