"""What the command line refuses before any command begins to work."""

import shlex

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
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


def _trained(monkeypatch, *options):
    """(data, recipe, command) that `train-drafter` hands to the recipe."""
    seen = []

    def train(source, data, out, recipe, *, command, **_):
        seen.append((data, recipe, command))
        return {}

    monkeypatch.setattr("paceline.adapt.recipes.drafter.train_drafter", train)
    result = RUN.invoke(app, ["train-drafter", "--target", "bundled", "--out", "o", *options])
    assert result.exit_code == 0, result.output
    return seen[0]


def test_the_recorded_command_trains_the_same_drafter_again(tmp_path, monkeypatch):
    options = ["--without", "shift, rank-head", "--learning-rate", "1e-3", "--data", str(tmp_path), "--domains", "code"]
    data, recipe, command = _trained(monkeypatch, *options)
    assert data == tmp_path and recipe.without == ("shift", "rank-head") and recipe.learning_rate == 1e-3
    assert "--data DIR" in command and str(tmp_path) not in command
    again = _trained(monkeypatch, *shlex.split(command.replace("DIR", str(tmp_path)))[6:])
    assert again == (data, recipe, command)


def test_the_recorded_command_names_only_what_was_given(monkeypatch):
    data, recipe, command = _trained(monkeypatch, "--domains", "code")
    assert data is None and recipe.learning_rate is None and recipe.without == ()
    assert command == (
        "paceline train-drafter --target bundled --out DIR --drafter specblock --domains code --tokens 400000 --epochs 3 "
        "--seed 1"
    )
