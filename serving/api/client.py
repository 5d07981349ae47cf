"""Engine client: the HTTP layer's way to the engine of its own process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline.errors import EngineStoppedError
from paceline.serving.api.generation import EngineInfo
from paceline.serving.engine.engine import Engine
from paceline.serving.engine.thread import EngineThread
from paceline.serving.sampling.request import GenerationRequest, RoundEvent


class LocalEngineClient:
    """An EngineClient over an engine and its thread."""

    def __init__(self, engine: Engine, thread: EngineThread, *, model_name: str, aliases: Sequence[str] = ()) -> None:
        self._engine, self._thread = engine, thread
        self._info = EngineInfo(
            model_name=model_name,
            aliases=tuple(aliases),
            target_version=engine.target.version,
            context_tokens=engine.max_context_tokens,
            vocab_size=engine.target.vocab_size,
            created=int(time.time()),
        )

    def prepare(self, request: GenerationRequest) -> object:
        grammar = request.params.grammar
        return self._engine.grammars.prepare(grammar, request.tenant) if grammar is not None else None

    def submit_all(self, requests: Sequence[GenerationRequest], on_event: Callable[[RoundEvent], None]) -> None:
        if not self._thread.is_alive:
            raise EngineStoppedError("the engine of this replica has stopped; send the request again")
        self._engine.submit_all(requests, on_event)

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def info(self) -> EngineInfo:
        return self._info

    def now(self) -> float:
        return self._engine.now()

    def num_waiting(self) -> int:
        return self._engine.num_waiting

    def is_draining(self) -> bool:
        return self._thread.is_draining

    def heartbeat_age_s(self) -> float:
        return self._thread.heartbeat_age_s() if self._thread.is_alive else float("inf")
