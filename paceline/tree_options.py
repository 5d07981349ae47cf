"""How do a few words of a command line or a benchmark become a tree configuration?"""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.config import TreeConfig


def with_tree_options(
    base: TreeConfig,
    *,
    policy: str | None = None,
    max_draft_tokens: int | None = None,
    mix: str | None = None,
) -> TreeConfig:
    """`base` with what is given; None keeps its value.

    More draft tokens than the largest of the node budgets that policy `adaptive` chooses among: those are continued,
    so that it can use them.
    Raises: ConfigError on a value that is not allowed.
    """
    given: dict[str, Any] = {"policy": policy, "max_draft_tokens": max_draft_tokens, "mix": mix}
    changes = {name: value for name, value in given.items() if value is not None}
    if max_draft_tokens is not None:
        changes["node_buckets"] = node_buckets(base.node_buckets, max_draft_tokens)
    return dataclasses.replace(base, **changes)


def node_buckets(known: tuple[int, ...], max_draft_tokens: int) -> tuple[int, ...]:
    """The known budgets, continued in steps of about a half of the last one up to max_draft_tokens."""
    out = list(known)
    while out[-1] < max_draft_tokens:
        out.append(min(out[-1] + max(out[-1] // 2, 1), max_draft_tokens))
    return tuple(out)
