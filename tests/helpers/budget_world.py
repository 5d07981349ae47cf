"""Worlds for the budget controller: requests of several classes come and go, rounds take heavy-tailed times, machines drift.

Nothing here knows the controller's constants or forms: drafted rounds take what the world says, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from paceline.serving.budget.controller import BudgetController
from paceline.serving.budget.stats import DraftKey, RoundObservation


@dataclass(kw_only=True)
class Traffic:
    """One class of requests."""

    key: DraftKey
    acceptance: Callable[[int], float]
    """Round -> mean tokens accepted by a drafted round; requests scatter around it."""
    spread: float = 0.5
    """Standard deviation of a request's mean over the class's, relative."""
    num_tokens: int = 96
    nodes: int = 8
    share: float = 1.0
    """Chance that the drafter has something for a request of a round; of the others it costs nothing."""


@dataclass
class _Request:
    traffic: Traffic
    factor: float
    left: int
    context: int
    backlog: int


@dataclass
class Log:
    """What happened; lists have one element per round."""

    seconds: list[float] = field(default_factory=list)
    """Without the noise that all deciders meet alike."""
    tokens: list[int] = field(default_factory=list)
    num_drafting: list[int] = field(default_factory=list)

    def rate(self, start: int = 0, stop: int | None = None) -> float:
        """Tokens per second of the rounds."""
        return sum(self.tokens[start:stop]) / sum(self.seconds[start:stop])

    def share(self, start: int = 0, stop: int | None = None) -> float:
        """Part of the rounds in which anything was drafted."""
        return float(np.mean(np.array(self.num_drafting[start:stop]) > 0))


@dataclass(kw_only=True)
class World:
    """A machine under traffic."""

    traffics: list[Traffic]
    batch: Callable[[int], int] = lambda _: 1
    """Round -> requests that run."""
    rest_s: float = 0.3e-3
    """Of a round outside the two models."""
    row_s: float = 0.4e-3
    base_s: float = 4e-3
    draft_s: float = 1.2e-3
    draft_request_s: float = 0.15e-3
    ingest_row_s: float = 0.03e-3
    noise: float = 0.06
    hiccup: float = 0.03
    """Share of rounds that take several times as long."""
    speed: Callable[[int], float] = lambda _: 1.0
    """Round -> factor on every time."""

    def verify_s(self, rows: int) -> float:
        """Of a forward of so many rows."""
        return self.base_s + self.row_s * rows

    def plain_rate(self) -> float:
        """Tokens per second of a run that never drafts, in a batch that stays as it is."""
        return self.batch(0) / (self.verify_s(self.batch(0)) + self.rest_s)

    def run(self, choose: BudgetController | bool, num_rounds: int, seed: int = 0) -> Log:
        """choose: who decides; True drafts always, False never."""
        rng, log, requests = np.random.default_rng(seed), Log(), list[_Request]()
        machine = np.random.default_rng(seed + 1)
        for at in range(num_rounds):
            while len(requests) < self.batch(at):
                traffic = self.traffics[int(rng.integers(len(self.traffics)))]
                factor = float(rng.gamma(1 / traffic.spread**2, traffic.spread**2)) if traffic.spread else 1.0
                length = 1 + int(rng.geometric(1 / traffic.num_tokens))
                requests.append(_Request(traffic, factor, length, 100, 100))
            del requests[self.batch(at) :]
            keys: list[DraftKey | None] = [r.traffic.key for r in requests]
            context = sum(r.context for r in requests)
            if isinstance(choose, bool):
                wants = [choose] * len(keys)
            else:
                backlogs = [r.backlog for r in requests]
                wants = choose.wants_draft(keys, context, backlogs, [max(64, r.context - 100) for r in requests])
            has_draft = [r.traffic.share >= 1 or rng.random() < r.traffic.share for r in requests]
            wants = [w and h for w, h in zip(wants, has_draft, strict=True)]
            rolls = rng.poisson([max(r.factor * r.traffic.acceptance(at), 0.0) for r in requests])
            num_nodes = [r.traffic.nodes if w else 0 for r, w in zip(requests, wants, strict=True)]
            accepted = [min(int(k), n) for k, n in zip(rolls, num_nodes, strict=True)]
            n = sum(wants)
            factor = self.speed(at) * float(machine.lognormal(0, self.noise))
            factor *= float(machine.pareto(1.5)) + 2 if machine.random() < self.hiccup else 1.0
            draft_s = factor * (self.draft_s + self.draft_request_s * n if n else 0.0)
            verify_s = factor * self.verify_s(len(keys) + sum(num_nodes))
            catching_up = [i for i, (r, w) in enumerate(zip(requests, wants, strict=True)) if w and r.backlog > 32]
            behind = sum(requests[i].backlog for i in catching_up)
            catch_up_s = factor * self.ingest_row_s * behind
            seconds = draft_s + verify_s + factor * self.rest_s
            if not isinstance(choose, bool):
                choose.observe(
                    RoundObservation(
                        keys=keys, is_drafted=wants, num_nodes=num_nodes, num_accepted_tokens=accepted,
                        context_rows=context, draft_s=draft_s, verify_s=verify_s, round_s=seconds,
                        catch_up_s=catch_up_s, num_catch_up_rows=behind, catching_up=catching_up,
                    )
                )  # fmt: skip
            for r, w, k in zip(requests, wants, accepted, strict=True):
                r.context += 1 + k
                r.left -= 1 + k
                r.backlog = 1 + k if w else r.backlog + 1
            requests = [r for r in requests if r.left > 0]
            log.seconds.append((seconds + catch_up_s) / factor)
            log.tokens.append(len(keys) + sum(accepted))
            log.num_drafting.append(n)
        return log
