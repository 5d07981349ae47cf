"""How likely does the target find the tokens of a prompt: which rows of a prefill yield it, and how many at once?

Row i of a prompt scores token i + 1; nothing scores the first token, and the last row belongs to the first output token.
"""

from __future__ import annotations

import torch

from paceline.serving.request import TokenLogprob
from paceline.serving.running_request import RunningRequest
from paceline.serving.sampling import token_logprobs

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
    own, top_ids, top_values = token_logprobs(logits, torch.tensor(scored, device=logits.device), num_top)
    rows = zip(scored, own.tolist(), top_ids.tolist(), top_values.tolist(), strict=True)
    known += [TokenLogprob(token_id=t, logprob=lp, top=tuple(zip(i, v, strict=True))) for t, lp, i, v in rows]
