"""Headless Chromium for tests: starts it, notes what a page logs and asks for, measures what is on it."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
HOW = "install it: apt-get update && apt-get install -y chromium (or set PACELINE_CHROMIUM to its path)"
PATIENCE_MS = 120_000
"""Of every wait; a busy machine draws slowly."""

# Text is compared with the nearest opaque background behind it; SVG text with its fill.
CONTRAST = """() => {
  const parse = (c) => { const m = c.match(/[\\d.]+/g).map(Number); return m.length === 3 ? [...m, 1] : m; };
  const light = ([r, g, b]) => { const f = (v) => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }; return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b); };
  const behind = (n) => { for (; n; n = n.parentElement) { const c = parse(getComputedStyle(n).backgroundColor); if (c[3] > 0.99) return c; } return [255, 255, 255, 1]; };
  const out = [];
  for (const n of document.querySelectorAll('body *')) {
    const own = [...n.childNodes].some((c) => c.nodeType === 3 && c.textContent.trim());
    if (!own || !n.getClientRects().length || n.closest('[disabled], .sr, .skip, noscript, option')) continue;
    const s = getComputedStyle(n), svg = n instanceof SVGElement;
    if (s.visibility === 'hidden' || (svg && s.fill === 'none')) continue;
    const [a, b] = [light(parse(svg ? s.fill : s.color)), light(behind(n))];
    out.push({ text: n.textContent.trim().slice(0, 40), tag: n.tagName, ratio: (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), px: parseFloat(s.fontSize), weight: Number(s.fontWeight) });
  }
  return out;
}"""


@dataclass
class Watch:
    """A page and everything that it logged or asked for."""

    page: Any
    errors: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)

    def check_clean(self, url: str) -> None:
        """No error was logged, and every request went to the page's own origin."""
        assert self.errors == []
        origin = urlsplit(url).netloc
        foreign = {u for u in self.asked if urlsplit(u).netloc != origin and not u.startswith(("data:", "blob:"))}
        assert foreign == set()

    def check_contrast(self) -> int:
        """Every visible text has WCAG's AA contrast (4.5, large text 3); returns how many were measured."""
        found = self.page.evaluate(CONTRAST)
        weak = [
            f
            for f in found
            if f["ratio"] < (3.0 if f["px"] >= 24 or (f["px"] >= 18.66 and f["weight"] >= 700) else 4.5)
        ]
        assert weak == []
        return len(found)

    def traces(self, selector: str) -> list[dict[str, Any]]:
        """Data of a drawn chart: plotly's own full data of every trace; times as seconds."""
        return self.page.evaluate(
            """(s) => { const gd = document.querySelector(s); return gd.data.map((t) => ({ name: t.name, meta: t.meta, y: [...(t.y ?? [])],
                x: [...(t.x ?? [])].map((v) => (v instanceof Date ? v.getTime() / 1000 : v)) })); }""",
            selector,
        )

    def wait(self, expression: str, arg: Any = None) -> Any:
        """The first true value of a JavaScript expression or function of `arg`.

        Polled from here: Playwright's own wait_for_function evaluates inside the page, which its security policy forbids.
        """
        deadline = time.monotonic() + PATIENCE_MS / 1e3
        while not (value := self.page.evaluate(expression, arg)):
            assert time.monotonic() < deadline, f"{expression} did not come true; the page logged {self.errors}"
            time.sleep(0.1)
        return value


def chromium_path() -> str | None:
    """Chromium of this machine, None when there is none."""
    return os.environ.get("PACELINE_CHROMIUM") or next(
        (p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None
    )


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    """A headless browser; skips the test where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install 'paceline[test]'")
    path = chromium_path()
    if path is None:
        pytest.skip(f"no Chromium on this machine; {HOW}")
    with sync_api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path, args=FLAGS, timeout=PATIENCE_MS)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def watched_page(browser: Any, *, width: int = 1280, height: int = 900, scheme: str = "light") -> Iterator[Watch]:
    """A fresh page with its own storage."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    watch = Watch(page)
    page.on("console", lambda m: watch.errors.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: watch.errors.append(str(e)))
    page.on("request", lambda r: watch.asked.add(r.url))
    try:
        yield watch
    finally:
        context.close()
