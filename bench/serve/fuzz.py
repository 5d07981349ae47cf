"""Fuzz: requests that nobody should send, to any OpenAI-compatible server, and whether it takes them as a service should.

Bodies are drawn from the server's own /openapi.json and then spoilt; beside them go headers that cannot be meant, and, over
plain sockets, what no HTTP library sends (fuzz_sockets.py). A request follows from the seed and its number. A server passes
when no answer is a 5xx other than 503 with a reason (and 504 to a request with a time limit of its own), none takes longer than
--timeout, a smuggled request is never answered, connections that send no whole head are closed, and it serves as before
afterwards with nothing left over: no request, no page, no memory, no open file.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated as A
from typing import Any

import httpx
from rich.console import Console

from paceline.bench.common.result_file import ResultFile
from paceline.bench.common.terminal import new_table, progress
from paceline.bench.serve.fuzz_sockets import PATIENCE_S, UNFINISHED, RawOutcome, ask_raw, ends_unfinished
from paceline.bench.serve.server_metrics import parse_page
from paceline.errors import PacelineError
from paceline.records import JsonFile, Setting, count, record

SOCKET_SHARE = 0.15
"""Part of the requests that goes over plain sockets."""
MAX_NEW_TOKENS = 8
"""Most answers stay this short: a fuzzer looks for faults, not for load."""
MAX_KEPT = 20
"""Faults that are written out; more are only counted."""
_REQUESTS_A_SAVE = 1000
"""Requests between two times that a result file is written."""
CHECK_S = 30.0
"""Longest time that the server has afterwards to be as before."""
NUM_EACH_UNFINISHED = 4
"""Connections of each kind in UNFINISHED, which wait beside the requests."""
MAX_GROWTH_BYTES = 150 * 2**20
"""Memory that a server may gain between the first tenth of the requests and the end, a KV pool in RAM apart. Bounded caches
(compiled grammars, tokenizations, prefixes) and the allocator's gaps gain some whatever the number of requests; it is a
leak of 175 bytes a request in a night's 1e6."""
MAX_MORE_FILES = 32
"""Files that it may gain beyond the fuzzer's connections: pools of connections to Redis, which grow up to its threads."""


@record()
class FuzzOptions:
    """Requests that cannot be meant: spoilt bodies from /openapi.json, hostile headers, and broken HTTP over plain sockets
    (slow, split, oversized, smuggled). Exit code 1 on a fault: a 5xx but 503 with a reason, a hang, something left over.
    Ctrl-C says what came so far, and by which --skip the run goes on.

    Examples: paceline bench fuzz http://127.0.0.1:8000 --requests 5000 --seed 1. The request of a fault again: --skip NUMBER --requests 1.
    """

    url: A[str, Setting("Address of the server.", is_argument=True)]
    num_requests: A[int, Setting("Requests in all; 1e6 for a night.", flag="requests", ge=1, parser=count)] = 5000
    seed: A[int, Setting("Seed of the requests.", ge=0)] = 0
    skip: A[int, Setting("Begin behind so many requests of the seed.", ge=0, parser=count)] = 0
    concurrency: A[int, Setting("Requests at once.", ge=1, le=256)] = 8
    timeout_s: A[float, Setting("Seconds without an answer that count as a hang.", flag="timeout", gt=0)] = 30.0
    api_token: A[str | None, Setting("Bearer token of the server.", env="PACELINE_API_TOKEN")] = None
    json: JsonFile = None


