"""Row batch: logged requests packed side by side, and the loss against the logged target distribution.

Shape legend: B requests of a batch, T rows (padded at the end), F feature size, k logged target log-probs a token,
N selected rows, V (draft) vocabulary. Row j of a request is (feature at j, token at j + 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from paceline.adapt.data.trace_store import learned_span
from paceline.serving.sampling.request import RequestTrace

_MAX_LOGITS = 2**26
"""Logits held at once; beyond it the output head runs in checkpointed chunks."""


@dataclass(kw_only=True, slots=True)
class RowBatch:
    """Logged requests side by side; position p of `token_ids`, `topk_*` and `is_output` is a token position."""

    features: torch.Tensor  # (B, T, F), rows 0..num_rows-1 of each request
    token_ids: torch.Tensor  # (B, T + 1) int64, padded with 0
    is_output: torch.Tensor  # (B, T + 1) bool: the target wrote this token (false in prompts and padding)
    topk_ids: torch.Tensor  # (B, T + 1, k) int64: target's most likely tokens at this position
    topk_logprobs: torch.Tensor  # (B, T + 1, k) float32, -inf = absent; where nothing was logged: the token itself, 0
    temperatures: torch.Tensor  # (B,) float32, 0 = greedy

    @property
    def num_rows(self) -> int:
        """Rows that slot 0 of block 1 supervises."""
        return int(self.is_output[:, 2:].sum()) if self.token_ids.shape[1] > 2 else 0


def collate(
    traces: Sequence[RequestTrace], *, max_rows: int | None = None, device: str | torch.device = "cpu"
) -> RowBatch:
    """Pack traces into one batch.

    Requests longer than max_rows rows are cut to their `learned_span`: what teaches is the output, and only distances between
    rows count.
    """
    spans = [learned_span(t, max_rows or len(t.token_ids)) for t in traces]
    widths = [0 if t.topk_ids is None else int(t.topk_ids.shape[-1]) for t in traces]  # type: ignore[attr-defined]
    rows = [torch.as_tensor(t.features)[span.start : span.stop - 1] for t, span in zip(traces, spans, strict=True)]
    features = pad_sequence(rows, batch_first=True)
    texts = [torch.tensor(t.token_ids[span]) for t, span in zip(traces, spans, strict=True)]
    token_ids = pad_sequence(texts, batch_first=True)
    is_output = torch.zeros(token_ids.shape, dtype=torch.bool)
    topk_ids = torch.zeros(*token_ids.shape, max(1, *widths), dtype=torch.int64)
    topk_logprobs = torch.full(topk_ids.shape, float("-inf"))
    topk_ids[..., 0] = token_ids
    for i, (trace, span) in enumerate(zip(traces, spans, strict=True)):
        output = slice(trace.prompt_len - span.start, span.stop - span.start)
        is_output[i, output] = True
        topk_logprobs[i, : output.stop, 0] = 0.0
        count = output.stop - output.start
        if widths[i]:
            topk_ids[i, output, : widths[i]] = trace.topk_ids[:count].long()  # type: ignore[index]
            topk_logprobs[i, output, : widths[i]] = trace.topk_logprobs[:count]  # type: ignore[index]
    return RowBatch(
        features=features.to(device),
        token_ids=token_ids.to(device),
        is_output=is_output.to(device),
        topk_ids=topk_ids.to(device),
        topk_logprobs=topk_logprobs.to(device),
        temperatures=torch.tensor([float(t.temperature) for t in traces], device=device),
    )


def soft_cross_entropy(logits: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Cross-entropy per row to the logged top-k plus one bucket for the rest: (N, V), (N, k), (N, k) -> (N,)."""
    draft = torch.log_softmax(logits.float(), dim=-1).gather(1, ids.clamp_min(0))
    target = logprobs.exp() * (ids >= 0)
    rest = (1.0 - target.sum(-1)).clamp_min(0.0)
    draft_mass = (draft.exp() * (target > 0)).sum(-1)
    loss = -(target * draft.masked_fill(target == 0, 0.0)).sum(-1)
    return loss - rest * torch.log1p(-draft_mass.clamp_max(1 - 1e-6))


def calibrated(logits: torch.Tensor, log_beta: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Logits (N, V) over temperature, times the calibration's factor. log_beta: (N, 2), of greedy and sampled requests."""
    is_sampled = temperatures > 0
    beta = log_beta.gather(1, is_sampled.long()[:, None])[:, 0].exp()
    return logits * (beta / torch.where(is_sampled, temperatures.clamp_min(0.05), 1.0))[:, None]


def draft_index(draft_token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """(V,) int64 draft id of each target id, -1 outside the draft vocabulary."""
    index = torch.full((vocab_size,), -1, dtype=torch.int64, device=draft_token_ids.device)
    index[draft_token_ids] = torch.arange(draft_token_ids.numel(), device=draft_token_ids.device)
    return index


def in_draft_vocab(
    to_draft: torch.Tensor, text: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draft ids (-1 = outside) of text (N,) and logged tokens (N, k), log-probs given that the token is not known to lie
    outside, and whether the most likely token is inside (N,). to_draft: of `draft_index`."""
    mapped = to_draft[ids]
    is_outside = mapped < 0
    mass = (logprobs.exp() * is_outside).sum(-1, keepdim=True)
    kept = logprobs - torch.log1p(-mass.clamp_max(1 - 1e-6))
    return to_draft[text], mapped, kept.masked_fill(is_outside, float("-inf")), ~is_outside[:, 0]


def row_chunks(rows: torch.Tensor, width: int) -> Sequence[torch.Tensor]:
    """Row numbers in parts whose logits over `width` tokens may be held at once."""
    return rows.split(max(1, _MAX_LOGITS // width))


def head_loss(
    head: torch.Tensor, z: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor, *, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`soft_cross_entropy` of the output head (V, H) at normed hidden states z (N, H), its argmax (N,) and its logits.

    num_rows: of all chunks together; where their logits would not fit, these are computed again backwards and the third
    result is None.
    """
    if num_rows * head.shape[0] > _MAX_LOGITS and torch.is_grad_enabled():
        loss, best = checkpoint(_loss_and_best, head, z, ids, logprobs, use_reentrant=False)
        return loss, best, None
    logits = F.linear(z, head)
    return soft_cross_entropy(logits, ids, logprobs), logits.argmax(-1), logits


def _loss_and_best(
    head: torch.Tensor, z: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = F.linear(z, head)
    return soft_cross_entropy(logits, ids, logprobs), logits.argmax(-1)
