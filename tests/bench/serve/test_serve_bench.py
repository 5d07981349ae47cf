"""`paceline bench serve` against a real engine behind the real HTTP layer, and against servers with faults."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from typer.testing import CliRunner

from paceline.bench.serve.cell import CellRunner, Load
from paceline.bench.serve.client import ServerFeatures, StreamClient, StreamRequest, find_features
from paceline.bench.serve.run import MIN_WAVES, ServeBenchOptions, plan_requests
from paceline.cli.main import app
from paceline.config import EngineConfig
from paceline.errors import ConfigError, PacelineError
from paceline.serving.wire.accounts import Clients
from paceline.serving.wire.credentials import Tokens
from tests.helpers.api_server import TOKENIZER, serve_app, serve_engine
from tests.helpers.fakes import tiny_target

RUN = CliRunner()
TOKEN = "secret-token"
FEATURES = ServerFeatures(model="m", has_token_ids=False, has_usage=False)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A real engine with a drafter behind the real HTTP layer."""
    target = tiny_target(vocab=300, layers=2, width=16, context=512)
    target.tokenizer = TOKENIZER
    config = EngineConfig(max_running=4, max_waiting=64, kv_bytes=8 * 512 * target.kv_row_bytes)
    with serve_engine(target, config, clients=Clients(Tokens(api_token=TOKEN))) as (base, _):
        yield base


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_a_sound_server_is_measured_under_both_kinds_of_load(url, tmp_path, route):
    path = tmp_path / "serve.json"
    result = RUN.invoke(app, ["bench", "serve", "--url", f"{url}/v1", "--route", route, "--concurrency", "1,3", "--rate", "40", "--requests", "12", "--warmup", "2", "--max-tokens", "24", "--extra-body", '{"ignore_eos": true}', "--json", str(path)], env={"PACELINE_API_TOKEN": TOKEN})  # fmt: skip
    assert result.exit_code == 0, result.output
    text = path.read_text()
    document = json.loads(text)
    assert TOKEN not in text and document["is_complete"] and document["options"]["api_token"] == "given"
    assert [c["load"] for c in document["cells"]] == ["1 client", "3 clients", "40 requests/s"]
    for cell in document["cells"]:
        assert cell["num_whole"] == cell["num_requests"] == 12 and cell["problems"] == {}
        assert (
            cell["token_count"] == "token ids" and cell["num_tokens"] == 12 * 24
        )  # to the limit, whatever was drafted
        assert cell["acceptance"]["source"] == "answers" and 1 <= cell["acceptance"]["acceptance_length"]["value"] <= 25
        assert cell["acceptance"]["num_rounds"] > 0
    for cell in document["cells"][:2]:
        assert cell["window"]["seconds"] < cell["seconds"]
        low, high = cell["output_tokens_per_s"]["interval"]
        assert 0 < low <= cell["output_tokens_per_s"]["value"] <= high
        assert cell["ttft_ms"]["p50"] <= cell["ttft_ms"]["p95"] <= cell["ttft_ms"]["max"]
    assert "ramp-up" in result.output and "exact: chunks name their tokens" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers at"),
        (["--url", "http://127.0.0.1:9", "--model", "m"], "refuses a plain streaming request: connection"),
        (["--url", "localhost:8000"], "url must begin with http"),
        (["--concurrency", ""], "concurrency and rate must not both be empty"),
        (["--concurrency", "0"], "concurrency must be in [1, 4096]"),
        (["--concurrency", "two"], "concurrency must be a comma list of numbers"),
        (["--rate", "-1"], "rate must be"),
        (["--route", "embeddings"], "route must be one of completions, chat"),
        (["--extra-body", "[1]"], "extra-body must be a JSON object"),
        (["--extra-body", "{oops"], "extra-body must be a JSON object"),
        (["--buckets", "poems"], "bucket must be one of"),
    ],
)
def test_bad_options_are_answered_in_one_sentence(arguments, message):
    result = RUN.invoke(app, ["bench", "serve", *arguments])
    assert isinstance(result.exception, PacelineError), result.output
    assert message in str(result.exception) and "\n" not in str(result.exception)


def test_a_server_that_wants_a_token_is_named_as_such(url):
    for more in ([], ["--model", "tiny"]):
        result = RUN.invoke(app, ["bench", "serve", "--url", url, *more], env={"PACELINE_API_TOKEN": None})
        assert isinstance(result.exception, PacelineError) and "PACELINE_API_TOKEN" in str(result.exception)


