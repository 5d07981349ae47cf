"""Scheduler classes: vLLM's own two, which also tell what each request's rounds were like.

`--scheduler-cls paceline_vllm.scheduler.PacelineScheduler`, or PacelineAsyncScheduler where vLLM schedules asynchronously.
Everything but the calls into vLLM is in RoundLog, which runs in the engine's process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from paceline.config import FeedbackConfig
from paceline.contracts import ASKED_GROUP, Group, RoundStats
from paceline.infra.engines.draft_length import DraftLength
from paceline.infra.engines.windows import RecentRows
from paceline.infra.replica.feedback import FeedbackPublisher
from paceline.infra.state.redis_clients import Keys
from paceline.infra.state.redis_clock import RedisClock
from paceline.machine import SystemClock
from paceline_vllm.capture import Ended
from paceline_vllm.settings import Settings, settings_of, target_version_of

BUCKET_FIELD, GROUP_FIELD = "bucket", "group"
"""Keys of `vllm_xargs` in a request's body."""


@dataclass(slots=True)
class _Open:
    """A request in flight."""

    bucket: str
    group: str
    is_greedy: bool
    is_plain: bool
    """Its client wants no drafts."""
    switch: int
    """Number of the switch since which it runs."""
    num_rounds: int = 0


class RoundLog:
    """Turns steps of the scheduler into rows of rounds, and says which requests draft how much."""

    def __init__(self, settings: Settings, target_version: str, max_draft_tokens: int) -> None:
        self.settings = settings
        self.publisher = FeedbackPublisher(
            settings.redis_url, Keys(settings.service), replica_id=settings.replica_id, target_version=target_version,
            config=FeedbackConfig(), clock=RedisClock(),
        ).start()  # fmt: skip
        self.length = DraftLength(max_draft_tokens)
        self._open: dict[str, _Open] = {}
        self._ended: dict[str, Ended] = {}
        self._version, self._group = "", ASKED_GROUP  # until the agent has said what is served
        self._num_switches = 0
        self._is_training = False
        self._recent = RecentRows()
        self.has_stale_blocks = False
        """Prefixes may lie in the cache that another drafter than the present one has filled."""
        self.num_stale = self.num_mixed = 0
        """Requests that began with cached blocks of another drafter; requests that lived through a switch."""
        self._last_end = 0.0

    # ---- calls of the engine
    def switch(self, version: str, group: str) -> None:
        self._num_switches += version != self._version  # one drafter in two groups is no mixture
        self._version, self._group = version, group

    def control(self, is_training: bool) -> None:
        self._is_training = is_training

    def state(self) -> dict[str, Any]:
        return {
            "version": self._version, "group": self._group, "num_switches": self._num_switches,
            "feedback": self.publisher.counters(), "num_stale": self.num_stale, "num_mixed": self.num_mixed,
            "draft_table": self.length.table(),
            "rows": self._recent.now(time.monotonic()),
        }  # fmt: skip

    # ---- before a step
    def open(self, request: Any) -> _Open:
        """The request's entry, made when it is seen first."""
        found = self._open.get(request.request_id)
        if found is None:
            params = request.sampling_params
            extra = (params.extra_args if params is not None else None) or {}
            bucket, asked = str(extra.get(BUCKET_FIELD, "")), extra.get(GROUP_FIELD)
            group = self._group
            is_plain = asked == Group.PLAIN
            if is_plain:
                group = Group.PLAIN if self.settings.trusts_groups else ASKED_GROUP
            found = self._open[request.request_id] = _Open(
                bucket=self._recent.bucket(bucket), group=group,
                is_greedy=params is not None and params.temperature == 0, is_plain=is_plain, switch=self._num_switches,
            )  # fmt: skip
        return found

    def cut(self, running: list[Any]) -> None:
        """Take drafts away from requests that decode plainly, and what is beyond the draft length from the others."""
        for request in running:
            drafts = request.spec_token_ids
            if drafts:
                entry = self.open(request)
                limit = None
                if entry.is_plain:
                    limit = 0
                elif self.settings.adapts_length:
                    limit = self.length.tokens(entry.bucket, self._version)
                if limit is not None and limit < len(drafts):
                    request.spec_token_ids = drafts[:limit]

    def start(self, requests: dict[str, Any], new: list[Any]) -> None:
        """Requests that a step begins with, and whether cached blocks of another drafter are under them."""
        for request in new:
            entry = self.open(requests[request.req_id])
            if self.has_stale_blocks and request.num_computed_tokens > 0:
                self.num_stale += 1
                if self.settings.stale_prefix != "count" and entry.group != Group.PLAIN:
                    entry.group = ASKED_GROUP

    def take_ended(self, request_ids: set[str]) -> dict[str, Ended]:
        """What is known of requests that have ended since the step before; forgets them."""
        for request_id in request_ids:
            self._open.pop(request_id, None)
        return {i: self._ended.pop(i) for i in list(self._ended) if i in request_ids}

    # ---- after a step
    def seen(self, requests: dict[str, Any], scheduled: Any, sampled: Any) -> Iterator[tuple[Any, int, int, int, int]]:
        """(request, scheduled tokens, draft tokens, sampled tokens, output tokens before) of a step's requests."""
        tokens = sampled.sampled_token_ids
        for request_id, num_scheduled in scheduled.num_scheduled_tokens.items():
            request = requests.get(request_id)
            if request is not None and tokens:
                num_drafts = len(scheduled.scheduled_spec_decode_tokens.get(request_id, ()))
                num_sampled = len(tokens[sampled.req_id_to_index[request_id]])
                yield request, num_scheduled, num_drafts, num_sampled, request.num_output_tokens

    def record(self, steps: list[tuple[Any, int, int, int, int]], began: float) -> None:
        """Add the rows of a step that has been processed.

        Args:
            began: when it was scheduled, s of the monotonic clock.
        """
        end, now = time.perf_counter(), SystemClock().now()  # the publisher's, which knows how far off it is
        step_ms = 1e3 * (end - max(began, self._last_end))
        self._last_end = end
        rounds = [
            s for s in steps if s[4] > 0 and s[3] > 0 and s[1] == 1 + s[2]
        ]  # prefill yields a token, too, but no round
        if rounds:
            share_ms = step_ms * sum(s[1] for s in rounds) / sum(s[1] for s in steps) / len(rounds)
            self._record_rounds(rounds, share_ms, now)
        for request, *_ in steps:
            if request.is_finished():
                params = request.sampling_params
                entry = self.open(request)
                self._ended[request.request_id] = Ended(
                    bucket=entry.bucket, temperature=0.0 if params is None else params.temperature,
                    prompt_len=request.num_prompt_tokens, token_ids=list(request.all_token_ids),
                    finish_reason=str(request.get_finished_reason()),
                )  # fmt: skip

    def _record_rounds(self, rounds: list[tuple[Any, int, int, int, int]], share_ms: float, now: float) -> None:
        columns: dict[str, list] = {name: [] for name in RoundStats.__struct_fields__}
        for request, _, num_drafts, num_sampled, before in rounds:
            entry = self.open(request)
            if entry.switch != self._num_switches and entry.group not in (Group.PLAIN, ASKED_GROUP):
                entry.group = ASKED_GROUP  # its draft keys and values are of two drafters
                self.num_mixed += 1
            accepted = min(num_sampled - 1, num_drafts)
            row = (
                request.request_id, entry.bucket, entry.group, "" if entry.is_plain else self._version, entry.is_greedy,
                entry.num_rounds, num_drafts, accepted, request.num_output_tokens - before, len(rounds), 0.0, share_ms,
                share_ms, self._is_training, now, False,
            )  # fmt: skip
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
            entry.num_rounds += 1
            self._recent.add(entry.bucket, 1, time.monotonic())
            self.length.observe(entry.bucket, self._version, num_drafts, accepted)
        self.length.observe_round(len(rounds), sum(s[2] for s in rounds), share_ms * len(rounds))
        self.publisher.record_rounds(RoundStats(**columns))


