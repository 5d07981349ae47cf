"""What does random traffic look like: which request comes next, and which one is given up?

Everything is a function of the seed. Half of the prompts begin with one of a few long shared prefixes (system prompts,
in practice), lengths are log-uniform, a tenth of the requests is aborted within its next 40 rounds, most of them early.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.contracts import Group
from paceline.serving.request import GenerationRequest, SamplingParams

NUM_PREFIXES = 6
SHARED_SHARE = 0.5
ABORT_SHARE = 0.1
MAX_ABORT_ROUNDS = 40
TEMPERATURES = (0.0, 0.0, 0.5, 1.0)
GROUPS = (Group.ADAPTIVE, Group.ADAPTIVE, Group.ADAPTIVE, Group.PLAIN)


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakRequest:
    """A request and when it is given up."""

    request: GenerationRequest
    abort_after_rounds: int | None
    """Rounds after its submission; None = never. It may have ended by then."""


class SoakTraffic:
    """An endless series of requests."""

    def __init__(
        self,
        texts: Mapping[str, Sequence[Sequence[int]]],
        *,
        context_tokens: int,
        max_tokens: int,
        seed: int,
    ) -> None:
        """texts: prompts by bucket. context_tokens: what one request may have; max_tokens: longest answer."""
        self._rng = np.random.default_rng(seed)
        self._texts = {b: [tuple(p) for p in prompts] for b, prompts in texts.items()}
        self._buckets = list(self._texts)
        self._max_tokens = max_tokens
        self._room = context_tokens - max_tokens - 1
        longest = max(1, self._room // 2)
        self._prefixes = [self._text_of(self._length(longest // 2 + 1, longest)) for _ in range(NUM_PREFIXES)]
        self.num_made = 0

    def next(self) -> SoakRequest:
        """The next request."""
        rng, i = self._rng, self.num_made
        self.num_made += 1
        bucket = self._buckets[int(rng.integers(len(self._buckets)))]
        own = self._texts[bucket][int(rng.integers(len(self._texts[bucket])))]
        if rng.random() < SHARED_SHARE:
            prompt = self._prefixes[int(rng.integers(NUM_PREFIXES))] + own
        elif rng.random() < 0.5:
            prompt = self._text_of(self._length(1, self._room))
        else:
            prompt = own
        params = SamplingParams(
            temperature=float(rng.choice(TEMPERATURES)), max_tokens=self._length(1, self._max_tokens), seed=i,
            top_p=float(rng.choice((1.0, 0.9))), ignore_eos=bool(rng.random() < 0.3),
            repetition_penalty=1.1 if rng.random() < 0.05 else 1.0, logprobs=2 if rng.random() < 0.05 else None,
            stop=("\n\n",) if rng.random() < 0.1 else (),
        )  # fmt: skip
        request = GenerationRequest(
            request_id=f"soak-{i}", prompt_token_ids=prompt[: self._room] or own[:1], params=params, bucket=bucket,
            group=GROUPS[int(rng.integers(len(GROUPS)))],
        )  # fmt: skip
        abort = self._length(1, MAX_ABORT_ROUNDS) - 1 if rng.random() < ABORT_SHARE else None
        return SoakRequest(request=request, abort_after_rounds=abort)

    def wanted(self, limit: int) -> int:
        """How many requests should be in flight now: bursts and lulls between none and `limit`."""
        return int(self._rng.integers(0, limit + 1))

    def _length(self, low: int, high: int) -> int:
        """Log-uniform in [low, high]: most are short, some are as long as allowed."""
        return int(math.exp(self._rng.uniform(math.log(low), math.log(high + 1)))) if high > low else low

    def _text_of(self, num_tokens: int) -> tuple[int, ...]:
        """Prompts in a row, cut to a length."""
        out: list[int] = []
        while len(out) < num_tokens:
            prompts = self._texts[self._buckets[int(self._rng.integers(len(self._buckets)))]]
            out += prompts[int(self._rng.integers(len(prompts)))]
        return tuple(out[:num_tokens])
