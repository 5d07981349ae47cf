"""An exported drafter holds the same numbers in another engine's layout, and what an engine has no place for is refused."""

import hashlib
import json
import shlex

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, Qwen3Config
from typer.testing import CliRunner

from paceline.adapt.families.target_handle import load_target_handle
from paceline.adapt.versions.export_drafter import FORMATS, ExportDrafterOptions, export_drafter
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.cli.main import app
from paceline.errors import ConfigError, DrafterMismatchError, ManifestError
from paceline.paths import REGISTRY, bundled
from paceline.serving.drafters.network import DrafterModel
from paceline.serving.eagle3.model import EagleConfig, EagleModel
from paceline.serving.loading.families import build_model, load_drafter, read_drafter_files, save_drafter
from paceline.serving.loading.released import read_released
from paceline.serving.loading.target import read_target
from paceline.serving.parallel_head.model import ParallelHeadConfig, ParallelHeadModel
from tests.helpers import released
from tests.helpers.exported import without_edges
from tests.helpers.released import DRAFT_VOCAB, HIDDEN, VOCAB, write

SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": 12, "num_heads": 2, "num_kv_heads": 1, "head_dim": 6, "vocab_size": VOCAB,
    "feature_size": 3 * HIDDEN, "rope_theta": 5000.0,
}  # fmt: skip
LLAMA3 = (8.0, 1.0, 4.0, 256.0)
CALIBRATION = {"log_beta", "log_coverage"}
TAPS = (0, 4, 9)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    return released.write_target(tmp_path_factory.mktemp("target"))


def eagle(**changes) -> EagleModel:
    return EagleModel(EagleConfig(**{**SIZES, "num_slots": 1, "embed_size": HIDDEN, **changes}))


def head(**changes) -> ParallelHeadModel:
    return ParallelHeadModel(ParallelHeadConfig(**{**SIZES, "is_causal": False, "num_slots": 4, **changes}))


def saved(folder, model: DrafterModel, target_dir, taps=TAPS):
    """A drafter folder with random weights, norms and calibrations included, and every other token where it drafts few."""
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.3 + (p.dim() == 1))
        if model.config.draft_vocab_size is not None:
            model.draft_token_ids.copy_(
                torch.randperm(VOCAB, generator=g)[: model.config.draft_vocab_size].sort().values
            )
            model.log_coverage.fill_(-0.2)
    save_drafter(folder, model, load_target_handle(target_dir).version, tap_layers=taps)
    return folder


def export(source, form, out, target="bundled", **more):
    return export_drafter(ExportDrafterOptions(version=str(source), format=form, out=out, target=str(target), **more))


def assert_equal_in_bf16(ours, back, dropped=CALIBRATION):
    assert set(ours) - dropped == set(back) - dropped
    for name in set(ours) - dropped:
        was = ours[name].bfloat16().float() if ours[name].is_floating_point() else ours[name]
        assert torch.equal(was, back[name]), name


@pytest.mark.parametrize(
    ("name", "form"),
    [("eagle3", "vllm"), ("eagle3", "speculators"), ("eagle3", "sglang"), ("dflash", "vllm"), ("jetspec", "vllm")],
)
def test_bundled_drafters_come_back_bit_equal_in_bfloat16(tmp_path, name, form):
    folder = bundled(name)
    if name == "jetspec":
        with pytest.raises(DrafterMismatchError, match="no edge correction"):
            export(name, form, tmp_path / "out")
        folder = without_edges(name, tmp_path / "drafter")
    done = export(folder, form, tmp_path / "out")
    target = load_target_handle(bundled("target"))
    config, back = read_released(tmp_path / "out", target)
    own, ours = read_drafter_files(folder)
    assert_equal_in_bf16(ours, back)
    assert done.drafter_type == config["drafter_type"] == name and config["target_version"] == own["target_version"]
    assert tuple(config["tap_layers"]) == target.tap_layers == done.tap_layers
    engines = {k: v for k, v in own.items() if k in config and k not in ("num_steps", "max_depth", "num_slots")}
    assert {k: config[k] for k in engines} == engines and config["num_slots"] == own["num_slots"]


