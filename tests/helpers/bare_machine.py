"""Bare machine: child processes that see torch, triton, transformers, numpy, safetensors and what these need, and nothing else."""

import re
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

BASE = ("torch", "transformers", "triton", "numpy", "safetensors")
NEEDED = ("msgspec", "pydantic")
"""What docs/gpu.md and --help say to carry."""
CARRIED = (*NEEDED, "pydantic-core", "annotated-types", "typing-inspection")
"""With what these need."""

_SITE = '''
import sys

MODULES, DISTRIBUTIONS = {modules!r}, {distributions!r}


class Filter:
    """A finder that finds what is there."""

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        is_pythons = top in sys.stdlib_module_names or top.startswith("_sysconfigdata")
        if path is None and top not in MODULES and not is_pythons:
            return None
        return self.finder.find_spec(name, path, target)

    def find_distributions(self, *context):
        for found in getattr(self.finder, "find_distributions", lambda *a: ())(*context):
            if (found.metadata["Name"] or "").lower().replace("_", "-") in DISTRIBUTIONS:
                yield found


sys.meta_path[:] = [Filter(finder) for finder in sys.meta_path]
'''


def write_bare_site(folder: Path, extra: tuple[str, ...] = ()) -> Path:
    """A folder that, on PYTHONPATH, hides every other package from Python processes.

    extra: distributions that are there besides.
    """
    hidden = {*CARRIED}
    names = {name for name in _closure(BASE) if name not in hidden} | {*extra}
    modules = {m for m, owners in packages_distributions().items() if {_plain(o) for o in owners} & names}
    modules |= {"paceline", "tests", "sitecustomize", "carried_package"}
    folder.mkdir(parents=True, exist_ok=True)
    text = _SITE.format(modules=sorted(modules), distributions=sorted(names))
    (folder / "sitecustomize.py").write_text(text)
    return folder


def _closure(names: tuple[str, ...]) -> set[str]:
    found, todo = set(), [*names]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        try:
            needed = requires(name) or []
        except PackageNotFoundError:  # of another platform
            continue
        found.add(name)
        todo += [_plain(re.split(r"[^A-Za-z0-9._-]", r)[0]) for r in needed if "extra ==" not in r]
    return found


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
