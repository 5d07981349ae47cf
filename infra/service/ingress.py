"""Ingress: the front of a service whose answers outlive the replica that writes them (`resume: true`).

Two deployments: `ingress` speaks HTTP and has the tokenizer, `engine` has the models and is reached through a Serve
handle. What a request does when its engine dies is infra/resume/client.py; here is only what Ray brings.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from paceline.config import ServiceConfig
from paceline.contracts import HttpMeters
from paceline.errors import CapacityError, EngineStoppedError
from paceline.infra.controller.actor import HEAD_ROLE, ROLE_LABEL, TRAIN_ROLE
from paceline.infra.replica.exchange import NumbersExchange, ReplicaNumbers
from paceline.infra.replica.late_timers import StepWatch
from paceline.infra.replica.span_target import SpanTarget
from paceline.infra.resume.client import MAX_SILENCE_S, ResumingClient
from paceline.infra.resume.relay import answer_http, relay_router
from paceline.infra.resume.stream import EngineFacts, decode_facts, encode, stream_events
from paceline.infra.service.claim import claim, own_application
from paceline.infra.service.deployment import DeploymentLimits, RunningReplica, bind_engine, close_grpc_port, deployment
from paceline.infra.service.presence import Presence
from paceline.infra.service.stores import StorePaths
from paceline.infra.state.log import configure_logging
from paceline.infra.state.redis_clients import Keys
from paceline.infra.web.metrics import MetricSpec, Value, http_values, render_processes, replica_spec
from paceline.names import INGRESS
from paceline.paths import keep_private, resolve_model
from paceline.records import build
from paceline.serving.api.app import build_api
from paceline.serving.api.generation import ApiParts
from paceline.serving.wire.accounts import Clients
from paceline.serving.wire.credentials import Tokens

if TYPE_CHECKING:
    from paceline.infra.replica.spans import ProcessSpans

log = logging.getLogger(__name__)

PROBE_S = 2.0
PROBE_TIMEOUT_S = 5.0
INGRESS_PLACE = {"num_cpus": 0, "num_gpus": 0, "label_selector": {ROLE_LABEL: f"!in({TRAIN_ROLE},{HEAD_ROLE})"}}
"""No CPU of its own: where a node is lost, engines take what is left, and without an ingress nobody reaches them. Replicas outlive
a head that is lost, an ingress there would not."""


class EngineBehindIngress:
    """An engine replica without HTTP of its own. Everything crosses as bytes: Ray's own encoding is slower."""

    def __init__(self, factory: str, config: dict[str, Any]) -> None:
        self._running, self._model = RunningReplica(factory, config), str(config.get("model", ""))
        self._api = self._running.parts.api
        self._app = build_api(self._api)

    async def check_health(self) -> None:
        self._running.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_running"):
            await self._running.close()

    async def facts(self) -> bytes:
        """Encoded EngineFacts."""
        api = self._api
        age_s = api.client.heartbeat_age_s()
        if age_s > api.max_silence_s:
            raise EngineStoppedError(f"the engine has been silent for {age_s:.0f} s")
        return encode(EngineFacts(info=api.client.info(), holdback_percent=api.holdback_percent(), model=self._model))

    async def generate(self, raw: bytes) -> AsyncGenerator[bytes, None]:
        """Encoded StreamItems of an encoded GenerationRequest."""
        api = self._api
        stream = stream_events(api.client, raw, model=self._model, max_silence_s=api.max_silence_s)
        async with contextlib.aclosing(stream) as items:
            async for item in items:
                yield item

    async def http(self, raw: bytes) -> AsyncGenerator[bytes, None]:
        """Encoded HttpParts of an encoded HttpRequest."""
        async with contextlib.aclosing(answer_http(self._app, raw)) as parts:
            async for part in parts:
                yield part


class HandleStream:
    """An ItemStream over a streaming call of some replica; Serve chooses which."""

    def __init__(self, method: Any, raw: bytes) -> None:
        self._method, self._raw = method, raw
        self._response: DeploymentResponseGenerator | None = None

    async def __anext__(self) -> bytes:
        if self._response is None:
            self._response = self._method.remote(self._raw)
        try:
            return await self._response.__anext__()
        except BackPressureError as e:
            raise CapacityError("the queues of all replicas are full; try again later") from e
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EngineStoppedError("the call was cancelled by Serve") from None  # not by who waits for it

    def cancel(self) -> None:
        if self._response is not None:
            with contextlib.suppress(Exception):  # Ray raises many kinds when there is nothing to cancel any more
                self._response.cancel()


