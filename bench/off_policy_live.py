"""Do off-policy estimates agree with live replays, where training is real?"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.bench import replay_live
from paceline.bench.off_policy_check import BASE, compare, explore, summarise
from paceline.bench.replay_live import ORDERS, LiveService
from paceline.bench.replay_plan import Variant

STUDY = 3


def run_live_check(
    variants: Sequence[Variant],
    num_logs: int,
    *,
    cache: Path | None,
    data: Path | None,
    console: Console,
    draws: int = 4,
) -> list[dict[str, Any]]:
    """One summary for every policy over `num_logs` live logs, which go through the orders of phases in turn.

    Texts, jobs and scores are kept in `cache` (the --resume folder), so that no job is trained twice.
    """
    with (
        tempfile.TemporaryDirectory(prefix="paceline-off-policy-") as own,
        console.status("preparing texts and round times") as status,
    ):
        service = LiveService(replay_live.SMALL, data, cache or Path(own), status.update)
        rows: list[dict[str, Any]] = []
        for seed in range(num_logs):
            order = seed % len(ORDERS)
            for variant in variants:
                truth = service.world(variant, order).run()
                logging = explore(service.world(Variant(policy=BASE, settings=variant.settings), order, seed))
                rows.append({"label": variant.label, **compare(logging, truth.net_s, truth.never_s, variant, draws)})
                status.update(f"log {seed + 1} of {num_logs}, {variant.label}")
    return [summarise(v.label, [r for r in rows if r["label"] == v.label], STUDY) for v in variants]
