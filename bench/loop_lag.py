"""How late does the event loop of a load generator run? Its lag is no fault of the server that it measures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TICK_S = 0.05


async def watch_lag(lags_s: list[float], on_tick: Callable[[float], None]) -> None:
    """Append the seconds by which each tick came late, and call `on_tick(perf_counter)`; runs until cancelled."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(TICK_S)
        now = time.perf_counter()
        lags_s.append(max(0.0, now - before - TICK_S))
        on_tick(now)
