"""Launch counts: how often a launcher really launches its Triton kernel, and with which constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def count_launches(monkeypatch: Any, module: Any, name: str) -> Callable[[], int]:
    """Watch the kernel `name` of a module; the function returned says how often it has been launched since."""
    kernel, launches = getattr(module, name), []

    class Watched:
        def __getitem__(self, grid: Any) -> Any:
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(module, name, Watched())
    return lambda: len(launches)


def note_constants(monkeypatch: Any, module: Any, name: str) -> list[dict[str, Any]]:
    """Watch the kernel `name` of a module; the list gets the constants and options of every launch since."""
    kernel, constants = getattr(module, name), []

    class Watched:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> Any:
                constants.append(kwargs)
                return kernel[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(module, name, Watched())
    return constants
