"""The page of a replay is small, whole and well-formed, whatever names, reasons and figures it shows."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.replay import charts
from paceline.bench.replay.html import write_html
from paceline.bench.replay.report import build_report

EVIL = '<script>alert("1")</script>&'
FIGURES = st.floats(-1e6, 1e6)


def _row(cell, label, seed, curve, events=()):
    net = curve[-1]
    return {
        "cell": cell, "family": cell, "label": label, "policy": label, "settings": {}, "seed": seed, "never_s": 100.0,
        "serving_s": 100.0 - net, "net_s": net, "spent": {}, "ledger": {}, "curve": curve,
        "times": [10.0 * i for i in range(len(curve))], "num_jobs": 0, "num_swaps": 0, "events": list(events), "contradictions": [],
    }  # fmt: skip


def _page(tmp_path, rows):
    path = tmp_path / "r.html"
    write_html(build_report(rows, kind="synthetic", source=EVIL, scenarios=[{"name": "a"}]), path)
    page = path.read_text()
    return page, [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("with_oracle", [False, True])
def test_a_page_shows_every_cell_and_act_and_escapes_what_it_shows(tmp_path, seeds, with_oracle):
    act = {"t": 20.0, "action": "train", "bucket": EVIL, "what": "full", "reason": EVIL}
    labels = ("payoff", EVIL, *(("oracle",) if with_oracle else ()))
    rows = [_row(c, label, s, [0.0, 1.0 + s, 2.0 - 3 * s], [act]) for c in ("a", EVIL) for label in labels for s in range(seeds)]  # fmt: skip
    page, figures = _page(tmp_path, rows)
    assert len(figures) == 1 + 2 * 2 and "<script" not in page
    dots, over_time, acts = figures[:3]
    assert len(dots.findall("circle")) == 2 * len(labels)
    assert len(over_time.findall("polyline")) == 2  # against the oracle: not the oracle itself
    assert len([p for p in acts.findall("path") if p.find("title") is not None]) == 2
    assert ("Regret against the oracle" in page) is with_oracle


def test_a_page_with_many_cells_stays_far_below_a_plotting_library(tmp_path):
    act = {"t": 20.0, "action": "recall", "bucket": "b", "what": "v1", "reason": "why " * 60}
    rows = [_row(f"cell{c}", f"policy{p}", 0, [0.1 * i for i in range(61)], [act] * 30) for c in range(33) for p in range(5)]  # fmt: skip
    page, _ = _page(tmp_path, rows)
    assert len(page) < 2_000_000


@given(mean=FIGURES, half=st.floats(0, 1e6), ends=st.booleans())
def test_dots_of_any_figures_stay_within_the_chart(mean, half, ends):
    point = (mean, mean - half, mean + half) if ends else (mean, None, None)
    figure = ElementTree.fromstring(charts.dots({"a": {"x": point}}, {"x": "#111111"}, -20.0))
    (dot,) = figure.findall("circle")
    assert charts.LABELS <= float(dot.get("cx")) <= charts.WIDTH


@given(values=st.lists(FIGURES, min_size=1, max_size=5))
def test_lines_of_any_figures_stay_within_the_chart(values):
    times = [10.0 * i for i in range(len(values))]
    figure = ElementTree.fromstring(charts.lines({"x": (times, values)}, {"x": "#111111"}))
    for place in figure.find("polyline").get("points").split():
        x, y = map(float, place.split(","))
        assert charts.LABELS <= x <= charts.WIDTH and -0.1 <= y <= 160.1


def test_a_chart_without_runs_is_empty():
    assert charts.lines({}, {}) == ""
    assert charts.acts({}, {}, 1.0).startswith("<svg")
