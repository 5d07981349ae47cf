"""The import table of ARCHITECTURE.md holds for every module."""

import ast
from pathlib import Path

import pytest

from tests.helpers.architecture_page import PAGE, page, parse_module

ROOT = Path(__file__).resolve().parent.parent
OURS = ("paceline", "kernels", "serving", "bandit", "adapt", "infra", "bench")
ALLOWED_FOLDERS = {
    "paceline": set(),
    "kernels": set(),
    "bandit": set(),
    "serving": {"kernels"},
    "adapt": {"kernels", "serving"},
    "bench": {"kernels", "serving", "adapt", "bandit"},
    "infra": {"kernels", "serving", "adapt", "bandit", "bench"},
}
ADAPT_MAY_IMPORT_FROM_SERVING = {
    "drafter", "draft_tree", "tree_builder", "tree_policy", "budget", "specblock_model", "specblock_drafter", "request",
    "target", "sinks", "kv_cache", "verify", "specblock_attention", "specblock_rope", "score_calibration",
    "drafter_family", "drafter_families", "eagle_model", "reentry", "parallel_head_model", "released_layouts",
}  # fmt: skip
FORBIDDEN = {
    "paceline": {"torch", "triton", "transformers", "ray", "redis"},
    "kernels": {"ray", "transformers", "redis", "fastapi"},
    "bandit": {"torch", "triton", "transformers", "ray", "redis", "fastapi"},
    "serving": {"ray", "redis", "river"},
    "adapt": {"ray", "redis", "fastapi", "river"},
    "bench": {"redis"},
    "infra": set(),
}
RAY_LEAVES = {"infra/service/deployment.py", "adapt/online/task.py"}
COMMAND_LINE = {
    "paceline/cli/main.py",
    "paceline/cli/bench.py",
    "paceline/cli/bench_drafters.py",
    "paceline/cli/bench_serve.py",
    "paceline/cli/replay.py",
    "paceline/cli/versions.py",
}  # hands each command to the folder that does it, inside the function


def _modules():
    return [p for f in OURS for p in sorted((ROOT / f).glob("*.py"))]


def _imports(path: Path):
    for node in ast.walk(parse_module(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or "", node
            if node.module == "paceline":
                for alias in node.names:
                    yield f"paceline.{alias.name}", node


def violations(path: Path, folder: str, relative: str) -> list[str]:
    """Return one sentence for each import of `path` that the table does not allow."""
    found = []
    for name, node in _imports(path):
        parts = name.split(".")
        if parts[0] in OURS[1:]:
            found.append(f"{relative}:{node.lineno} imports {name} without the package name")
        if parts[0] == "paceline" and len(parts) > 1 and parts[1] in OURS[1:]:
            other = parts[1]
            if relative in COMMAND_LINE:
                if node.col_offset == 0:
                    found.append(f"{relative}:{node.lineno} imports {name} at import time")
            elif other != folder and other not in ALLOWED_FOLDERS[folder]:
                found.append(f"{relative}:{node.lineno} {folder} may not import {name}")
            elif folder == "adapt" and other == "serving" and len(parts) > 2 and parts[2] not in ADAPT_MAY_IMPORT_FROM_SERVING:  # fmt: skip
                found.append(f"{relative}:{node.lineno} adapt may not import {name}")
        elif parts[0] in FORBIDDEN[folder]:
            if parts[0] == "ray" and relative in RAY_LEAVES:
                continue
            if relative in COMMAND_LINE and node.col_offset > 0:
                continue
            found.append(f"{relative}:{node.lineno} {folder} may not import {name}")
    return found


@pytest.mark.parametrize("path", _modules(), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_module_keeps_the_import_table(path):
    assert violations(path, path.parent.name, f"{path.parent.name}/{path.name}") == []


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("bandit", "import torch"),
        ("bandit", "from paceline.serving import engine"),
        ("bandit", "import paceline.serving.engine.engine"),
        ("serving", "import ray"),
        ("serving", "from kernels import dispatch"),
        ("kernels", "def f():\n    import paceline.adapt.gate.gate"),
        ("paceline", "import torch"),
        ("adapt", "from paceline.serving import deployment\nfrom paceline.serving.api.app import x"),
    ],
)
def test_planted_violation_is_found(tmp_path, folder, line):
    path = tmp_path / "planted.py"
    path.write_text(line)
    assert violations(path, folder, f"{folder}/planted.py")


@pytest.mark.parametrize("folder", OURS[1:])
def test_root_folder_has_no_init_so_that_it_shadows_nothing(folder):
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("path", _modules(), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_module_says_what_it_answers_and_stays_short(path):
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(parse_module(path)), "a module begins with the question that it answers"
    assert text.count("\n") <= 400


def _types(path: Path) -> set[str]:
    """Names of classes and of types that a module defines."""
    names: set[str] = set()
    for node in parse_module(path).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name) and not t.id.isupper()}
    return {n for n in names if n[0].isupper()}


@pytest.mark.parametrize("folder", ["kernels", "serving", "infra"])
def test_the_name_of_a_type_means_one_thing_in_its_folder(folder):
    seen: dict[str, list[str]] = {}
    for path in sorted((ROOT / folder).glob("*.py")):
        for name in _types(path):
            seen.setdefault(name, []).append(path.name)
    assert {name: files for name, files in seen.items() if len(files) > 1} == {}


def test_architecture_page_has_one_sentence_for_every_module():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python tests/helpers/architecture_page.py`"
