"""Draft length: how many tokens of a chain are worth verifying, for each class, by the rate of tokens.

A chain's k-th token is emitted with the probability that it and all before it are accepted, and costs what one more row
costs a round. It is worth that where it raises tokens per second: where its probability exceeds the tokens that the round
makes in the time of the row. So chains are short where rows are dear, as in a batch that fills the device, and for a class whose
drafts are refused: none at all where even the first one costs more than it brings. Two of _PROBE rounds
of a class go the whole length and half of it, so that what is not drafted, and what a row costs, stay known.
Pure: no clock, no engine.
"""

from __future__ import annotations

import numpy as np

_PROBE = 16
_MEMORY = 400.0
"""Rounds that the rates of a class remember; rounds of the engine that the costs remember are as many times _MANY."""
_MANY = 5.0
_FIT_EVERY = 32
_LEAST = 50
"""Rounds before anything is cut."""
MAX_PAIRS = 256
"""Classes and versions whose rates are kept: every job makes a version, and `table` is told between two steps of the engine."""


class DraftLength:
    """Rates of acceptance by class and version, cost of a row by the batch, and the table that follows from them."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._most = max_draft_tokens
        self._rates: dict[tuple[str, str], np.ndarray] = {}  # (2, K): drafts that were reached, those accepted
        self._products, self._targets = np.zeros((3, 3)), np.zeros(3)  # normal equations of ms by (1, requests, drafts)
        self._costs: np.ndarray = np.zeros(3)
        self._tokens = self._ms = 0.0
        self._num_rounds = 0
        self._turns: dict[tuple[str, str], int] = {}

    def observe(self, bucket: str, version: str, num_drafts: int, num_accepted: int) -> None:
        """A request's round."""
        self._tokens += num_accepted + 1
        if num_drafts:
            rates = self._rates.pop((bucket, version), None)
            if rates is None:
                rates = np.zeros((2, self._most))
                if len(self._rates) == MAX_PAIRS:
                    oldest = next(iter(self._rates))
                    del self._rates[oldest]
                    self._turns.pop(oldest, None)
            self._rates[bucket, version] = rates  # the latest is the last
            rates *= 1 - 1 / _MEMORY
            reached = min(num_drafts, num_accepted + 1, self._most)
            rates[0, :reached] += 1
            rates[1, : min(num_accepted, self._most)] += 1

    def observe_round(self, num_requests: int, num_drafts: int, ms: float) -> None:
        """A round of the engine: draft rows and time of all its requests."""
        row = np.array([1.0, num_requests, num_drafts])
        fade = 1 - 1 / (_MEMORY * _MANY)
        self._products = self._products * fade + np.outer(row, row)
        self._targets = self._targets * fade + row * ms
        self._tokens, self._ms = self._tokens * fade, self._ms * fade + ms
        self._num_rounds += 1
        if self._num_rounds % _FIT_EVERY == 0:
            ridge = 1e-6 * np.diag(np.maximum(np.diag(self._products), 1.0))
            self._costs = np.linalg.solve(self._products + ridge, self._targets)

    def tokens(self, bucket: str, version: str) -> int:
        """Draft tokens of the next round of a request of this class."""
        key = (bucket, version)
        turn = self._turns[key] = self._turns.get(key, 0) + 1
        if turn % _PROBE == 0:
            return self._most
        return self._most // 2 if turn % _PROBE == _PROBE // 2 else self.best(bucket, version)

    def best(self, bucket: str, version: str) -> int:
        """The length without probing; the longest while too little is known."""
        rates = self._rates.get((bucket, version))
        if rates is None or rates[0, 0] < _LEAST or self._num_rounds < _LEAST or self._ms <= 0:
            return self._most
        # one more row for this request alone; a cost that noise makes negative is none
        least = max(0.0, float(self._costs[2])) * self._tokens / self._ms
        share = rates[1] / np.maximum(rates[0], 1.0)
        share = np.where(rates[0] < 1, share[0], share)  # never reached: as the first one
        worth = np.cumprod(share) >= least
        return self._most if worth.all() else int(np.argmin(worth))

    def table(self) -> dict[str, int]:
        """Class and version -> length now, for pages."""
        return {f"{bucket} {version}": self.best(bucket, version) for bucket, version in sorted(self._rates)}