def test_every_load_has_its_own_prompts_and_enough_of_them():
    options = ServeBenchOptions(concurrencies=(2, 40), rates_per_s=(5.0,), num_requests=10, warmup=3)
    plan, repeated = plan_requests(options)
    assert [(len(a), len(b)) for a, b in plan] == [(3, 10), (3, MIN_WAVES * 40), (3, 10)] and repeated == 0
    every = [r for a, b in plan for r in (*a, *b)]
    assert len({r.prompt for r in every}) == len(every) and len({r.seed for r in every}) == len(every)
    per_bucket = Counter(r.bucket for r in every)
    assert max(per_bucket.values()) - min(per_bucket.values()) <= 1
    with pytest.raises(ConfigError, match="tries must be"):
        ServeBenchOptions(num_tries=0)


# ---- servers with faults --------------------------------------------------------------------------------------------
def _event(text="a", finish=None, **more):
    return "data: " + json.dumps({"choices": [{"text": text, "finish_reason": finish}], **more}) + "\n\n"


DONE = "data: [DONE]\n\n"


class Faulty:
    """Speaks completions; what is wrong with an answer is its prompt. Counts what it was asked."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict] = []
        self.buckets: list[str | None] = []
        self.times: list[float] = []
        self.default = _whole
        self.app = FastAPI()
        self.app.post("/v1/completions")(self.completions)
        self.app.get("/metrics")(self.metrics)
        self.app.get("/v1/models")(self.models)

    async def models(self):
        return JSONResponse({"error": "no such page"}, status_code=500)

    async def metrics(self):
        n = self.asked["whole"]
        page = "".join(f"# TYPE vllm:spec_decode_num_{k} counter\nvllm:spec_decode_num_{k}_total {v * n}.0\n" for k, v in (("drafts", 2), ("draft_tokens", 6), ("accepted_tokens", 3)))  # fmt: skip
        return PlainTextResponse(page)

    async def completions(self, request: Request):
        body = await request.json()
        self.bodies.append(body)
        self.buckets.append(request.headers.get("x-paceline-bucket"))
        self.times.append(time.perf_counter())
        kind = body["prompt"]
        if "stream_options" in body or "return_token_ids" in body or "seed" in body:
            return JSONResponse({"error": "unknown field"}, status_code=422)
        self.asked[kind if kind in KINDS else "whole"] += 1
        if kind == "full_once" and self.asked[kind] <= 2:
            return JSONResponse({"error": "full"}, status_code=429, headers={"retry-after": "0.2"})
        if kind == "always_full":
            return JSONResponse({"error": "full"}, status_code=429, headers={"retry-after": "0.06"})
        if kind == "http_503":
            return JSONResponse({"error": "draining"}, status_code=503)
        return StreamingResponse(KINDS.get(kind, self.default)(), media_type="text/event-stream")


async def _whole():
    for text in "ab":
        yield _event(text)
        await asyncio.sleep(0.002)
    yield _event("", "stop") + DONE


async def _malformed():
    yield _event("a") + "data: {oops\n\n" + DONE


async def _foreign():
    yield "data: [1, 2]\n\n" + DONE


async def _early():
    yield _event("a")
    raise RuntimeError("the connection breaks")


async def _silent():
    yield _event("a")
    await asyncio.sleep(30)


KINDS = {"Hello": _whole, "malformed": _malformed, "foreign": _foreign, "early": _early, "silent": _silent, "full_once": _whole, "always_full": _whole, "http_503": _whole}  # fmt: skip


@pytest.fixture
def faulty() -> Iterator[tuple[str, Faulty]]:
    server = Faulty()
    with serve_app(server.app) as base:
        yield base, server


def _cell(base, prompts, load=None, *, num_tries=4, timeout_s=5.0, drain_s=5.0, max_s=10.0, names_buckets=False):
    async def go():
        async with httpx.AsyncClient(base_url=base, timeout=timeout_s) as http:
            client = StreamClient(
                http, is_chat=False, features=FEATURES, extra={"seed": None}, names_buckets=names_buckets
            )
            runner = CellRunner(
                client, load or Load(concurrency=2), max_s=max_s, drain_s=drain_s, num_tries=num_tries,
                rng=random.Random(0), on_answer=lambda _: None,
            )  # fmt: skip
            return await runner.run([StreamRequest(prompt=p, bucket="b", max_tokens=4, temperature=0.0, seed=i) for i, p in enumerate(prompts)])  # fmt: skip

    return asyncio.run(go())


@pytest.mark.parametrize("names_buckets", [True, False])
def test_the_server_is_told_the_traffic_class_only_when_asked(faulty, names_buckets):
    run = _cell(faulty[0], ["whole"], names_buckets=names_buckets)
    assert run.answers[0].result.problem is None
    assert faulty[1].buckets == ["b" if names_buckets else None]


@pytest.mark.parametrize(
    ("kind", "problem"),
    [("malformed", "bad_json"), ("foreign", "bad_event"), ("early", "connection"), ("http_503", "http_503")],
)
def test_a_fault_is_named_and_the_load_goes_on(faulty, kind, problem):
    run = _cell(faulty[0], ["whole", kind, "whole", "whole"])
    assert [(a.result.problem or "").split(":")[0] for a in run.answers] == ["", problem, "", ""]


def test_a_silent_stream_is_a_timeout_and_a_stream_without_end_is_given_up(faulty):
    run = _cell(faulty[0], ["silent"], Load(concurrency=1), timeout_s=0.2)
    assert (run.answers[0].result.problem or "").startswith("timeout")
    began = time.perf_counter()
    run = _cell(faulty[0], ["whole", "silent"], timeout_s=20.0, drain_s=0.3)
    open_still = run.answers[1].result
    assert (open_still.problem or "").startswith("unfinished") and time.perf_counter() - began < 10
    assert open_still.text == "a" and len(open_still.arrivals) == 1 and open_still.ttft_s is not None, "it came in time"


def test_a_refusal_is_waited_out_for_as_long_as_it_asks(faulty):
    base, server = faulty
    run = _cell(base, ["full_once"], Load(concurrency=1))
    answer = run.answers[0]
    assert answer.result.problem is None and answer.num_refused == 2 and answer.waited_s == pytest.approx(0.4)
    gaps = [b - a for a, b in zip(server.times, server.times[1:], strict=False)]
    assert len(gaps) == 2 and min(gaps) >= 0.19
    assert answer.first_token_s is not None and answer.first_token_s - answer.due_s >= 0.39  # the user waited, too


def test_a_server_that_stays_full_is_asked_no_more_often_than_allowed(faulty):
    base, server = faulty
    run = _cell(base, ["always_full"], Load(concurrency=1), num_tries=3)
    assert (run.answers[0].result.problem or "").startswith("refused") and run.answers[0].num_refused == 3
    assert server.asked["always_full"] == 3


def test_an_open_loop_does_not_wait_for_answers(faulty):
    run = _cell(faulty[0], ["silent"] * 6, Load(rate_per_s=100.0), timeout_s=20.0, drain_s=0.2)
    assert run.max_in_flight == 6 and len(run.answers) == 6
    dues = [a.due_s for a in run.answers]
    assert dues == sorted(dues) and len(set(dues)) == 6


def test_nothing_is_sent_after_the_time_limit(faulty):
    for load in (Load(concurrency=1), Load(rate_per_s=1000.0)):
        run = _cell(faulty[0], ["whole"] * 5000, load, max_s=0.15)
        assert 0 < len(run.answers) < 5000 and all(a.result.problem is None for a in run.answers)


def test_a_bare_server_is_measured_and_every_gap_in_its_account_is_told(faulty, tmp_path):
    """No model list, no usage, no token ids, unknown fields refused: chunks stand for tokens, and that is said."""
    base, server = faulty
    path = tmp_path / "bare.json"
    arguments = ["bench", "serve", "--url", base, "--model", "m", "--concurrency", "2", "--requests", "8", "--warmup", "1", "--extra-body", '{"seed": null, "top_p": 0.5}', "--json", str(path)]  # fmt: skip
    result = RUN.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    cell = json.loads(path.read_text())["cells"][0]
    assert cell["token_count"] == "chunks" and cell["num_tokens"] == 16 and "ESTIMATE" in result.output
    assert cell["acceptance"]["source"] == "vllm counters"
    assert cell["acceptance"]["num_rounds"] == 16 and cell["acceptance"]["acceptance_length"]["value"] == 2.5
    assert all(b["top_p"] == 0.5 and "seed" not in b for b in server.bodies)
    assert isinstance(RUN.invoke(app, ["bench", "serve", "--url", base]).exception, PacelineError)  # names no model


def test_errors_fail_the_command(faulty):
    base, server = faulty
    server.default = _malformed  # every prompt but the probe's
    result = RUN.invoke(app, ["bench", "serve", "--url", base, "--model", "m", "--concurrency", "1", "--requests", "4", "--warmup", "0", "--extra-body", '{"seed": null}'])  # fmt: skip
    assert result.exit_code == 1 and "4 x bad_json" in result.output, result.output


def test_a_server_that_never_sends_done_is_found_out_by_asking():
    server = FastAPI()

    @server.post("/v1/completions")
    async def completions():
        async def stream():
            yield _event("a")
            yield _event("", "length", usage={"completion_tokens": 1})

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def ask(base):
        async with httpx.AsyncClient(base_url=base) as http:
            features = await find_features(http, base, is_chat=False, model="m")
            request = StreamRequest(prompt="p", bucket="b", max_tokens=1, temperature=0.0, seed=0)
            return features, await StreamClient(http, is_chat=False, features=features).stream(request)

    with serve_app(server) as base:
        features, result = asyncio.run(ask(base))
    assert features == ServerFeatures(model="m", has_token_ids=False, has_usage=True, has_done=False)
    assert result.problem is None and result.usage_tokens == 1
