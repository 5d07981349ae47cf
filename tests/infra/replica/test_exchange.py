"""Claims of infra/replica/exchange.py against a real server: one scrape shows every process, and what it shows never falls."""

import threading
import time

import pytest

from paceline.config import IngressConfig, ServiceConfig
from paceline.contracts import Histogram, HttpMeters
from paceline.infra.replica.exchange import WINDOW_S, NumbersExchange, ReplicaNumbers
from paceline.infra.resume.client import ResumingClient
from paceline.infra.resume.stream import EngineFacts
from paceline.infra.service.ingress import ingress_parts, render_ingress_metrics
from paceline.infra.state.desired import REPORT_TTL_S
from paceline.infra.web.metrics import render_metrics
from paceline.infra.web.state_routes import latency_state
from paceline.names import ENGINE, INGRESS
from paceline.serving.api.generation import EngineInfo


class Process:
    """A process that counts, with its end of the exchange."""

    def __init__(self, url, keys, name, kind=ENGINE):
        self.rounds, self.http, self.queue, self.now = 0, HttpMeters(), Histogram(), 0.0
        counters = lambda: {"engine": {"num_rounds": self.rounds}}  # noqa: E731
        self.exchange = NumbersExchange(
            url, keys, name, timer=lambda: self.now,
            read=lambda: ReplicaNumbers(kind=kind, model="m", counters=counters(), http=self.http, queue=self.queue),
        )  # fmt: skip

    def scrape(self) -> dict[str, int]:
        return {name: n.counters["engine"]["num_rounds"] for name, n in self.exchange.gather(ENGINE).items()}


@pytest.fixture
def pair(shared_redis, keys):
    made = [Process(shared_redis.url, keys, name) for name in "ab"]
    yield made
    for p in made:
        p.exchange.close()


def test_whoever_is_asked_tells_of_all(pair):
    a, b = pair
    a.rounds, b.rounds = 3, 5
    b.scrape()
    assert a.scrape() == {"a": 3, "b": 5}
    text = render_metrics(a.exchange.gather(ENGINE))[0].decode()
    assert 'paceline_rounds_total{model="m",replica="a"} 3.0' in text
    assert 'paceline_rounds_total{model="m",replica="b"} 5.0' in text
    assert text.count("# TYPE paceline_rounds_total") == 1


def test_who_has_left_or_fallen_silent_is_not_counted(pair, client, keys):
    a, b = pair
    assert a.exchange.num_processes is None
    b.scrape()
    a.scrape()
    assert a.exchange.num_processes == 2
    client.zincrby(keys.numbers, -REPORT_TTL_S - 1, "b")
    a.scrape()
    assert a.exchange.num_processes == 1
    b.scrape()
    b.exchange.close()
    a.scrape()
    assert a.exchange.num_processes == 1 and client.zrange(keys.numbers, 0, -1) == [b"a"]


def test_processes_on_nodes_whose_clocks_are_off_count_each_other(pair, client, keys, monkeypatch):
    a, b = pair
    now = time.time()
    for p, skew_s in ((a, 3600.0), (b, 0.0), (a, 3600.0)):
        monkeypatch.setattr(time, "time", lambda skew_s=skew_s: now + skew_s)
        p.scrape()
    assert a.exchange.num_processes == b.exchange.num_processes == 2
    client.zincrby(keys.numbers, -REPORT_TTL_S - 1, "a")  # it is gone, and its clock was ahead
    b.scrape()
    assert b.exchange.num_processes == 1


def test_what_a_scrape_has_shown_never_falls_in_the_next(pair):
    shown: dict[str, int] = {}
    for i in range(40):
        asked = pair[i % 3 % 2]
        for p in pair:
            p.rounds += i % 4
        for name, value in asked.scrape().items():
            assert value >= shown.get(name, 0)
            shown[name] = value


def test_a_thread_writes_without_a_scrape(shared_redis, keys, client, wait_until, monkeypatch):
    monkeypatch.setattr("paceline.infra.replica.exchange.PERIOD_S", 0.02)
    p = Process(shared_redis.url, keys, "a")
    p.exchange.start()
    wait_until(lambda: client.exists(keys.numbers_of("a")))
    assert 0 < client.ttl(keys.numbers_of("a")) <= REPORT_TTL_S
    p.exchange.close()
    assert not client.exists(keys.numbers_of("a")), "who leaves is no longer seen"


