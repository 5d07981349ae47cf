"""How much may drafting in batches of this size have cost, against plain decoding, before it has to stop for a while?

The budget controller decides by what it expects. This guard keeps an account of what really happened: every drafted round
is charged the time it took and credited the plain rounds that its tokens would have taken; every round of either kind earns
a small allowance. In debt beyond a limit, nothing is drafted in such batches, trials and probes included, until the
allowance has paid half of it off. Whatever the forecasts say, drafting thus costs a batch at most the limit once, the loss
of the round that crosses it, and the allowance's share of the time from then on.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.003
"""Rounds' worth of loss allowed per round."""
LIMIT, RESUME = 4.0, 2.0
"""Debts in plain rounds at which drafting stops and may begin again."""
CREDIT = 8.0
"""Gains in plain rounds that later losses may use up, at most."""
LEAST_PLAIN = 3
"""Plain rounds to know before any drafting."""
PLAIN_EVERY, PLAIN_EVERY_WHEN_SURE = 16, 64
"""Rounds of which one is plain, whatever drafting yields: contexts grow and machines slow down, so only plain rounds of the
last moments are a fair comparison. Rarer with at least half of the credit."""
_RATE = 0.25
_HICCUP = 4.0
"""A round counts as at most so many plain ones."""


@dataclass(slots=True)
class BatchGuard:
    """The account of one batch size (its log2)."""

    debt: float = 0.0
    """What drafting has cost beyond what it brought and what it was allowed, in plain rounds; negative = credit."""
    is_locked: bool = False
    scale: float = 0.0
    """EMA of a plain round's time over its forecast."""
    num_plain: int = 0
    num_calls: int = 0

    def forbids(self) -> bool:
        """Whether this round must not draft; call once a round."""
        self.num_calls += 1
        every = PLAIN_EVERY if self.debt > -CREDIT / 2 else PLAIN_EVERY_WHEN_SURE
        return self.is_locked or self.num_plain < LEAST_PLAIN or self.num_calls % every == 0

    def note(self, tokens_per_request: float, seconds: float, forecast_s: float, *, is_drafted: bool) -> None:
        """One round.

        Args:
            tokens_per_request: tokens emitted over requests; 1 when plain.
            seconds: of the whole round, catching up included.
            forecast_s: of a plain round of so many requests at start; only its shape over sizes matters.
        """
        ratio = seconds / forecast_s
        if is_drafted and self.scale > 0:
            self.debt += min(ratio / self.scale, _HICCUP) - tokens_per_request
        elif not is_drafted:
            self.num_plain += 1
            old = self.scale or ratio
            self.scale += max(_RATE, 1 / self.num_plain) * (min(ratio, _HICCUP * old) - self.scale)
        self.debt = max(self.debt - SHARE, -CREDIT)
        self.is_locked = self.debt > (RESUME if self.is_locked else LIMIT)
