"""What does the budget controller remember of a traffic class, and what does a round tell it?

Shape legend: B requests of the round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

DraftKey = tuple[str, str, bool]
"""(drafter version, traffic bucket, is_greedy): what statistics are kept by."""


@dataclass(slots=True)
class KeyStats:
    """What is known about one (drafter version, bucket, greedy or sampled)."""

    state: str = "trial"
    """trial: new, always drafts | on | off: plain decoding, credit grows | probe: drafts to look again."""
    num_accepted_tokens: float = 0.0
    """EMA of accepted tokens per drafted round and request."""
    num_nodes: float = 0.0
    """EMA of draft nodes per drafted round and request."""
    weight: float = 0.0
    """Observations behind the EMAs, capped."""
    rounds_left: int = 0
    """Forced rounds left of a trial or probe."""
    credit_s: float = 0.0
    """Seconds that probing may lose; may be negative."""
    share: float = 0.0
    """Part of plain decoding's time that becomes credit."""
    rounds_on: int = 0
    losses: float = 0.0
    """Rounds' worth of drafting time that recent rounds lost beyond what they gained, while on; not below 0."""
    expand_gain: float = 2.0
    """Decayed sum of tokens accepted in re-entered blocks (with a prior)."""
    expand_mass: float = 2.0
    """Decayed sum of the frontier mass that was re-entered."""
    expand_wait: int = 0
    """Rounds until the next trial expansion."""
    expand_backoff: int = 32

    def slack(self, num_requests: int) -> float:
        """Factor on the rate that drafting promises: hysteresis, and caution where few rounds speak for turning it on.

        A batch gains less than a lone request and can lose more, so it asks for more.
        """
        if self.state == "on":
            return 1.01 if num_requests == 1 else 0.95
        return (0.98 if num_requests == 1 else 0.9) - 0.15 / math.sqrt(max(self.weight, 1.0))


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
    frontier_mass: Sequence[float] = field(default_factory=list)
    """(B,) mass re-entered; empty when no block was re-entered."""
    num_accepted_tokens_reentered: Sequence[int] = field(default_factory=list)
