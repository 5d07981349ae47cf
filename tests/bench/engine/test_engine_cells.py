"""Statistics of the engine benchmark on data with known answers."""

import numpy as np
import pytest

from paceline.bench.engine.arms import BenchGroup, GroupTiming, Stretch, TransformersArm
from paceline.bench.engine.cells import (
    arm_summary,
    cell_row,
    crossover,
    crossovers,
    full_batch_pairs,
    judge,
    overall_verdict,
    paired_ratio,
    split_of_rounds,
)
from paceline.serving.sampling.request import SamplingParams


def stretch(seconds, tokens, rounds, **part_s):
    return Stretch(seconds=seconds, num_tokens=tokens, num_rounds=rounds, part_s=part_s)


def timing(seconds, tokens, *, full=None, batch=2, rounds=10, accepted=0, ttft_s=0.1):
    return GroupTiming(
        token_ids=tuple((0,) * (tokens // batch) for _ in range(batch)),
        seconds=seconds,
        ttft_s=(ttft_s,) * batch,
        whole=stretch(seconds, tokens, rounds, draft=0.1 * seconds, verify=0.5 * seconds, host=0.2 * seconds),
        full_batch=full,
        num_request_rounds=rounds * batch,
        num_draft_tokens=3 * rounds * batch,
        num_accepted_tokens=accepted,
    )


def test_ratio_is_that_of_the_pooled_rates():
    row = paired_ratio([(100, 1.0), (300, 1.0)], [(100, 2.0), (300, 2.0)])
    assert row["ratio"] == 2.0 and row["interval"] == [2.0, 2.0] and row["num_groups"] == 2


def test_one_group_has_a_ratio_but_no_interval_and_none_has_neither():
    assert paired_ratio([(100, 1.0)], [(100, 2.0)]) == {"ratio": 2.0, "interval": None, "num_groups": 1}
    assert paired_ratio([], []) is None


def test_interval_of_six_groups_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(150):
        size = rng.lognormal(0, 0.4, 6)
        fast = [(100.0, float(s)) for s in size * rng.lognormal(0, 0.1, 6) / 1.3]
        slow = [(100.0, float(s)) for s in size * rng.lognormal(0, 0.1, 6)]
        low, high = paired_ratio(fast, slow)["interval"]
        hits += low <= 1.3 <= high
    assert 0.93 <= hits / 150 <= 1.0  # the plain percentile bootstrap covers 0.91 here


def test_split_of_rounds_is_per_round_and_counts_everything_but_the_models_as_outside():
    split = split_of_rounds(
        [stretch(1, 9, 5, draft=0.1, verify=0.5, build=0.3, strange=0.1), stretch(1, 9, 5, verify=1.0)]
    )
    assert split["round_ms"] == 200.0 and split["num_rounds"] == 10
    assert split["part_ms"] == {"draft": 10.0, "verify": 150.0, "build": 30.0, "strange": 10.0}
    assert split["outside_share"] == 0.2
    assert split_of_rounds([])["round_ms"] is None


def test_arm_summary_pools_acceptance_over_rounds_and_sets_prefill_apart():
    fast, slow = timing(1.0, 40, rounds=2, accepted=12), timing(1.0, 20, rounds=8, accepted=0)
    row = arm_summary([fast, slow])
    assert row["acceptance_length"] == pytest.approx(12 / 20 + 1)  # not the mean of 4 and 1
    assert row["draft_tokens_per_round"] == 3.0
    assert row["tokens_per_s"] == 30.0 and row["prefill_s"] == pytest.approx(0.4)  # 0.2 s of each group outside rounds
    assert row["decode_tokens_per_s"] == pytest.approx((60 - 4) / 1.6, abs=0.01)
    assert row["ttft_ms"] == {"p50": 100.0, "p95": 100.0, "max": 100.0}
    assert row["full_batch_tokens_per_s"] is None and row["num_full_batch_rounds"] == 0


def test_prefill_of_batches_one_after_the_other_is_all_of_theirs():
    arm = TransformersArm("transformers", None, 0, lookup=False)
    arm._generate = lambda prompts, params: (
        [(0,) * 9 for _ in prompts],
        2.0,
        1.0,
    )  # each batch: 1 of 2 s is its prefill
    params = (SamplingParams(max_tokens=9),) * 4
    row = arm_summary([arm.run(BenchGroup(tag="g", bucket="b", prompts=((1,),) * 4, params=params, batch=2))])
    assert row["prefill_s"] == 2.0 and row["decode_tokens_per_s"] == 16.0  # 32 of 36 tokens in the other two seconds


def test_full_batch_part_counts_only_groups_in_which_both_arms_had_one():
    full = stretch(0.5, 30, 5, verify=0.4)
    a = [timing(1.0, 40, full=full), timing(1.0, 40)]
    b = [timing(1.0, 40, full=stretch(1.0, 30, 9, verify=0.8)), timing(1.0, 40, full=full)]
    assert full_batch_pairs(a, b) == ([(30.0, 0.5)], [(30.0, 1.0)])


def test_cell_is_judged_on_its_full_batch_part_and_predicts_the_ratio_from_round_times():
    plain = [timing(2.0, 40, full=stretch(1.0, 20, 10, verify=1.0), rounds=20) for _ in range(4)]
    fast = [timing(1.5, 40, full=stretch(0.5, 20, 5, draft=0.1, verify=0.4), rounds=10, accepted=20) for _ in range(4)]
    row = cell_row("tools", 2, 0.0, {"plain": plain, "speculative": fast})
    ratio = row["ratios"]["speculative"]
    assert ratio["whole"]["ratio"] == pytest.approx(4 / 3, abs=1e-3) and ratio["full_batch"]["ratio"] == 2.0
    assert ratio["from_parts"] == pytest.approx(100 * 2.0 / 100)  # equal rounds, two tokens each
    assert (row["verdict"], row["judged_on"]) == ("gain", "full_batch")


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ([1.01, 1.2], "gain"),
        ([0.985, 1.1], "holds"),
        ([0.9, 1.1], "unclear"),
        ([0.9, 0.97], "below"),
        (None, "unclear"),
    ],
)
def test_verdict_of_a_cell(interval, verdict):
    row = {"ratio": 1.0, "interval": interval, "num_groups": 4}
    assert judge({"whole": row, "full_batch": None}) == {"verdict": verdict, "judged_on": "whole"}


