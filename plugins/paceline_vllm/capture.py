"""Capture: the target's tapped hidden states and best tokens of a step, kept until their request has ended.

EAGLE-3 and DFlash read these states anyway; a copy of them costs no forward pass. Rows of rejected drafts are overwritten
by the next step's rows of the same positions. Runs in the worker's process, in the one of rank 0 alone.
Shape legend: B requests of a step, F features of a row (all tapped layers side by side), k best tokens.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.data.trace_writer import TraceWriter
from paceline.config import TraceConfig
from paceline.infra.state.redis_clients import producer_client
from paceline.infra.state.redis_clock import RedisClock
from paceline.serving.sampling.request import RequestTrace
from paceline_vllm.settings import Settings, settings_of, target_version_of

log = logging.getLogger(__name__)


_SPLIT_ELSEWHERE = {"batch_sharder": "batch-sharded sampling", "adaptive_verification": "adaptive verification"}
"""Attributes of the V2 runner, and what they belong to."""


class Ended(NamedTuple):
    """A request that has ended, as the scheduler tells it to the workers."""

    bucket: str
    temperature: float
    prompt_len: int
    token_ids: list[int]
    """Prompt and output."""
    finish_reason: str


class _Rows(NamedTuple):
    """Consecutive rows of one request."""

    first: int
    """Position of the first."""
    values: tuple[torch.Tensor, ...]
    """Each (rows, ...)."""


class FeatureCapture:
    """Rows of the requests in flight of one model runner."""

    def __init__(self, settings: Settings, target_version: str) -> None:
        self._topk, self._most, self._target_version = settings.topk, settings.max_trace_tokens, target_version
        clock = RedisClock()
        with producer_client(settings.redis_url) as client:
            clock.try_to_look(client)
        config = TraceConfig(share=settings.trace_share, topk=settings.topk, shard_rows=settings.shard_rows)
        # the service's limits are its controller's to keep
        self._writer = TraceWriter(TraceStore(settings.traces, clock=clock), config, clock=clock, keeps_limits=False)
        self._features: dict[str, list[_Rows]] = {}
        self._best: dict[str, list[_Rows]] = {}
        self.num_incomplete = 0
        """Requests without a trace: too long, or rows missing, since a prefix came from the cache."""

    def wants(self, request_id: str) -> bool:
        return self._writer.is_sampled(request_id)

    def keep_features(self, request_id: str, first: int, rows: list[torch.Tensor]) -> None:
        """rows: (n, H) of each tapped layer, at positions first, first + 1, ..."""
        if first < self._most:
            self._features.setdefault(request_id, []).append(_Rows(first, (torch.cat(rows, dim=-1).cpu(),)))

    def keep_best(self, request_id: str, first: int, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        """ids, logprobs: (n, k) of the tokens at positions first, first + 1, ..."""
        if first < self._most:
            self._best.setdefault(request_id, []).append(_Rows(first, (ids.int().cpu(), logprobs.cpu())))

    def end(self, request_ids: set[str], ended: dict[str, Ended]) -> None:
        """Write the traces of requests that have ended, and forget those that were aborted."""
        for request_id in request_ids:
            features, best = self._features.pop(request_id, []), self._best.pop(request_id, [])
            request = ended.get(request_id)
            if request is None or not features:
                continue
            total, start = len(request.token_ids), request.prompt_len
            rows, tops = _joined(features, 0, total - 1), _joined(best, start, total)
            if rows is None or tops is None or total <= start:
                self.num_incomplete += 1
                continue
            if self._writer.wants(request_id, request.bucket):
                self._writer.record_trace(
                    RequestTrace(
                        request_id=request_id, bucket=request.bucket, temperature=request.temperature, prompt_len=start,
                        token_ids=request.token_ids, features=rows[0], topk_ids=tops[0], topk_logprobs=tops[1],
                        target_version=self._target_version, finish_reason=request.finish_reason,
                    )
                )  # fmt: skip

    def best_of(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, V) -> ids and log-probabilities (n, k)."""
        k = min(self._topk, logits.shape[-1])
        values, ids = logits.float().topk(k, dim=-1)
        return ids, values - logits.float().logsumexp(-1, keepdim=True)


def _joined(parts: list[_Rows], begin: int, end: int) -> list[torch.Tensor] | None:
    """Rows begin..end-1, later ones over earlier ones; None where one is missing."""
    if not parts or end <= begin:
        return None
    out = [torch.zeros(end - begin, *v.shape[1:], dtype=v.dtype) for v in parts[0].values]
    seen = torch.zeros(end - begin, dtype=torch.bool)
    for first, values in parts:
        low, high = max(first, begin), min(first + len(values[0]), end)
        if high > low:
            for whole, rows in zip(out, values, strict=True):
                whole[low - begin : high - begin] = rows[low - first : high - first]
            seen[low - begin : high - begin] = True
    return out if bool(seen.all()) else None


