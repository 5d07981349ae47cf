"""`paceline bench shapes`: counts at full size, times of every part, and a document that says which is which."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from paceline.bench.shapes import kernel_shapes
from paceline.bench.shapes.costs import DraftPlan, eagle3_forwards, verify_forward
from paceline.bench.shapes.timing import estimate_on_cpu, time_on_gpu
from paceline.cli.main import app
from paceline.errors import PacelineError

RUN = CliRunner()
SMALL = {"hidden_size": 64, "ffn_size": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab_size": 128, "num_layers": 3}  # fmt: skip


def test_counts_of_both_models_are_written_with_their_assumptions(tmp_path):
    path = tmp_path / "shapes.json"
    result = RUN.invoke(app, ["bench", "shapes", "--no-time", "--contexts", "1024,32768", "--batch", "1", "--json", str(path)])  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert document["is_complete"] and document["options"]["plan"] == {"depth": 8, "topk": 10, "leaves": 10, "accepted": 4}  # fmt: skip
    assert list(document["models"]) == ["llama-3.1-8b", "qwen3-8b"]
    for found in document["models"].values():
        short, long = found["cells"]
        assert short["specblock_over_eagle3"]["bytes"] <= 0.52 < long["specblock_over_eagle3"]["bytes"]
        assert found["specblock_over_eagle3_by_depth"]["8"] == short["specblock_over_eagle3"]
        assert 1024 < found["context_at_limit"]["1"] < 32768 and "time" not in found
        for drafter in short["drafters"].values():
            assert drafter["draft"]["bytes"] == sum(c["bytes"] for c in drafter["calls"])
            assert drafter["draft"]["bytes"] == drafter["draft"]["weight_bytes"] + drafter["draft"]["kv_bytes"]
    assert "SpecBlock drafts within 0.52 x EAGLE-3's bytes up to" in result.output


def test_without_a_gpu_times_are_called_an_estimate(monkeypatch, tmp_path):
    monkeypatch.setitem(kernel_shapes.MODELS, "llama-3.1-8b", replace(kernel_shapes.MODELS["llama-3.1-8b"], **SMALL))
    path = tmp_path / "shapes.json"
    result = RUN.invoke(app, ["bench", "shapes", "--models", "llama-3.1-8b", "--contexts", "16", "--batch", "2", "--repeats", "1", "--device", "cpu", "--json", str(path)])  # fmt: skip
    assert result.exit_code == 0, result.output
    time = json.loads(path.read_text())["models"]["llama-3.1-8b"]["time"]
    assert time["kind"].startswith("estimate") and "estimate" in result.output
    for name, draft_ms in time["draft_ms"].items():
        assert 0 < draft_ms < time["round_ms"][name]
        assert time["round_ms"][name] == pytest.approx(draft_ms + time["verify_ms"], abs=0.01)
    assert time["draft_ms"]["jetspec"] == time["draft_ms"]["dflash"]


def test_one_layer_stands_for_all_of_its_kind():
    """Every part of every forward has a time; parts that differ in rows alone share a module."""
    shape = replace(kernel_shapes.MODELS["qwen3-8b"], **SMALL, context=8, requests=1, nodes=4)
    forwards = [*eagle3_forwards(shape, DraftPlan(depth=3)), verify_forward(shape)]
    built: list[str] = []
    seconds = estimate_on_cpu(forwards, 1, built.append)
    assert set(seconds) == {p for f in forwards for p in f.parts} and min(seconds.values()) > 0
    assert built == ["features", "layer", "head", "layers", "head"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "gpt-2"], "models must be among llama-3.1-8b, qwen3-8b"),
        (["--contexts", "0"], "contexts must be"),
        (["--batch", ""], "batch must not be empty"),
        (["--depth", "9"], "depth must be in [1, 8]"),
        (["--nodes", "0"], "nodes must be >= 1"),
        (["--device", "tpu"], "device must be one of auto, cpu, cuda"),
    ],
)
def test_bad_options_are_answered_in_one_sentence(arguments, message):
    result = RUN.invoke(app, ["bench", "shapes", "--no-time", *arguments])
    assert isinstance(result.exception, PacelineError), result.output
    assert message in str(result.exception)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_round_is_captured_and_replayed_on_a_gpu():
    shape = replace(kernel_shapes.MODELS["qwen3-8b"], **SMALL, context=64, requests=2, nodes=8)
    assert 0 < time_on_gpu([*eagle3_forwards(shape, DraftPlan()), verify_forward(shape)], 3) < 1
