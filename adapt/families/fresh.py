"""Fresh drafters: what one takes over from its training text before the first step.

Shape legend: H drafter hidden size, F fused feature size, m tapped layers, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.adapt.families.target_handle import TargetHandle
from paceline.serving.drafters.network import TargetHandles
from paceline.serving.sampling.request import RequestTrace

_MAX_TRACES, _ROWS_PER_TRACE = 256, 8


@torch.no_grad()
def even_taps(weight: torch.Tensor, traces: Sequence[RequestTrace], target: TargetHandle) -> None:
    """Divide a projection's columns (H, F) by each tap's root mean square: deep taps would drown shallow ones."""
    num_taps = max(1, target.feature_size // target.embed_weight.shape[1])
    rows = torch.cat([t.features[:: max(1, len(t.token_ids) // _ROWS_PER_TRACE)] for t in traces[:_MAX_TRACES]]).float()  # type: ignore[index]
    width = weight.shape[1] // num_taps
    for i in range(num_taps):
        span = slice(i * width, (i + 1) * width)
        rms = rows[:, span].pow(2).mean().sqrt().clamp_min(1e-6)
        weight[:, span] /= rms


@torch.no_grad()
def reduce_vocab(model: Any, traces: Sequence[RequestTrace]) -> None:
    """Choose the draft vocabulary of a model that has a reduced one (buffers draft_token_ids and log_coverage)."""
    c = model.config
    if c.draft_vocab_size is not None:
        ids, log_coverage = most_frequent_tokens(traces, c.draft_vocab_size, c.vocab_size)
        model.draft_token_ids.copy_(ids)
        model.log_coverage.copy_(log_coverage)


def target_embedding(target: TargetHandles, device: torch.device) -> torch.Tensor:
    """What most losses read of the target: its token embedding (V, E) float32, without gradient."""
    return target.embed_weight.detach().to(device, torch.float32)


def most_frequent_tokens(
    traces: Sequence[RequestTrace], num_tokens: int, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The draft vocabulary: the tokens that the target wrote most often, by rising id, and their share of its output.

    Returns: (Vd,) int64 target ids, and the log of the smoothed share of output tokens among them, () float32 <= 0.
    """
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for trace in traces:
        counts += torch.bincount(
            torch.tensor(trace.token_ids[trace.prompt_len :], dtype=torch.int64), minlength=vocab_size
        )
    ids = counts.argsort(descending=True, stable=True)[:num_tokens].sort().values
    # One imagined token of each side: a text that never left the draft vocabulary does not prove that none will.
    share = (counts[ids].sum() + 1) / (counts.sum() + (1 if num_tokens == vocab_size else 2))
    return ids, share.log().float()
