"""The registry commits manifests last and refuses whatever does not fit."""

import json
import time

import pytest
import torch

from paceline.adapt.data.blob_io import MAX_UNFINISHED_S
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.errors import DrafterMismatchError, ManifestError
from paceline.machine import ManualClock

FIELDS = {"drafter_type": "specblock", "config": {"num_slots": 4}, "target_version": "t1"}


def state(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(3, 4, generator=g), "b": torch.randn(4, generator=g).bfloat16()}


def test_what_killed_writers_left_goes_after_an_hour(tmp_path):
    clock = ManualClock(time.time())
    registry = DrafterRegistry(tmp_path, clock=clock)
    registry.put(state(1), **FIELDS)
    left = tmp_path / "blobs" / "abc.safetensors.0123.tmp"
    left.write_bytes(b"half")
    registry.put(state(2), **FIELDS)
    assert left.exists(), "its writer may be at it"
    clock.advance(MAX_UNFINISHED_S + 60.0)
    last = registry.put(state(3), **FIELDS)
    assert not left.exists() and len(registry.list()) == 3 and registry.load_state(last.version)


def blob(tmp_path):
    return next((tmp_path / "blobs").glob("*.safetensors"))


def test_weights_come_back_exactly(tmp_path):
    registry = DrafterRegistry(tmp_path)
    m = registry.put(state(), **FIELDS, arm="full", metrics={"loss": 1.5})
    back = registry.load_state(m.version, target_version="t1")
    assert all(torch.equal(back[k], v) and back[k].dtype == v.dtype for k, v in state().items())
    assert registry.get_manifest(m.version) == m and m.version == m.sha256[:12] and m.arm == "full"


def test_same_content_is_the_same_version_and_other_target_is_another(tmp_path):
    registry = DrafterRegistry(tmp_path)
    a, b = registry.put(state(), **FIELDS), registry.put(state(), **FIELDS)
    c = registry.put(state(), **{**FIELDS, "target_version": "t2"})
    assert a == b and c.version != a.version and len(registry.list()) == 2


def whole_state():
    return {"layer.o_proj.weight": torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), "norm": torch.ones(6)}


def factors(rank=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "layer.o_proj.down": torch.randn(rank, 4, generator=g),
        "layer.o_proj.up": torch.randn(6, rank, generator=g),
    }


def test_a_delta_is_read_as_its_factors_and_as_whole_weights(tmp_path):
    registry = DrafterRegistry(tmp_path)
    base = registry.put(whole_state(), **FIELDS).version
    delta = registry.put(factors(), **FIELDS, parent=base, delta_of=base)
    assert delta.delta_of == base and registry.get_manifest(delta.version) == delta
    own, whole = registry.load_own(delta.version), registry.load_state(delta.version, target_version="t1")
    assert all(torch.equal(own[k], v) for k, v in factors().items())
    added = factors()["layer.o_proj.up"] @ factors()["layer.o_proj.down"]
    assert torch.equal(whole["layer.o_proj.weight"], whole_state()["layer.o_proj.weight"] + added)
    assert torch.equal(whole["norm"], torch.ones(6)) and set(whole) == set(whole_state())


def test_the_same_factors_on_another_base_are_another_version(tmp_path):
    registry = DrafterRegistry(tmp_path)
    bases = [registry.put({**whole_state(), "norm": torch.full((6,), v)}, **FIELDS).version for v in (1.0, 2.0)]
    deltas = {registry.put(factors(), **FIELDS, delta_of=base).version for base in bases}
    assert len(deltas) == 2 and DrafterRegistry.version_of(factors(), **FIELDS, delta_of=bases[0]) in deltas


def test_a_delta_adds_to_whole_weights_that_are_there_and_fit(tmp_path):
    registry = DrafterRegistry(tmp_path)
    base = registry.put(whole_state(), **FIELDS).version
    delta = registry.put(factors(), **FIELDS, delta_of=base).version
    with pytest.raises(DrafterMismatchError, match="a delta itself"):
        registry.put(factors(seed=1), **FIELDS, delta_of=delta)
    with pytest.raises(ManifestError, match="not in the registry"):
        registry.put(factors(seed=1), **FIELDS, delta_of="0" * 12)
    narrow = {**factors(), "layer.o_proj.down": torch.zeros(2, 5)}
    wrong = registry.put(narrow, **FIELDS, delta_of=base).version
    with pytest.raises(DrafterMismatchError, match="fit the base"):
        registry.load_state(wrong)
    registry.delete_weights(base)
    with pytest.raises(ManifestError, match="missing"):
        registry.load_state(delta)


def test_wrong_target_is_refused(tmp_path):
    registry = DrafterRegistry(tmp_path)
    m = registry.put(state(), **FIELDS)
    with pytest.raises(DrafterMismatchError, match="trained for target t1, this target is t2"):
        registry.load_state(m.version, target_version="t2")


def test_non_finite_weights_never_enter(tmp_path):
    registry = DrafterRegistry(tmp_path)
    for bad in (float("nan"), float("inf")):
        s = state()
        s["w"][1, 2] = bad
        with pytest.raises(DrafterMismatchError, match="tensor w must be finite"):
            registry.put(s, **FIELDS)
    assert registry.list() == [] and not (tmp_path / "blobs").exists()


def test_oversized_weights_never_enter(tmp_path):
    with pytest.raises(DrafterMismatchError, match="at most 64 bytes"):
        DrafterRegistry(tmp_path, max_blob_bytes=64).put(state(), **FIELDS)


