"""Attached engines: the control plane for replicas that others run, first drafter, controller and dashboard.

Such a replica needs Redis and the data folder, and an agent: the plugin in its engine (plugins/paceline_vllm), or one here
that speaks to it over HTTP (infra/engines/sglang.py). What it is, it says in its reports; it follows the desired state like a
replica of this project's own.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from redis.exceptions import RedisError
from starlette.applications import Starlette
from starlette.routing import Mount

from paceline.adapt.families.target_handle import load_target_handle
from paceline.adapt.versions.first_drafter import drafter_taps
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.config import AttachOptions, ServiceConfig
from paceline.contracts import EngineFacts
from paceline.errors import ConfigError, EngineAwayError, PacelineError
from paceline.infra.controller.snapshot import state_json
from paceline.infra.engines.sglang import SglangReplica
from paceline.infra.service.connections import Connection
from paceline.infra.service.parts import ControllerSupervisor, controller_spec
from paceline.infra.service.stores import StorePaths
from paceline.infra.state.desired import read_reports
from paceline.infra.state.layout import make_home
from paceline.infra.state.redis_clients import OUTAGE_ERRORS, Keys, patient_client
from paceline.infra.state.redis_clock import deployment_time
from paceline.infra.web.access import Access
from paceline.infra.web.dashboard_routes import dashboard_router
from paceline.infra.web.feed import DashboardFeed
from paceline.infra.web.metrics import render_metrics
from paceline.infra.web.state_routes import ServiceView, service_router
from paceline.paths import resolve_drafter, resolve_model
from paceline.serving.api.http import answer_errors
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.loading.families import build_drafter, read_drafter_files
from paceline.serving.wire.credentials import Tokens
from paceline.serving.wire.exchange import Exchange

log = logging.getLogger(__name__)

_RETRY_S = 2.0
"""Between two looks for an SGLang that did not answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDrafter:
    """The drafter that the service begins with, as the registry has it."""

    version: str
    target_version: str


def put_first_drafter(config: ServiceConfig) -> FirstDrafter:
    """Put the configured drafter's weights into the registry, under their content id.

    Raises: ConfigError where it has none that can be trained; DrafterMismatchError where it does not fit the target.
    """
    folder = resolve_drafter(config.drafter, config.model)
    if folder is None:
        raise ConfigError(
            f"drafter must have weights, got {config.drafter!r}; name the one that the engines draft with"
        )
    paths = StorePaths.of(config)
    make_home(paths.home)
    target = load_target_handle(resolve_model(config.model), tap_layers=drafter_taps(config))
    settings, state = read_drafter_files(folder, target)
    build_drafter(settings, state, target)  # refuses before anything is registered
    manifest = DrafterRegistry(paths.registry).put(
        state, drafter_type=settings["drafter_type"], config=settings, target_version=target.version
    )
    return FirstDrafter(version=manifest.version, target_version=target.version)


def wait_for_engine(config: ServiceConfig, is_stopped: Callable[[float], bool]) -> EngineFacts | None:
    """Facts of the first engine that reports under the service's name; None once `is_stopped`, which waits so many s."""
    assert config.redis_url is not None
    with patient_client(config.redis_url) as client:
        while True:
            try:
                for report in read_reports(client, Keys(config.model_name)):
                    if report.engine is not None:
                        return report.engine
            except OUTAGE_ERRORS as e:
                log.warning("redis is away: %s", e)
            except RedisError as e:
                raise PacelineError(f"reports cannot be read: {e}") from e
            if is_stopped(1.0):
                return None


