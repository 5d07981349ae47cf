"""Prefill runner: brings prompts into the KV pool, by one packed causal forward over a bounded chunk of rows a round.

Rows that complete a prompt yield the request's first output token. After a preemption the rows of prompt and output are
recomputed and nothing is drawn: the anchor is already known. A request that wants its prompt's log-probabilities gets
logits of its prompt rows too: row i of a prompt scores token i + 1, and nothing scores the first token.

Shape legend: N packed rows, B requests in the chunk, M rows with logits, D requests whose prompt is complete, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.serving.engine.classes import PromptClasses
from paceline.serving.engine.output import RoundOutput, round_logprobs
from paceline.serving.engine.running import DrafterPins, RunningRequest, cut_tokens
from paceline.serving.engine.scheduler import Scheduler
from paceline.serving.sampling.draw import SamplingBatch, draw_tokens, token_logprobs, token_ranks
from paceline.serving.sampling.request import TokenLogprob
from paceline.serving.target_model.kv_cache import KVPool
from paceline.serving.target_model.model import TargetBatch, TargetModel, TargetOutput

MAX_ELEMENTS = 1 << 24
"""Logits of prompt rows that one forward may hold: 64 MiB of float32."""


def bound_chunks(
    chunks: list[tuple[RunningRequest, int]], vocab_size: int, max_elements: int = MAX_ELEMENTS
) -> list[tuple[RunningRequest, int]]:
    """Cut or leave out requests whose prompt is scored where their logits would take too much memory.

    Args:
        chunks: (request, rows to prefill now).
    Returns: the same for fewer rows, at least one.
    """
    if all(r.request.prompt_logprobs is None for r, _ in chunks):
        return chunks
    room = max(max_elements // vocab_size, 1)
    bounded = []
    for request, num_rows in chunks:
        if num_scores(request, request.context_len + num_rows):
            num_rows = min(num_rows, room)
            room -= num_rows
        if num_rows:
            bounded.append((request, num_rows))
    return bounded


def num_scores(request: RunningRequest, stop: int) -> int:
    """Rows before position `stop` that score prompt tokens; the first of them is at `first_score_position`.

    Rows known from before a preemption are not scored again.
    """
    if request.request.prompt_logprobs is None:
        return 0
    return max(min(stop, request.prompt_len - 1) - first_score_position(request), 0)


def first_score_position(request: RunningRequest) -> int:
    """Position of the next row that scores a token; it must be among the rows computed now or later, never cached."""
    return len(request.prompt_logprobs) - 1


def score_prompt(request: RunningRequest, logits: torch.Tensor) -> None:
    """Append the log-probabilities of the next prompt tokens, one for each row of logits (r, V).  Syncs: one."""
    known, num_top = request.prompt_logprobs, request.request.prompt_logprobs or 0
    scored = request.tokens[len(known) : len(known) + len(logits)]
    token_ids = torch.tensor(scored, device=logits.device)
    ranks = token_ranks(logits, token_ids)
    own, top_ids, top_values = token_logprobs(logits, token_ids, num_top)
    rows = zip(scored, own.tolist(), top_ids.tolist(), top_values.tolist(), ranks.tolist(), strict=True)
    known += [
        TokenLogprob(token_id=t, logprob=lp, top=tuple(zip(i, v, strict=True)), rank=rank) for t, lp, i, v, rank in rows
    ]


@dataclass(kw_only=True, slots=True)
class PromptRows:
    """The prompt rows of one round, packed."""

    chunks: list[tuple[RunningRequest, int]]
    logit_rows: list[int]
    drawing: list[RunningRequest]  # whose prompt is complete after this forward
    draw_at: list[int]  # (D,) their rows of logits
    scoring: list[tuple[RunningRequest, int, int]]  # (request, its first row of logits, their number)

    out_rows: torch.Tensor | None = None
    """(N,) int64 pool rows on the device, once `batch` was asked for."""

    @property
    def num_rows(self) -> int:
        """N."""
        return sum(num for _, num in self.chunks)

    def batch(self, device: torch.device) -> TargetBatch:
        """The rows for an eager forward."""
        token_ids, positions, offsets = list[int](), list[int](), [0]
        table = torch.zeros(len(self.chunks), max(r.context_len for r, _ in self.chunks), dtype=torch.int64)
        for i, (request, num_rows) in enumerate(self.chunks):
            start, stop = request.context_len, request.context_len + num_rows
            token_ids += request.tokens[start:stop]
            positions += range(start, stop)
            offsets.append(len(token_ids))
            table[i, :start] = request.rows[:start]  # type: ignore[index]
        out_rows = [r.rows[r.context_len : r.context_len + num] for r, num in self.chunks]  # type: ignore[index]
        self.out_rows = torch.cat(out_rows).to(device)
        return TargetBatch(
            token_ids=torch.tensor(token_ids, device=device),
            positions=torch.tensor(positions, device=device),
            cu_rows=torch.tensor(offsets, device=device),
            context_lens=torch.tensor([r.context_len for r, _ in self.chunks], device=device),
            slot_table=table.to(device),
            out_rows=self.out_rows,
            ancestors=None,
            logit_rows=torch.tensor(self.logit_rows, dtype=torch.int64, device=device),
        )


class PrefillRunner:
    """Runs prefill chunks. Engine thread only."""

    def __init__(
        self,
        target: TargetModel,
        kv: KVPool,
        scheduler: Scheduler,
        output: RoundOutput,
        pins: DrafterPins,
        classes: PromptClasses | None = None,
    ) -> None:
        """pins: what a class that was told changes; classes: what sorts requests without a bucket; None = nothing does."""
        self._target = target
        self._kv = kv
        self._scheduler = scheduler
        self._output = output
        self._pins = pins
        self._classes = classes
        self.num_rows = 0

    def run(self, chunks: list[tuple[RunningRequest, int]]) -> None:
        """Prefill the next rows of each request; requests whose rows are complete start running (or end)."""
        rows = self.pack(chunks)
        self.finish(rows, self._target.forward(rows.batch(self._target.device), self._kv))

    def pack(self, chunks: list[tuple[RunningRequest, int]]) -> PromptRows:
        """Lay out the next rows of each request for a forward. Mutates nothing."""
        chunks = bound_chunks(chunks, self._target.vocab_size)
        num_rows, logit_rows = 0, list[int]()
        drawing: list[RunningRequest] = []
        draw_at: list[int] = []
        scoring: list[tuple[RunningRequest, int, int]] = []  # (request, its first row of logits, their number)
        for request, num in chunks:
            start, stop = request.context_len, request.context_len + num
            assert request.rows is not None
            if num_scored := num_scores(request, stop):
                first = num_rows + first_score_position(request) - start
                assert first >= num_rows, "a row that scores a prompt token was not computed"
                scoring.append((request, len(logit_rows), num_scored))
                logit_rows += range(first, first + num_scored)
            num_rows += num
            if stop == len(request.tokens):  # no output yet, so the last row's logits are the first token's
                draw_at.append(len(logit_rows))
                logit_rows.append(num_rows - 1)
                drawing.append(request)
        return PromptRows(chunks=chunks, logit_rows=logit_rows, drawing=drawing, draw_at=draw_at, scoring=scoring)

    def finish(self, rows: PromptRows, out: TargetOutput) -> None:
        """Take the forward's output; requests whose rows are complete start running (or end).

        Syncs: one where first tokens are drawn, or where the prompt of a resumed answer tells its class.
        """
        self.num_rows += rows.num_rows
        if out.features is not None and self._kv.features is not None and rows.out_rows is not None:
            self._kv.features.index_copy_(0, rows.out_rows, out.features)
        for request, num_rows in rows.chunks:
            request.context_len += num_rows
            self._scheduler.publish(request)
            if request.context_len == request.prefill_len:
                self._scheduler.start_running(request)
        for request, at, num in rows.scoring:
            score_prompt(request, out.logits[at : at + num])
        ready = [r for r, _ in rows.chunks if r.context_len == r.prefill_len] if self._classes is not None else []
        vectors = self._classes.launch(ready) if self._classes is not None and ready else None
        logits = out.logits[rows.draw_at] if rows.scoring else out.logits
        token_ids = self._draw_first(rows.drawing, logits) if rows.drawing else []
        if self._classes is not None and vectors is not None:
            if vectors.is_pinned() and not rows.drawing:
                torch.cuda.current_stream().synchronize()
            for request in self._classes.assign(ready, vectors):
                self._pins.follow_class(request)
        if rows.drawing:
            self._emit_first(rows.drawing, logits, token_ids)

    def _draw_first(self, requests: list[RunningRequest], logits: torch.Tensor) -> list[int]:
        """Draw the first output token of each request from logits (D, V)."""
        device = logits.device
        sampling = SamplingBatch.from_params(
            [r.request.params for r in requests], [r.seed for r in requests], [r.counts for r in requests], device,
            [r.grammar for r in requests], [r.limits for r in requests],
        )  # fmt: skip
        positions = torch.tensor([len(r.tokens) for r in requests], device=device)
        owner = torch.arange(len(requests), device=device)
        sampling.rewind()
        token_ids = draw_tokens(logits, owner, positions, sampling).tolist()
        sampling.advance(range(len(requests)), token_ids)
        return token_ids

    def _emit_first(self, requests: list[RunningRequest], logits: torch.Tensor, token_ids: list[int]) -> None:
        """Emit what was drawn from logits (D, V)."""
        rows = [[i] for i in range(len(requests))]
        if self._output.traces is not None:
            self._output.traces.add(requests, rows, logits)
        logprobs = round_logprobs(requests, logits, rows, [[t] for t in token_ids])
        for i, request in enumerate(requests):
            kept, reason, match = cut_tokens(request, [token_ids[i]])
            request.append_output(kept)
            prompt = tuple(request.prompt_logprobs) if request.request.prompt_logprobs is not None else None
            own = logprobs[i] if logprobs else None
            self._output.emit(request, kept, 0, own[: len(kept)] if own else own, reason, match, prompt)
