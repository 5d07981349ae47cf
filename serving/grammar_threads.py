"""In which threads do requests wait whose grammar has to be compiled first?

In a few of their own: a compilation may take seconds, and the event loop's threads read metrics, states and files. A
thread only compiles. The request itself is submitted by the event loop afterwards, so that one whose client went away
meanwhile never existed for the engine: nothing has to be undone, and a retry under the same id finds the id free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")

NUM_THREADS = 8
"""Most of them wait: a GrammarFactory compiles no more than a few at once. Further requests queue up for a thread."""


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")


async def compile_in_thread(compile_it: Callable[[], T]) -> T:
    """Run `compile_it` in one of the threads and return its result; raises what it raises.

    When the caller is cancelled, one that still waits for a thread is never begun, and one that has begun ends unheard.
    """
    return await asyncio.wrap_future(_threads().submit(compile_it))
