"""Beliefs about buckets: load, device time per token, acceptance length and rows, as exponential means."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from paceline.bandit.beliefs.evidence import Unsure
from paceline.bandit.beliefs.observation import BucketObservation, speculative
from paceline.contracts import Group

FAST = 0.7
"""Largest weight of the newest epoch in load, mix and time per token."""
STEADY = 0.4
"""Weight of the newest epoch in the load, relative to its weight in the rest: a new mix sets the load at once anyway."""
FULL_REQUESTS, FULL_S = 20.0, 60.0
"""Requests, or seconds, of an epoch that earn it this weight; of less, fewer: a handful of requests says little."""
ACTIVE_SHARE = 0.02
"""Share of the load below which a bucket does not count."""
PLAIN_SHARE = 0.2
"""Share of undrafted rounds above which their cost is taken as the price of not drafting."""


def epoch_weight(num_requests: float, seconds: float) -> float:
    """Weight of an epoch in the exponential means, in [0, FAST]: steady time constants, however short epochs are."""
    return 1.0 - (1.0 - FAST) ** min(max(num_requests / FULL_REQUESTS, seconds / FULL_S), 1.0)


class BatchCost(msgspec.Struct, frozen=True, kw_only=True):
    """Price of rounds of one batch size in one bucket."""

    share: float
    """Of the bucket's tokens; the shares of a belief sum to 1."""
    round_s: float | None
    """Device seconds of a drafted round, per request, when they were seen last; None when too few ever were."""
    plain_token_s: float | None
    """Device seconds per token without drafting, when a good part of the rounds went without."""
    text_share: float = 0.0
    """Of its tokens: those from rounds that a text drafter had, whatever version is live."""
    text_token_s: float = 0.0
    """Device seconds per token of these."""

    def token_s(self, length: np.ndarray | float) -> np.ndarray:
        """Device seconds per token at an acceptance length, like its argument; never dearer than plain decoding and text."""
        plain = np.inf if self.plain_token_s is None else self.plain_token_s
        round_s = np.inf if self.round_s is None else self.round_s
        own = np.minimum(round_s / np.maximum(length, 1.0), plain)
        return self.text_share * self.text_token_s + (1.0 - self.text_share) * own


