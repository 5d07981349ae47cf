"""A released drafter is imported by the command, read from its folder by the bench and the service, and stays lossless."""

import json
import time

import pytest
import torch
from typer.testing import CliRunner

from paceline.adapt.data.storage_calls import StorageCalls
from paceline.adapt.families.target_handle import load_target_handle
from paceline.adapt.versions import first_drafter
from paceline.adapt.versions.first_drafter import drafter_taps, make_slots
from paceline.adapt.versions.import_drafter import import_drafter
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bench.common.engine_run import build_engine, load_named_drafter, load_target
from paceline.bench.engine.arms import run_group
from paceline.cli.main import app
from paceline.config import EngineConfig, ServiceConfig
from paceline.contracts import Group
from paceline.errors import ConfigError, DrafterMismatchError
from paceline.serving.loading.families import load_drafter
from paceline.serving.loading.target import read_target
from paceline.serving.sampling.request import SamplingParams
from tests.helpers import released
from tests.helpers.api_server import wait_until
from tests.helpers.hanging import Hanging
from tests.helpers.released import HIDDEN, write

OTHER_TAPS = (0, 4, 9)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    return released.write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def dflash_dir(tmp_path):
    values, tensors = released.parallel_head_files()
    values["dflash_config"]["target_layer_ids"] = list(OTHER_TAPS)
    return write(tmp_path / "released-dflash", values, tensors)


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=True)


def test_the_command_writes_a_folder_that_loads_without_the_release(tmp_path, target_dir, dflash_dir):
    out = tmp_path / "ours"
    result = run("import-drafter", dflash_dir, "--out", out, "--target", target_dir)
    assert result.exit_code == 0 and "dflash written" in result.output, result.output
    assert sorted(p.name for p in out.iterdir()) == ["PROVENANCE.md", "config.json", "drafter.safetensors"]
    config = json.loads((out / "config.json").read_text())
    assert config["drafter_type"] == "dflash" and config["tap_layers"] == list(OTHER_TAPS)
    text = (out / "PROVENANCE.md").read_text()
    assert "`released-dflash`" in text and str(tmp_path) not in text and config["target_version"] in text
    target = read_target(target_dir, tap_layers=OTHER_TAPS)
    ours, direct = load_drafter(out, target), load_drafter(dflash_dir, target)
    assert all(torch.equal(t, direct.forward.weights[n]) for n, t in ours.forward.weights.items())
    with pytest.raises(DrafterMismatchError, match=r"load it with tap_layers=\(0, 4, 9\)"):
        load_drafter(out, read_target(target_dir))


def test_taps_given_by_hand_replace_those_of_the_release(tmp_path, target_dir):
    folder = write(tmp_path / "r", *released.eagle3_files())
    assert import_drafter(folder, tmp_path / "a", target_dir)["tap_layers"] == [1, 5, 8]
    assert import_drafter(folder, tmp_path / "b", target_dir, tap_layers=(2, 5, 8))["tap_layers"] == [2, 5, 8]
    with pytest.raises(DrafterMismatchError, match=r"fuses 3 target layers, tap_layers are \(2, 5\)"):
        import_drafter(folder, tmp_path / "c", target_dir, tap_layers=(2, 5))
    with pytest.raises(DrafterMismatchError, match=r"target has layers 0..11"):
        import_drafter(folder, tmp_path / "c", target_dir, tap_layers=(2, 5, 12))
    assert not (tmp_path / "c").exists()


def test_folders_that_cannot_be_read_or_written_are_refused(tmp_path, target_dir, dflash_dir):
    with pytest.raises(ConfigError, match="new or empty"):
        import_drafter(dflash_dir, dflash_dir, target_dir)
    import_drafter(dflash_dir, tmp_path / "ours", target_dir)
    with pytest.raises(DrafterMismatchError, match="own already"):
        import_drafter(tmp_path / "ours", tmp_path / "again", target_dir)
    with pytest.raises(DrafterMismatchError, match=r"readable config\.json"):
        import_drafter(tmp_path / "nowhere", tmp_path / "again", target_dir)


