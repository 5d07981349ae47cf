"""Where benchmark and demo prompts come from: the prompts bundled with the package, or a data folder."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from paceline.errors import ConfigError

BUNDLED_BUCKETS = ("tools", "code", "math", "facts")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt of a traffic class."""

    prompt_id: str
    bucket: str
    text: str


def bundled_prompts(bucket: str) -> list[Prompt]:
    """Return the prompts of one bucket that ship with the package; raises ConfigError on an unknown bucket."""
    if bucket not in BUNDLED_BUCKETS:
        raise ConfigError(f"bucket must be one of {', '.join(BUNDLED_BUCKETS)}, got {bucket!r}")
    text = (files("paceline") / "prompts" / f"{bucket}.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines() if line]
    return [Prompt(prompt_id=r["id"], bucket=r["bucket"], text=r["prompt"]) for r in rows]


def data_prompts(bucket: str, data: Path) -> list[Prompt]:
    """Return held-out prompts of one domain of a data folder: each document up to its first answer."""
    from paceline.adapt.data import corpus

    prompts = []
    for i, doc in enumerate(corpus.documents(bucket, data, "held_out")):
        cut = doc.find(corpus.ASSISTANT)
        call = doc.find(corpus.CALL)
        ends = [e for e in (cut + len(corpus.ASSISTANT) if cut > 0 else -1, call) if e > 0]
        if ends:
            prompts.append(Prompt(prompt_id=f"{bucket}-data-{i}", bucket=bucket, text=doc[: min(ends)]))
    return prompts


def load_prompts(bucket: str, data: Path | None, count: int, seed: int = 0) -> list[Prompt]:
    """Return `count` prompts of a bucket in seeded random order, repeating the list only when it is too short."""
    pool = bundled_prompts(bucket) if data is None else data_prompts(bucket, data)
    if not pool:
        raise ConfigError(f"bucket {bucket!r} has no prompts in {data}")
    rng = random.Random(f"{seed}-{bucket}")
    out: list[Prompt] = []
    while len(out) < count:
        out += rng.sample(pool, len(pool))
    return out[:count]
