"""Training record: what a drafter's folder says of its domains, rows learned and provenance."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.adapt.data.trace_store import count_rows
from paceline.adapt.recipes.learning_curve import CURVE_FILE
from paceline.paths import write_atomic
from paceline.serving.sampling.request import RequestTrace

CONFIG_FILE = "config.json"


def training_facts(domains: Sequence[str], traces: Iterable[RequestTrace]) -> dict[str, Any]:
    """Keys that a trained drafter's config.json holds besides its settings: its domains and distinct rows of each."""
    learned: dict[str, int] = {}
    for trace in traces:
        learned[trace.bucket] = learned.get(trace.bucket, 0) + count_rows([trace])
    return {"domains": list(domains) or sorted(learned), "learned_rows": dict(sorted(learned.items()))}


def add_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Add `facts` to the config.json of a drafter folder."""
    path = folder / CONFIG_FILE
    values = {**json.loads(path.read_text(encoding="utf-8")), **facts}
    write_atomic(path, json.dumps(values, indent=1) + "\n")


def write_provenance(
    out: Path,
    *,
    recipe: Mapping[str, Any],
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    results: Mapping[str, Mapping[str, float]],
    num_nodes: int,
    done: Mapping[str, Any],
) -> None:
    """Write PROVENANCE.md: command, seed, text, licences, held-out numbers, recipe, architecture.

    Args:
        text: what regeneration reported: target_version, tokens, requests, loops, seconds, sources (domain -> licence).
        results: domain -> name -> held-out number. num_nodes: draft nodes of the replay that gave the lengths.
        done: command, rows, steps, the step whose weights were kept, seconds and parameters of the training.
    """
    licences = [f"- {domain}: {licence}" for domain, licence in text["sources"].items()]
    sources = "\n".join(licences) or "- prompts from the folder given as data"
    names = sorted({k for r in results.values() for k in r})
    table = "| domain | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1) + "\n"
    table += "".join(
        f"| {d} | " + " | ".join(f"{r[n]:.3f}" if n in r else "" for n in names) + " |\n" for d, r in results.items()
    )
    write_atomic(
        out / "PROVENANCE.md",
        f"# Provenance of the drafter\n\nTrained from random initial weights by this project's own recipe, on text that "
        f"the target itself wrote (target version `{text['target_version']}`).\n\nCommand: `{done['command']}`\n\n"
        f"Seed {recipe['seed']}; {text['tokens']:,} output tokens in {text['requests']:,} requests "
        f"({text['loops']:,} cut at an exact short loop), written in {text['seconds'] / 60:.0f} minutes; "
        f"{done['rows']:,} supervised rows in {done['steps']:,} optimizer steps, {done['seconds'] / 60:.0f} minutes; "
        f"{done['parameters']:,} parameters; torch {torch.__version__} on {platform.machine()}.\n\n"
        f"Learning curve: `{CURVE_FILE}`, loss and `nll` of the training rows over steps, rows and seconds, and both "
        f"measures of a held-out sample. The weights are those after step {done['kept_step']:,}, which accepted most of "
        "that sample; the numbers below are on other held-out requests.\n\n"
        f"## Prompts and their licences\n\n{sources}\n\n"
        f"## Held-out documents\n\n`nll` in nats per row at the first slot; `blockB_slotS` is the share of rows whose "
        f"slots 0..S of block B are all right; acceptance length by exact replay with {num_nodes} draft nodes. "
        f"`trained_`: the same of training requests; how far the two are apart says how much was learned by heart.\n\n"
        f"{table}\n## Recipe\n\n```json\n{json.dumps(recipe, indent=1)}\n```\n\n"
        f"## Architecture\n\n```json\n{json.dumps(config, indent=1)}\n```\n",
    )