CASES = {
    "eagle3": (eagle, {}, FORMATS),
    "eagle3 with few tokens": (eagle, {"draft_vocab_size": DRAFT_VOCAB}, FORMATS),
    "eagle3 that shares the head": (eagle, {"draft_vocab_size": DRAFT_VOCAB, "shares_head": True}, FORMATS),
    "eagle3 with scaled angles": (eagle, {"rope_scaling": LLAMA3}, FORMATS),
    "eagle3 with a normed residual": (eagle, {"norm_before_residual": True}, FORMATS[:2]),
    "eagle3 of four layers": (eagle, {"feature_size": 4 * HIDDEN}, FORMATS[:2]),
    "dflash": (head, {"mask_token_id": 7}, FORMATS),
    "dflash with scaled angles": (head, {"mask_token_id": 7, "rope_scaling": LLAMA3}, FORMATS),
    "dflash with few tokens": (head, {"mask_token_id": 7, "draft_vocab_size": DRAFT_VOCAB}, FORMATS[:2]),
    "dflash with a mask of its own": (head, {}, FORMATS[:1]),
    "jetspec": (head, {"is_causal": True, "mask_token_id": 7}, FORMATS[:1]),
    "jetspec with few tokens": (head, {"is_causal": True, "draft_vocab_size": DRAFT_VOCAB}, FORMATS[:1]),
}
EVERY = pytest.mark.parametrize(
    ("case", "form"), [(case, form) for case, (_, _, forms) in CASES.items() for form in forms]
)


@EVERY
def test_every_form_that_a_format_takes_comes_back_and_drafts_the_same(tmp_path, target_dir, case, form):
    make, changes, _ = CASES[case]
    taps = (0, 2, 4, 9) if "four" in case else TAPS
    source = saved(tmp_path / "ours", make(**changes), target_dir, taps)
    export(source, form, tmp_path / "out", target_dir)
    target = load_target_handle(target_dir, tap_layers=taps)
    config, back = read_drafter_files(tmp_path / "out", target)
    own, ours = read_drafter_files(source)
    if own.get("shares_head"):
        ours = {**ours, "lm_head.weight": target.head_weight[ours["draft_token_ids"]].float()}
    assert_equal_in_bf16(ours, back)
    kept = set(config) - {"shares_head", "num_steps", "max_depth"}
    assert {k: config[k] for k in kept} == {k: own.get(k) for k in kept}
    # ...and the network that is built of it computes what ours does with these numbers
    rounded = {k: v.bfloat16().float() if v.is_floating_point() else v for k, v in ours.items()}
    rounded = {k: torch.zeros_like(v) if k in CALIBRATION else v for k, v in rounded.items()}
    built = [build_model({**own, "shares_head": False}, rounded), build_model(config, back)]
    x = torch.randn(2, 3, own["feature_size"], generator=torch.Generator().manual_seed(1))
    fused = [m.fuse(x) if hasattr(m, "fuse") else m.fc(x) for m in built]
    assert torch.equal(*fused)


@EVERY
def test_transformers_reads_the_settings_as_they_are_meant(tmp_path, target_dir, case, form):
    make, changes, _ = CASES[case]
    taps = (0, 2, 4, 9) if "four" in case else TAPS
    export(saved(tmp_path / "ours", make(**changes), target_dir, taps), form, tmp_path / "out", target_dir)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    layer = values.get("transformer_layer_config", values)
    read = (LlamaConfig if make is eagle else Qwen3Config)(**layer)
    assert (read.hidden_size, read.head_dim, read.num_key_value_heads) == (HIDDEN, 6, 1)
    assert read.rope_parameters["rope_theta"] == 5000.0
    kind = read.rope_parameters.get("rope_type", "default")
    assert kind == ("llama3" if changes.get("rope_scaling") else "default")
    assert values["torch_dtype"] == "bfloat16" and layer["max_position_embeddings"] > 0


