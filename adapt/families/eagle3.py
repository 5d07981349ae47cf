"""EAGLE-3 training: the training-time test on logged requests, and how a drafter is made, trained, updated and judged.

Row j of step 0 holds the fused feature at j and the token at j + 1; row j of step t holds its own hidden state of step
t - 1 and the token at j + 1 + t, and predicts the token at j + 2 + t. A row of step t sees what the t-th token below an
anchor sees in serving: the true-feature rows 0..j of step 0 and, on its own diagonal, the rows of steps 1..t.
Every supervised row is unrolled over the text for `num_steps` tokens. The loss of a step is the soft cross-entropy to the
target's distribution (its logged top k and one bucket for the rest), restricted to the draft vocabulary; rows whose most
likely target token lies outside it are left out. Step t weighs step_decay ** t.
Source: EAGLE-3 (arXiv 2503.01840), figure 6, and its released training code.
Shape legend: B requests of a batch, T rows (padded at the end), N selected rows, H drafter hidden size, Hq/Hkv query/KV
heads, Dh head dim, V target vocabulary, Vd draft vocabulary, k logged log-probs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline.adapt.families.family import TrainingFamily, num_reached
from paceline.adapt.families.recipe import DrafterRecipe, TargetShape
from paceline.adapt.families.row_batch import (
    RowBatch,
    calibrated,
    draft_index,
    head_loss,
    in_draft_vocab,
    row_chunks,
)
from paceline.adapt.families.target_handle import TargetHandle, TargetTables
from paceline.errors import ConfigError
from paceline.serving.drafters.network import rope_cos_sin
from paceline.serving.eagle3 import drafter
from paceline.serving.eagle3.model import EagleConfig, EagleModel


def unrolled_hidden(model: EagleModel, batch: RowBatch, embed: torch.Tensor, num_steps: int) -> Iterator[torch.Tensor]:
    """Hidden states (B, T, H), before the final norm, of steps 0..num_steps-1. embed: (V, E), the target's embedding."""
    c = model.config
    rows = batch.features.shape[1]
    hidden = F.linear(batch.features.to(model.fc.weight.dtype), model.fc.weight)
    groups = c.num_heads // c.num_kv_heads
    token_ids = F.pad(batch.token_ids, (0, num_steps))
    positions = torch.arange(rows, device=hidden.device)
    future = torch.ones(rows, rows, dtype=torch.bool, device=hidden.device).triu_(1)
    every_k: list[torch.Tensor] = []
    every_v: list[torch.Tensor] = []
    for step in range(num_steps):
        embedded = F.embedding(token_ids[:, 1 + step : 1 + step + rows], embed)
        cos, sin = rope_cos_sin((positions + step)[None], c.head_dim, c.rope_theta, c.rope_scaling)
        q, k, v = model.qkv(hidden, embedded, cos, sin)
        every_k.append(k.repeat_interleave(groups, 1))
        every_v.append(v.to(k.dtype).repeat_interleave(groups, 1))
        if step == 0:
            attended = F.scaled_dot_product_attention(q, every_k[0], every_v[0], is_causal=True)
        else:
            attended = _attend_diagonals(q, every_k, every_v, future)
        hidden = model.finish(hidden, attended)
        yield hidden


