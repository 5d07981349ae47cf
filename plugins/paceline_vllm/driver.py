"""vLLM as an engine with one drafter, exchanged between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.v1.engine.exceptions import EngineDeadError

from paceline.errors import DrafterMismatchError, EngineAwayError
from paceline.infra.engines.one_drafter import Looked, Staged
from paceline.serving.drafters.released_fields import MASK_FILE

CALL_TIMEOUT_S = 60.0

Call = Callable[..., Coroutine[Any, Any, Any]]


@dataclass(kw_only=True)
class VllmEngine:
    """OneDrafterEngine, by calls of vLLM's engine."""

    served_folder: Path
    """The drafter's folder that vLLM was started with."""
    call: Call
    """(method, *arguments) -> what the engine's call returns; runs in `loop`."""
    loop: asyncio.AbstractEventLoop
    last: dict[str, Any] = field(default_factory=dict)
    """What the engine told last, by `paceline_state`."""

    def ask(self, method: str, *args: Any) -> Any:
        """The answer of a call between two steps. Raises: DrafterMismatchError with the engine's reason; EngineAwayError."""
        future = asyncio.run_coroutine_threadsafe(self.call(method, *args), self.loop)
        try:
            return future.result(CALL_TIMEOUT_S)
        except FutureTimeoutError as e:
            future.cancel()
            raise EngineAwayError(f"vLLM did not answer {method} within {CALL_TIMEOUT_S:g} s") from e
        except EngineDeadError as e:
            raise EngineAwayError(f"vLLM's engine has ended: {e}") from e
        except Exception as e:  # vLLM's own kinds, and what its engine's process raised
            raise DrafterMismatchError(f"vLLM refused {method}: {e}") from e

    def check(self, folder: Path) -> None:
        if not _same_mask(self.served_folder / MASK_FILE, folder / MASK_FILE):
            raise DrafterMismatchError(
                f"drafter {folder.name} must have the mask vector that vLLM was started with: it reads that at its start"
            )

    def publish(self, staged: Staged | None, version: str, group: str) -> float:
        path, sha256 = ("", "") if staged is None else (str(staged.file), staged.sha256)
        if staged is not None:
            staged.file.read_bytes()  # slow or failing storage shows here, where no step waits; it is in the cache then
        return self.ask("paceline_publish", path, sha256, version, group)

    def look(self) -> Looked:
        self.last = self.ask("paceline_state")
        is_published = bool(self.last["version"])
        return Looked(self.last["rows"], (self.last["group"], self.last["version"]) if is_published else ("", ""))

    def tell_training(self, is_training: bool) -> None:
        self.ask("paceline_control", is_training)

    def counters(self) -> dict[str, Any]:
        """Feedback rows, as the engine's process counts them."""
        return self.last.get("feedback", {})


def _same_mask(one: Path, other: Path) -> bool:
    if not (one.is_file() and other.is_file()):
        return one.is_file() == other.is_file()
    a, b = (torch.load(path, weights_only=True)["embedding"] for path in (one, other))
    return torch.equal(a, b)
