"""Launch count: how many kernels a piece of work would launch on a device, and how often the host would wait for it.

Operators of torch are seen by a dispatch mode (views and allocations launch nothing), kernels of Triton in its interpreter,
whose own operators are not counted. Copies from the host are not seen.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from paceline.kernels.dispatch import Kernels

_SILENT = ("empty", "new_empty", "detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias", "resolve")


class LaunchCount(TorchDispatchMode):
    """Names of what was launched, with how often."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.is_paused = False

    @property
    def total(self) -> int:
        return sum(self.names.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(_SILENT):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing: inside of a kernel or a graph."""
        before, self.is_paused = self.is_paused, True
        try:
            with _disable_current_modes():  # no call of Python for each operator
                yield
        finally:
            self.is_paused = before

    def kernels(self, table: Kernels) -> Kernels:
        """The same kernels, each counted as one launch instead of by the operators of its reference."""

        def counted(name: str) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                if not self.is_paused:
                    self.names[name] += 1
                with self.paused():
                    return getattr(table, name)(*args, **kwargs)

            return run

        names = [f.name for f in fields(Kernels) if f.name not in ("backend", "is_capturable")]
        return replace(table, **{name: counted(name) for name in names})


@contextlib.contextmanager
def counted_launches() -> Iterator[LaunchCount]:
    """Count as long as the context lasts."""
    from triton.runtime.interpreter import GridExecutor

    count, run = LaunchCount(), GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not count.is_paused:
            count.names[self.fn.__name__] += 1
        with count.paused():
            return run(self, *args, **kwargs)

    GridExecutor.__call__ = launch
    try:
        with count:
            yield count
    finally:
        GridExecutor.__call__ = run


class WaitCount(TorchFunctionMode):
    """Names of the calls of tensors that wait for a device, with how often."""

    NAMES = ("item", "tolist", "cpu", "nonzero", "synchronize", "__int__", "__float__", "__bool__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.NAMES:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))