def log_of(scheduler: Any) -> RoundLog:
    """The scheduler's log. Raises: RuntimeError where vLLM runs another scheduler or without settings."""
    log = getattr(scheduler, "paceline", None)
    if log is None:
        raise RuntimeError(
            "vLLM must be started with --scheduler-cls paceline_vllm.scheduler.PacelineScheduler and "
            'with {"paceline": {...}} in --additional-config'
        )
    return log


def _with_rounds(base: type) -> type:
    """A scheduler of vLLM's with a RoundLog."""

    class WithRounds(base):  # type: ignore[misc]
        paceline: RoundLog | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            settings = settings_of(self.vllm_config)
            if settings is not None:
                version = target_version_of(self.vllm_config.model_config.model)
                self.paceline = RoundLog(settings, version, self.num_spec_tokens)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            log, began = self.paceline, time.perf_counter()
            if log is None:
                return super().schedule(*args, **kwargs)
            log.cut(self.running)
            out = super().schedule(*args, **kwargs)
            log.start(self.requests, out.scheduled_new_reqs)
            out.paceline_began, out.paceline_ended = began, log.take_ended(out.finished_req_ids)
            return out

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            log = self.paceline
            if log is None:
                return super().update_from_output(scheduler_output, model_runner_output)
            steps = list(log.seen(self.requests, scheduler_output, model_runner_output))
            out = super().update_from_output(scheduler_output, model_runner_output)
            log.record(steps, scheduler_output.paceline_began)
            return out

        def shutdown(self) -> None:
            super().shutdown()
            if self.paceline is not None:
                self.paceline.publisher.close()

    return WithRounds


PacelineScheduler = _with_rounds(Scheduler)
PacelineAsyncScheduler = _with_rounds(AsyncScheduler)