def test_a_full_batch_part_that_some_groups_lack_does_not_decide():
    whole = {"ratio": 1.0, "interval": [0.99, 1.1], "num_groups": 4}
    full = {"ratio": 0.5, "interval": [0.4, 0.6], "num_groups": 3}
    assert judge({"whole": whole, "full_batch": full})["judged_on"] == "whole"


def test_crossover_lies_where_the_line_in_log_batch_meets_one():
    assert crossover([(1, 2.0), (4, 1.5), (16, 0.5)]) == {"gains_up_to": 4, "crossover_batch": 8.0}
    assert crossover([(4, 1.2), (1, 2.0)]) == {"gains_up_to": 4, "crossover_batch": None}
    assert crossover([(1, 0.9), (4, 0.8)]) == {"gains_up_to": None, "crossover_batch": None}


def _cell(verdict, batch=1, ratio=1.5, lossless=None):
    return {"bucket": "tools", "batch": batch, "temperature": 0.0, "verdict": verdict, "judged_on": "whole", "lossless": lossless,
            "ratios": {"speculative": {"whole": {"ratio": ratio}}}}  # fmt: skip


@pytest.mark.parametrize(
    ("verdicts", "overall"),
    [
        (["gain", "holds"], "holds"),
        (["gain", "unclear"], "unclear"),
        (["unclear", "below"], "violated"),
        ([], "unclear"),
    ],
)
def test_overall_verdict_is_that_of_the_worst_cell(verdicts, overall):
    summary = overall_verdict([_cell(v) for v in verdicts])
    assert summary["verdict"] == overall and summary["num_cells"] == len(verdicts)


def test_overall_verdict_sums_mismatches_and_crossovers_go_by_bucket_and_temperature():
    found = {"num_mismatches": 2, "num_checked_tokens": 50}
    cells = [_cell("gain", 1, 3.0, found), _cell("below", 4, 0.5, found)]
    assert overall_verdict(cells)["num_mismatches"] == 4
    assert crossovers(cells) == [{"bucket": "tools", "temperature": 0.0, "gains_up_to": 1, "crossover_batch": 3.0}]
