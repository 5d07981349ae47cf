"""`paceline bench kernels` times every kernel, states bytes that formulas give, and answers bad input in one sentence."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from paceline.bench.shapes.kernel_cases import CASES
from paceline.bench.shapes.kernel_shapes import MODELS, floor_bytes, kv_bytes, weight_bytes
from paceline.bench.shapes.kernels import KernelBenchOptions, plan_cells
from paceline.cli.main import app
from paceline.errors import ConfigError
from paceline.kernels.dispatch import select_kernels

RUN = CliRunner()
SMALL = ["--contexts", "1024", "--requests", "8", "--nodes", "5", "--repeats", "2", "--device", "cpu"]


def test_every_kernel_is_measured_on_scaled_down_shapes(tmp_path):
    path = tmp_path / "new" / "k.json"
    result = RUN.invoke(app, ["bench", "kernels", *SMALL, "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "SCALED-DOWN" in result.output and "Floor of a verify forward" in result.output
    report = json.loads(path.read_text())
    assert report["format"] == 1 and report["is_scaled_down"] and report["device"] == "cpu"
    available = {n for n in CASES if n != "topk_lse" or hasattr(select_kernels("cpu"), n)}
    assert {r["kernel"] for r in report["rows"]} == available
    for row in report["rows"]:
        assert row["time_us"] > 0 and row["measured_bytes"] > 0 and row["timing"] == "perf_counter"
        assert row["gb_per_s"] == pytest.approx(row["measured_bytes"] / row["time_us"] / 1e3)
        assert row["share_of_copy"] == pytest.approx(row["gb_per_s"] / report["copy_gb_per_s"])
        assert row["measured_shape"]["context"] == 16 and row["measured_shape"]["requests"] == 1
    attention = next(r for r in report["rows"] if r["kernel"] == "tree_attention")
    assert attention["models"] == ["llama-3.1-8b", "qwen3-8b"]  # the same work for both
    # 8 requests of 1024 + 6 rows of 8 KV heads x 128 x 2 and 48 query rows in and out, 2 bytes each; 8 bytes an index.
    assert attention["bytes"] == 2 * 8 * (1024 + 6) * 2048 + 2 * 2 * 48 * 4096 + 8 * 8 * 1024
    assert all(f["floor_ms"] is None for f in report["floors"])


def test_bytes_of_a_round_are_weights_and_context_once():
    llama = replace(MODELS["llama-3.1-8b"], context=1000, requests=3)
    # 8.03e9 parameters less the embedding's 0.53e9, 2 bytes each; the norms' 0.3e6 are not counted.
    assert weight_bytes(llama) == pytest.approx(2 * (8.0303e9 - 128256 * 4096), rel=1e-4)
    assert weight_bytes(MODELS["qwen3-8b"]) == pytest.approx(2 * (8.1907e9 - 151936 * 4096), rel=1e-4)
    assert kv_bytes(llama) == 3 * 1000 * 131072
    assert floor_bytes(llama) == weight_bytes(llama) + kv_bytes(llama)


def test_shapes_with_the_same_work_are_measured_once():
    options = KernelBenchOptions(
        contexts=(1024, 2048), requests=(1,), nodes=(4, 8), kernels=("commit_rows", "tree_build")
    )
    cells = plan_cells(options)
    # Commits depend on layers (two models) and on accepted rows (both trees hold enough), trees on nodes alone.
    assert [(c.kernel, c.models) for c in cells] == [
        ("commit_rows", ["llama-3.1-8b"]),
        ("commit_rows", ["qwen3-8b"]),
        ("tree_build", ["llama-3.1-8b", "qwen3-8b"]),
        ("tree_build", ["llama-3.1-8b", "qwen3-8b"]),
    ]


def test_scaled_down_shapes_keep_groups_and_never_vanish():
    for shape in MODELS.values():
        small = shape.scaled_down()
        assert small.heads // small.kv_heads == shape.heads // shape.kv_heads
        assert small.context == small.requests == 1 and small.vocab_size > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernels": ("warp",)}, "kernels must be among all, tree_attention"),
        ({"kernels": ()}, "kernels must not be empty"),
        ({"models": ("gpt-2",)}, "models must be among llama-3.1-8b, qwen3-8b, got 'gpt-2'"),
        ({"contexts": (0,)}, "contexts must be in \\[1, 131072\\], got '0'"),
        ({"nodes": (1, 257)}, "nodes must be in \\[1, 256\\], got '1,257'"),
        ({"requests": ()}, "requests must not be empty"),
        ({"repeats": 0}, "repeats must be in \\[1"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"dtype": "int8"}, "dtype must be one of auto, float32, bfloat16, float16, got 'int8'"),
    ],
)
def test_nonsense_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        KernelBenchOptions(**options)


def test_the_command_line_refuses_in_one_sentence(tmp_path):
    for arguments, message in (
        (["--contexts", "1k"], "contexts must be a comma list of numbers, got '1k'"),
        (["--json", str(tmp_path)], "json must name a file that can be written"),
    ):
        result = RUN.invoke(app, ["bench", "kernels", *arguments])
        assert result.exit_code != 0
        assert message in str(result.exception)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="device must be auto or cpu where torch sees no GPU"):
        KernelBenchOptions(device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_measures_full_shapes(tmp_path):
    path = tmp_path / "k.json"
    result = RUN.invoke(app, ["bench", "kernels", "--contexts", "1024", "--requests", "2", "--nodes", "8", "--json", str(path)])  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert not report["is_scaled_down"]
    assert all("skipped" not in r and r["timing"].startswith("events") for r in report["rows"])
    assert all(f["floor_ms"] > 0 for f in report["floors"])
