"""EAGLE-3's training step on logged requests: the training-time test against the logged target distribution.

Every supervised row is unrolled over the text for `num_steps` tokens, each step fed with the drafter's own hidden states.
The loss of a step is the soft cross-entropy to the target's distribution (its logged top k and one bucket for the rest),
restricted to the draft vocabulary; rows whose most likely target token lies outside it are left out. Step t weighs
step_decay ** t. Source: EAGLE-3 (arXiv 2503.01840) and its released training code.
Shape legend: B requests of a batch, T rows, N selected rows, V target vocabulary, Vd draft vocabulary, k logged log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline.adapt.eagle_rows import unrolled_hidden
from paceline.adapt.row_batch import RowBatch, draft_index, head_loss, row_chunks
from paceline.serving.eagle_model import EagleModel


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleLossConfig:
    """What is trained on a batch and how it is weighted."""

    num_steps: int = 5
    step_decay: float = 0.8
    calibration_weight: float = 0.1
    side_share: float = 0.25
    """Share of rows whose calibration loss is computed."""


def training_loss(
    model: EagleModel,
    batch: RowBatch,
    embed: torch.Tensor,
    config: EagleLossConfig,
    generator: torch.Generator,
    *,
    trains_backbone: bool = True,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of one batch (mean per supervised row) and detached sums for reporting.

    Returns the loss and {"rows", "loss", "nll1", "correct1" (histogram over 0..num_steps of how many tokens in a row the
    greedy chain gets right)}; see TrainingLoss for the arguments. embed: (V, E), the target's token embedding.
    """
    c, last = model.config, batch.token_ids.shape[1] - 1
    request, row = batch.is_output[:, 2:].nonzero(as_tuple=True)
    device = row.device
    num_rows = max(1, row.numel())
    total = torch.zeros((), device=device)
    first_nll = torch.zeros((), device=device)
    correct = torch.zeros_like(row)
    is_right = torch.ones_like(row, dtype=torch.bool)
    is_side = torch.rand(row.numel(), generator=generator).to(device) < config.side_share
    to_draft = draft_index(model.draft_token_ids, c.vocab_size) if c.draft_vocab_size is not None else None  # type: ignore[arg-type]
    learns = torch.is_grad_enabled() and trains_backbone
    steps = unrolled_hidden(model, batch, embed, config.num_steps)
    for step in range(config.num_steps):
        with torch.set_grad_enabled(learns):
            hidden = next(steps)
        at = row + 2 + step
        inside = (at <= last) & batch.is_output[request, at.clamp_max(last)]
        is_right &= inside
        chosen = inside.nonzero()[:, 0]
        for part in row_chunks(chosen, c.num_draft_ids):
            where = (request[part], at[part])
            text, ids, logprobs = batch.token_ids[where], batch.topk_ids[where], batch.topk_logprobs[where]
            is_taught = torch.ones_like(text, dtype=torch.bool)
            if to_draft is not None:
                text, ids, logprobs, is_taught = _in_draft_vocab(to_draft, text, ids, logprobs)
            z = model.normed(hidden[request[part], row[part]])
            loss, best, logits = head_loss(model.lm_head, z, ids, logprobs, num_rows=chosen.numel())
            loss = loss * is_taught
            total = total + config.step_decay**step * loss.sum()
            if step == 0:
                first_nll = first_nll + loss.detach().sum()
            is_right[part] &= best == text
            side = is_side[part] & (text >= 0)
            if config.calibration_weight and bool(side.any()):
                known = model.lm_head(z[side]) if logits is None else logits[side]
                temperatures = batch.temperatures[request[part][side]]
                calibration = _calibration_loss(model, known.detach().float(), text[side], temperatures, step)
                total = total + config.calibration_weight / config.side_share * calibration
        correct += is_right
    total = total / num_rows
    report = {
        "rows": torch.tensor(float(row.numel())),
        "loss": total.detach(),
        "nll1": first_nll,
        "correct1": torch.bincount(correct, minlength=config.num_steps + 1).float(),
    }
    return total, report


def _in_draft_vocab(
    to_draft: torch.Tensor, text: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draft ids (-1 = outside) of text (N,) and logged tokens (N, k), log-probs given that the token is not known to lie
    outside, and whether the most likely token is inside (N,)."""
    mapped = to_draft[ids]
    is_outside = mapped < 0
    mass = (logprobs.exp() * is_outside).sum(-1, keepdim=True)
    kept = logprobs - torch.log1p(-mass.clamp_max(1 - 1e-6))
    return to_draft[text], mapped, kept.masked_fill(is_outside, float("-inf")), ~is_outside[:, 0]


def _calibration_loss(
    model: EagleModel, logits: torch.Tensor, text: torch.Tensor, temperatures: torch.Tensor, step: int
) -> torch.Tensor:
    """The text's negative log-likelihood as a function of log_beta alone, summed."""
    is_sampled = temperatures > 0
    beta = model.log_beta[is_sampled.long(), min(step, model.config.num_steps - 1)].exp()
    scaled = logits * (beta / torch.where(is_sampled, temperatures.clamp_min(0.05), 1.0))[:, None]
    return F.cross_entropy(scaled, text, reduction="sum")
