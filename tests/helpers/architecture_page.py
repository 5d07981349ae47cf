"""Write the module list of ARCHITECTURE.md from the modules' own first lines: `python tests/helpers/architecture_page.py`."""

import ast
import gc
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "ARCHITECTURE.md"
MARK = "<!-- modules -->\n"
FOLDERS = {
    "paceline": "shared vocabulary and command line; loads no torch when imported",
    "kernels": "what runs on the accelerator: Triton kernels, and the torch references that specify them and run on the CPU",
    "serving": "how text is generated; imports `kernels`",
    "bandit": "whether an update pays; numpy, scipy and river, imports none of the others",
    "adapt": "how a drafter improves; imports `kernels` and serving's drafter modules",
    "infra": "how it is put together; may import everything",
    "bench": "how fast it is; imports `serving`, `adapt`, `bandit`",
}


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


def module_list() -> str:
    """One line a module: its name and the first line of its docstring."""
    out = []
    for folder, purpose in FOLDERS.items():
        out.append(f"\n### `{folder}/`: {purpose}\n")
        for path in sorted(
            p
            for p in (ROOT / folder).rglob("*.py")
            if p.name not in ("__init__.py", "__main__.py") or p.parent.name == "paceline"
        ):
            doc = ast.get_docstring(parse_module(path)) or ""
            out.append(f"- `{path.relative_to(ROOT / folder)}`: {doc.splitlines()[0] if doc else ''}")
    return "\n".join(out) + "\n"


def page() -> str:
    """The page with an up-to-date module list."""
    head = PAGE.read_text(encoding="utf-8").split(MARK)[0]
    return head + MARK + module_list()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