def test_the_service_taps_and_registers_what_a_released_drafter_reads(tmp_path, target_dir, dflash_dir):
    config = ServiceConfig(drafter=str(dflash_dir), model=str(target_dir))
    assert drafter_taps(config) == OTHER_TAPS
    assert (drafter_taps(ServiceConfig(drafter="lookup")), drafter_taps(ServiceConfig())) == ((), None)
    registry = DrafterRegistry(tmp_path / "registry")
    slots = make_slots(config, read_target(target_dir, tap_layers=drafter_taps(config)), registry)
    manifest = registry.get_manifest(slots.live_version)
    assert manifest.config["tap_layers"] == list(OTHER_TAPS)
    handle = load_target_handle(target_dir, tap_layers=manifest.config["tap_layers"])
    assert handle.feature_size == 3 * HIDDEN and handle.tap_layers == OTHER_TAPS


def test_a_replica_starts_with_its_first_drafter_while_the_registry_hangs_and_registers_it_later(tmp_path, target_dir, dflash_dir):  # fmt: skip
    config = ServiceConfig(drafter=str(dflash_dir), model=str(target_dir))
    target = read_target(target_dir, tap_layers=drafter_taps(config))
    version = make_slots(config, target, DrafterRegistry(tmp_path / "other")).live_version
    registry, calls = DrafterRegistry(tmp_path / "registry"), StorageCalls("the registry", 0.2)
    folder = Hanging(tmp_path / "registry" / "manifests" / f"{version}.json")
    began = time.monotonic()
    slots = make_slots(config, target, registry, calls)
    assert (slots.live_version, slots.first_version) == (version, version)
    assert time.monotonic() - began < 60.0 and calls.hung_s > 0
    folder.release()
    wait_until(lambda: [m.version for m in registry.list()] == [version] and registry.has_weights(version))


class Refusing(DrafterRegistry):
    """Refuses what it is to store while `is_refused`."""

    is_refused = True

    def put(self, *args, **about):
        if self.is_refused:
            raise OSError("the store failed: EndpointConnectionError")
        return super().put(*args, **about)


def test_a_replica_starts_with_its_first_drafter_while_the_registry_refuses_and_registers_it_later(tmp_path, target_dir, dflash_dir, monkeypatch):  # fmt: skip
    monkeypatch.setattr(first_drafter, "RETRY_S", 0.05)
    config = ServiceConfig(drafter=str(dflash_dir), model=str(target_dir))
    target = read_target(target_dir, tap_layers=drafter_taps(config))
    registry, calls = Refusing(tmp_path / "registry"), StorageCalls("the registry", 5.0)
    slots = make_slots(config, target, registry, calls)
    assert slots.live_version == slots.first_version and registry.list() == []
    with pytest.raises(OSError, match="EndpointConnectionError"):
        make_slots(config, target, registry)
    registry.is_refused = False
    wait_until(lambda: [m.version for m in registry.list()] == [slots.live_version])


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "specblock"])
def test_answers_drafted_by_a_released_drafter_are_the_targets_own(tmp_path, target_dir, kind):
    makers = {
        "eagle3": released.eagle3_files,
        "dflash": released.parallel_head_files,
        "specblock": released.specblock_files,
    }
    values, tensors = makers[kind]()
    if kind == "dflash":
        values["dflash_config"]["target_layer_ids"] = list(OTHER_TAPS)
    folder = str(write(tmp_path, values, tensors))
    target = load_target(str(target_dir), "float32", drafters=[folder])
    engine = build_engine(target, load_named_drafter(folder, target), EngineConfig(prefix_caching=False))
    prompts, params = [[5, 9, 12, 7], [3, 4]], [SamplingParams(temperature=0.0, max_tokens=12, seed=0)] * 2
    options = {"prompts": prompts, "params": params, "bucket": "b"}
    drafted = run_group(engine, **options, group=Group.ADAPTIVE, tag="d")
    plain = run_group(engine, **options, group=Group.PLAIN, tag="p")
    assert drafted.token_ids == plain.token_ids and drafted.num_draft_tokens > 0


def test_drafters_that_read_different_layers_are_not_compared_in_one_process(tmp_path, target_dir, dflash_dir):
    usual = str(write(tmp_path / "e", *released.eagle3_files()))
    named = released.parallel_head_files()
    same = str(write(tmp_path / "d", *named))
    assert load_target(str(target_dir), drafters=[usual, "lookup", same]).tap_layers == (1, 5, 8)
    with pytest.raises(ConfigError, match="must read the same target layers"):
        load_target(str(target_dir), drafters=[usual, str(dflash_dir)])