def _attend_diagonals(
    q: torch.Tensor, every_k: list[torch.Tensor], every_v: list[torch.Tensor], future: torch.Tensor
) -> torch.Tensor:
    """q and each k, v (B, Hq, T, Dh): causal over step 0, own row only over later steps -> (B, Hq, T, Dh)."""
    q = q * q.shape[-1] ** -0.5
    rows = q.shape[2]
    context = (q @ every_k[0].transpose(2, 3)).float().masked_fill(future, float("-inf"))
    own = torch.stack([(q * k).sum(-1) for k in every_k[1:]], dim=-1).float()
    shares = torch.cat((context, own), dim=-1).softmax(-1).to(q.dtype)
    out = shares[..., :rows] @ every_v[0]
    for i, v in enumerate(every_v[1:]):
        out = out + shares[..., rows + i, None] * v
    return out


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
    tables: TargetTables,
    config: EagleLossConfig,
    generator: torch.Generator,
    *,
    trains_backbone: bool = True,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of one batch (mean per supervised row) and detached sums for reporting.

    Returns the loss and {"rows", "loss", "nll1", "correct1" (histogram over 0..num_steps of how many tokens in a row the
    greedy chain gets right)}; see TrainingLoss for the arguments.
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
    steps = unrolled_hidden(model, batch, tables.embed, config.num_steps)
    head = tables.head_of(model)
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
                text, ids, logprobs, is_taught = in_draft_vocab(to_draft, text, ids, logprobs)
            z = model.normed(hidden[request[part], row[part]])
            loss, best, logits = head_loss(head, z, ids, logprobs, num_rows=chosen.numel())
            loss = loss * is_taught
            total = total + config.step_decay**step * loss.sum()
            if step == 0:
                first_nll = first_nll + _nll(model, loss.detach(), is_taught).sum()
            is_right[part] &= best == text
            side = is_side[part] & (text >= 0)
            if config.calibration_weight and bool(side.any()):
                known = F.linear(z[side], head) if logits is None else logits[side]
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


def _nll(model: EagleModel, loss: torch.Tensor, is_taught: torch.Tensor) -> torch.Tensor:
    """Cross-entropy (N,) of draft tokens in the target's vocabulary; all tokens outside the draft vocabulary are one.

    loss: within the draft vocabulary, of rows that are taught.
    """
    if model.config.draft_vocab_size is None:
        return loss
    log_coverage = model.get_buffer("log_coverage")
    outside = -torch.log1p(-log_coverage.exp().clamp_max(1 - 1e-6))
    return torch.where(is_taught, loss - log_coverage, outside)


def _calibration_loss(
    model: EagleModel, logits: torch.Tensor, text: torch.Tensor, temperatures: torch.Tensor, step: int
) -> torch.Tensor:
    """The text's negative log-likelihood as a function of log_beta alone, summed."""
    beta = model.log_beta[:, min(step, model.config.num_steps - 1)].expand(len(text), 2)
    return F.cross_entropy(calibrated(logits, beta, temperatures), text, reduction="sum")


_CALIBRATION = ("log_beta",)


def make_config(target: TargetHandle, shape: TargetShape, recipe: DrafterRecipe) -> EagleConfig:
    """One layer shaped like the target's. recipe: complete. Raises: ConfigError when it wants more layers."""
    if recipe.num_layers != 1:
        raise ConfigError(f"num_layers of an EAGLE-3 drafter must be 1, got {recipe.num_layers}")
    assert recipe.num_slots is not None and isinstance(recipe.loss, EagleLossConfig)
    return EagleConfig(
        **shape.sizes(target),
        embed_size=target.embed_weight.shape[1],
        num_slots=recipe.num_slots,
        num_steps=recipe.loss.num_steps,
        draft_vocab_size=recipe.draft_vocab_size,
        shares_head=recipe.shares_head,
    )


def update_loss(model: EagleModel, trains_backbone: bool) -> EagleLossConfig:
    """As many steps as the drafter was trained with; every row teaches calibration where rows are cheap."""
    return EagleLossConfig(num_steps=model.config.num_steps, side_share=0.25 if trains_backbone else 1.0)


def follow_reach(config: EagleLossConfig, reach: Sequence[float], shape: EagleConfig) -> EagleLossConfig:
    return dataclasses.replace(config, num_steps=num_reached(reach, shape.num_steps))


def held_out_loss(config: EagleLossConfig) -> EagleLossConfig:
    return EagleLossConfig(num_steps=config.num_steps, step_decay=config.step_decay, calibration_weight=0)


FAMILY = TrainingFamily(
    serving=drafter.FAMILY,
    defaults={"learning_rate": 2e-3, "num_layers": 1, "num_slots": 1, "loss": EagleLossConfig()},
    make_config=make_config,
    projection="fc.weight",
    loss=training_loss,
    update_loss=update_loss,
    follow_reach=follow_reach,
    held_out_loss=held_out_loss,
    arms={"calibration": _CALIBRATION, "head": (*_CALIBRATION, "lm_head.", "final_norm"), "full": None},
)