def test_changed_weights_are_noticed(tmp_path):
    registry = DrafterRegistry(tmp_path)
    m = registry.put(state(), **FIELDS)
    data = bytearray(blob(tmp_path).read_bytes())
    data[-1] ^= 1
    blob(tmp_path).write_bytes(bytes(data))
    with pytest.raises(ManifestError, match="differ from their manifest"):
        registry.load_state(m.version)


def test_missing_weights_are_noticed_and_restored_by_publishing_again(tmp_path):
    registry = DrafterRegistry(tmp_path)
    m = registry.put(state(), **FIELDS)
    blob(tmp_path).unlink()
    with pytest.raises(ManifestError, match="missing"):
        registry.load_state(m.version)
    assert registry.put(state(), **FIELDS) == m
    registry.load_state(m.version)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 3}', b"\xff\xfe"])
def test_damaged_manifest_says_what_to_do_and_is_left_out_of_the_list(tmp_path, content):
    registry = DrafterRegistry(tmp_path)
    m = registry.put(state(), **FIELDS)
    (tmp_path / "manifests" / f"{m.version}.json").write_bytes(content)
    with pytest.raises(ManifestError, match="delete it and publish the drafter again"):
        registry.get_manifest(m.version)
    assert registry.list() == []


def test_manifest_of_another_version_is_refused(tmp_path):
    registry = DrafterRegistry(tmp_path)
    a, b = registry.put(state(0), **FIELDS), registry.put(state(1), **FIELDS)
    folder = tmp_path / "manifests"
    (folder / f"{a.version}.json").write_bytes((folder / f"{b.version}.json").read_bytes())
    with pytest.raises(ManifestError, match="belongs to another version"):
        registry.load_state(a.version)


def test_manifest_with_wrong_shapes_is_refused(tmp_path):
    registry = DrafterRegistry(tmp_path)
    m = registry.put(state(), **FIELDS)
    path = tmp_path / "manifests" / f"{m.version}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "shapes_hash": "0" * 16}))
    with pytest.raises(ManifestError, match="shapes"):
        registry.load_state(m.version)


def test_unknown_and_malformed_versions_are_refused(tmp_path):
    registry = DrafterRegistry(tmp_path)
    with pytest.raises(ManifestError, match="not in the registry"):
        registry.get_manifest("0" * 12)
    for version in ("../../etc/pw", "", "A" * 12, "0" * 13):
        with pytest.raises(ManifestError, match="12 hexadecimal digits"):
            registry.get_manifest(version)


def test_a_version_exists_only_once_its_manifest_does(tmp_path, monkeypatch):
    registry = DrafterRegistry(tmp_path)
    import paceline.adapt.versions.registry as module

    real, calls = module.write_atomic, []

    def crash_on_second(fs, path, data):
        calls.append(path)
        if len(calls) == 2:
            raise OSError("power loss")
        real(fs, path, data)

    monkeypatch.setattr(module, "write_atomic", crash_on_second)
    with pytest.raises(OSError, match="power loss"):
        registry.put(state(), **FIELDS)
    assert "blobs" in calls[0] and "manifests" in calls[1] and registry.list() == []


def test_list_is_oldest_first(tmp_path):
    clock = ManualClock(10.0)
    registry = DrafterRegistry(tmp_path, clock=clock)
    versions, parent = [], None
    for seed in range(3):
        parent = registry.put(state(seed), **FIELDS, parent=parent).version
        versions.append(parent)
        clock.advance(1)
    assert [m.version for m in registry.list()] == versions


def test_parent_must_be_known(tmp_path):
    with pytest.raises(ManifestError, match="not in the registry"):
        DrafterRegistry(tmp_path).put(state(), **FIELDS, parent="0" * 12)


def test_deleted_weights_leave_the_manifest_and_come_back_with_the_same_content(tmp_path):
    registry = DrafterRegistry(tmp_path)
    m = registry.put(state(), **FIELDS)
    assert registry.has_weights(m.version) and not registry.has_weights("0123456789ab")
    assert registry.list() == [m] and registry.with_weights() == {m.version}
    registry.delete_weights(m.version)
    registry.delete_weights(m.version)
    assert not registry.has_weights(m.version) and registry.list() == [m] and registry.with_weights() == set()
    with pytest.raises(ManifestError, match="missing"):
        registry.load_state(m.version)
    assert registry.put(state(), **FIELDS) == m and registry.has_weights(m.version)


def test_the_list_reads_each_manifest_once_and_follows_the_store(tmp_path, monkeypatch):
    writer, reader = DrafterRegistry(tmp_path), DrafterRegistry(tmp_path)
    versions, reads = [writer.put(state(seed), **FIELDS).version for seed in (1, 2)], []
    read = reader._fs.cat_file
    monkeypatch.setattr(reader._fs, "cat_file", lambda path: reads.append(path) or read(path))
    assert [m.version for m in reader.list()] == [m.version for m in reader.list()] and len(reads) == 2
    versions.append(writer.put(state(3), **FIELDS).version)
    assert {m.version for m in reader.list()} == set(versions) and len(reads) == 3
    (tmp_path / "manifests" / f"{versions[0]}.json").unlink()
    assert {m.version for m in reader.list()} == set(versions[1:])
    back = writer.put(state(1), **FIELDS)
    assert back in reader.list() and len(reads) == 4, "it is read anew, as written now"
