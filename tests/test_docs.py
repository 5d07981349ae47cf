"""Pages are short, their links lead somewhere, and the files that they name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    *sorted(DOCS.glob("*.md")),
    *sorted(DOCS.glob("api/*.md")),
    DOCS / "results" / "README.md",
]
LONGEST = {"README.md": 6_000, "ARCHITECTURE.md": 9_000}
FOLDERS = ("paceline", "infra", "bench", "adapt", "serving", "kernels", "bandit", "tests")


def prose(page: Path) -> str:
    """A page without its fenced code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What links may name behind the hash, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_is_short_and_leads_somewhere(page):
    assert page.stat().st_size <= LONGEST.get(page.relative_to(ROOT).as_posix(), 12_000)
    lost = []
    for target in re.findall(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)", prose(page)):
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            found = (page.parent / name).resolve() if name else page
            if not found.is_file() or (anchor and anchor not in anchors(found)):
                lost.append(target)
    assert lost == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(page):
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/]*\w(?:\.\w+)?/?)`", prose(page))
    assert [name for name in named if not (ROOT / name).exists() and "NAME" not in name] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_that_a_page_prints_have_the_options_that_it_gives_them(page):
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    promised = (ROOT / "tests" / "commands.txt").read_text(encoding="utf-8").splitlines()
    known = {name: set(re.findall(r"--[a-z-]+", options)) for name, _, options in (p.partition(": ") for p in promised)}
    fenced = "".join(re.findall(r"^```.*?^```", text, flags=re.MULTILINE | re.DOTALL)).splitlines()
    inline = [code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", prose(page))]
    wrong = []
    for line in (*fenced, *inline):
        for words in re.findall(r"(?<![\w=-])paceline ([a-z-]+(?: [^#|]*)?)$", line.partition(" #")[0]):
            name = max((n for n in known if f"{words} ".startswith(f"{n} ")), key=len, default="")
            given = set(re.findall(r"(?<!\S)--[a-z-]+", words))
            if "..." not in words and not given <= known.get(name, set()):
                wrong.append(line)
    assert wrong == []


def test_every_picture_and_every_result_is_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [p.name for p in (DOCS / "images").iterdir() if f"images/{p.name}" not in text] == []
    listed = (DOCS / "results" / "README.md").read_text(encoding="utf-8")
    results = {p.stem for p in (DOCS / "results").glob("*.json")}
    families = [name for name in results if name.endswith("_over_eagle3") or name == "bench_bastion_batch8"]
    assert [name for name in results - set(families) if f"`{name}`" not in listed] == []
