"""House: the folders of the product, their floors and their sizes; `python tests/helpers/house.py` prints them.

A folder imports only from folders on floors below its own, so there is neither a circle nor an import upwards.
"""

import ast
import gc
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("paceline", "infra", "bench", "adapt", "serving", "kernels", "bandit")
MAX_ENTRIES = 12
"""Modules and folders that one folder may hold; `__init__.py` and `py.typed` are no entries."""

FLOORS = (
    ("paceline/cli",),
    ("infra/demo", "bench/chaos"),
    ("infra",),
    ("infra/service",),
    ("infra/web",),
    ("infra/engines",),
    ("infra/replica",),
    ("infra/resume",),
    ("infra/controller",),
    ("infra/state",),
    ("bench/gpu_check",),
    ("bench/shadow",),
    ("bench/drafters", "bench/peers", "bench/shapes"),
    ("paceline/replay",),
    ("bench/serve", "bench/replay"),
    ("bench/engine",),
    ("bench/common",),
    ("adapt/online", "adapt/recipes"),
    ("adapt/gate", "adapt/versions"),
    ("adapt/families",),
    ("adapt/data",),
    ("serving/api",),
    ("serving/engine", "serving/wire"),
    ("serving/loading",),
    ("serving/specblock", "serving/eagle3", "serving/parallel_head", "serving/trees"),
    ("serving/drafters", "serving/sampling"),
    ("serving/target_model", "serving/budget"),
    ("kernels",),
    ("kernels/gpu", "kernels/cpu"),
    ("kernels/reference",),
    ("bandit/off_policy",),
    ("bandit/replay",),
    ("bandit/controller",),
    ("bandit/policies",),
    ("bandit/ledger",),
    ("bandit/beliefs",),
    ("bandit",),
    ("paceline",),
)
"""From the roof down. Folders on one floor do not import one another."""

SHUT = {
    "kernels": ("bandit",),
    "serving": ("bandit",),
    "adapt": ("bandit",),
}
"""Folder -> folders below it that stay closed to it all the same: deciding knows nothing of text, nor text of deciding."""

FORBIDDEN = {
    "paceline": {"torch", "triton", "transformers", "ray", "redis"},
    "kernels": {"ray", "transformers", "redis", "fastapi"},
    "bandit": {"torch", "triton", "transformers", "ray", "redis", "fastapi"},
    "serving": {"ray", "redis"},
    "adapt": {"ray", "redis", "fastapi"},
    "bench": {"redis"},
    "infra": set(),
}
"""Folder -> third-party packages that it never imports."""

RAY_LEAVES = {"adapt/online/task.py"}
"""The only module below `bench` that knows Ray: a training job as a Ray task."""


