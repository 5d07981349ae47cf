"""In which threads do requests wait whose grammar has to be compiled first?

In a few of their own: a compilation may take seconds, and the event loop's default threads read metrics, states and files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

NUM_THREADS = 8
"""Most of them wait: a GrammarFactory compiles no more than a few at once. Further requests queue up for a thread."""


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar-submit")


async def submit_in_thread(submit: Callable[[], None], undo: Callable[[], None]) -> None:
    """Run `submit` in one of the threads; raises what it raises.

    undo: called when the caller is cancelled and `submit` succeeds nevertheless: nobody waits for it any more.
    """
    future = _threads().submit(submit)
    try:
        await asyncio.shield(asyncio.wrap_future(future))
    except asyncio.CancelledError:
        loop = asyncio.get_running_loop()

        def after(done: Future[None]) -> None:
            if not done.cancelled() and done.exception() is None:
                try:
                    loop.call_soon_threadsafe(undo)
                except RuntimeError:  # the loop is closed, so nothing can run beside this
                    undo()

        if not future.cancel():  # one that still waits for a thread is never begun
            future.add_done_callback(after)
        raise
