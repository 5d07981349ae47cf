"""The shadow check compares like with like, judges what it should, and goes on where it stopped."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from paceline.adapt.gate.gate import RequestScore
from paceline.bench.common.engine_run import load_target
from paceline.bench.common.recorders import Round
from paceline.bench.shadow import check as shadow_check
from paceline.bench.shadow.check import ShadowCheckOptions, make_workloads, run_shadow_check
from paceline.bench.shadow.report import MAX_ERROR_PERCENT, MIN_ROUNDS, compare, error_interval, judge
from paceline.bench.shadow.versions import plan_versions
from paceline.cli.main import app
from paceline.errors import ConfigError, DrafterMismatchError
from paceline.serving.loading.families import save_drafter
from paceline.serving.specblock.model import SpecBlockConfig, SpecBlockModel
from tests.helpers.fakes import tiny_model, tiny_tokenizer

BUCKETS = ("tools", "code", "math", "facts")


def rounds(num_rounds, accepted, emitted=None, drafted=None):
    drafted = num_rounds if drafted is None else drafted
    totals = [(accepted, emitted or accepted + num_rounds), *[(0, 0)] * (num_rounds - 1)]
    return [
        Round(num_draft_tokens=8 * (i < drafted), num_accepted_tokens=a, num_emitted_tokens=e)
        for i, (a, e) in enumerate(totals)
    ]


# ---- figures


def test_equal_rounds_have_no_error_and_no_interval():
    scores = [RequestScore("a", 12, 4), RequestScore("b", 9, 5, 1.0)]
    row = compare(scores, [rounds(4, 8), rounds(5, 5)], is_paired=True)
    assert row["error_percent"] == 0 and row["interval"] == [0, 0]
    assert row["shadow_acceptance_length"] == row["real_acceptance_length"] == pytest.approx(22 / 9, abs=1e-4)
    assert (row["num_requests"], row["num_rounds"]) == (2, 9)


def test_error_is_signed_and_in_percent_of_the_real_length():
    row = compare([RequestScore("a", 33, 10)], [rounds(10, 20)], is_paired=True)
    assert row["error_percent"] == pytest.approx(10.0)
    assert compare([RequestScore("a", 27, 10)], [rounds(10, 20)], is_paired=True)["error_percent"] == -10.0


def test_rounds_without_a_draft_count_unless_left_out():
    real = [rounds(10, 16, drafted=8)]
    assert compare([RequestScore("a", 26, 10)], real, is_paired=True)["error_percent"] == 0
    assert compare([RequestScore("a", 24, 8)], real, is_paired=True, drafted_only=True)["error_percent"] == 0


def test_interval_covers_zero_about_as_often_as_it_says_when_texts_are_independent():
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(200):
        shadow, real = (np.stack([rng.normal(60, 12, 20), np.full(20, 20.0)], 1) for _ in range(2))
        low, high = error_interval(shadow, real, is_paired=False)
        hits += low <= 0 <= high
    assert 0.85 <= hits / 200 <= 1.0


def test_pairing_removes_what_both_sides_share():
    rng = np.random.default_rng(4)
    real = np.stack([rng.normal(60, 12, 20), np.full(20, 20.0)], 1)
    shadow = real * [1.01, 1.0]
    paired, apart = (error_interval(shadow, real, is_paired=p) for p in (True, False))
    assert paired[0] == pytest.approx(1.0) == paired[1]
    assert apart[1] - apart[0] > 1


def row(error, *, text="own", budget="fixed", num_rounds=MIN_ROUNDS, temperature=0.0):
    return {
        "error_percent": error, "text": text, "budget": budget, "num_rounds": num_rounds, "temperature": temperature
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "passed"),
    [
        ([row(MAX_ERROR_PERCENT), row(-MAX_ERROR_PERCENT, text="same")], True),
        ([row(0.0), row(-2.01)], False),
        ([row(0.0), row(2.01, text="same")], False),
        ([row(0.0), row(9.0, text="other"), row(9.0, budget="adaptive")], True),
        ([row(0.0), row(9.0, num_rounds=MIN_ROUNDS - 1)], True),
        ([row(0.0, num_rounds=MIN_ROUNDS - 1)], False),  # nothing was judged
    ],
)
def test_only_paired_rows_with_enough_rounds_are_judged(rows, passed):
    assert judge(rows)["passed"] is passed


def test_summary_keeps_the_sign_of_the_mean_and_the_largest_size():
    (summary,) = judge([row(1.0), row(-2.0), row(0.4)])["summary"]
    assert summary["mean_error_percent"] == pytest.approx(-0.2)
    assert summary["largest_absolute_error_percent"] == 2.0 and summary["num_rows"] == 3


# ---- plans


@pytest.mark.parametrize("num_buckets", [1, 2, 3, 4])
def test_plans_are_different_and_begin_with_the_first_drafter(num_buckets):
    plans = plan_versions(3 * num_buckets + 1, BUCKETS[:num_buckets])
    assert plans[0].arm == "initial" and plans[0].trained_on is None
    assert len({p.name for p in plans}) == len(plans)
    with pytest.raises(ConfigError, match="versions"):
        plan_versions(3 * num_buckets + 2, BUCKETS[:num_buckets])


def test_few_versions_cover_every_arm_and_different_buckets():
    trained = plan_versions(4, BUCKETS)[1:]
    assert {p.arm for p in trained} == {"full", "head", "calibration"}
    assert len({p.trained_on for p in trained}) == 3


# ---- the whole check on a tiny target in float32, where text does not depend on the drafter


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shadow")
    tiny_model("qwen3", layers=6, width=32).save_pretrained(folder / "target")
    tiny_tokenizer(64).save_pretrained(folder / "target")
    target = load_target(str(folder / "target"), "float32")
    config = SpecBlockConfig(
        hidden_size=16, intermediate_size=32, num_heads=2, num_kv_heads=1, head_dim=8, vocab_size=target.vocab_size,
        feature_size=target.feature_size, embed_size=target.hidden_size,
    )  # fmt: skip
    torch.manual_seed(0)
    save_drafter(folder / "drafter", SpecBlockModel(config), target.version)
    options = ShadowCheckOptions(
        num_versions=2, buckets=("math",), num_prompts=4, max_tokens=14, num_train_prompts=8, num_adaptive_prompts=2,
        batch=3, model=str(folder / "target"), drafter=str(folder / "drafter"), dtype="float32",
        work=folder / "work", json=folder / "out.json",
    )  # fmt: skip
    return target, options, run_shadow_check(options, Console(quiet=True))


def test_every_version_and_temperature_is_compared_on_every_text(tiny):
    _, options, result = tiny
    fixed = [r for r in result["rows"] if r["budget"] == "fixed"]
    keys = {(r["version"], r["arm"], r["temperature"], r["text"]) for r in fixed}
    assert len(keys) == len(fixed) == 2 * 2 * 3
    assert {r["arm"] for r in fixed} == {"initial", "full"} and len({r["version"] for r in fixed}) == 2
    written = json.loads(options.json.read_text(encoding="utf-8"))
    assert written["rows"] == result["rows"] and written["passed"] == result["passed"]


def test_same_text_scores_as_own_text(tiny):
    rows = {(r["version"], r["temperature"], r["text"]): r for r in tiny[2]["rows"] if r["budget"] == "fixed"}
    for version, t in {(v, t) for v, t, _ in rows}:
        own, same = rows[version, t, "own"], rows[version, t, "same"]
        assert same["num_requests"] == own["num_requests"] == 4
        assert same["shadow_acceptance_length"] == own["shadow_acceptance_length"]
        assert abs(own["error_percent"]) <= MAX_ERROR_PERCENT


def test_a_second_run_decodes_nothing(tiny, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("decoded again")

    monkeypatch.setattr(shadow_check, "decode", refuse)
    assert run_shadow_check(tiny[1], Console(quiet=True))["rows"] == tiny[2]["rows"]


def test_command_exits_with_1_when_nothing_could_be_judged_and_2_on_other_options(tiny):
    _, options, _ = tiny
    words = [
        "bench", "shadow", "--versions", "2", "--buckets", "math", "--num-prompts", "4", "--max-tokens", "14",
        "--train-prompts", "8", "--adaptive-prompts", "0", "--batch", "3", "--model", options.model,
        "--drafter", options.drafter, "--dtype", "float32", "--work", str(options.work),
    ]  # fmt: skip
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1 and "ask for more prompts or tokens" in done.output
    other = CliRunner().invoke(app, [*words, "--seed", "1"])
    assert isinstance(other.exception, ConfigError) and "other options" in str(other.exception)


def test_chains_are_decoded_and_replayed_as_chains(tiny):
    _, options, trees = tiny
    few = dataclasses.replace(options, num_versions=1, chain=2, temperatures=(0.0,), num_adaptive_prompts=0, work=None)
    result = run_shadow_check(dataclasses.replace(few, json=None), Console(quiet=True))
    assert result["tree"] == {"num_nodes": 2, "max_frontier": 1} and trees["tree"]["num_nodes"] > 2
    own = next(r for r in result["rows"] if r["text"] == "own")
    assert own["error_percent"] == 0 and 1 <= own["real_acceptance_length"] <= 3
    with pytest.raises(DrafterMismatchError, match="chain must be at most 8, the tokens that drafter"):
        run_shadow_check(dataclasses.replace(few, json=None, chain=9), Console(quiet=True))


def test_no_prompt_is_used_twice(tiny):
    target, options, _ = tiny
    work = make_workloads(options, target, "math")
    names = ("train", "scored 0", "other 0")
    prompts = [set(work[n].prompts) for n in names]
    assert sum(map(len, prompts)) == len(set().union(*prompts))
    assert work["scored 0"].prompts == work["scored 0.8"].prompts
    seeds = [{p.seed for p in work[n].params} for n in names]
    assert sum(map(len, seeds)) == len(set().union(*seeds))


def test_too_few_prompts_are_reported_with_what_is_needed(tiny):
    options = ShadowCheckOptions(num_prompts=200, model=tiny[1].model)
    with pytest.raises(ConfigError, match="different prompts"):
        make_workloads(options, tiny[0], "math")
