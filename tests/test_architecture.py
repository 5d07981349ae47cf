"""The house stands: floors, sizes of folders, docstrings and names hold for every module."""

import ast
import re
from pathlib import Path

import pytest

from tests.helpers.house import (
    FLOORS,
    MAX_ENTRIES,
    ROOT,
    TOPS,
    base_classes_with_one_subclass,
    entries,
    floor,
    folder_of,
    folders,
    modules,
    parse_module,
    violations,
)

PAGE = ROOT / "ARCHITECTURE.md"
LISTED = ("docs", "infra/page")
"""Folders without modules that readers walk through all the same."""


@pytest.mark.parametrize("top", TOPS)
def test_folders_import_only_from_floors_below(top):
    assert [v for p in modules() if p.parts[0] == top for v in violations(ROOT / p, p.as_posix())] == []


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("bandit/ledger/planted.py", "import torch"),
        ("bandit/ledger/planted.py", "from paceline.serving.engine import engine"),
        ("bandit/ledger/planted.py", "from paceline.bandit.controller import controller"),
        ("serving/trees/planted.py", "import ray"),
        ("serving/trees/planted.py", "from kernels import dispatch"),
        ("serving/trees/planted.py", "from paceline.serving.engine.engine import Engine"),
        ("serving/eagle3/planted.py", "from paceline.serving.specblock.model import SpecBlockModel"),
        ("serving/engine/planted.py", "from paceline.bandit.ledger import ledger"),
        ("kernels/gpu/planted.py", "def f():\n    import paceline.adapt.gate.gate"),
        ("kernels/reference/planted.py", "from paceline.kernels import gpu"),
        ("paceline/planted.py", "import torch"),
        ("paceline/planted.py", "from paceline.cli import main"),
        ("paceline/cli/planted.py", "from paceline.infra.demo.run import run"),
        ("infra/state/planted.py", "from paceline.infra import app"),
        ("adapt/data/planted.py", "import ray"),
    ],
)
def test_planted_violation_is_found(tmp_path, place, line):
    path = tmp_path / "planted.py"
    path.write_text(line)
    assert violations(path, place)


def test_every_folder_has_its_floor_and_every_floor_its_folder():
    rows = [folder for row in FLOORS for folder in row]
    with_modules = {p.parent.as_posix() for p in modules()}
    assert len(rows) == len(set(rows))
    assert set(rows) == with_modules


def test_names_are_found_in_the_folder_that_holds_them():
    assert folder_of("paceline.serving.engine.engine.Engine") == "serving/engine"
    assert folder_of("paceline.contracts.FeedbackBatch") == "paceline"
    assert folder_of("numpy.random") is None
    assert floor("paceline") == 0
    assert floor("nowhere") is None


@pytest.mark.parametrize("folder", [*(f.as_posix() for f in folders()), *LISTED])
def test_folder_holds_no_more_than_one_takes_in_at_a_glance(folder):
    assert len(folder.split("/")) <= 2, "two levels"
    found = entries(ROOT / folder)
    assert len(found) <= MAX_ENTRIES, found


@pytest.mark.parametrize("folder", TOPS[1:])
def test_root_folder_has_no_init_so_that_it_shadows_nothing(folder):
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("top", TOPS)
def test_modules_state_what_they_are(top):
    asking = []
    for path in modules():
        if path.parts[0] == top and path.name != "__init__.py":
            first = (ast.get_docstring(parse_module(ROOT / path)) or "").split("\n\n")[0]
            if not re.match(r"^[A-Z`][^?]*$", first):
                asking.append(f"{path}: {first}")
    assert asking == []


def test_no_class_is_split_from_its_only_subclass():
    assert base_classes_with_one_subclass() == {}


def _types(path: Path) -> set[str]:
    """Names of classes and of types that a module defines."""
    names: set[str] = set()
    for node in parse_module(path).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name) and not t.id.isupper()}
    return {n for n in names if n[0].isupper()}


@pytest.mark.parametrize("top", ["kernels", "serving", "infra"])
def test_the_name_of_a_type_means_one_thing_in_its_folder(top):
    seen: dict[str, list[str]] = {}
    for path in modules():
        if path.parts[0] == top:
            for name in _types(ROOT / path):
                seen.setdefault(name, []).append(path.as_posix())
    assert {name: files for name, files in seen.items() if len(files) > 1} == {}


def test_no_test_imports_another_test():
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if re.match(r"\s*(from|import) tests\.(?!helpers\b)", line):
                found.append(f"{path.relative_to(ROOT)}: {line.strip()}")
    assert found == []


def test_architecture_page_names_every_folder():
    page = PAGE.read_text(encoding="utf-8")
    assert [f for row in FLOORS for f in row if f"`{f}/`" not in page] == []
    assert len(page.encode()) <= 9_000