def test_layers_are_counted_as_each_engine_counts_them(tmp_path, target_dir):
    """vLLM and `speculators` count the embedding as 0; SGLang adds 1 to what stands in eagle_config, vLLM does not."""
    found = {}
    for form in FORMATS:
        export(saved(tmp_path / f"e-{form}", eagle(), target_dir), form, tmp_path / f"eagle-{form}", target_dir)
        export(
            saved(tmp_path / f"d-{form}", head(mask_token_id=7), target_dir),
            form,
            tmp_path / f"head-{form}",
            target_dir,
        )
        for kind in ("eagle", "head"):
            found[kind, form] = json.loads((tmp_path / f"{kind}-{form}" / "config.json").read_text())
    name, above = "eagle_aux_hidden_state_layer_ids", [t + 1 for t in TAPS]
    assert found["eagle", "vllm"][name] == found["eagle", "speculators"][name] == above
    assert "eagle_config" not in found["eagle", "vllm"] and name not in found["eagle", "sglang"]
    assert found["eagle", "sglang"]["eagle_config"] == {name: list(TAPS)}
    for form in ("vllm", "sglang"):
        assert found["head", form]["dflash_config"]["target_layer_ids"] == list(TAPS)
    assert found["head", "speculators"]["aux_hidden_state_layer_ids"] == above
    names = set(load_file(tmp_path / "eagle-sglang" / "model.safetensors"))
    assert "midlayer.hidden_norm.weight" in names and not any(n.startswith("layers.") for n in names)


@pytest.mark.parametrize(
    ("model", "form", "message"),
    [
        *((lambda: head(mask_token_id=7, edge_rank=4), form, "no edge correction") for form in FORMATS),
        (lambda: head(mask_token_id=7, is_shifted=True), "vllm", "rows behind the anchor"),
        *((lambda: head(mask_token_id=7, is_causal=True), form, "a causal block") for form in FORMATS[1:]),
        *((head, form, "a learned mask vector") for form in FORMATS[1:]),
        (lambda: head(mask_token_id=7, draft_vocab_size=DRAFT_VOCAB), "sglang", "whole vocabulary"),
        (lambda: eagle(norm_before_residual=True), "sglang", "residual before its norm"),
        *(
            (lambda: eagle(hidden_size=10, head_dim=4), form, "as wide as the target's embedding, 8")
            for form in FORMATS
        ),
    ],
)
def test_what_a_format_has_no_place_for_is_refused_and_leaves_nothing(tmp_path, target_dir, model, form, message):
    source = saved(tmp_path / "ours", model(), target_dir)
    with pytest.raises(DrafterMismatchError, match=message):
        export(source, form, tmp_path / "out", target_dir)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ours"]


def test_specblock_four_layers_for_sglang_and_drafters_without_weights_are_refused(tmp_path, target_dir):
    with pytest.raises(DrafterMismatchError, match="of a kind that vllm has a network for, eagle3, dflash and jetspec"):
        export("bundled", "vllm", tmp_path / "out")
    source = saved(tmp_path / "ours", eagle(feature_size=4 * HIDDEN), target_dir, (0, 2, 4, 9))
    with pytest.raises(DrafterMismatchError, match="read three target layers"):
        export(source, "sglang", tmp_path / "out", target_dir)
    with pytest.raises(ConfigError, match="must be a drafter with weights, got 'lookup'"):
        export("lookup", "vllm", tmp_path / "out")
    with pytest.raises(ConfigError, match="format must be one of vllm, speculators, sglang, got 'gguf'"):
        export("eagle3", "gguf", tmp_path / "out")


@pytest.mark.parametrize("taps", [(4, 0, 9), (1, 1, 8)])
@pytest.mark.parametrize("form", FORMATS)
def test_layers_out_of_order_are_refused(tmp_path, target_dir, taps, form):
    """vLLM sorts the layers and drops doubles without a word, so that features would come in another order."""
    source = saved(tmp_path / "ours", eagle(), target_dir, taps)
    with pytest.raises(DrafterMismatchError, match="read different target layers, the lowest first"):
        export(source, form, tmp_path / "out", target_dir)


