"""`paceline bench curves`: one line a drafter, over seconds and over rows; what has no curve is refused."""

from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from paceline.adapt.recipes.learning_curve import LearningCurve
from paceline.bench.drafters.curves import read_curves, write_curves
from paceline.cli.main import app
from paceline.errors import ConfigError

RUN = CliRunner()


class Addresses(HTMLParser):
    """What a page's tags fetch; the text of scripts, plotly's own names of servers among it, is no tag."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("src", "href")]


@pytest.fixture
def folders(tmp_path):
    """Two folders of drafters; the second learns twice as fast."""
    out = []
    for name, speed in (("slow", 1), ("fast", 2)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        curve = LearningCurve(4)
        for step in range(1, 5):
            nll = 4.0 / (speed * step)
            curve.add(step=step, rows=100 * step, seconds=10.0 * step / speed, loss=nll, nll=nll)
            if speed == 2 and step > 1:  # worth most after the third step
                curve.validate(nll=nll + 0.1, acceptance_length=3 - 0.5 * abs(step - 3))
        curve.write(folder)
        out.append(str(folder))
    return out


def test_a_table_and_a_page_show_every_drafter(tmp_path, folders):
    page = tmp_path / "deep" / "c.html"
    result = RUN.invoke(app, ["bench", "curves", *folders, "--html", str(page)])
    assert result.exit_code == 0, result.output
    rows = {line.split()[1]: line.split()[3::2] for line in result.output.splitlines() if "│" in line}
    assert rows["slow"] == ["4", "400", "40", "2.000", "1.000", "-", "-", "-"]
    assert rows["fast"][2:] == ["20", "1.000", "0.500", "0.767", "3.000", "3"]
    text = page.read_text()
    assert text.count('"type":"log"') >= 4 and "supervised rows" in text and '"name":"fast"' in text
    assert '"name":"fast, held out"' in text and "slow, held out" not in text
    assert Addresses(text).found == [], "the page needs no network"
    assert Addresses('<script src="https://a/b.js"></script>').found == ["https://a/b.js"]


def test_a_figure_has_the_points_of_the_files(tmp_path, folders):
    curves = read_curves(folders)
    assert curves["fast"][0]["seconds"] == [5, 10, 15, 20] and curves["slow"][0]["nll"][0] == 4
    assert curves["fast"][1]["rows"] == [200, 300, 400] and curves["slow"][1]["rows"] == []
    write_curves(curves, tmp_path / "c.html")
    assert "[5.0,10.0,15.0,20.0]" in (tmp_path / "c.html").read_text()


def test_what_has_no_curve_or_no_name_of_its_own_is_refused(tmp_path, folders):
    with pytest.raises(ConfigError, match=r"must have weights.*'lookup'"):
        read_curves(["lookup"])
    with pytest.raises(ConfigError, match="'slow' twice"):
        read_curves([folders[0], folders[0]])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"learning_curve\.json must be the learning curve"):
        read_curves([str(tmp_path)])
