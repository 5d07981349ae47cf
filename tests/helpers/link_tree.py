"""Build a folder of links in which mypy sees one regular package and vLLM's plugin: `python tests/helpers/link_tree.py TREE`."""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PLUGIN = "paceline_vllm"
FOLDERS = ("kernels", "serving", "bandit", "adapt", "infra", "bench")


def build(tree: Path) -> None:
    """Replace `tree` by paceline/ with one link for each module and each folder."""
    shutil.rmtree(tree, ignore_errors=True)
    package = tree / "paceline"
    package.mkdir(parents=True)
    for path in (ROOT / "paceline").iterdir():
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    for folder in FOLDERS:
        (package / folder).mkdir()
        (package / folder / "__init__.py").touch()
        for module in (ROOT / folder).rglob("*.py"):
            place = package / module.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(module)
    (tree / PLUGIN).mkdir()
    for module in (ROOT / "plugins" / PLUGIN).glob("*.py"):
        (tree / PLUGIN / module.name).symlink_to(module)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
