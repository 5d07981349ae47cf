"""Drafter cells: acceptance, drafting cost, predicted and measured speedup of a drafter, and all cells together.

A cell is one (bucket, batch, temperature); an arm is a drafter with a policy. Everything here is arithmetic.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from paceline.bench.drafters.arms import ArmSpec
from paceline.bench.drafters.metrics import acceptance, round_times, share_of_time, stream_metrics
from paceline.bench.engine.arms import BenchGroup, GroupTiming
from paceline.bench.engine.cells import PLAIN
from paceline.bootstrap import interval, resampled


def drafting_row(spec: ArmSpec | None, groups: Sequence[BenchGroup], timings: Sequence[GroupTiming]) -> dict[str, Any]:
    """What the rounds of one engine arm in one cell come to. spec: None for plain decoding."""
    prompts: list[Hashable] = [p for g in groups for p in g.prompts]
    rounds = [r for t in timings for r in t.rounds]
    requests = list(zip(prompts, rounds, strict=True))
    drafted = [(p, [r for r in own if r.num_draft_tokens]) for p, own in requests]
    parts = [t.whole.part_s for t in timings if t.whole is not None]
    total_s = [sum(p.values()) for p in parts]
    num_rounds = sum(t.whole.num_rounds for t in timings if t.whole is not None)
    out = {
        **acceptance(requests),
        "drafted": acceptance(drafted),
        "round_ms": {"mean": 1e3 * sum(total_s) / num_rounds if num_rounds else None, **round_times(requests)},
        **stream_metrics(timings, prompts),
    }
    if spec is not None:
        out["cost"] = drafting_cost(spec, timings, parts, total_s)
    return out


def drafting_cost(
    spec: ArmSpec, timings: Sequence[GroupTiming], parts: Sequence[dict[str, float]], total_s: Sequence[float]
) -> dict[str, Any]:
    """Drafting as a share of the time of rounds, as time and as weight bytes.

    share: time inside the drafter; share_with_build: and in making trees. A pass is a call of propose or expand, which
    reads all weights once. Values per draft are None when nothing was drafted.
    """
    draft_s = [p["draft"] for p in parts]
    with_build_s = [p["draft"] + p["build"] for p in parts]
    num_drafts = sum(t.calls.num_propose for t in timings)
    num_passes = num_drafts + sum(t.calls.num_expand for t in timings)
    passes = num_passes / num_drafts if num_drafts else None
    return {
        "of_round": share_of_time(draft_s, total_s),
        "of_round_with_build": share_of_time(with_build_s, total_s),
        "num_drafts": num_drafts,
        "ms_per_draft": 1e3 * sum(draft_s) / num_drafts if num_drafts else None,
        "passes_per_draft": passes,
        "weight_bytes_per_draft": passes * spec.weight_bytes if passes is not None else None,
    }


def speed_prediction(row: dict[str, Any], arm: str, acceptance_length: float) -> dict[str, Any] | None:
    """t_plain x acceptance_length / t_arm from mean times of rounds, beside what was measured; None without rounds.

    row: of engine_cells.cell_row. Times and measurement are those of the full-batch part where every group has one: while
    a batch drains, rounds get cheaper and the two arms drain at different times.
    Source: SPEED-Bench, arXiv 2604.09557, Table 10.
    """
    ratios, plain, own = row["ratios"][arm], row["arms"][PLAIN], row["arms"][arm]
    full = ratios["full_batch"]
    is_full = full is not None and full["num_groups"] == ratios["whole"]["num_groups"]
    name = "full_batch_rounds" if is_full else "rounds"
    t_plain, t_arm = plain[name]["round_ms"], own[name]["round_ms"]
    if not t_plain or not t_arm:
        return None
    predicted, measured = t_plain * acceptance_length / t_arm, (full if is_full else ratios["whole"])["ratio"]
    return {
        "part": "full_batch" if is_full else "whole", "plain_round_ms": t_plain, "round_ms": t_arm,
        "predicted": predicted, "measured": measured, "difference": predicted - measured,
    }  # fmt: skip


def log_speedups(cell: dict[str, Any], arm: str, seed: int) -> tuple[float, np.ndarray]:
    """Log of the pooled speed ratio of an arm to plain in one cell, and over resamples of its groups."""
    plain, own = cell["arms"][PLAIN], cell["arms"][arm]
    columns = np.array([own["group_tokens"], own["group_seconds"], plain["group_tokens"], plain["group_seconds"]])
    return resampled(columns, lambda s: np.log(s[0] / s[1]) - np.log(s[2] / s[3]), seed=seed)


def summarise(cells: Sequence[dict[str, Any]], specs: Sequence[ArmSpec], kinds: dict[str, str]) -> list[dict[str, Any]]:
    """Per arm, batch and temperature, over the buckets of one kind (domain | load): geometric mean of the speedups with
    its interval, the least of them, and the acceptance length as macro mean (each bucket counts once) and pooled.

    kinds: of each bucket; random buckets are left out, since they are no result.
    """
    out = []
    keys = dict.fromkeys((kinds[c["bucket"]], c["batch"], c["temperature"]) for c in cells)
    for kind, batch, temperature in keys:
        if kind == "random":
            continue
        own = [c for c in cells if (kinds[c["bucket"]], c["batch"], c["temperature"]) == (kind, batch, temperature)]
        for spec in specs:
            logs = [log_speedups(c, spec.name, seed) for seed, c in enumerate(own)]
            mean = float(np.exp(np.mean([value for value, _ in logs])))
            spread = np.exp(np.mean([values for _, values in logs], axis=0))
            least_groups = min(c["num_groups"] for c in own)
            worst = min(own, key=lambda c: c["ratios"][spec.name]["whole"]["ratio"])
            rows = [c["drafting"][spec.name] for c in own]
            known = [(r["acceptance_length"]["pooled"], r["num_rounds"]) for r in rows if r["acceptance_length"]]
            costs = [r["cost"]["of_round"]["share"] for r in rows if r["cost"]["of_round"]]
            out.append(
                {
                    "kind": kind, "batch": batch, "temperature": temperature, "arm": spec.name, "drafter": spec.drafter,
                    "policy": spec.policy, "num_buckets": len(own), "speedup": mean,
                    "speedup_interval": interval(mean, spread, least_groups, is_positive=True),
                    "least_speedup": worst["ratios"][spec.name]["whole"]["ratio"], "least_bucket": worst["bucket"],
                    "acceptance_length_macro": float(np.mean([v for v, _ in known])) if known else None,
                    "acceptance_length_pooled": sum(v * n for v, n in known) / sum(n for _, n in known) if known else None,
                    "draft_share": float(np.mean(costs)) if costs else None,
                }
            )  # fmt: skip
    return out


def random_gaps(cells: Sequence[dict[str, Any]], kinds: dict[str, str], twins: dict[str, str]) -> list[dict[str, Any]]:
    """How far random-token prompts flatter or hurt each arm: its speed there over its speed on real text.

    twins: real bucket -> random bucket of like input length. Real buckets of one random bucket are pooled.
    """
    out = []
    for name in dict.fromkeys(twins.values()):
        real = [b for b, twin in twins.items() if twin == name]
        for noise in (c for c in cells if c["bucket"] == name):
            where = (noise["batch"], noise["temperature"])
            own = [c for c in cells if c["bucket"] in real and (c["batch"], c["temperature"]) == where]
            for arm, row in noise["arms"].items():
                tokens = sum(c["arms"][arm]["num_tokens"] for c in own if arm in c["arms"])
                seconds = sum(c["arms"][arm]["seconds"] for c in own if arm in c["arms"])
                if seconds > 0:
                    rate = tokens / seconds
                    out.append(
                        {
                            "random_bucket": name, "kind": kinds[real[0]], "batch": where[0], "temperature": where[1],
                            "arm": arm, "random_tokens_per_s": row["tokens_per_s"], "real_tokens_per_s": rate,
                            "gap": row["tokens_per_s"] / rate - 1,
                        }
                    )  # fmt: skip
    return out