class ResumeIngress:
    """One process in front of the engines."""

    async def __init__(self, engines: DeploymentHandle, values: dict[str, Any]) -> None:  # type: ignore[misc]
        """Ready when an engine has said what it serves."""
        close_grpc_port()
        StepWatch().start()
        keep_private()
        self._config = build(ServiceConfig, values)
        claim(self._config, own_application())
        self._replica_id = replica_id = serve.get_replica_context().replica_id.unique_id
        home = StorePaths.of(self._config).home
        configure_logging(
            file=home / f"ingress-{replica_id}.log",
            access_file=home / f"access-{replica_id}.log" if self._config.access_log else None,
        )
        target = SpanTarget.of(self._config)
        self._spans = None if target is None else target.open(replica_id)
        self._closers: list[Callable[[], None]] = [] if self._spans is None else [self._spans.close]
        self._engines = engines
        Presence().start()  # has this process told of engines whatever happens to Serve's controller
        streams = engines.options(stream=True)
        self._generate, self._http = streams.generate, streams.http
        facts = None
        while facts is None:
            facts = await self._ask()
        self._client = ResumingClient(
            lambda raw: HandleStream(self._generate, raw), facts, self._config.ingress, model=self._config.model
        )
        self._prober = asyncio.get_running_loop().create_task(self._probe())

    def __serve_build_asgi_app__(self) -> FastAPI:
        open_http, process_id = lambda raw: HandleStream(self._http, raw), self._replica_id
        parts, closers = ingress_parts(self._config, self._client, open_http, process_id, self._spans)
        self._closers += closers
        return build_api(parts)

    async def __del__(self) -> None:
        for close in reversed(getattr(self, "_closers", ())):
            await asyncio.to_thread(close)

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            facts = await self._ask()
            if facts is not None:
                self._client.heard(facts)

    async def _ask(self) -> EngineFacts | None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                facts = decode_facts(await self._engines.facts.remote())
        # Ray raises many kinds while replicas start, die and are replaced, and this where Serve cancelled the call
        except (Exception, asyncio.CancelledError) as e:
            task = asyncio.current_task()
            if isinstance(e, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            log.info("no engine answers: %s", type(e).__name__)
        else:
            if facts.model in ("", self._config.model):
                return facts
            log.info("an engine answers that serves %s, as while one model replaces the other", facts.model)
        await asyncio.sleep(PROBE_S / 4)
        return None


def ingress_parts(
    config: ServiceConfig, client: ResumingClient, open_http: Any, process_id: str, spans: ProcessSpans | None = None
) -> tuple[ApiParts, list[Callable[[], None]]]:
    """What the routes of an ingress are put together from, and what closes it.

    Raises: ConfigError without a readable tokenizer.
    """
    from paceline.serving.loading.checkpoint import open_checkpoint

    meters = HttpMeters()

    def numbers() -> ReplicaNumbers:
        counters = dataclasses.asdict(client.counters)
        if spans is not None:
            counters |= {f"spans_{what}": n for what, n in spans.counters().items()}
        return ReplicaNumbers(kind=INGRESS, model=config.model_name, counters=counters, http=meters)

    tokenizer = open_checkpoint(resolve_model(config.model)).tokenizer()
    tokens = Tokens.of(config).start()
    exchange = NumbersExchange(config.redis_url, Keys(config.model_name), process_id, numbers).start()
    parts = ApiParts(
        client=client,
        admitted=client.admitted,
        tokenizer=tokenizer,
        clients=Clients.of(config, tokens, num_sharing=lambda: config.ingress.num_replicas),
        holdback_percent=client.holdback_percent,
        trusts_groups=config.policy.trusts_groups,
        opt_out_tenants=frozenset(config.trace.opt_out_tenants),
        # requests may wait for a replica, so that no engine at all is an illness only after that
        max_silence_s=max(MAX_SILENCE_S, config.ingress.max_wait_s) + 5.0,
        sends_request_id=False,  # Serve's middleware does it
        has_access_log=config.access_log,
        meters=meters,
        spans=None if spans is None else spans.http,
        open_routers=(relay_router(open_http, lambda: render_ingress_metrics(exchange.gather(INGRESS))),),
    )
    return parts, [tokens.close, exchange.close]


def bind_resuming(
    factory: str, engine_values: dict[str, Any], ingress_values: dict[str, Any], limits: DeploymentLimits
) -> Application:
    """The Serve application of engines built by `factory(engine_values, replica_id)` behind ingress replicas.

    ingress_values: plain values of a ServiceConfig.
    """
    engine = bind_engine(EngineBehindIngress, factory, engine_values, limits)
    config = build(ServiceConfig, ingress_values)
    return deployment(
        serve.ingress()(ResumeIngress), INGRESS, limits, num_replicas=config.ingress.num_replicas,
        # a proxy may send one ingress everything that all engines hold
        max_ongoing_requests=limits.max_ongoing_requests * limits.max_replicas + 64,
        max_surge_percent=100,
        ray_actor_options=INGRESS_PLACE,
    ).bind(engine, ingress_values)  # fmt: skip


INGRESS_METRICS: tuple[tuple[str, MetricSpec], ...] = (
    ("num_requests", replica_spec("ingress_requests", "counter", "1", "Requests that this ingress sent to engines")),
    ("num_broken", replica_spec("ingress_broken", "counter", "1", "Answers whose replica was lost while it wrote them")),
    ("num_resumed", replica_spec("ingress_resumed", "counter", "1", "Answers that another replica took over")),
    ("num_given_up", replica_spec("ingress_given_up", "counter", "1", "Requests that failed because no replica finished them")),
    ("spans_exported", replica_spec("ingress_spans_exported", "counter", "1", "Spans that the collector took")),
    ("spans_dropped", replica_spec("ingress_spans_dropped", "counter", "1", "Spans lost, as above")),
)  # fmt: skip
"""Attribute of ResumeCounters, or `spans_` and a name of SpanCounts.values -> metric."""


def render_ingress_metrics(ingresses: Mapping[str, ReplicaNumbers]) -> bytes:
    """Prometheus' text format, of ingress id -> numbers."""

    def read(numbers: ReplicaNumbers) -> Iterator[tuple[MetricSpec, Value]]:
        yield from ((spec, numbers.counters.get(name, 0)) for name, spec in INGRESS_METRICS)
        yield from http_values(numbers)

    return render_processes(ingresses, read)
