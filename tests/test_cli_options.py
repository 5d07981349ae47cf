"""What the command line refuses before any command begins to work."""

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.errors import ConfigError
from paceline.paths import check_output

RUN = CliRunner()


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["bench", "drafters"], "html"),
        (["bench", "drafters"], "json"),
        (["bench", "engine"], "json"),
        (["bench", "curves", "specblock"], "html"),
        (["bench", "compare", "a.json", "b.json"], "json"),
        (["bench", "shadow"], "json"),
        (["bench", "feedback"], "json"),
        (["replay", "small"], "html"),
        (["replay", "small"], "suggest"),
        (["demo"], "html"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else v,
)
def test_a_result_that_cannot_be_written_is_refused_before_the_work(tmp_path, command, option):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "below"):
        result = RUN.invoke(app, [*command, f"--{option}", str(path)])
        assert isinstance(result.exception, ConfigError), result.output
        assert str(result.exception).startswith(f"{option} must name a file that can be written, got {path}")


def test_the_check_makes_the_folder_and_leaves_what_is_there(tmp_path):
    assert check_output(None, "json") is None
    path = tmp_path / "new" / "r.json"
    assert check_output(path, "json") == path and path.parent.is_dir() and not path.exists()
    path.write_text("old")
    check_output(path, "json")
    assert path.read_text() == "old"
