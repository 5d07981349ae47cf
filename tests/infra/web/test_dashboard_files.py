"""The dashboard's files: no inline code, nothing from elsewhere, text never parsed as HTML."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from paceline.infra.web.dashboard_routes import FOLDER


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[dict] = []
        self.links: list[str] = []
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        values = dict(attrs)
        if tag == "script":
            self.scripts.append(values)
        self.links += [values[k] for k in ("src", "href") if values.get(k)]
        self.found += [k for k in values if k.startswith("on") or k == "style"]


@pytest.mark.parametrize("name", ["index.html", "decision.html"])
def test_pages_have_no_inline_code_and_nothing_from_elsewhere(name: str) -> None:
    page = _Page()
    page.feed((FOLDER / name).read_text(encoding="utf-8"))
    assert page.scripts and all(s.get("src") for s in page.scripts)
    assert page.found == []
    assert all(
        link.startswith(("dashboard/static/", "../static/", "../../dashboard", "#", "data:,")) for link in page.links
    )


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.js")), ids=lambda p: p.name)
def test_scripts_never_parse_text_as_html_or_code(path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setAttribute\(.style", text
    )
    assert "http://" not in text and "https://" not in text
    assert text.count("\n") <= 200
