"""How do prompts enter the KV pool: one packed causal forward over a bounded chunk of rows a round?

Rows that complete a prompt yield the request's first output token. After a preemption the rows of prompt and output are
recomputed and nothing is drawn: the anchor is already known.

Shape legend: N packed rows, B requests in the chunk, M requests whose prompt is complete, V vocab.
"""

from __future__ import annotations

import torch

from paceline.serving.kv_cache import KVPool
from paceline.serving.round_output import RoundOutput, round_logprobs
from paceline.serving.running_request import RunningRequest
from paceline.serving.sampling import SamplingBatch, draw_tokens
from paceline.serving.scheduler import Scheduler
from paceline.serving.stop_check import cut_tokens
from paceline.serving.target import TargetBatch, TargetModel


class PrefillRunner:
    """Runs prefill chunks. Engine thread only."""

    def __init__(self, target: TargetModel, kv: KVPool, scheduler: Scheduler, output: RoundOutput) -> None:
        self._target = target
        self._kv = kv
        self._scheduler = scheduler
        self._output = output
        self.num_rows = 0

    def run(self, chunks: list[tuple[RunningRequest, int]]) -> None:
        """Prefill the next rows of each request; requests whose rows are complete start running (or end)."""
        device = self._target.device
        token_ids: list[int] = []
        positions: list[int] = []
        offsets = [0]
        out_rows, logit_rows, drawing = [], [], []
        for request, num_rows in chunks:
            start, stop = request.context_len, request.context_len + num_rows
            assert request.rows is not None
            token_ids += request.tokens[start:stop]
            positions += range(start, stop)
            out_rows.append(request.rows[start:stop])
            offsets.append(len(token_ids))
            if stop == len(request.tokens):  # no output yet, so the last row's logits are the first token's
                logit_rows.append(len(token_ids) - 1)
                drawing.append(request)
        longest = max(r.context_len for r, _ in chunks)
        table = torch.zeros(len(chunks), longest, dtype=torch.int64)
        for i, (request, _) in enumerate(chunks):
            table[i, : request.context_len] = request.rows[: request.context_len]  # type: ignore[index]
        out = self._target.forward(
            TargetBatch(
                token_ids=torch.tensor(token_ids, device=device),
                positions=torch.tensor(positions, device=device),
                cu_rows=torch.tensor(offsets, device=device),
                context_lens=torch.tensor([r.context_len for r, _ in chunks], device=device),
                slot_table=table.to(device),
                out_rows=torch.cat(out_rows).to(device),
                ancestors=None,
                logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
            ),
            self._kv,
        )
        self.num_rows += len(token_ids)
        for i, (request, num_rows) in enumerate(chunks):
            if out.features is not None and (request.needs_features or request.trace is not None):
                features = out.features[offsets[i] : offsets[i + 1]]
                if len(chunks) > 1:
                    features = features.clone()  # a view would keep the other requests' rows alive
                if request.needs_features:
                    request.pending.append(features)
                if request.trace is not None:
                    self._output.trace_features(request, request.context_len, features)
            request.context_len += num_rows
            if request.context_len == request.prefill_len:
                self._scheduler.start_running(request)
        if drawing:
            self._draw_first(drawing, out.logits)

    def _draw_first(self, requests: list[RunningRequest], logits: torch.Tensor) -> None:
        """Draw and emit the first output token of each request from logits (M, V)."""
        device = logits.device
        sampling = SamplingBatch.from_params(
            [r.request.params for r in requests], [r.seed for r in requests], [r.counts for r in requests], device,
            [r.grammar for r in requests],
        )  # fmt: skip
        positions = torch.tensor([len(r.tokens) for r in requests], device=device)
        owner = torch.arange(len(requests), device=device)
        sampling.rewind()
        token_ids = draw_tokens(logits, owner, positions, sampling).tolist()
        sampling.advance(range(len(requests)), token_ids)
        rows = [[i] for i in range(len(requests))]
        logprobs = round_logprobs(requests, logits, rows, [[t] for t in token_ids])
        for i, request in enumerate(requests):
            kept, reason, match = cut_tokens(request, [token_ids[i]])
            request.append_output(kept)
            if request.trace is not None:
                self._output.trace_logits(request, logits[i : i + 1])
            self._output.emit(request, kept, 0, logprobs[i] if logprobs else None, reason, match)
