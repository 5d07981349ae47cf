"""Groups of requests, and arms that take turns: another one begins each time, so that drift hits all alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from paceline.bench.engine.arms import Arm, BenchGroup, GroupTiming
from paceline.serving.sampling.request import SamplingParams
from paceline.serving.target_model.model import TargetModel


def make_groups(
    prompts: Sequence[tuple[int, ...]],
    *,
    bucket: str,
    batch: int,
    group_size: int,
    temperature: float,
    max_tokens: int,
    seed: int,
    ignore_eos: bool = False,
    label: str = "",
) -> list[BenchGroup]:
    """Cut prompts into groups of group_size requests, of which `batch` run at once; a rest that fills no group is left out.

    Request i of the list draws with seed + i in every arm. label: part of the tag, where a cell has several lists.
    """
    out = []
    for i, at in enumerate(range(0, len(prompts) - group_size + 1, group_size)):
        params = tuple(
            SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + at + j, ignore_eos=ignore_eos)
            for j in range(group_size)
        )
        tag = f"{bucket}-{batch}-{temperature:g}-{label}{i}"
        texts = tuple(prompts[at : at + group_size])
        out.append(BenchGroup(tag=tag, bucket=bucket, prompts=texts, params=params, batch=batch))
    return out


def run_alternating(
    arms: Sequence[Arm], groups: Sequence[BenchGroup], *, num_warmup: int, on_group: Callable[[], None]
) -> dict[str, list[GroupTiming]]:
    """Run all groups in all arms in turn; timings by arm, without those of the first num_warmup groups.

    on_group: called after each group. Raises: PacelineError when a request fails.
    """
    timings: dict[str, list[GroupTiming]] = {a.name: [] for a in arms}
    for i, group in enumerate(groups):
        turn = i % len(arms)
        for arm in itertools.chain(arms[turn:], arms[:turn]):
            timing = arm.run(group)
            if i >= num_warmup:
                timings[arm.name].append(timing)
        on_group()
    return timings


def random_prompts(target: TargetModel, count: int, num_tokens: int, seed: int) -> list[tuple[int, ...]]:
    """Prompts of uniformly random token ids without end tokens: a bound that real text never reaches."""
    rng = np.random.default_rng(seed)
    allowed = np.setdiff1d(np.arange(target.vocab_size), sorted(target.eos_token_ids))
    return [tuple(row) for row in rng.choice(allowed, (count, num_tokens)).tolist()]