def parse_module(path: Path) -> ast.Module:
    """The syntax tree of a file, built without garbage collection.

    CPython 3.11 keeps the depth of tree construction per interpreter: a collection in its midst runs finalizers, hence
    other threads, and one of those that parses too makes this fail with "recursion depth mismatch" (python/cpython#106905).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        if was_enabled:
            gc.enable()


def modules(root: Path = ROOT) -> list[Path]:
    """Every module of the product, relative to `root`."""
    return [
        p.relative_to(root) for top in TOPS for p in sorted((root / top).rglob("*.py")) if "__pycache__" not in p.parts
    ]


def folder_of(name: str, root: Path = ROOT) -> str | None:
    """The folder in which the dotted name of a module, or of something in it, lies; None = not ours."""
    parts = name.split(".")
    if parts[0] != "paceline":
        return None
    path = root / "paceline"
    if len(parts) > 1 and parts[1] in TOPS[1:]:
        path, parts = root, parts[1:]
    else:
        parts = parts[1:]
    for part in parts:
        if not (path / part).is_dir():
            break
        path /= part
    return path.relative_to(root).as_posix()


def imports(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    """(dotted name, statement) of everything that a module imports, inside functions too."""
    for node in ast.walk(parse_module(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node


def floor(folder: str) -> int | None:
    """The height of a folder, 0 = lowest; None = not in the table."""
    return next((len(FLOORS) - 1 - i for i, row in enumerate(FLOORS) if folder in row), None)


def violations(path: Path, place: str, root: Path = ROOT) -> list[str]:
    """One sentence for each import of the file `path`, taken as the module `place` ("folder/name.py"), that breaks a rule."""
    folder = Path(place).parent.as_posix()
    top, found = folder.split("/")[0], []
    is_command_line = folder == "paceline/cli"
    for name, node in imports(path):
        where = f"{place}:{node.lineno}"
        first = name.split(".")[0]
        other = folder_of(name, root)
        if first in TOPS[1:]:
            found.append(f"{where} imports {name} without the package name")
        elif other is not None and other != folder:
            below = floor(other)
            if below is None or below >= (floor(folder) or 0):
                found.append(f"{where} {folder} may not import {name}: {other} is not on a floor below")
            elif other.split("/")[0] in SHUT.get(top, ()):
                found.append(f"{where} {folder} may not import {name}: {other} is shut to {top}")
            elif is_command_line and node.col_offset == 0 and other != "paceline":
                found.append(f"{where} imports {name} at import time; a command imports what it runs")
        elif (
            first in FORBIDDEN[top]
            and not (first == "ray" and place in RAY_LEAVES)
            and not (is_command_line and node.col_offset > 0)
        ):
            found.append(f"{where} {top} may not import {name}")
    return found


def entries(folder: Path) -> list[str]:
    """What a reader sees in a folder."""
    hidden = ("__pycache__", "__init__.py", "py.typed")
    return sorted(p.name for p in folder.iterdir() if p.name not in hidden and not p.name.startswith("."))


def folders(root: Path = ROOT) -> list[Path]:
    """Every folder of the product that holds modules, and the folders between."""
    found = {path.parent for path in modules(root)}
    return sorted(found | {parent for path in found for parent in path.parents if parent != Path()})


def base_classes_with_one_subclass(root: Path = ROOT) -> dict[str, str]:
    """Class -> its only subclass, for classes of the product that nothing else derives from or makes."""
    bases: dict[str, set[str]] = defaultdict(set)
    made: set[str] = set()
    protocols: set[str] = set()
    defined: set[str] = set()
    for path in modules(root):
        tree = parse_module(root / path)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names = {
                    b.id if isinstance(b, ast.Name) else b.attr
                    for b in node.bases
                    if isinstance(b, ast.Name | ast.Attribute)
                }
                defined.add(node.name)
                if "Protocol" in names:
                    protocols.add(node.name)
                for name in names:
                    bases[name].add(node.name)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                made.add(node.func.id)
    return {b: next(iter(s)) for b, s in sorted(bases.items()) if b in defined - made - protocols and len(s) == 1}


def table(root: Path = ROOT) -> str:
    """Folders from the roof down with their modules, lines and the folders that they import."""
    lines: dict[str, list[int]] = defaultdict(list)
    uses: dict[str, set[str]] = defaultdict(set)
    for path in modules(root):
        folder = path.parent.as_posix()
        lines[folder].append((root / path).read_text(encoding="utf-8").count("\n"))
        if path.name == "__init__.py":
            lines[folder].pop()
        uses[folder] |= {f for name, _ in imports(root / path) if (f := folder_of(name, root)) and f != folder}
    out = [f"{'floor':>5}  {'folder':<22}{'entries':>8}{'modules':>9}{'lines':>8}  imports"]
    for i, row in enumerate(FLOORS):
        for folder in row:
            sizes = lines.get(folder, [])
            used = " ".join(sorted(uses[folder] - {"paceline"}))
            out.append(
                f"{len(FLOORS) - 1 - i:>5}  {folder:<22}{len(entries(root / folder)):>8}{len(sizes):>9}{sum(sizes):>8}  {used}"
            )
    total = [n for sizes in lines.values() for n in sizes]
    out.append(f"{'':>5}  {'product':<22}{'':>8}{len(total):>9}{sum(total):>8}")
    tests = [p.read_text(encoding="utf-8").count("\n") for p in (root / "tests").rglob("*.py")]
    out.append(f"{'':>5}  {'tests':<22}{'':>8}{len(tests):>9}{sum(tests):>8}")
    return "\n".join(out)


if __name__ == "__main__":
    print(table())
    broken = [v for path in modules() for v in violations(ROOT / path, path.as_posix())]
    print("\n".join(broken) or "no import goes upwards or sideways")