def test_another_target_and_full_folders_are_refused(tmp_path, target_dir):
    with pytest.raises(DrafterMismatchError, match=r"trained for, version .* name it with --target"):
        export(bundled("eagle3"), "vllm", tmp_path / "out", target_dir)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(ConfigError, match="out must be a new or empty folder"):
        export("eagle3", "vllm", tmp_path / "full")
    with pytest.raises(
        ConfigError, match=r"out must be a new or empty folder that can be written, got .*Not a directory"
    ):
        export("eagle3", "vllm", tmp_path / "full" / "x" / "y")
    (tmp_path / "empty").mkdir()
    export("eagle3", "vllm", tmp_path / "empty")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "full"]


def test_a_version_of_a_registry_takes_its_history_along(tmp_path, target_dir):
    version = load_target_handle(target_dir).version
    config, state = read_drafter_files(saved(tmp_path / "ours", eagle(), target_dir))
    registry = DrafterRegistry(tmp_path / "data" / REGISTRY)
    fields = {"drafter_type": "eagle3", "config": config, "target_version": version}
    first = registry.put(state, **fields).version
    learned = registry.put(
        {**state, "fc.weight": state["fc.weight"] + 1},
        **fields,
        parent=first,
        arm="full",
        bucket="b",
        num_train_rows=1234,
    ).version
    export(learned, "vllm", tmp_path / "out", target_dir, data_dir=tmp_path / "data")
    text = (tmp_path / "out" / "PROVENANCE.md").read_text()
    assert f"`{learned}`: arm full, bucket b, 1,234 rows" in text and f"`{first}`: the first version" in text
    digest = hashlib.sha256((tmp_path / "out" / "model.safetensors").read_bytes()).hexdigest()
    assert digest in text and str(tmp_path) not in text
    _, back = read_released(tmp_path / "out", load_target_handle(target_dir, tap_layers=TAPS))
    assert torch.equal(back["fc.weight"], (state["fc.weight"] + 1).bfloat16().float())
    with pytest.raises(ManifestError, match="is not in the registry"):
        export("0" * 12, "vllm", tmp_path / "other", target_dir, data_dir=tmp_path / "data")
    with pytest.raises(DrafterMismatchError, match="name it with --target"):
        export(learned, "vllm", tmp_path / "other", data_dir=tmp_path / "data")


def test_licence_and_provenance_of_a_folder_go_along(tmp_path, target_dir):
    source = saved(tmp_path / "ours", eagle(), target_dir)
    (source / "LICENSE").write_text("free")
    (source / "NOTICE.txt").write_text("by us")
    (source / "PROVENANCE.md").write_text("# Provenance\n\nfrom a book\n")
    export(source, "vllm", tmp_path / "out", target_dir)
    names = ["LICENSE", "NOTICE.txt", "PROVENANCE.md", "config.json", "model.safetensors"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == names
    assert "from a book" in (tmp_path / "out" / "PROVENANCE.md").read_text()
    assert "Apache-2.0" not in (tmp_path / "out" / "PROVENANCE.md").read_text()


def test_a_release_is_exported_in_another_layout(tmp_path, target_dir):
    values, tensors = released.eagle3_files()
    source = write(tmp_path / "released", values, tensors)
    export(source, "speculators", tmp_path / "out", target_dir, target_name="org/model")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/model"
    target = read_target(target_dir)
    assert load_drafter(tmp_path / "out", target).caps.name == load_drafter(source, target).caps.name == "eagle3"


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("vllm", ["vllm", "serve", "TARGET", "--speculative-config"]),
        (
            "sglang",
            ["python", "-m", "sglang.launch_server", "--model-path", "TARGET", "--speculative-draft-model-path"],
        ),
    ],
)
def test_the_command_prints_how_to_start_the_engine(tmp_path, form, words):
    out = tmp_path / "a folder"
    arguments = ["export-drafter", "eagle3", "--format", form, "--out", str(out)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0 and "eagle3 written to" in result.output
    printed = shlex.split(result.output.splitlines()[-1])
    words = [str(bundled("target")) if w == "TARGET" else w for w in words]
    assert printed[: len(words)] == words
    if form == "vllm":
        settings = {"method": "eagle3", "model": str(out), "num_speculative_tokens": 5}
        assert json.loads(printed[-1]) == settings
    else:
        assert printed[len(words)] == str(out) and "EAGLE3" in printed