class SglangReplicas:
    """The running SGLangs of `--url`, each with its agent in this process; none with another engine."""

    def __init__(self, config: ServiceConfig, options: AttachOptions, first: FirstDrafter) -> None:
        self._config, self._options, self._first = config, options, first
        self._replicas: list[SglangReplica] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> SglangReplicas:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for replica in self._replicas:
            replica.close()

    def wait(self, is_stopped: Callable[[float], bool]) -> None:
        """Return when the first of them has its agent, or once `is_stopped`, which waits so many s; the others get theirs
        when they answer.

        Raises: ConfigError where one was started without what it needs, or two write their records into one folder.
        """
        missing = list(self._options.url)
        while missing:
            missing = [url for url in missing if not self._reach(url)]
            if self._replicas:
                break
            if is_stopped(1.0):
                return
        if missing:
            self._thread = threading.Thread(target=self._reach_later, args=(missing,), name="sglang-urls", daemon=True)
            self._thread.start()

    def _reach_later(self, missing: list[str]) -> None:
        said: dict[str, str] = {}
        while missing and not self._stop.wait(_RETRY_S):
            for url in list(missing):
                try:
                    if self._reach(url):
                        missing.remove(url)
                except Exception as e:  # it may be started again, with what it needs; the thread is for the others, too
                    if said.get(url) != repr(e):
                        log.error("%s", e, exc_info=not isinstance(e, PacelineError))
                    said[url] = repr(e)

    def _reach(self, url: str) -> bool:
        """Whether the SGLang answered, and has its agent now."""
        config, options, paths = self._config, self._options, StorePaths.of(self._config)
        assert config.redis_url is not None
        try:
            replica = SglangReplica(
                url, key=options.engine_key, redis_url=config.redis_url, service=config.model_name,
                home=paths.home, registry=paths.registry, target=resolve_model(config.model),
                target_version=self._first.target_version, window_s=options.window_s, max_stale_tokens=options.max_stale_tokens,
                taken={other.records for other in self._replicas},
            )  # fmt: skip
        except EngineAwayError as e:
            log.info("%s", e)
            return False
        self._replicas.append(replica.start())
        return True


class Attached:
    """Controller and dashboard of a service whose engines are others'; Ray must run."""

    def __init__(self, config: ServiceConfig, first: FirstDrafter, facts: EngineFacts, http: Mapping[str, Any]) -> None:
        """config: with redis_url, and the port to listen on. http: what uvicorn is told about that port.

        Raises: ConfigError, before anything is started.
        """
        if config.engine.max_class_deltas:
            raise ConfigError("engine.max_class_deltas must be 0: only Paceline's own engine drafts with deltas")
        if facts.draft_shape == "chain" and config.gate_chain is None:  # the gate replays what the engine drafts
            config = dataclasses.replace(config, gate_chain=facts.max_draft_tokens)
        self.config = config
        self._tokens = Tokens.of(config)
        self._supervisor = ControllerSupervisor(
            controller_spec(
                config, first.target_version, first_version=first.version, deployed_at=deployment_time(config.redis_url)
            )
        )
        self._supervisor.start()
        view = ServiceView(
            model=config.model_name, target=config.model, replica_id="attached", target_version=first.target_version,
            slots=DrafterSlots(), counters=dict, watcher=None, is_adaptive=True,
        )  # fmt: skip
        self._tokens.start()
        self._feed = DashboardFeed(view.state, view.traffic)
        app = Starlette(
            routes=[Mount(config.route_prefix.rstrip("/"), app=_app(config, self._tokens, view, self._feed))]
        )
        self._server = uvicorn.Server(uvicorn.Config(Exchange(app), http=Connection, log_level="warning", **http))
        self._thread = threading.Thread(target=self._server.run, name="attached-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._supervisor.remove()
        self._server.should_exit = True
        self._thread.join(10.0)
        self._feed.close()
        self._tokens.close()


def _app(config: ServiceConfig, tokens: Tokens, view: ServiceView, feed: DashboardFeed) -> FastAPI:
    app, access = FastAPI(title="Paceline", openapi_url=None), Access.of(config, tokens)
    answer_errors(app)

    @app.get("/paceline/state")
    async def state(request: Request) -> Response:
        access.check_read(request)
        found: Any = await feed.run(view.state)
        return Response(msgspec.json.encode(state_json(found)), media_type="application/json")

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        access.check_metrics(request)
        body, kind = await feed.run(lambda: render_metrics({}, view.controller(), model=view.model))
        return Response(body, media_type=kind)

    app.include_router(service_router(view, access, feed.run))
    app.include_router(dashboard_router(view, access, feed))
    return app
