"""Demo pools: the prompts of each bucket as the target is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from paceline.bench.common.workloads import Prompt, asked_text, has_template, prompt_pool, question_text, read_questions
from paceline.records import require

NUM_KINDS = 8
"""Kinds of text of a day, if the data has as many."""

Pools = dict[str, list[Prompt]]


def bucket_pools(buckets: Iterable[str], data: Path | None, tokenizer: Any = None) -> Pools:
    """Bucket -> its prompts. tokenizer: of a target that is asked through its chat template. Raises: ConfigError."""
    return {
        b: [
            Prompt(prompt_id=p.prompt_id, bucket=b, text=text)
            for p in prompt_pool(b, data)
            if (text := _rendered(asked_text, p.text, tokenizer)) is not None
        ]
        for b in buckets
    }


def kind_pools(kinds: Sequence[str], data: Path | None, tokenizer: Any) -> Pools:
    """The same of a day: of these kinds, else of those of which the data has most. Raises: ConfigError."""
    found = read_questions(data)
    for kind in kinds:
        require(kind in found, f"--kinds must be of {', '.join(sorted(found))}", kind)
    chosen = kinds or sorted(sorted(found), key=lambda kind: -len(found[kind]))[:NUM_KINDS]
    require(1 < len(chosen) == len({*chosen}), "--kinds must be two or more, and different", chosen)
    return {
        kind: [
            Prompt(prompt_id=q.question_id, bucket=kind, text=text)
            for q in found[kind]
            if (text := _rendered(question_text, q, tokenizer)) is not None
        ]
        for kind in chosen
    }


def fitting_pools(pools: Pools, tokenizer: Any, room: int) -> Pools:
    """The prompts of at most `room` tokens. Raises: ConfigError where a bucket has none."""
    out = {}
    for bucket, prompts in pools.items():
        texts, is_raw = [p.text for p in prompts], not has_template(tokenizer)
        lengths = tokenizer(texts, add_special_tokens=is_raw)["input_ids"] if texts else []
        out[bucket] = [p for p, ids in zip(prompts, lengths, strict=True) if len(ids) <= room]
        require(
            bool(out[bucket]),
            f"the prompts of {bucket} must fit the model, in {room} tokens and its chat template",
            len(prompts),
        )
    return out


def _rendered(render: Callable[[Any, Any], str], what: Any, tokenizer: Any) -> str | None:
    """The text; None where the chat template refuses the conversation (a system turn, two turns of one role)."""
    try:
        return render(what, tokenizer)
    except TemplateError:
        return None