# ---- what is sent ---------------------------------------------------------------------------------------------------
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 0.5, -1.5, 1e308, 5e-324, float("nan"), float("inf"), 2**31, 2**63, -(2**70), 10**40, "",
    "x", "0", "null", "\x00", "\ud800", "ä" * 300, "日本" * 50, "a" * 20_000, "../../etc/passwd", "<script>", "${jndi:x}",
    [], [None], [[]], {}, {"": None}, {"a": {"b": []}}, [1, "a", None, {}], ["x"] * 500,
)  # fmt: skip
ODD_HEADERS: tuple[tuple[str, tuple[bytes, ...]], ...] = (
    ("x-request-id", (b"one", b"a b", b"\xff\xfe", b"\xc3\xa4", b"x" * 129, b"x" * 5000, b"~c1", b"{}", b"a\tb")),
    ("x-paceline-tenant", (b"acme", b"~own", b"../x", b"\xff", b"x" * 65)),
    ("x-paceline-bucket", (b"tools", b"~class-1", b"other", b"default", b"\xff", b"x" * 65, b"a/b")),
    ("x-paceline-group", (b"static", b"plain", b"adaptive", b"asked", b"\xff", b"STATIC")),
    ("x-paceline-trace", (b"on", b"off", b"maybe", b"\xff")),
    ("x-request-timeout-ms", (b"1", b"0", b"-1", b"1e3", b"999999999", b"\xb2")),
    ("x-request-timeout-seconds", (b"0.001", b"-1", b"x")),
    ("x-request-disconnect-disabled", (b"?1", b"true")),
    ("x-session-id", (b"a", b"\xff")),
    ("serve-multiplexed-model-id", (b"a", b"\xff")),
    (
        "content-type",
        (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x", b"\xff"),
    ),
    ("accept-encoding", (b"gzip, br", b"\xff")),
    ("x-forwarded-for", (b"1.2.3.4", b"\xff")),
    ("cookie", (b"a=b; " * 400,)),
)


class BodyWriter:
    """Draws values that a JSON schema allows, some of them spoilt."""

    def __init__(self, document: dict[str, Any], rng: random.Random, spoilt: float = 0.06) -> None:
        """document: OpenAPI's. spoilt: probability that a value is replaced by one that may not belong there."""
        self._schemas, self._rng, self._spoilt = document.get("components", {}).get("schemas", {}), rng, spoilt

    def value(self, schema: dict[str, Any], depth: int = 0) -> Any:
        """A value for a schema."""
        rng = self._rng
        if rng.random() < self._spoilt or depth > 8:
            return rng.choice(ODD_VALUES)
        if "$ref" in schema:
            return self.value(self._schemas.get(schema["$ref"].rsplit("/", 1)[-1], {}), depth + 1)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return self.value(rng.choice(schema[name]), depth + 1)
        if "allOf" in schema:
            return self.value(schema["allOf"][0], depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        kind = schema.get("type")
        made: dict[str, Callable[[], Any]] = {
            "object": lambda: self._object(schema, depth),
            "array": lambda: [
                self.value(schema.get("items", {}), depth + 1) for _ in range(rng.choice((0, 1, 1, 2, 3)))
            ],
            "string": lambda: "".join(rng.choice("ab 12ä{}[]\"'\\<|>") for _ in range(rng.randrange(12))),
            "integer": lambda: rng.randint(*self._bounds(schema, -2, 40)),
            "number": lambda: rng.uniform(*self._bounds(schema, -2, 2)),
            "boolean": lambda: rng.random() < 0.5,
            "null": lambda: None,
        }
        return made[kind]() if kind in made else rng.choice(ODD_VALUES)

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        rng, fields = self._rng, schema.get("properties", {})
        share = 0.12 if len(fields) > 12 else 0.5
        wanted = [
            n for n in fields if (n in schema.get("required", ()) and rng.random() < 0.97) or rng.random() < share
        ]
        found = {n: self.value(fields[n], depth + 1) for n in wanted}
        if not fields or rng.random() < 0.03:
            found[rng.choice(("a", "b", "no_such_field", ""))] = rng.choice(ODD_VALUES)
        return found

    @staticmethod
    def _bounds(schema: dict[str, Any], low: int, high: int) -> tuple[int, int]:
        low = int(schema.get("minimum", low))
        return low, max(low, min(int(schema.get("maximum", low + high)), low + high))


def spoil(raw: bytes, rng: random.Random) -> bytes:
    """The bytes of a body, broken."""
    at = rng.randrange(len(raw) + 1)
    junk = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
    return rng.choice(
        (raw[:at], raw[:at] + junk + raw[at:], raw[at:] + raw[:at], raw * 2, junk, b"", raw.decode("latin-1").encode("utf-16"),
         b"[" * 50_000, b'{"prompt": ' + b'"x' * 100, raw[:at] + junk + raw[at + len(junk):])
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FuzzRequest:
    """One request over HTTP."""

    method: str
    path: str
    headers: list[tuple[str, bytes]]
    body: bytes
    hangs_up: bool
    """The client leaves after a moment."""

    @property
    def has_deadline(self) -> bool:
        """It asked for a time limit itself, so that 504 is an answer."""
        return b"timeout_s" in self.body or any(k == "x-request-timeout-ms" for k, _ in self.headers)


class FuzzRequests:
    """Draws requests for the routes of an OpenAPI document."""

    def __init__(self, document: dict[str, Any], api_token: str | None) -> None:
        self._document, self._token = document, api_token
        self._posts: list[tuple[str, dict[str, Any]]] = []
        self._gets: list[str] = []
        for path, operations in document.get("paths", {}).items():
            schema = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
            if "schema" in schema:
                self._posts.append((path, schema["schema"]))
            if "get" in operations and "events" not in path:  # a stream of events has no end
                self._gets.append(path)
        if not self._posts:
            raise PacelineError("the server's /openapi.json describes no POST with a JSON body")

    def draw(self, rng: random.Random) -> FuzzRequest:
        """A request."""
        headers = self._headers(rng)
        hangs_up = rng.random() < 0.05
        if rng.random() < 0.12:
            path = re.sub(
                r"\{[^}]*\}",
                lambda _: rng.choice(("a", "0", "%2e%2e", "%00", "x" * 300, "%ff")),
                rng.choice(self._gets),
            )
            method = rng.choice(("GET", "GET", "GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"))
            return FuzzRequest(method, path, headers, b"", hangs_up)
        path, schema = rng.choice(self._posts)
        body = BodyWriter(self._document, rng).value(schema)
        if isinstance(body, dict):
            self._keep_short(body, rng)
        raw = json.dumps(body).encode()
        if rng.random() < 0.1:
            raw = spoil(raw, rng)
        return FuzzRequest("POST", path, headers, raw, hangs_up)

    @staticmethod
    def _keep_short(body: dict[str, Any], rng: random.Random) -> None:
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(body.get(name), int) and body[name] > MAX_NEW_TOKENS:
                body[name] = MAX_NEW_TOKENS
        if rng.random() < 0.95:
            if "prompt" in body or "messages" in body:
                body.setdefault("max_tokens", MAX_NEW_TOKENS)
            elif "input" in body:
                body.setdefault("max_output_tokens", MAX_NEW_TOKENS)
            body["n"] = 2 if body.get("n", 1) not in (None, 1) else body.get("n", 1)
            if ("prompt" not in body and "messages" not in body) or body["n"] == 1:
                del body["n"]

    def _headers(self, rng: random.Random) -> list[tuple[str, bytes]]:
        headers = [("content-type", b"application/json")]
        if self._token is not None and rng.random() < 0.95:
            headers.append(("authorization", b"Bearer " + self._token.encode()))
        elif rng.random() < 0.2:
            headers.append(
                ("authorization", rng.choice((b"Bearer", b"Bearer \xff", b"Basic YTpi", b"Bearer " + b"x" * 5000)))
            )
        for _ in range(rng.choice((0, 0, 0, 1, 1, 3))):
            name, values = rng.choice(ODD_HEADERS)
            headers.append((name, rng.choice(values)))
        return headers


# ---- what comes back ------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class FuzzTotals:
    """What the server answered."""

    statuses: Counter[str] = field(default_factory=Counter)
    raw: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)
    slowest_s: float = 0.0
    num_begun: int = 0
    """Requests of this run, skipped ones apart."""
    in_flight: set[int] = field(default_factory=set)
    """Which of them are not over."""
    warm: dict[str, float] = field(default_factory=dict)
    """_USAGE after the first tenth of the requests."""

    def plain(self) -> dict[str, Any]:
        """What of it a result file keeps."""
        return {
            "num_begun": self.num_begun, "statuses": dict(self.statuses), "raw": dict(sorted(self.raw.items())),
            "slowest_s": round(self.slowest_s, 3), "faults": dict(self.faults), "examples": list(self.examples),
        }  # fmt: skip

    def fault(self, kind: str, number: int | None, what: object) -> None:
        """Note something that a service must not do. number: of the request; None = of no single one."""
        self.faults[kind] += 1
        if len(self.examples) < MAX_KEPT:
            self.examples.append({"kind": kind, "number": number, "what": repr(what)[:2000]})


def fault_of(status: int, body: bytes, *, has_deadline: bool) -> str | None:
    """Why an answer is a fault; None: it is none."""
    if status < 500 or (status == 504 and has_deadline):
        return None
    if status == 503:
        try:
            error = json.loads(body)["error"]
            reason = error["message"]
        except (ValueError, TypeError, KeyError):
            reason = ""
        return None if isinstance(reason, str) and reason else "503 without a reason"
    return f"status {status}"


async def run_one(http: httpx.AsyncClient, number: int, request: FuzzRequest, totals: FuzzTotals) -> None:
    """Send a request and judge the answer."""
    began = time.perf_counter()
    headers = [(k.encode(), v) for k, v in request.headers]
    try:
        if request.hangs_up:
            async with http.stream(request.method, request.path, headers=headers, content=request.body) as answer:
                totals.statuses[f"{answer.status_code}"] += 1
                return
        answer = await http.request(request.method, request.path, headers=headers, content=request.body)
    except httpx.TimeoutException:
        totals.fault("hang", number, request)
        return
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as e:
        totals.statuses[type(e).__name__] += 1  # the server may close on what is no HTTP
        if request.method == "POST" and request.body and not request.hangs_up:
            totals.fault("closed without an answer", number, request)
        return
    except (httpx.LocalProtocolError, httpx.InvalidURL, httpx.ConnectError) as e:
        if isinstance(e, httpx.ConnectError):
            totals.fault("no connection", number, request)
        totals.statuses["not sent"] += 1
        return
    totals.slowest_s = max(totals.slowest_s, time.perf_counter() - began)
    totals.statuses[f"{answer.status_code}"] += 1
    kind = fault_of(answer.status_code, answer.content, has_deadline=request.has_deadline)
    if kind is not None:
        totals.fault(kind, number, (request, answer.content[:500]))


def judge_raw(outcome: RawOutcome, number: int, totals: FuzzTotals) -> None:
    """Count what came back over a plain socket."""
    totals.raw[f"{outcome.name}: {' '.join(map(str, outcome.statuses)) or 'closed'}"] += 1
    if outcome.has_smuggled:
        totals.fault("smuggled request was answered", number, outcome)
    if outcome.is_hung:
        totals.fault("hang", number, outcome)
    for status in outcome.statuses:
        if status >= 500 and status not in (501, 503, 505):
            totals.fault(f"status {status}", number, outcome)


async def _fuzz(options: FuzzOptions, console: Console, totals: FuzzTotals, result: ResultFile) -> None:
    limits = httpx.Limits(max_connections=options.concurrency)
    async with httpx.AsyncClient(base_url=options.url, timeout=options.timeout_s, limits=limits) as http:
        try:
            document = (await http.get("/openapi.json")).raise_for_status().json()
        except (httpx.HTTPError, ValueError) as e:
            raise PacelineError(f"url must be of a server that publishes /openapi.json, got {options.url}: {e}") from e
        requests = FuzzRequests(document, options.api_token)
        before = await _gauges(http, options)
        with progress(console, "fuzz", options.num_requests) as bar:

            async def worker() -> None:
                while (begun := totals.num_begun) < options.num_requests:
                    totals.num_begun += 1
                    totals.in_flight.add(begun)
                    number = options.skip + begun
                    if begun % _REQUESTS_A_SAVE == 0:
                        result.update(**totals.plain())
                    if begun == options.num_requests // 10:
                        with contextlib.suppress(httpx.HTTPError):
                            totals.warm = await _gauges(http, options, _USAGE)
                    rng = random.Random(f"{options.seed}:{number}")
                    if rng.random() < SOCKET_SHARE:
                        judge_raw(await ask_raw(options.url, rng, options.timeout_s), number, totals)
                    else:
                        await run_one(http, number, requests.draw(rng), totals)
                    totals.in_flight.discard(begun)
                    bar.step()

            began = time.perf_counter()
            names = [name for name in UNFINISHED for _ in range(NUM_EACH_UNFINISHED)]
            waiting = [asyncio.create_task(ends_unfinished(options.url, name)) for name in names]
            try:
                await asyncio.gather(*(worker() for _ in range(options.concurrency)))
                seconds = time.perf_counter() - began
                found = await asyncio.gather(*waiting)
            finally:
                for task in waiting:
                    task.cancel()
        ends: dict[str, float | None] = {}
        for name, end_s in zip(names, found, strict=True):
            before_s = ends.get(name, 0.0)
            ends[name] = None if end_s is None or before_s is None else max(end_s, before_s)
            if end_s is None:
                what = f"{name} was sent, and the connection was open after {PATIENCE_S:g} s"
                totals.fault("unfinished head was kept", None, what)
        after = await _settled(http, options, before, totals)
        usage: dict[str, float] = {}
        with contextlib.suppress(httpx.HTTPError):
            usage = await _gauges(http, options, _USAGE)
        judge_usage(usage, totals, options)
    result.update(
        seconds=round(seconds, 1), before=before, after=after, unfinished_s=ends, usage={"warm": totals.warm, "after": usage}
    )  # fmt: skip


_GAUGES = ("paceline_kv_pages_free", "paceline_requests_running", "paceline_requests_waiting")
_MEMORY, _FILES, _POOL = "paceline_resident_memory_bytes", "paceline_open_files", "paceline_host_kv_bytes"
_USAGE = (_MEMORY, _FILES, _POOL)


def judge_usage(usage: dict[str, float], totals: FuzzTotals, options: FuzzOptions) -> None:
    """Compare memory and open files with what they were; a server that does not tell them is not judged."""
    pool = usage.get(_POOL, 0.0)  # the system gives its memory when a page is first written
    for name, most in ((_MEMORY, MAX_GROWTH_BYTES + pool), (_FILES, MAX_MORE_FILES + options.concurrency)):
        if name in usage and usage[name] - totals.warm.get(name, usage[name]) > most:
            what = f"{name} rose from {totals.warm[name]:.0f} to {usage[name]:.0f}, by more than {most:.0f}"
            totals.fault("leak", None, what)


async def _gauges(http: httpx.AsyncClient, options: FuzzOptions, names: tuple[str, ...] = _GAUGES) -> dict[str, float]:
    """What /metrics says of requests and pages, or of other names; {} where it says nothing or is closed."""
    headers = {} if options.api_token is None else {"authorization": f"Bearer {options.api_token}"}
    page = parse_page((await http.get("/metrics", headers=headers)).text)
    return {name: total for name in names if (total := page.total(name)) is not None}


async def _settled(
    http: httpx.AsyncClient, options: FuzzOptions, before: dict[str, float], totals: FuzzTotals
) -> dict[str, float]:
    """Wait until the server is as before; what is left over by then is a fault."""
    deadline = time.monotonic() + CHECK_S
    while True:
        try:
            health, after = (await http.get("/healthz")).status_code, await _gauges(http, options)
        except httpx.HTTPError as e:
            health, after = 0, {}
            reason = repr(e)
        else:
            reason = f"/healthz {health}, {before} before and {after} after"
        if health == 200 and after == before:
            return after
        if time.monotonic() > deadline:
            totals.fault("not as before", None, reason)
            return after
        await asyncio.sleep(0.5)


def run_fuzz(options: FuzzOptions, console: Console) -> dict[str, Any]:
    """Send the requests, print what came back, return (and keep on disk) the document.

    Raises: PacelineError when the server cannot be reached or does not describe itself.
    """
    shown = dataclasses.replace(options, api_token="given" if options.api_token else None)  # never written to a file
    result, totals = ResultFile(options.json, command="bench fuzz", options=shown), FuzzTotals()
    try:
        asyncio.run(_fuzz(options, console, totals, result))
    except KeyboardInterrupt:
        result.update(**totals.plain())
        _print(result.document, console)
        left = min(totals.in_flight, default=totals.num_begun)
        rest = f"--skip {options.skip + left} --requests {options.num_requests - left}"
        console.print(
            f"stopped after {totals.num_begun} of {options.num_requests} requests; {rest} goes on", markup=False
        )
        raise
    document = result.close(**totals.plain())
    _print(document, console)
    return document


def _print(document: dict[str, Any], console: Console) -> None:
    time_of = f" in {document['seconds']} s" if "seconds" in document else ""
    table = new_table(f"{document['num_begun']} requests{time_of}", ("answer", "requests"))
    for status, number in sorted(document["statuses"].items()):
        table.add_row(status, f"{number}")
    table.add_row("over plain sockets", f"{sum(document['raw'].values())}")
    for name, end_s in document.get("unfinished_s", {}).items():
        table.add_row(f"{name}, then silence", "kept" if end_s is None else f"closed after {end_s:g} s")
    usage = document.get("usage", {"warm": {}, "after": {}})
    warm, after = usage["warm"], usage["after"]
    for name, words, unit in ((_MEMORY, "memory, MiB", 2**20), (_FILES, "open files", 1)):
        if name in warm and name in after:
            table.add_row(
                f"{words}, after a tenth and at the end", f"{warm[name] / unit:.0f}, {after[name] / unit:.0f}"
            )
    console.print(table)
    for kind, number in document["faults"].items():
        console.print(f"[red]fault[/red] {kind}: {number}")
    for example in document["examples"][:5]:
        console.print(example, highlight=False, markup=False)


def has_failed(document: dict[str, Any]) -> bool:
    """Whether the server did what a service must not do."""
    return bool(document["faults"])
