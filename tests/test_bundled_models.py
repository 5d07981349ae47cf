"""Bundled drafters are found by name, fit the bundled target, and say where they come from."""

import json
import re

import pytest

from paceline import paths
from paceline.adapt.families.target_handle import load_target_handle
from paceline.adapt.families.training import FAMILIES
from paceline.adapt.recipes.learning_curve import CURVE_FILE, read_curve
from paceline.bench.common.engine_run import load_named_drafter, trained_domains
from paceline.bench.drafters.arms import weights_of
from paceline.errors import ConfigError
from paceline.paths import (
    BUNDLED_DRAFTER,
    BUNDLED_DRAFTERS,
    TEXT_DRAFTERS,
    bundled,
    bundled_drafters,
    resolve_drafter,
    resolve_model,
)
from paceline.serving.target_model.model import checkpoint_version

HERE = bundled_drafters()


@pytest.fixture(scope="module")
def target():
    return load_target_handle(bundled("target"))


def test_every_family_has_a_name_and_a_bundled_drafter():
    assert set(HERE) == set(BUNDLED_DRAFTERS) == set(FAMILIES)
    assert resolve_drafter("bundled") == resolve_drafter(BUNDLED_DRAFTER) == bundled(BUNDLED_DRAFTER)
    assert trained_domains("bundled") == ("tools", "code"), "what the demo calls known traffic"
    assert (bundled("target") / "PROVENANCE.md").is_file()


@pytest.mark.parametrize("name", HERE)
def test_a_bundled_drafter_is_of_its_family_and_fits_the_bundled_target(name, target):
    config = json.loads((resolve_drafter(name) / "config.json").read_text(encoding="utf-8"))
    assert config["drafter_type"] == name and config["target_version"] == checkpoint_version(bundled("target"))
    drafter = load_named_drafter(name, target)
    assert drafter.caps.name == name
    num_weights, num_bytes = weights_of(name)
    assert 0 < num_weights < num_bytes and trained_domains(name) == tuple(config["domains"])


@pytest.mark.parametrize("name", HERE)
def test_a_bundled_drafter_says_how_it_was_trained(name):
    folder = resolve_drafter(name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    provenance = (folder / "PROVENANCE.md").read_text(encoding="utf-8")
    assert f"`{config['target_version']}`" in provenance and "Command: `paceline train-drafter " in provenance
    assert all(f"\n| {domain} | " in provenance for domain in config["domains"]), "held-out numbers of every domain"
    files = {p.name for p in folder.iterdir()}
    assert files == {"config.json", "drafter.safetensors", "PROVENANCE.md", CURVE_FILE}
    assert f"`{CURVE_FILE}`" in provenance
    curve = read_curve(folder)
    counts = re.search(r"([\d,]+) supervised rows in ([\d,]+) optimizer steps", provenance).groups()
    assert [curve[n][-1] for n in ("rows", "step")] == [int(count.replace(",", "")) for count in counts]


@pytest.mark.parametrize("name", BUNDLED_DRAFTERS)
def test_a_name_whose_weights_are_absent_is_refused_by_name(name, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "files", lambda package: tmp_path)
    assert bundled_drafters() == ()
    (tmp_path / "models" / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"bundled drafter '{name}' is missing at .*here: none.*or a folder"):
        resolve_drafter(name)
    (tmp_path / "models" / name / "config.json").write_text("{}")
    assert bundled_drafters() == (name,) and resolve_drafter(name) == tmp_path / "models" / name


def test_an_absent_target_is_refused_with_what_to_give_instead_and_no_word_of_drafters(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "files", lambda package: tmp_path)
    with pytest.raises(
        ConfigError, match=r"^the bundled target is missing at \S+; reinstall .*transformers checkpoint$"
    ):
        resolve_model("bundled")


def test_a_name_that_nobody_knows_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'bundled', 'specblock', 'eagle3', .*'lookup'.*got 'eagle9'"):
        resolve_drafter("eagle9")
    assert [resolve_drafter(n) for n in ("none", *TEXT_DRAFTERS)] == [None] * 4