def test_a_process_that_is_gone_leaves_and_is_forgotten(pair, client, keys):
    a, b = pair
    b.scrape()
    client.delete(keys.numbers_of("b"))  # as its time to live does
    assert a.scrape() == {"a": 0}
    assert client.zrange(keys.numbers, 0, -1) == [b"a"]


def test_records_of_another_release_are_left_out(pair, client, keys):
    a, b = pair
    b.scrape()
    client.set(keys.numbers_of("b"), b"\x93garbage")
    assert a.scrape() == {"a": 0}


def test_without_redis_a_process_tells_of_itself(keys):
    p = Process(None, keys, "a")
    p.exchange.start()
    p.rounds = 2
    assert p.scrape() == {"a": 2}
    p.exchange.close()


def test_while_redis_is_away_a_process_tells_of_itself_at_once(own_redis, keys):
    a, b = (Process(own_redis.url, keys, name) for name in "ab")
    b.scrape()
    own_redis.stop()
    a.rounds = 7
    assert a.scrape() == {"a": 7}
    a.rounds = 8
    assert a.scrape() == {"a": 8}


def test_the_past_minute_is_known_without_a_redis_before_anybody_asks(keys, monkeypatch):
    monkeypatch.setattr("paceline.infra.replica.exchange.PERIOD_S", 0.01)
    alone, seen = Process(None, keys, "a"), threading.Semaphore(0)
    read = alone.exchange._read
    alone.exchange._read = lambda: seen.release() or read()
    alone.exchange.start()
    try:
        assert all(seen.acquire(timeout=10) for _ in range(2)), "the numbers before are noted"
        alone.http.times(True).whole.observe(0.5)
        assert sum(alone.exchange.gather(ENGINE)["a"].recent.streamed.whole.counts) == 1
    finally:
        alone.exchange.close()


def test_recent_forgets_what_is_older_than_its_window(pair):
    a, _ = pair
    a.exchange.own()
    a.now, _ = 1.0, a.http.times(True).whole.observe(0.5)
    assert sum(a.exchange.own().recent.streamed.whole.counts) == 1
    a.now += WINDOW_S
    a.exchange.own()
    a.now += WINDOW_S
    own = a.exchange.own()
    assert sum(own.recent.streamed.whole.counts) == 0 and sum(own.http.streamed.whole.counts) == 1


def test_the_past_minute_of_all_who_speak_http(pair):
    a, b = pair
    for p in pair:
        p.exchange.own()
    a.http.times(True).whole.observe(0.25, 99)
    b.http.times(False).whole.observe(4.0, 1)
    b.http.count("/v1/completions", 503, False)
    a.http.count("/v1/completions", 200, True)
    b.scrape()
    state = latency_state(a.exchange.gather(ENGINE, INGRESS).values())
    assert state.num_answers == 100 and state.num_failed == 2
    assert 0.2 <= state.whole.p50_s <= 0.3 and state.first_token.p50_s is None
    assert latency_state([]) is None


def test_ingresses_are_told_by_ingresses(shared_redis, keys):
    engine, one, two = (
        Process(shared_redis.url, keys, name, kind) for name, kind in (("e", ENGINE), ("i", INGRESS), ("j", INGRESS))
    )
    for p in (engine, one, two):
        p.scrape()
    text = render_ingress_metrics(one.exchange.gather(INGRESS)).decode()
    assert 'paceline_ingress_requests_total{model="m",replica="i"} 0.0' in text and 'replica="j"' in text
    assert 'replica="e"' not in text and text.count("# TYPE paceline_request_seconds histogram") == 1
    for p in (engine, one, two):
        p.exchange.close()


def test_an_ingress_that_ends_is_in_no_scrape_any_more(shared_redis, client, keys, wait_until):
    config = ServiceConfig(redis_url=shared_redis.url, model_name=keys.model)
    info = EngineInfo(model_name=keys.model, target_version="t", context_tokens=64, vocab_size=300, created=0)
    serving = ResumingClient(lambda raw: None, EngineFacts(info=info, holdback_percent=0), IngressConfig())
    _, closers = ingress_parts(config, serving, lambda raw: None, "ingress-1")
    wait_until(lambda: client.zrange(keys.numbers, 0, -1) == [b"ingress-1"])
    for close in reversed(closers):
        close()
    assert client.zrange(keys.numbers, 0, -1) == [] and client.get(keys.numbers_of("ingress-1")) is None
