"""Are an arm's answers those of the plain engine, and the target's own?"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.bench.common.lossless import LosslessChecker
from paceline.bench.common.lossless_sampled import check_sampled
from paceline.bench.engine.arms import BenchGroup, GroupTiming
from paceline.bench.engine.cells import PLAIN, SPECULATIVE
from paceline.serving.sampling.request import SamplingParams


def lossless_row(
    groups: Sequence[BenchGroup],
    timings: dict[str, list[GroupTiming]],
    checker: LosslessChecker | None,
    num_check: int,
    arm: str = SPECULATIVE,
) -> dict[str, float]:
    """Every answer that differs between `arm` and the plain engine is checked against the fp32 target (a near tie may go
    either way), and the first `num_check` of each engine besides.

    Greedy and sampled answers: with equal seeds both engines draw the same tokens.
    """
    answers: dict[tuple[tuple[int, ...], tuple[int, ...], SamplingParams], None] = {}
    num_differing = num_compared = 0
    for g, group in enumerate(groups):
        for i, (prompt, params) in enumerate(zip(group.prompts, group.params, strict=True)):
            texts = [timings[name][g].token_ids[i] for name in (PLAIN, arm) if name in timings]
            is_same = len(set(texts)) == 1
            num_compared += 1
            num_differing += not is_same
            if not is_same or num_compared <= num_check:
                answers.update(dict.fromkeys((prompt, text, params) for text in texts))
    out = {"num_compared": num_compared, "num_differing": num_differing}
    if checker is None:
        return {**out, "num_checked_tokens": 0, "num_near_ties": 0, "num_mismatches": 0, "largest_gap": 0.0}
    reports = (
        checker.check([(prompt, text) for prompt, text, p in answers if p.temperature == 0]),
        check_sampled(checker, [a for a in answers if a[2].temperature > 0]),
    )
    return {
        **out,
        "num_checked_tokens": sum(r.checked for r in reports),
        "num_near_ties": sum(r.near_ties for r in reports),
        "num_mismatches": sum(r.mismatches for r in reports),
        "largest_gap": round(max(r.largest_gap for r in reports), 5),
    }