def install() -> None:
    """Have both model runners keep rows; once a process."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1

    for runner, hooks in ((V1, _v1_hooks), (V2, _v2_hooks)):
        if not hasattr(runner, "paceline_capture"):
            runner.paceline_capture = functools.cached_property(_capture_of)  # type: ignore[attr-defined]
            runner.paceline_capture.__set_name__(runner, "paceline_capture")
            for name, hook in hooks(runner).items():
                setattr(runner, name, functools.wraps(getattr(runner, name))(hook))


def _capture_of(runner: Any) -> FeatureCapture | None:
    """None where nothing is to be kept: without settings, without a share, or in another rank than the first."""
    settings = settings_of(runner.vllm_config)
    if settings is None or settings.trace_share == 0 or runner.parallel_config.rank != 0:
        return None
    for name, option in _SPLIT_ELSEWHERE.items():
        if getattr(runner, name, None) is not None:
            log.warning("no training text is kept with %s: which rows are whose is known on the device alone", option)
            return None
    return FeatureCapture(settings, target_version_of(runner.vllm_config.model_config.model))


def _end(runner: Any, scheduler_output: Any) -> None:
    ended = getattr(scheduler_output, "paceline_ended", {})
    runner.paceline_capture.end(scheduler_output.finished_req_ids, ended)


# ---- V1
def _v1_hooks(runner: Any) -> dict[str, Callable[..., Any]]:
    execute, sample, propose = runner.execute_model, runner._sample, runner.propose_draft_token_ids

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self.paceline_capture is not None:
            _end(self, scheduler_output)
            self.paceline_scheduled = scheduler_output
        return execute(self, scheduler_output, *args, **kwargs)

    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        if self.paceline_capture is not None and logits is not None:
            _keep_best(self, logits, spec_decode_metadata)
        return sample(self, logits, spec_decode_metadata)

    def propose_draft_token_ids(
        self: Any, scheduler_output: Any, sampled: Any, metadata: Any, hidden: Any, sample_hidden: Any, aux: Any, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        if self.paceline_capture is not None and aux is not None:
            for request_id, at, count, first in _places(self, scheduler_output):
                self.paceline_capture.keep_features(request_id, first, [layer[at : at + count] for layer in aux])
        return propose(self, scheduler_output, sampled, metadata, hidden, sample_hidden, aux, *args, **kwargs)

    return {"execute_model": execute_model, "_sample": _sample, "propose_draft_token_ids": propose_draft_token_ids}


def _places(runner: Any, scheduler_output: Any) -> list[tuple[str, int, int, int]]:
    """(request, its first row in the step, its rows, position of the first) of wanted requests, in the step's order."""
    out, at = [], 0
    positions = getattr(runner.positions, "gpu", runner.positions)
    for request_id in runner.input_batch.req_ids:
        count = scheduler_output.num_scheduled_tokens.get(request_id, 0)
        if count and runner.paceline_capture.wants(request_id):
            out.append((request_id, at, count, int(positions[at])))
        at += count
    return out


def _keep_best(runner: Any, logits: torch.Tensor, spec_decode_metadata: Any) -> None:
    """logits: (n, V), for each request of the step its drafted rows and the one behind them."""
    ids, logprobs = runner.paceline_capture.best_of(logits)
    places = {request_id: (count, first) for request_id, _, count, first in _places(runner, runner.paceline_scheduled)}
    drafted = None if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
    at = 0
    for i, request_id in enumerate(runner.input_batch.req_ids):
        rows = 1 if drafted is None else drafted[i] + 1
        if request_id in places:
            count, first = places[request_id]
            # row j of the n rows at its end says what comes behind position first + count - n + j
            runner.paceline_capture.keep_best(
                request_id, first + count - rows + 1, ids[at : at + rows], logprobs[at : at + rows]
            )
        at += rows


# ---- V2
def _wanted(runner: Any, batch: Any, starts: Any) -> list[int]:
    """Places of the wanted requests that have rows, by their starts (B + 1,) on the host; padding behind them is not looked at."""
    names = enumerate(batch.req_ids[: batch.num_reqs])
    return [i for i, name in names if starts[i + 1] > starts[i] and runner.paceline_capture.wants(name)]


def _v2_hooks(runner: Any) -> dict[str, Callable[..., Any]]:
    """Syncs: one a step for the positions of the requests that are wanted, none where none is; the copies of their rows."""
    execute, tokens, sample = runner.execute_model, runner.sample_tokens, runner.sample

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self.paceline_capture is not None:
            _end(self, scheduler_output)
        return execute(self, scheduler_output, *args, **kwargs)

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        state = self.execute_model_state
        if self.paceline_capture is not None and state is not None and state.aux_hidden_states is not None:
            batch, starts = state.input_batch, state.input_batch.query_start_loc_np
            if wanted := _wanted(self, batch, starts):
                firsts = batch.positions[[int(starts[i]) for i in wanted]].tolist()
                for i, first in zip(wanted, firsts, strict=True):
                    rows = [layer[starts[i] : starts[i + 1]] for layer in state.aux_hidden_states]
                    self.paceline_capture.keep_features(batch.req_ids[i], first, rows)
        return tokens(self, grammar_output)

    def sample_(self: Any, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        starts = input_batch.cu_num_logits_np
        if self.paceline_capture is None or not (wanted := _wanted(self, input_batch, starts)):
            return sample(self, hidden_states, input_batch, grammar_output)
        compute = self.model.compute_logits

        def compute_logits(rows: torch.Tensor) -> torch.Tensor:
            logits = compute(rows)
            ids, logprobs = self.paceline_capture.best_of(logits)
            at = input_batch.logits_indices[[int(starts[i]) for i in wanted]]
            for i, position in zip(wanted, input_batch.positions[at].tolist(), strict=True):
                own = slice(starts[i], starts[i + 1])
                # the logits at a position say what comes behind it
                self.paceline_capture.keep_best(input_batch.req_ids[i], position + 1, ids[own], logprobs[own])
            return logits

        self.model.compute_logits = compute_logits
        try:
            return sample(self, hidden_states, input_batch, grammar_output)
        finally:
            del self.model.compute_logits

    return {"execute_model": execute_model, "sample_tokens": sample_tokens, "sample": sample_}
