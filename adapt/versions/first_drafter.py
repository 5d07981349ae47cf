"""First drafter: what a service begins with, checked against the target and registered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from paceline.adapt.data.storage_calls import StorageCalls
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.config import ServiceConfig
from paceline.errors import StorageHangsError
from paceline.paths import resolve_drafter
from paceline.serving.drafters.family import TargetHandles
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.drafters.text import make_text_drafter
from paceline.serving.loading.families import build_drafter, read_drafter_files
from paceline.serving.loading.released import wanted_tap_layers

log = logging.getLogger(__name__)
RETRY_S = 30.0
"""Between two tries to put the first drafter into a registry that refuses."""


def drafter_taps(config: ServiceConfig) -> tuple[int, ...] | None:
    """Target layers that the configured drafter reads: none without weights; None = the usual three."""
    folder = resolve_drafter(config.drafter, config.model)
    return () if folder is None else wanted_tap_layers(folder)


def _put_later(calls: StorageCalls, put: Callable[[], Any]) -> None:
    """Have weights put into the registry when it answers and takes them."""

    def look(done: Future) -> None:
        if isinstance(done.exception(), OSError):
            again = threading.Timer(RETRY_S, _put_later, (calls, put))
            again.daemon = True
            again.start()

    calls.later(put).add_done_callback(look)


def make_slots(
    config: ServiceConfig, target: TargetHandles, registry: DrafterRegistry, calls: StorageCalls | None = None
) -> DrafterSlots:
    """Drafter slots with the first drafter live; its weights are put into the registry under their content id.

    Args:
        calls: of the registry: where that hangs or refuses, the weights are put there later. None = it is waited for.
    Raises: ConfigError, DrafterMismatchError when the drafter does not exist or does not fit the target.
    """
    folder = resolve_drafter(config.drafter, config.model, version=target.version)
    if folder is None:
        return DrafterSlots() if config.drafter == "none" else DrafterSlots(make_text_drafter(config.drafter))
    settings, state = read_drafter_files(folder, target)

    def build() -> Any:
        return build_drafter(settings, state, target)

    live = build()  # refuses before anything is registered
    about = {"drafter_type": settings["drafter_type"], "config": settings, "target_version": target.version}
    version = registry.version_of(state, **about)
    try:
        (registry if calls is None else calls.guard(registry)).put(state, **about)
    except (StorageHangsError, OSError) as e:
        if calls is None:
            raise
        log.error("%s: this replica begins with the drafter of %s, version=%s", e, folder, version)
        _put_later(calls, partial(registry.put, state, **about))
    first, engine = build(), config.engine
    if engine.max_class_deltas:
        first.hold_deltas(engine.max_class_deltas, engine.delta_rank)
    return DrafterSlots(
        live, version, first=first, first_version=version, spawn=build,
        num_class_slots=engine.max_class_versions,
    )  # fmt: skip
