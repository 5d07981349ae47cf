"""Round costs: the price of a round at each batch size, and the batch sizes at which a bucket is served."""

from __future__ import annotations

import msgspec

from paceline.bandit.beliefs.belief import FAST, PLAIN_SHARE, BatchCost
from paceline.contracts import FeedbackSums, Group

HALF_LIFE_S = 300.0
"""Of the price of a round at one batch size: hardware and tree budget change slowly."""
MIN_ROUNDS = 8.0
"""Rounds behind a price."""
FORETOLD_ROUNDS = 1000.0
"""Drafted rounds that what engines foretell is worth at most. Over the demo's classes the drafted rounds of one, over its plain
ones, erred by 7 to 23% (root mean square) where they were fewer than 512, by 2 to 6% where they were more; what was foretold by 6%.
The few are of another time: of probes and of the rounds before the engine found that drafting does not pay, with other trees, on a
machine that was slower or faster."""


def size_class(batch_size: int) -> int:
    """The batch size that stands for it: 1 to 4 themselves, beyond that the next power of two."""
    return batch_size if batch_size <= 4 else 1 << (batch_size - 1).bit_length()


class RoundSums(msgspec.Struct):
    """Rounds of one bucket at one batch size."""

    drafted_s: float = 0.0
    drafted_rounds: float = 0.0
    plain_s: float = 0.0
    plain_rounds: float = 0.0
    tokens: float = 0.0
    """Of the adaptive group, for the shares; fades faster than the prices."""
    text_tokens: float = 0.0
    """Those of them from rounds that a text drafter had."""
    text_s: float = 0.0
    """What these rounds took."""
    foretold_s: float = 0.0
    """What the plain rounds would have taken with a draft, by the engines' cost tables."""
    foretold_rounds: float = 0.0
    """Plain rounds of which an engine told it."""
    last_round_s: float | None = None
    """`round_s` when enough rounds were known last. It stays the price of drafting while nobody drafts or foretells:
    whether a better drafter pays hangs on it."""

    def round_s(self) -> float | None:
        """Seconds of a drafted round, of those that were and of plain ones as foretold; None when too few were ever known."""
        if self.drafted_rounds + self.foretold_rounds < MIN_ROUNDS:
            return self.last_round_s
        weight = min(FORETOLD_ROUNDS / max(self.foretold_rounds, 1.0), 1.0)
        return (self.drafted_s + weight * self.foretold_s) / (self.drafted_rounds + weight * self.foretold_rounds)

    def price(self, share: float) -> BatchCost:
        """What these rounds say about the price of this batch size."""
        rounds = self.drafted_rounds + self.plain_rounds
        is_often_plain = self.plain_rounds >= max(PLAIN_SHARE * rounds, MIN_ROUNDS)
        return BatchCost(
            share=share,
            round_s=self.round_s(),
            plain_token_s=self.plain_s / self.plain_rounds if is_often_plain else None,
            text_share=self.text_tokens / self.tokens if self.tokens > 0 else 0.0,
            text_token_s=self.text_s / self.text_tokens if self.text_tokens > 0 else 0.0,
        )


class RoundCosts(msgspec.Struct):
    """bucket -> batch size class -> sums; the rows of a closed epoch fade, those of the open one count in full."""

    sums: dict[str, dict[int, RoundSums]] = {}

    def fold(self, feedback: FeedbackSums) -> None:
        """Add its cells; requests without a drafter are left out."""
        for cell in feedback.cells:
            if cell.group == Group.PLAIN:
                continue
            by_size = self.sums.setdefault(cell.bucket, {})
            for size, rounds in cell.sizes.items():
                key = size_class(size)
                sums = by_size.get(key)
                if sums is None:
                    sums = by_size[key] = RoundSums()
                sums.drafted_s += rounds.drafted_s
                sums.drafted_rounds += rounds.drafted_rounds
                sums.plain_s += rounds.plain_s
                sums.plain_rounds += rounds.num_rounds - rounds.drafted_rounds
                if rounds.draft_ratio > 0:
                    sums.foretold_s += rounds.draft_ratio * rounds.plain_s
                    sums.foretold_rounds += rounds.num_rounds - rounds.drafted_rounds
                if cell.group == Group.ADAPTIVE:
                    sums.tokens += rounds.num_tokens
                    sums.text_tokens += rounds.text_tokens
                    sums.text_s += rounds.text_s

    def fade(self, seconds: float) -> None:
        """Begin a new epoch, `seconds` after the last one began; called before its rows are folded."""
        keep = 0.5 ** (seconds / HALF_LIFE_S)
        for by_size in self.sums.values():
            for sums in by_size.values():
                sums.last_round_s = sums.round_s()
                for name in ("drafted_s", "drafted_rounds", "plain_s", "plain_rounds", "foretold_s", "foretold_rounds"):
                    setattr(sums, name, getattr(sums, name) * keep)
                for name in ("tokens", "text_tokens", "text_s"):
                    setattr(sums, name, getattr(sums, name) * (1.0 - FAST))

    def round_s(self, bucket: str) -> float | None:
        """Seconds of a drafted round at the batch sizes that the bucket is served at; None when none has a price."""
        priced = [(b.share, b.round_s) for b in self.batches(bucket) if b.round_s is not None]
        shares = sum(share for share, _ in priced)
        return sum(share * round_s for share, round_s in priced) / shares if shares > 0 else None

    def batches(self, bucket: str) -> list[BatchCost]:
        """Price and share of each batch size with a price that the bucket is served at; [] when none has one."""
        found = {
            size: sums
            for size, sums in sorted(self.sums.get(bucket, {}).items())
            if sums.tokens >= 1.0 and max(sums.drafted_rounds, sums.plain_rounds) >= MIN_ROUNDS
        }
        priced = {size: sums.price(1.0) for size, sums in found.items()}
        found = {s: v for s, v in found.items() if not (priced[s].round_s is None and priced[s].plain_token_s is None)}
        total = sum(sums.tokens for sums in found.values())
        return [sums.price(sums.tokens / total) for sums in found.values()]
