"""`paceline bench engine` measures cells end to end, keeps what it measured, and refuses what it cannot do."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from paceline.bench.common.result_file import ResultFile
from paceline.bench.engine.arms import BenchGroup, EngineArm, GroupTiming, new_engine
from paceline.bench.engine.cells import lossless_row
from paceline.bench.engine.run import EngineBenchOptions, EngineCommand
from paceline.cli.main import app
from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group
from paceline.errors import ConfigError, PacelineError
from paceline.serving.sampling.request import SamplingParams
from tests.helpers.api_server import wait_until
from tests.helpers.fakes import tiny_target
from tests.helpers.scripted_drafters import RandomDrafter

RUN = CliRunner()
TINY = ["--buckets", "tools", "--temperature", "0", "--prompts", "2", "--groups", "2", "--warmup", "1", "--max-tokens", "8", "--check", "1", "--threads", "1"]  # fmt: skip


@pytest.mark.slow
def test_every_arm_of_every_cell_is_measured(tmp_path):
    path = tmp_path / "deep" / "engine.json"
    result = RUN.invoke(app, ["bench", "engine", "--batch", "2,1", *TINY, "--json", str(path)])
    assert result.exit_code in (0, 1), result.output  # so few tokens may well come out below plain
    document = json.loads(path.read_text())
    assert document["is_complete"] and document["format"] == 1 and document["options"]["max_tokens"] == 8
    assert document["machine"]["packages"]["torch"] == torch.__version__
    assert [(c["bucket"], c["batch"]) for c in document["cells"]] == [("tools", 1), ("tools", 2)]
    alone, pair = document["cells"]
    assert set(alone["arms"]) == {"plain", "speculative", "transformers", "transformers_lookup"}
    assert set(pair["arms"]) == {"plain", "speculative", "transformers"}, "prompt lookup takes one request at a time"
    for cell in document["cells"]:
        assert cell["num_groups"] == 2 and cell["num_requests"] == {1: 2, 2: 12}[cell["batch"]]
        assert cell["lossless"]["num_mismatches"] == 0 and cell["lossless"]["num_checked_tokens"] > 0
        assert cell["memory"]["kv_bytes"]["plain"] > 0 and cell["memory"]["peak_rss_bytes"] >= cell["memory"]["rss_bytes"] * 0.5  # fmt: skip
        for name, ratio in cell["ratios"].items():
            low, high = ratio["whole"]["interval"]
            assert name != "plain" and low <= ratio["whole"]["ratio"] <= high
        for arm in ("plain", "speculative"):
            rounds = cell["arms"][arm]["rounds"]
            assert rounds["round_ms"] == pytest.approx(sum(rounds["part_ms"].values()), rel=0.01)
            assert cell["arms"][arm]["num_full_batch_rounds"] <= rounds["num_rounds"]
        assert cell["arms"]["plain"]["acceptance_length"] == 1.0 and cell["arms"]["transformers"]["ttft_ms"]["p50"] > 0
    assert document["summary"]["num_cells"] == 2 and len(document["crossovers"]) == 1
    assert "never below 0.98x plain" in result.output and "lossless at T=0: 0 mismatches" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "speculative"], "arms must be 'plain' and at least one more"),
        (["--arms", "plain,vllm"], "arms must be"),
        (["--batch", "0"], "batch must be"),
        (["--batch", "two"], "batch must be a comma list"),
        (["--temperature", "-1"], "temperature must be"),
        (["--buckets", "poems"], "buckets must be among tools, code, math, facts, random"),
        (["--groups", "0"], "groups must be >= 1"),
        (["--drafter", "none", "--arms", "plain,speculative", *TINY], "drafter must be"),
        (["--max-tokens", "4000"], "max-tokens must be at most"),
        (["--device", "tpu"], "device must be"),
        (["--shapes", "gpt-2"], "shapes must be among llama-3.1-8b, qwen3-8b"),
        (["--scale-down"], "scale-down must be left out without --shapes"),
        (
            ["--shapes", "qwen3-8b", "--scale-down", "--max-tokens", "32", "--prompts", "3"],
            "--max-tokens, --prompts must be left out with --shapes",
        ),
    ],
)
def test_bad_options_are_answered_in_one_sentence(arguments, message):
    result = RUN.invoke(app, ["bench", "engine", *arguments])
    assert isinstance(result.exception, PacelineError), result.output
    assert message in str(result.exception) and "\n" not in str(result.exception)


def test_quick_shrinks_what_was_not_asked_for_and_nothing_else():
    small = EngineCommand(options=EngineBenchOptions(batches=(2,), max_tokens=100), is_quick=True).chosen()
    assert small.batches == (2,) and small.max_tokens == 100
    assert small.temperatures == (0.0,) and small.buckets == ("tools",) and small.num_groups(2) == 4


def test_what_is_named_twice_is_one_cell():
    options = EngineBenchOptions(batches=(2, 2), temperatures=(0.0, 0.0, 0.8))
    cells = options.cells(("tools",), lambda *cell: [cell])
    assert cells == [[("tools", 2, 0.0)], [("tools", 2, 0.8)]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to run it on")
def test_large_shapes_are_refused_without_a_gpu():
    result = RUN.invoke(app, ["bench", "engine", "--shapes", "qwen3-8b"])
    assert isinstance(result.exception, PacelineError) and "--scale-down" in str(result.exception)


def test_scaled_down_shapes_are_labelled(tmp_path):
    path = tmp_path / "shapes.json"
    result = RUN.invoke(app, ["bench", "engine", "--shapes", "qwen3-8b", "--scale-down", "--quick", "--batch", "1", "--device", "cpu", "--threads", "1", "--json", str(path)])  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "says nothing about the model of that name" in result.output
    (row,) = json.loads(path.read_text())["rows"]
    assert row["is_scaled_down"] and row["floor_ms"] > 0 and row["arms"]["plain"]["round_ms"] > 0
    assert row["arms"]["speculative"]["num_rounds"] > 0


@pytest.mark.slow
def test_a_killed_run_leaves_the_cells_that_were_done(tmp_path):
    path = tmp_path / "engine.json"
    command = [
        sys.executable,
        "-m",
        "paceline.cli.main",
        "bench",
        "engine",
        *TINY,
        "--arms",
        "plain,speculative",
        "--check",
        "0",
    ]
    command += ["--batch", "1,2,3,4,5,6,7,8", "--groups", "8", "--json", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def cells():
        with contextlib.suppress(FileNotFoundError):
            return json.loads(path.read_text())["cells"]  # a reader never finds half a document
        return []

    try:
        wait_until(cells, timeout_s=180)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    document = json.loads(path.read_text())
    assert document["is_complete"] is False and 1 <= len(document["cells"]) < 8
    assert document["options"]["batches"] == list(range(1, 9)) and document["cells"][0]["ratios"]["speculative"]


def test_options_and_machine_are_on_disk_before_anything_is_measured(tmp_path):
    ResultFile(tmp_path / "r.json", command="x", options=EngineBenchLike())
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["options"] == {"path": "a"} and document["is_complete"] is False and document["machine"]["num_cpus"]
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_a_result_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="json must name a file that can be written"):
        ResultFile(tmp_path / "folder", command="x", options=EngineBenchLike())
    assert [p.name for p in tmp_path.iterdir()] == ["folder"], "nothing half-written stays"


def EngineBenchLike():
    import dataclasses
    from pathlib import Path

    return dataclasses.make_dataclass("Options", [("path", Path)])(Path("a"))


# ---- one group of requests through a real engine --------------------------------------------------------------------
def _arm(max_running=4):
    target = tiny_target(vocab=64, layers=2, width=16, context=128)
    config = EngineConfig(max_running=max_running, page_tokens=8, prefix_caching=False, tree=TreeConfig(max_draft_tokens=4))  # fmt: skip
    return EngineArm("speculative", new_engine(target, RandomDrafter(64), version="r", num_tokens=1024, config=config), Group.ADAPTIVE)  # fmt: skip


def _group(lengths, prompt=(5, 9, 7), batch=None):
    params = tuple(SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths)
    return BenchGroup(tag="g", bucket="b", prompts=(prompt,) * len(lengths), params=params, batch=batch or len(lengths))


def test_full_batch_part_ends_with_the_round_of_the_first_end():
    arm = _arm()
    run = arm.run(_group([4, 40, 40]))
    assert [len(t) for t in run.token_ids] == [4, 40, 40] and run.num_tokens == 84
    assert run.full_batch is not None and run.whole is not None
    assert 1 <= run.full_batch.num_rounds <= 3 < run.whole.num_rounds
    assert run.full_batch.seconds < run.whole.seconds and run.full_batch.num_tokens < 84
    assert 0 < sum(run.whole.part_s.values()) <= run.seconds and run.prefill_s > 0
    assert all(0 < t < run.seconds for t in run.ttft_s)
    # one first token each, then accepted and bonus tokens, less what the last rounds were cut by
    assert run.num_tokens <= 3 + run.num_request_rounds + run.num_accepted_tokens


def test_a_request_that_ends_is_followed_by_the_next_one():
    arm = _arm()
    run = arm.run(_group([6, 20, 6, 20, 6, 20], batch=2))
    assert [len(t) for t in run.token_ids] == [6, 20, 6, 20, 6, 20]
    assert arm.engine.stats()["num_finished"] == 6 and len(run.ttft_s) == 2
    assert run.full_batch is not None and run.full_batch.num_tokens > 40  # until the last wave has a free place


def test_a_group_that_never_runs_together_has_no_full_batch_part():
    run = _arm(max_running=1).run(_group([6, 6]))
    assert run.full_batch is None and run.num_tokens == 12


def test_answers_that_differ_between_the_engines_are_counted():
    group = _group([2, 2])
    same = GroupTiming(token_ids=((1, 2), (3, 4)), seconds=1.0, ttft_s=(0.1, 0.1))
    other = GroupTiming(token_ids=((1, 2), (3, 5)), seconds=1.0, ttft_s=(0.1, 0.1))
    row = lossless_row([group], {"plain": [same], "speculative": [other]}, None, 0)
    assert row["num_compared"] == 2 and row["num_differing"] == 1 and row["num_checked_tokens"] == 0
