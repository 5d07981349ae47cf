"""Resume mode with real processes: a replica that is killed takes no answer with it."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from paceline.bench.chaos.load import leave_streams, wait_for
from paceline.config import IngressConfig
from paceline.errors import PacelineError
from paceline.infra.app import Service
from tests.helpers.collector import Collector, Span
from tests.helpers.service_load import (
    HTTP,
    MAX_TOKENS,
    RESTART_S,
    fresh_state,
    replicas_of,
    running,
    tiny_config,
    under_load,
    wait_busy,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("resume")
    config = tiny_config(
        root, "resume", resume=True, ingress=IngressConfig(max_wait_s=RESTART_S), otlp_traces_endpoint=collector.url
    )
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with running(config) as service:
            yield service


def metric(url: str, name: str) -> float:
    text = HTTP.get(f"{url}/metrics", timeout=30).text  # an error while a replica is being lost has no such line
    found = [float(s.rsplit(" ", 1)[1]) for s in text.splitlines() if s.startswith(f"paceline_{name}{{")]
    return sum(found) if found else -1.0


def test_the_ingress_passes_on_what_engines_answer(service: Service) -> None:
    url = service.url
    assert HTTP.get(f"{url}/healthz").json()["status"] == "ok"
    card = HTTP.get(f"{url}/v1/models").json()["data"][0]
    assert card["id"] == "resume" and card["max_model_len"] > 64
    assert metric(url, "emitted_tokens_total") >= 0
    assert HTTP.get(f"{url}/paceline/swap").json()["slots"]
    page = HTTP.get(f"{url}/dashboard", follow_redirects=True)
    assert page.status_code == 200 and "content-security-policy" in page.headers
    assert len(HTTP.get(f"{url}/dashboard/static/plotly.min.js").content) > 10**6
    with httpx.stream("GET", f"{url}/dashboard/api/events", timeout=30) as events:
        assert next(events.iter_lines()) == "event: update"
    fresh_state(url)  # the controller is there
    refused = HTTP.post(f"{url}/paceline/pin", json={"version": "00000000aaaa"}, timeout=30)
    assert refused.status_code == 400 and "not in the registry" in refused.text
    assert HTTP.get(f"{url}/paceline/state", headers={"host": "evil.example"}).status_code == 403
    bad = HTTP.post(f"{url}/v1/completions", json={"prompt": [5, 10**6], "stream": True})
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "prompt"


def test_a_trace_goes_on_from_the_caller_through_the_ingress_into_the_replica(
    service: Service, collector: Collector
) -> None:
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    answer = HTTP.post(
        f"{service.url}/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0},
        headers={"traceparent": f"00-{trace}-{parent}-01"},
    ).json()  # fmt: skip
    http, engine, *phases = collector.trace(trace, 5)
    assert [http.name, engine.name] == ["POST /v1/completions", "llm_request"]
    assert (http.parent_id, engine.parent_id) == (parent, http.span_id)
    assert [(s.name, s.parent_id) for s in phases] == [(n, engine.span_id) for n in ("queue", "prefill", "decode")]
    assert http.resource["service.instance.id"] != engine.resource["service.instance.id"]
    assert engine.resource["service.instance.id"] in replicas_of(service.url)
    tokens = answer["usage"]["completion_tokens"]
    assert http.attributes["gen_ai.usage.completion_tokens"] == tokens
    assert engine.attributes["gen_ai.usage.completion_tokens"] == tokens
    assert engine.attributes["paceline.num_rounds"] == answer["paceline"]["num_rounds"]
    wait_for(lambda: metric(service.url, "ingress_spans_exported_total") >= 1, "counted spans of the ingress")
    wait_for(lambda: metric(service.url, "spans_exported_total") >= 4, "counted spans of the replicas")
    assert metric(service.url, "ingress_spans_dropped_total") == metric(service.url, "spans_dropped_total") == 0


def test_clients_that_hang_up_free_the_engines(service: Service) -> None:
    def totals() -> tuple[int, int]:
        engines = [r["engine"] for r in replicas_of(service.url).values()]
        return sum(e["num_aborted"] for e in engines), sum(e["num_running"] + e["num_waiting"] for e in engines)

    before = totals()[0]
    leave_streams(service.url, 4)
    wait_for(lambda: totals()[1] == 0, "empty engines")
    assert totals()[0] > before


def test_a_killed_replica_takes_no_answer_with_it(service: Service, collector: Collector) -> None:
    url = service.url

    def kill() -> None:
        while True:  # what a victim works on may end between the look and the kill
            victims = replicas_of(url)
            victim = next(iter(victims))
            wait_busy(url, victim, num_running=2)
            os.kill(victims[victim]["pid"], signal.SIGKILL)
            with contextlib.suppress(PacelineError):
                wait_for(lambda: metric(url, "ingress_resumed_total") >= 1, "an answer elsewhere", 30.0, every_s=0.01)
                return

    answers = under_load(url, kill, width=8, num_tokens=MAX_TOKENS)  # streams and whole answers
    assert {a.is_stream for a in answers} == {False, True}
    for answer in answers:
        answer.check_complete()
        stats = answer.stats[-1]
        assert stats["num_emitted_tokens"] == MAX_TOKENS
        assert 1 + stats["num_rounds"] + stats["num_accepted_tokens"] - stats["num_truncated_tokens"] == MAX_TOKENS
    assert wait_for(lambda: metric(url, "ingress_requests_total") > 0, "metrics")
    assert metric(url, "ingress_given_up_total") == 0

    def own_resumed(spans: list[Span]) -> list[Span]:
        """Of this load: on a busy computer a stream that was left before may have gone on elsewhere, too."""
        found = [s for s in spans if s.attributes.get("paceline.num_resumed_tokens")]
        return [s for s in found if s.attributes["gen_ai.request.max_tokens"] == MAX_TOKENS]

    resumed = collector.wait(own_resumed)
    for span in resumed:  # the answer's one trace goes on where the other replica takes over
        own = functools.partial(lambda parent, spans: [s for s in spans if s.span_id == parent], span.parent_id)
        (http,) = collector.wait(own)
        assert (http.name, http.trace_id) == ("POST /v1/completions", span.trace_id)
        assert span.attributes["gen_ai.usage.completion_tokens"] == MAX_TOKENS