class BucketBelief(msgspec.Struct, frozen=True, kw_only=True):
    """One bucket at the end of an epoch, about the version that is live."""

    bucket: str
    load: float
    """Tokens per second of the adaptive group."""
    time_per_token_s: float
    round_s: float
    """Device seconds of a drafted round, per request."""
    plain_token_s: float | None
    """Device seconds per token without drafting, when seen."""
    length: float
    """Acceptance length of the live version."""
    length_se: float
    usable_rows: int
    """Rows in the trace store that describe the bucket as it is now."""
    fresh_rows: int
    """Of these, written since the last job on the bucket."""
    learned_rows: int
    """Rows of the bucket that the live version was trained on."""
    first_rows: int = 0
    """Rows of it that the first version was trained on, before this service."""
    learner_rows: int = 0
    """Rows that the bucket's learner has learned since the live version, which the next burst goes on with."""
    learner_parameters: str = ""
    """What it learns; a burst on others would begin anew."""
    unsure: Unsure | None = None
    """What is known of its gain; None = nothing."""
    is_tried: bool = False
    """A job has read its present text, whatever came of it."""
    required_rows: int
    """Fresh rows that the pay-off rule waits for: doubles after a job that the gate refused."""
    is_active: bool
    batches: list[BatchCost] = []
    """The same prices apart by batch size: a better drafter gains less where rounds are full. [] = not known apart."""

    @classmethod
    def pooled(cls, first: BucketBelief, beliefs: Sequence[BucketBelief]) -> BucketBelief:
        """What is believed of some buckets with one version, by the name of `first`, one of them; its rounds are priced as
        those of all."""
        loads = [max(b.load, 1e-9) for b in beliefs]
        load = sum(loads)
        rounds = [x / b.length for x, b in zip(loads, beliefs, strict=True)]
        most = max(beliefs, key=lambda b: (b.learned_rows - b.first_rows, b.learned_rows))
        length, spread = load / sum(rounds), sum((x * b.length_se) ** 2 for x, b in zip(rounds, beliefs, strict=True))
        return msgspec.structs.replace(
            first,
            load=sum(b.load for b in beliefs),
            time_per_token_s=sum(x * b.time_per_token_s for x, b in zip(loads, beliefs, strict=True)) / load,
            length=length,
            length_se=math.sqrt(spread) / sum(rounds),
            usable_rows=sum(b.usable_rows for b in beliefs),
            fresh_rows=sum(b.fresh_rows for b in beliefs),
            learned_rows=most.learned_rows,
            first_rows=most.first_rows,
            required_rows=max(b.required_rows for b in beliefs),
            is_tried=any(b.is_tried for b in beliefs),
            is_active=any(b.is_active for b in beliefs),
        )

    @property
    def busy(self) -> float:
        """Device-seconds per second."""
        return self.load * self.time_per_token_s

    def token_s(self, length: float) -> float:
        """Device seconds per token at another acceptance length; never dearer than plain decoding."""
        return float(self.tokens_s(length))

    def tokens_s(self, lengths: np.ndarray | float) -> np.ndarray:
        """`token_s` of every element, over the batch sizes that are served now."""
        if self.batches:
            return sum((b.share * b.token_s(lengths) for b in self.batches), np.zeros(()))
        return BatchCost(share=1.0, round_s=self.round_s, plain_token_s=self.plain_token_s).token_s(lengths)

    def relative_gain(self, length_from: float, length_to: float) -> float:
        """Relative fall of device time per token between two acceptance lengths (negative: a rise)."""
        return float(self.relative_gains(length_from, length_to))

    def relative_gains(self, length_from: float, lengths_to: np.ndarray | float) -> np.ndarray:
        """`relative_gain` to every element."""
        now = self.token_s(length_from)
        return 1.0 - self.tokens_s(lengths_to) / now if now > 0 else np.zeros_like(np.asarray(lengths_to, float))


class BucketMeter(msgspec.Struct):
    """Exponential means behind a belief; one per bucket."""

    load: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0
    drafted_rounds: float = 0.0
    plain_s: float = 0.0
    plain_tokens: float = 0.0
    rounds: float = 0.0
    """All but those of text drafters."""
    num_epochs: int = 0

    def update(self, observation: BucketObservation | None, weight: float = FAST) -> None:
        """Fold one epoch; None = no traffic in this bucket; weight = epoch_weight of all traffic."""
        first = self.num_epochs == 0
        self.num_epochs += 1
        load = observation.load(Group.ADAPTIVE) if observation is not None else 0.0
        steady = STEADY * weight
        self.load = load if first else (1 - steady) * self.load + steady * load
        if observation is None or not observation.stats:
            return
        for name in ("seconds", "tokens", "drafted_rounds", "plain_s", "plain_tokens", "rounds"):
            setattr(self, name, getattr(self, name) * (1 - weight))
        for s in observation.stats:
            if not speculative(s):
                continue
            if s.group == Group.ADAPTIVE:
                self.seconds += s.device_s
                self.tokens += s.num_tokens
            self.drafted_rounds += s.drafted_rounds
            self.plain_s += s.plain_s
            self.plain_tokens += s.plain_tokens
            self.rounds += s.num_rounds

    def time_per_token_s(self) -> float | None:
        return self.seconds / self.tokens if self.tokens > 0 else None

    def plain_token_s(self) -> float | None:
        undrafted = self.rounds - self.drafted_rounds
        if self.plain_tokens < 1 or undrafted < PLAIN_SHARE * self.rounds:
            return None
        return self.plain_s / self.plain_tokens

    def is_resting(self) -> bool:
        """Whether most rounds went without a draft: the engine finds that drafting does not pay."""
        return self.drafted_rounds < 0.5 * self.rounds
