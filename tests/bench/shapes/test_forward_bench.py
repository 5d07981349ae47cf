"""Claims of `paceline bench forward`."""

import json

import pytest
from typer.testing import CliRunner

from paceline.bench.shapes import forward
from paceline.cli.main import app
from paceline.kernels.cpu.library import ISA_VARIABLE, choose_isa

RUN = CliRunner()


@pytest.mark.skipif(choose_isa() is None, reason="needs the compiled library")
@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("int8", 1)])
def test_every_size_is_timed_over_one_row_and_over_the_floor(tmp_path, dtype, size):
    path = tmp_path / "f.json"
    words = ["--models", "7m", "--rows", "1,9", "--contexts", "10", "--repeats", "6", "--threads", "1,2"]
    result = RUN.invoke(app, ["bench", "forward", *words, "--dtype", dtype, "--json", str(path)])
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert document["is_complete"] and [(c["threads"], c["rows"]) for c in document["cells"]] == [
        (1, 1),
        (1, 9),
        (2, 1),
        (2, 9),
    ]
    for cell in document["cells"]:
        # 32 layers of q, k, v (256), o (128), gate and up (768) and down (384 inputs), then 4,096 logits; 10 rows of K/V
        weights = 32 * (128 * 256 + 128 * 128 + 128 * 768 + 384 * 128) + 128 * 4096
        assert cell["weight_bytes"] == size * weights and cell["bytes"] - cell["weight_bytes"] == 2 * 10 * 32 * 128
        low, high = cell["over_floor"]["interval"]
        assert cell["ms"] > 0 and 0 < low <= cell["over_floor"]["ratio"] <= high
        assert (cell["over_one_row"] is None) == (cell["rows"] == 1)


@pytest.mark.skipif(choose_isa() is None, reason="needs the compiled library")
def test_number_types_take_turns_and_are_compared_with_the_first(tmp_path):
    path = tmp_path / "f.json"
    words = ["--models", "7m", "--rows", "1,9", "--repeats", "2", "--dtype", "bfloat16,int8", "--json", str(path)]
    assert RUN.invoke(app, ["bench", "forward", *words]).exit_code == 0
    cells = json.loads(path.read_text())["cells"]
    assert [(c["rows"], c["dtype"], c["over_first_dtype"] is None) for c in cells] == [
        (1, "bfloat16", True), (1, "int8", False), (9, "bfloat16", True), (9, "int8", False),
    ]  # fmt: skip


@pytest.mark.skipif(choose_isa() is None, reason="needs the compiled library")
@pytest.mark.parametrize("added_s", [0.5, 0.0])
def test_the_speed_of_reading_a_context_is_that_of_the_time_it_adds(tmp_path, monkeypatch, added_s):
    """Times are given: a machine that stops for a moment would make the real ones of so few repeats unsure."""
    path, size = tmp_path / "f.json", forward._READ_BYTES
    monkeypatch.setattr(forward, "memory_s", lambda *_: (size * 1e-9, 2 * size * 1e-9))  # 1 ns a byte read or copied
    monkeypatch.setattr(
        forward.RandomModel, "forward_s", lambda _, pool, rows, context, batch: 1.0 + added_s * (context > 0)
    )
    words = ["--models", "7m", "--rows", "1", "--contexts", "0,3000", "--repeats", "3", "--json", str(path)]
    assert RUN.invoke(app, ["bench", "forward", *words]).exit_code == 0
    bare, deep = json.loads(path.read_text())["cells"]
    kv_s = (deep["bytes"] - bare["bytes"]) * 1e-9
    assert bare["kv_over_copy"] is None and deep["ms"] == 1e3 * (1.0 + added_s)
    if added_s:
        assert deep["kv_over_copy"]["ratio"] == pytest.approx(kv_s / added_s, abs=1e-3)
    else:
        assert deep["kv_over_copy"] is None  # no time that a reading speed could be taken from


@pytest.mark.skipif(choose_isa() is None, reason="needs the compiled library")
def test_every_position_has_its_angles(monkeypatch):
    """The compiled forward reads them unchecked: beyond the table lies whatever memory holds."""
    asked = []

    def forward_s(model, pool, rows, context, batch):
        asked.append((context + rows, len(model.rope)))
        return 1.0

    monkeypatch.setattr(forward, "memory_s", lambda *_: (1.0, 1.0))
    monkeypatch.setattr(forward.RandomModel, "forward_s", forward_s)
    words = ["--models", "7m", "--rows", "1,9", "--contexts", "10,20000", "--repeats", "2"]
    assert RUN.invoke(app, ["bench", "forward", *words]).exit_code == 0
    assert max(most for most, _ in asked) == 20009 and all(most <= angles for most, angles in asked)


def test_without_the_library_it_says_how_to_build_it(monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, "none")
    result = RUN.invoke(app, ["bench", "forward"])
    assert result.exit_code != 0 and "kernels.cpu.build" in str(result.exception)
