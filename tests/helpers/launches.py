"""Launches: which Triton kernels really run, and with which constants, as their own hooks see it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Launches:
    """Names of the kernels that ran, in order, with what each got by position and by name."""

    names: list[str] = field(default_factory=list)
    arguments: list[dict[str, Any]] = field(default_factory=list)
    constants: list[dict[str, Any]] = field(default_factory=list)

    def hook(self, kernel: Any) -> Any:
        def note(*args: Any, **constants: Any) -> None:
            self.names.append(kernel.fn.__name__)
            self.arguments.append(dict(zip(kernel.arg_names, args, strict=False)))
            self.constants.append(constants)

        return note


@contextlib.contextmanager
def launches(*kernels: Any) -> Iterator[Launches]:
    """Watch kernels as long as the context lasts."""
    seen = Launches()
    hooks = [(kernel, seen.hook(kernel)) for kernel in kernels]
    for kernel, hook in hooks:
        kernel.add_pre_run_hook(hook)
    try:
        yield seen
    finally:
        for kernel, hook in hooks:
            kernel.pre_run_hooks.remove(hook)
