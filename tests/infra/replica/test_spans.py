"""Claims of infra/replica/spans.py, span_export.py and span_target.py with a real collector on this computer."""

import json
import subprocess
import sys
import time

import httpx
import pytest
import ray

from paceline.config import ServiceConfig
from paceline.errors import ConfigError
from paceline.infra.app import run_service
from paceline.infra.replica.span_target import SpanTarget
from paceline.infra.replica.spans import phases
from paceline.serving.engine.output import EndedRequest
from paceline.serving.sampling.request import GenerationRequest, RequestStats, SamplingParams
from paceline.serving.wire.accounts import Clients
from paceline.serving.wire.credentials import Tokens
from tests.helpers.api_server import serve_engine, wait_until
from tests.helpers.collector import Collector
from tests.helpers.fakes import tiny_target
from tests.helpers.hosts import make_host, send, settle
from tests.helpers.scripted import ScriptedController

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "xylophone quartz"
PHASES = ["queue", "prefill", "decode"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Spans go out at once, and nobody's variables matter."""
    for name in ("OTEL_TRACES_SAMPLER", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


@pytest.fixture
def collector():
    with Collector() as made:
        yield made


def open_spans(url, *, ratio=None, process_id="r1"):
    return SpanTarget(endpoint=url, model="tiny", ratio=ratio).open(process_id)


def serve(spans):
    return serve_engine(tiny_target(vocab=300), ends=spans.engine, spans=spans.http)


def ask(base, *, sampled=True, stream=False, **fields):
    headers = {
        "traceparent": f"00-{TRACE}-{PARENT}-0{int(sampled)}",
        "x-request-id": "mine",
        "x-paceline-tenant": "acme",
    }
    body = {
        "prompt": SECRET,
        "max_tokens": 24,
        "temperature": 0.5,
        "seed": 3,
        "ignore_eos": True,
        "stream": stream,
        **fields,
    }
    return httpx.post(f"{base}/v1/completions", json=body, headers=headers, timeout=30)


def test_a_request_is_one_trace_that_goes_on_behind_the_callers_and_holds_no_text(collector):
    spans = open_spans(collector.url)
    with serve(spans) as (base, _):
        began_s = time.time()
        answer = ask(base, top_p=0.9).json()
        ended_s = time.time()
        found = collector.trace(TRACE, 5)
        wait_until(lambda: sum(spans.counters().values()) >= 5)  # counted once the collector's answer is read
        counts = spans.counters()
    spans.close()
    http, engine, *rest = found
    assert [s.name for s in found] == ["POST /v1/completions", "llm_request", *PHASES]
    assert (http.parent_id, engine.parent_id) == (PARENT, http.span_id)
    assert {s.parent_id for s in rest} == {engine.span_id}
    assert (http.kind, engine.kind) == (2, 1)  # server, internal
    assert http.resource["service.name"] == "paceline" and http.resource["service.instance.id"] == "r1"

    usage, stats = answer["usage"], answer["paceline"]
    counted = {"gen_ai.usage.prompt_tokens": usage["prompt_tokens"], "gen_ai.usage.completion_tokens": 24}
    assert http.attributes.items() >= {
        "http.request.method": "POST", "http.route": "/v1/completions", "http.response.status_code": 200,
        "paceline.request_id": "mine", "gen_ai.response.model": "tiny", "paceline.bucket": stats["bucket"],
        "paceline.drafter_version": "repeat-1", **counted,
    }.items()  # fmt: skip
    own = engine.attributes
    assert own.items() >= {
        "gen_ai.request.id": http.attributes["gen_ai.request.id"], "gen_ai.request.max_tokens": 24,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.9, "gen_ai.response.finish_reasons": ["length"],
        "paceline.group": "adaptive", "paceline.num_rounds": stats["num_rounds"],
        "paceline.num_draft_tokens": stats["num_draft_tokens"],
        "paceline.acceptance_length": pytest.approx(stats["acceptance_length"]), **counted,
    }.items()  # fmt: skip
    queue, prefill, decode = rest
    assert began_s - 0.01 <= http.start_s <= engine.start_s and engine.end_s <= http.end_s + 0.01 <= ended_s + 0.02
    for name, span in (("time_in_queue", queue), ("time_in_model_prefill", prefill), ("time_in_model_decode", decode)):
        assert own[f"gen_ai.latency.{name}"] == pytest.approx(span.end_s - span.start_s, abs=2e-6)
    assert queue.start_s == engine.start_s and queue.end_s == prefill.start_s and prefill.end_s == decode.start_s
    assert own["gen_ai.latency.time_to_first_token"] == pytest.approx(prefill.end_s - queue.start_s, abs=2e-6)
    assert own["gen_ai.latency.e2e"] == pytest.approx(engine.end_s - engine.start_s, abs=2e-6)

    sent = b"".join(collector.bodies)
    text = answer["choices"][0]["text"]
    assert len(text) >= 8 and b"http.route" in sent  # neither compressed nor empty
    for private in (SECRET, text, text[:6], "acme"):
        assert private.encode() not in sent
    assert set(collector.paths) == {"/v1/traces"} and counts == {"exported": 5, "dropped": 0}


def test_every_choice_has_a_span_and_refusals_have_their_status(collector):
    spans = open_spans(collector.url)
    with serve(spans) as (base, _):
        assert ask(base, n=2, stream=True).text.rstrip().endswith("[DONE]")
        both = [s for s in collector.trace(TRACE, 9) if s.name == "llm_request"]
        assert ask(base, max_tokens=10**6).status_code == 400
        http = collector.wait(lambda found: [s for s in found if s.attributes.get("http.response.status_code") == 400])
    spans.close()
    assert {s.attributes["gen_ai.request.id"][-3:] for s in both} == {"~c0", "~c1"}
    assert len({s.parent_id for s in both}) == 1
    assert http[0].attributes["error.type"] and not http[0].is_error


def test_a_ratio_leaves_out_requests_but_not_those_that_their_caller_samples(collector):
    spans = open_spans(collector.url, ratio=0.0)
    with serve(spans) as (base, engine):
        for _ in range(3):
            assert httpx.post(f"{base}/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        assert ask(base, sampled=False).status_code == 200
        assert ask(base).status_code == 200
        assert len(collector.trace(TRACE, 5)) == 5
        assert engine.stats()["num_finished"] == 5
    spans.close()
    assert len(collector.spans) == 5 and spans.counters() == {"exported": 5, "dropped": 0}


def test_the_sampler_of_the_environment_holds(collector, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    spans = open_spans(collector.url)
    with serve(spans) as (base, _):
        assert ask(base).status_code == 200
    spans.close()
    assert collector.spans == []


def test_no_span_says_whose_own_a_bucket_is(collector, tmp_path):
    (tmp_path / "tokens.yaml").write_text("tokens:\n- {token: t1, tenant: acme}\n- {token: t2, name: acme.ci}\n")
    clients = Clients(Tokens(file=tmp_path / "tokens.yaml"))
    spans = open_spans(collector.url)
    with serve_engine(tiny_target(vocab=300), ends=spans.engine, spans=spans.http, clients=clients) as (base, _):
        for token in ("t1", "t2"):
            headers = {"authorization": f"Bearer {token}", "x-paceline-bucket": "code"}
            body = {"prompt": SECRET, "max_tokens": 4}
            assert httpx.post(f"{base}/v1/completions", json=body, headers=headers, timeout=30).status_code == 200
        spans.deeds.record_deed(
            "decision", 0.0, {"bucket": "code@acme", "buckets": ["code@~acme.ci"], "reason": "rows of code@acme, 768"}
        )
        wait_until(lambda: sum(spans.counters().values()) >= 11)
    spans.close()
    assert {s.attributes["paceline.bucket"] for s in collector.spans if "paceline.bucket" in s.attributes} == {"code"}
    (deed,) = (s.attributes for s in collector.spans if s.name == "paceline.decision")
    assert (deed["paceline.buckets"], deed["paceline.reason"]) == (["code"], "rows of code, 768")
    assert not any("acme" in str(s.attributes) for s in collector.spans)


@pytest.mark.parametrize("fault", ["hangs", "refuses", "is away"])
def test_requests_do_not_feel_a_collector_that(collector, monkeypatch, caplog, fault):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "10" if fault == "hangs" else "0.5")
    url = "http://127.0.0.1:1" if fault == "is away" else collector.url
    collector.status = 403
    if fault == "hangs":
        collector.go.clear()
    spans = open_spans(url)
    with serve(spans) as (base, engine):
        answers = [ask(base) for _ in range(8)]  # 40 spans
        took_s = max(a.elapsed.total_seconds() for a in answers)
        wait_until(lambda: spans.counters()["dropped"] >= 30)
        assert [a.status_code for a in answers] == [200] * 8
        assert took_s < 5.0, "an export that hangs would have taken 10 s"
        assert engine.stats()["num_callback_errors"] == 0
    if fault == "hangs":
        assert collector.num_asked == 1, "the queue was not emptied meanwhile"
    began_s = time.monotonic()
    spans.close()
    assert time.monotonic() - began_s < 5.0
    assert collector.spans == [] and spans.counters()["exported"] == 0
    if fault == "refuses":
        told = [r.getMessage() for r in caplog.records if "spans are dropped" in r.getMessage()]
        assert len(told) == 1 and "403" in told[0]


def test_a_request_that_ends_early_has_the_phases_that_it_came_to():
    request = GenerationRequest(request_id="r", prompt_token_ids=(1,), params=SamplingParams())
    stats = RequestStats(
        drafter_version="", num_rounds=0, num_draft_tokens=0, num_accepted_tokens=0, num_emitted_tokens=0, draft_ms=0.0,
        verify_ms=0.0, total_ms=0.0,
    )  # fmt: skip
    marks = {"request": request, "stats": stats, "finish_reason": "abort", "was_preempted": False, "submitted_s": 1.0}
    waiting = EndedRequest(admitted_s=None, first_token_s=None, ended_s=4.0, **marks)
    begun = EndedRequest(admitted_s=2.0, first_token_s=None, ended_s=4.0, **marks)
    assert phases(waiting) == [("queue", 1.0, 4.0)]
    assert phases(begun) == [("queue", 1.0, 2.0), ("prefill", 2.0, 4.0)]


def test_decisions_and_their_jobs_are_traces(shared_redis, client, keys, tmp_path, seeded, collector, wait_until):
    spans = open_spans(collector.url, process_id="controller")
    host = make_host(
        shared_redis.url,
        keys,
        tmp_path,
        make=lambda stored: ScriptedController(stored, train_every_rows=3),
        spans=spans,
    )
    host.connect()
    send(client, keys, 1)

    def is_over():
        settle(host)
        return host.session.controller.outcomes

    wait_until(is_over, timeout_s=60.0, what="the end of a job")
    host.stop()  # closes the spans, too
    by_name = {s.name: s for s in collector.spans}
    decision, job = by_name["paceline.decision"].attributes, by_name["paceline.training"].attributes
    assert (decision["paceline.action"], decision["paceline.bucket"]) == ("train", "math")
    assert {"paceline.arm", "paceline.expected_gain", "paceline.reason"} <= decision.keys()
    assert job["paceline.decision_id"] == decision["paceline.decision_id"]
    assert (job["paceline.status"], job["paceline.drafter_version"]) == ("accepted", "v2")
    assert by_name["paceline.training"].end_s >= by_name["paceline.decision"].end_s


def test_nothing_of_opentelemetry_is_imported_without_the_option():
    code = (
        "import sys, json, paceline.cli.main, paceline.config;"
        "a = [m for m in sys.modules if m.startswith('opentelemetry')];"
        "import paceline.infra.app, paceline.infra.service.ingress;"
        "b = [m for m in sys.modules if 'otlp' in m or m.startswith('paceline.infra.replica.span')];"
        "print(json.dumps([a, b]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout) == [[], ["paceline.infra.replica.span_target"]], done.stderr  # Ray brings the SDK


def test_the_option_is_refused_before_anything_starts_where_the_exporter_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    config = ServiceConfig(port=0, data_dir=str(tmp_path / "data"), otlp_traces_endpoint="http://127.0.0.1:4318")
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[otel\]'") as refused:
        run_service(config)
    assert "\n" not in str(refused.value) and not ray.is_initialized() and not (tmp_path / "data").exists()


def test_settings_that_cannot_work_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="otlp_traces_endpoint must be a URL"):
        ServiceConfig(otlp_traces_endpoint="collector:4317")
    config = ServiceConfig(otlp_traces_endpoint="http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc", None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-exporter-otlp-proto-grpc"):
        SpanTarget.of(config)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier-pigeon")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL must be one of"):
        SpanTarget.of(config)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "many")
    with pytest.raises(ConfigError, match="OTEL_BSP_MAX_QUEUE_SIZE must be a whole number"):
        SpanTarget.of(config)
    monkeypatch.delenv("OTEL_BSP_MAX_QUEUE_SIZE")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "0")
    with pytest.raises(ConfigError, match=r"OTEL_BSP_SCHEDULE_DELAY must be a whole number > 0, got '0'"):
        SpanTarget.of(config)
    assert SpanTarget.of(ServiceConfig()) is None


def test_a_queue_that_is_shorter_than_opentelemetrys_batch_is_sent_in_smaller_ones(collector, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    spans = open_spans(collector.url)
    spans.deeds.record_deed("swap", 0.1, {})
    wait_until(lambda: spans.counters() == {"exported": 1, "dropped": 0})
    spans.close()
