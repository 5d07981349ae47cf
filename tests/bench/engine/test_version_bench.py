"""The version benchmark serves every request with a version of its own, in one pass or in as many as there are versions."""

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from paceline.bench.engine.versions import DELTAS, ONE, WHOLE, VersionBenchOptions, run_version_bench
from paceline.cli.main import app
from paceline.errors import ConfigError

pytestmark = pytest.mark.slow


def test_arms_serve_the_same_texts_and_the_file_holds_their_rounds(tmp_path):
    options = VersionBenchOptions(
        num_versions=3, rank=8, num_groups=2, max_tokens=24, dtype="float32", device="cpu", num_threads=1,
        json=tmp_path / "versions.json",
    )  # fmt: skip
    document = run_version_bench(options, Console(quiet=True))
    rows = {r["arm"]: r for r in document["rows"]}
    assert list(rows) == [ONE, DELTAS, WHOLE] and rows[ONE]["round_over_one"] is None
    assert all(r["num_rounds"] > 0 and 0 < r["draft_ms"] < r["round_ms"] for r in rows.values())
    assert (
        rows[ONE]["weights_over_one"] == 1 < rows[DELTAS]["weights_over_one"] < 2
        and rows[WHOLE]["weights_over_one"] == 4
    )
    assert all(rows[name]["round_over_one"]["num_groups"] == 2 for name in (DELTAS, WHOLE))
    written = json.loads((tmp_path / "versions.json").read_text())
    assert written["is_complete"] and written["rows"] == json.loads(json.dumps(document["rows"]))


def test_a_drafter_without_weights_is_refused():
    with pytest.raises(ConfigError, match="must have weights"):
        run_version_bench(VersionBenchOptions(drafter="suffix", device="cpu"), Console(quiet=True))


def test_the_command_says_what_it_does():
    said = CliRunner().invoke(app, ["bench", "versions", "--help"])
    assert said.exit_code == 0 and "deltas" in said.output and "--rank" in said.output
