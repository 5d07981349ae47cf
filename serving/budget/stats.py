"""Round observation: what a verified round tells the budget controller.

Shape legend: B requests of the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

DraftKey = tuple[str, str, bool]
"""(drafter version or the text drafter's name, traffic bucket, is_greedy): what statistics are kept by."""


@dataclass(kw_only=True, slots=True)
class RoundObservation:
    """One verified round, B requests."""

    keys: Sequence[DraftKey | None]
    is_drafted: Sequence[bool]
    num_nodes: Sequence[int]
    num_accepted_tokens: Sequence[int]
    context_rows: int
    draft_s: float
    """Drafters and tree building, 0 when nobody drafted."""
    verify_s: float
    round_s: float
    longest_context: int | None = None
    """Rows of the request with most of them; None: not told."""
    num_new_rows: int = 0
    """Rows that drafters ingested; catching up after plain rounds is not a typical drafting cost."""
    expand_s: float = 0.0
    """Part of draft_s spent in re-entry."""
    num_leaves: int = 0
    """Leaves at which drafters were re-entered."""
    catch_up_s: float = 0.0
    """Drafting time, not in draft_s, that went into rows which earlier plain rounds left behind."""
    num_catch_up_rows: int = 0
    catching_up: Sequence[int] = ()
    """Requests that those rows are of, or that wait for their turn: they draft once they have caught up."""
    frontier_mass: Sequence[float] = field(default_factory=list)
    """(B,) mass re-entered; empty when no block was re-entered."""
    num_accepted_tokens_reentered: Sequence[int] = field(default_factory=list)
    has_text_turns: bool = False
    """Whether a text drafter drafted for some request in place of its own drafter: draft_s tells nothing of that one."""
