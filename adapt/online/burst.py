"""Burst: a learner reads new requests for a few seconds, each scored before it is learned, as long as that may pay.

Requests are scored a few side by side, which costs little more than one: a request's score is that of the learner as it was
up to SCORED_TOGETHER - 1 requests before, never after. Whatever ends the burst, what it learned and knows is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from paceline.adapt.gate.gate import Evidence, Finding, RequestScore
from paceline.adapt.gate.shadow import ShadowStoppedError, fixed_rounds, replay_rounds, request_scores
from paceline.adapt.online.learner import AVERAGED_STEPS, Learner, is_rehearsed
from paceline.bootstrap import SCORED_TOGETHER, SURE_EVERY, will_pay
from paceline.contracts import BurstPlan
from paceline.serving.drafters.family import TrainedDrafter
from paceline.serving.sampling.request import RequestTrace

SAVE_S, SAVE_SHARE = 10.0, 0.1
"""Seconds between two saved states, and the share of a burst's time that saving large ones may take: at most so much is lost to
a kill."""


class Burst:
    """One stretch of a learner's work against the version that serves."""

    def __init__(
        self,
        learner: Learner,
        candidate: TrainedDrafter,
        incumbent: TrainedDrafter,
        *,
        num_nodes: int,
        max_frontier: int,
        min_gain: float,
        plan: BurstPlan | None = None,
        device: object,
        clock: Callable[[], float],
        should_stop: Callable[[], bool],
        save: Callable[[], None],
    ) -> None:
        """Bind what takes part.

        Args:
            candidate: takes the learner's weights whenever it is scored.
            num_nodes, max_frontier: of the replay's trees, as for `fixed_rounds`.
            min_gain: relative rise of tokens per round that a swap costs. plan: as in TrainJob.
            clock: seconds. should_stop: polled at every step and replay round.
            save: stores the learner's state.
        """
        self._learner, self._candidate, self._incumbent = learner, candidate, incumbent
        self._rounds = tuple(fixed_rounds(num_nodes, max_frontier) for _ in range(2))
        self._min_gain, self._plan, self._device, self._clock, self._should_stop, self._save = (
            min_gain, plan, device, clock, should_stop, save,
        )  # fmt: skip
        self.train_s = self.shadow_s = 0.0
        self.num_learned = self.num_rows = 0
        """Requests and supervised rows of the class that this burst learned."""
        self.is_given_up = False
        """What was left would not have paid."""
        self.scored: list[tuple[RequestTrace, RequestScore]] = []
        """Requests of the class that this burst scored, with the incumbent's scores."""

    @property
    def evidence(self) -> Evidence:
        return self._learner.evidence

    def run(self, fresh: Sequence[RequestTrace], rehearsal: Sequence[RequestTrace]) -> Iterator[int]:
        """Read until the text ends, the rest would not pay or a stop is asked for; yields the requests read, step by step.

        One that surely gains reads on: what it would gain on the rest of the text that was paid for would be harder to prove
        behind a version of its own.

        Args:
            fresh: requests of the class that the learner has not read, in order; those of its first AVERAGED_STEPS
                steps since its base are learned unscored: its mean holds the base's weights still.
            rehearsal: of other classes; they come round again when they are used up, but only their first reading is
                scored.
        Raises: DrafterMismatchError when the learner diverges.
        """
        others = _endless(rehearsal)
        saved_at, save_s, finding, warm, has_scored = self._clock(), 0.0, Finding.OPEN, None, False
        try:
            for number, start in enumerate(range(0, len(fresh), SCORED_TOGETHER)):
                chunk = fresh[start : start + SCORED_TOGETHER]
                is_due = finding is not Finding.BETTER or number % SURE_EVERY == 0
                is_scored = is_due and self._learner.num_steps >= AVERAGED_STEPS
                share = self._learner.arm.rehearsal_share if is_scored else 0.0
                between = [next(others, None) if is_rehearsed(start + i, share) else None for i in range(len(chunk))]
                if is_scored:
                    self._score(chunk, [t for t in between if t is not None])
                for i, (trace, other) in enumerate(zip(chunk, between, strict=True)):
                    self._learn(trace)
                    if other is not None:
                        self._learn(other, is_rehearsal=True)
                    yield start + i + 1
                if (began := self._clock()) - saved_at > max(SAVE_S, save_s / SAVE_SHARE):
                    self._save()
                    saved_at = self._clock()
                    save_s = saved_at - began
                finding = self.evidence.finding(self._min_gain)
                if finding is Finding.SHORT:
                    break
                if warm is None or (is_scored and not has_scored):  # the first of a kind also loads and compiles
                    warm, has_scored = (self.train_s + self.shadow_s, self.num_learned), is_scored
                elif finding is Finding.OPEN and not self._will_pay(len(fresh) - self.num_learned, *warm):
                    self.is_given_up = True
                    break
        except ShadowStoppedError:
            return
        finally:
            self._save()

    def _will_pay(self, num_left: int, warm_s: float, num_warm: int) -> bool:
        """Whether the requests that are left pay, at the pace of those behind the first of their kind: (seconds, requests) up to there."""
        if self._plan is None or not num_left:
            return True
        request_s = (self.train_s + self.shadow_s - warm_s) / max(self.num_learned - num_warm, 1)
        return will_pay(
            self._plan, self._min_gain, self.evidence.log_ratios, num_read=self._learner.num_own_steps, num_left=num_left,
            left_s=request_s * num_left,
        )  # fmt: skip

    def _score(self, chunk: Sequence[RequestTrace], others: Sequence[RequestTrace]) -> None:
        """Enter the gains of the requests that the learner has not read yet, and mark them as read."""
        began = self._clock()
        others = list({t.request_id: t for t in others if not self._learner.has_read(t)}.values())
        traces = [*chunk, *others]
        with torch.inference_mode():  # the replay's KV, which loading clears, was made in it
            self._candidate.load_state(self._learner.snapshot())
        try:
            new, old = (
                request_scores(
                    traces,
                    replay_rounds(drafter, traces, rounds, device=self._device, should_stop=self._should_stop),  # type: ignore[arg-type]
                )
                for drafter, rounds in zip((self._candidate, self._incumbent), self._rounds, strict=True)
            )
        except (ShadowStoppedError, MemoryError, torch.OutOfMemoryError):  # not the text's fault
            raise
        except Exception:  # a request that nobody can score would end every burst from now on
            self._learner.mark_read(traces)
            raise
        finally:
            self.shadow_s += self._clock() - began
        self._learner.mark_read(traces)
        for i, trace in enumerate(traces):
            if i < len(chunk):
                self.evidence.add(new[i], old[i], min_gain=self._min_gain)
                self.scored.append((trace, old[i]))
            else:
                self.evidence.add_other(trace.bucket, new[i], old[i])

    def _learn(self, trace: RequestTrace, *, is_rehearsal: bool = False) -> None:
        began, before = self._clock(), self._learner.num_rows
        if self._should_stop():
            raise ShadowStoppedError
        if not self._learner.has_read(trace):
            self._learner.mark_read([trace])
        self._learner.learn(trace, is_rehearsal=is_rehearsal)
        self.train_s += self._clock() - began
        self.num_learned += not is_rehearsal
        self.num_rows += self._learner.num_rows - before


def _endless(traces: Sequence[RequestTrace]) -> Iterator[RequestTrace]:
    while traces:
        yield from traces
