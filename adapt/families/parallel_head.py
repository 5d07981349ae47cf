"""Parallel-head training: JetSpec's and DFlash's losses on logged requests, and how a drafter is made, updated and judged.

A block behind anchor a sees the context rows t < a (the anchor's own feature does not exist while drafting) and its own
rows, those before each row or all of them; blocks do not see each other.
The objective is the target's soft distribution by forward KL (JetSpec's paper) or the token in the text by cross-entropy
(DFlash's). Slots weigh the same (JetSpec's paper), exp(-s / gamma) with gamma = 7 in a block of 15 (DFlash's), or what is
`served`: the tokens that hang on a slot in the rounds of an exact replay. Sums are divided by the sum of their weights.
With a reduced draft vocabulary the head is the target's rows of its tokens, and rows are left out that serving cannot reach
or that teach nothing: behind a token of the text outside it, and where the token to learn (KL: the target's most likely
one) lies outside. A share of the rows sees the edge correction by the true previous token; the others keep the uncorrected
logits a good choice of candidates.
Shape legend: B requests of a batch, T context rows (padded at the end), A anchors of a request, S draft slots, N = 1 + S
block rows, M supervised (anchor, slot) rows, k logged target log-probs a token, H hidden size, Hq/Hkv query/KV heads,
G = Hq / Hkv, Dh head dim, V draft vocabulary.
Source: tree_speculation.md 1.4, 1.5 (JetSpec), 2 (DFlash), 4.3 (edge correction).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated as A

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from paceline.adapt.families.family import TrainingFamily, num_reached
from paceline.adapt.families.recipe import OBJECTIVES, DrafterRecipe, TargetShape
from paceline.adapt.families.row_batch import RowBatch, calibrated, draft_index, in_draft_vocab, soft_cross_entropy
from paceline.adapt.families.target_handle import TargetHandle, TargetTables
from paceline.errors import ConfigError
from paceline.records import Setting, record
from paceline.serving.drafters.family import DrafterFamily
from paceline.serving.drafters.network import rope_cos_sin
from paceline.serving.parallel_head import drafter
from paceline.serving.parallel_head.model import DRAFTER_TYPES, ParallelHeadConfig, ParallelHeadModel, block_visibility


def supervised_anchors(is_output: torch.Tensor) -> torch.Tensor:
    """(B, T + 1) bool: positions that the target wrote and behind which it wrote at least one more token."""
    out = torch.zeros_like(is_output)
    out[:, 1:-1] = is_output[:, 1:-1] & is_output[:, 2:]
    return out


def draw_anchors(
    is_output: torch.Tensor, num_anchors: int | None, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchors of each request, all different: positions (B, A) int64 and which of them are real (B, A) bool.

    num_anchors: drawn at random per request; None = every supervised position. The draws come from the CPU, so that
    they are the same on every device.
    """
    allowed = supervised_anchors(is_output)
    most = max(1, int(allowed.sum(1).max()))
    order = torch.rand(allowed.shape, generator=generator).to(allowed.device).masked_fill(~allowed, -1.0)
    draws, anchors = order.topk(most if num_anchors is None else min(num_anchors, most), dim=1)
    is_real = draws >= 0
    return torch.where(is_real, anchors, 1), is_real


def anchored_forward(
    model: ParallelHeadModel, batch: RowBatch, embed: torch.Tensor, anchors: torch.Tensor, num_slots: int | None = None
) -> torch.Tensor:
    """Hidden states of the first draft slots of every anchor, before the final norm: (B, A, num_slots, H).

    Args:
        embed: (V, H), the target's token embedding.
        anchors: (B, A) int64 token positions, each at least 1.
        num_slots: None = S. Causal blocks are no longer than that: no row sees one behind it.
    """
    c = model.config
    b, t = batch.features.shape[:2]
    num_slots = c.num_slots if num_slots is None else num_slots
    first = c.num_rows - c.num_slots
    rows = first + num_slots if c.is_causal else c.num_rows
    device = anchors.device
    g = model.fuse(batch.features.to(model.cond_proj.weight.dtype))  # (B, T, H)
    context_angles = rope_cos_sin(torch.arange(t, device=device), c.head_dim, c.rope_theta, c.rope_scaling)
    steps = torch.arange(rows, device=device)
    block_angles = rope_cos_sin(
        anchors[..., None] + steps, c.head_dim, c.rope_theta, c.rope_scaling
    )  # (B, A, N, Dh / 2)
    x = model.block_rows(batch.token_ids.gather(1, anchors), embed)[..., :rows, :].to(g.dtype)
    is_past = torch.arange(t, device=device) < anchors[..., None]  # (B, A, T)
    own = block_visibility(rows, c.is_causal, device)
    seen = torch.cat(
        (is_past[:, :, None].expand(-1, -1, rows, -1), own.expand(b, anchors.shape[1], -1, -1)), dim=3
    )  # (B, A, N, T + N)
    for layer in model.block_layers():
        context_k, context_v = layer.key_value(g, *context_angles)  # (B, T, Hkv, Dh)
        y = layer.enter(x)
        q = layer.query(y, *block_angles).unflatten(3, (c.num_kv_heads, -1))  # (B, A, N, Hkv, G, Dh)
        k, v = layer.key_value(y, *block_angles)  # (B, A, N, Hkv, Dh)
        # Two products share one softmax: the keys of other anchors' blocks are never multiplied.
        scores = torch.cat(
            (torch.einsum("banhgd,bthd->bhgant", q, context_k), torch.einsum("banhgd,bamhd->bhganm", q, k)), dim=-1
        )
        scores = scores.float() * c.head_dim**-0.5
        weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1).to(v.dtype)
        out = torch.einsum("bhgant,bthd->banhgd", weights[..., :t], context_v)
        out = out + torch.einsum("bhganm,bamhd->banhgd", weights[..., t:], v)
        x = layer.finish(x, out.flatten(3))
    return x[:, :, first : first + num_slots]


_MAX_LOGITS = 2**26
"""Logits held at once; beyond it the output head runs in checkpointed chunks."""
DFLASH_DECAY_SHARE = 7 / 15
FLAT, SERVED = "flat", "served"


@record("loss.")
class ParallelLossConfig:
    """What is trained on a batch and how it is weighted."""

    objective: A[str, Setting(choices=OBJECTIVES)] = "forward_kl"
    """'forward_kl' to the target's soft distribution (JetSpec) | 'cross_entropy' with the token in the text (DFlash)."""
    decay_share: A[float | None, Setting(gt=0)] = DFLASH_DECAY_SHARE
    """Slot s of S, counted from 0, weighs exp(-s / (decay_share * S)); None = all slots weigh the same."""
    is_served: bool = False
    """Weigh slots by `slot_values` as soon as there are some."""
    values: tuple[float, ...] | None = None
    """Of the slots, from the newest replay; None: none yet, `decay_share` says."""
    num_anchors: A[int | None, Setting(ge=1)] = 16
    """Anchors drawn per request and batch; None = every supervised position."""
    num_learned_slots: A[int | None, Setting(ge=1)] = None
    """Slots that learn, the first ones; None = all."""
    edge_share: float = 0.5
    """Share of rows whose logits are corrected by the previous token; only with an edge correction."""
    calibration_weight: float = 0.1
    calibration_share: float = 0.25
    """Share of rows whose calibration loss is computed."""


def slot_values(rounds: Sequence[Sequence[int]], num_slots: int) -> tuple[float, ...]:
    """Expected accepted tokens that hang on each slot s = 1..S: v_s = sum over d >= s of P(a >= d), a = accepted tokens.

    With slots that are accepted one after another, P(a >= d) = p_1 ... p_d, v_s is the derivative of the acceptance
    length by log p_s: what a nat less at that slot is worth in the trees that are really built. P(a >= d | a >= d - 1) is
    counted with one imagined round of each kind, so that a slot that was never reached still learns.

    Args:
        rounds: num_accepted_tokens of each text's rounds; the last one, which the text may have cut, is left out.
    """
    accepted = torch.tensor([a for text in rounds for a in text[:-1]], dtype=torch.int64)
    reached = (accepted[:, None] >= torch.arange(num_slots + 1)).sum(0).double()  # rounds with a >= 0..S
    alive = ((reached[1:] + 1) / (reached[:-1] + 2)).cumprod(0)  # P(a >= d), d = 1..S
    return tuple(alive.flip(0).cumsum(0).flip(0).tolist())


def slot_weights(config: ParallelLossConfig, num_slots: int) -> torch.Tensor:
    """(S,) float32 weights of the slots' losses."""
    if config.values is not None:
        return torch.tensor(config.values)
    if config.decay_share is None:
        return torch.ones(num_slots)
    return torch.exp(-torch.arange(num_slots) / (config.decay_share * num_slots))


def choose_loss(config: ParallelLossConfig, recipe: DrafterRecipe) -> ParallelLossConfig:
    """The settings with a recipe's objective and slot weights. Raises: ConfigError on another word for the weights."""
    if recipe.objective is not None:
        config = dataclasses.replace(config, objective=recipe.objective)
    if recipe.slot_decay is None:
        return config
    if recipe.slot_decay == SERVED:
        return dataclasses.replace(config, is_served=True)
    try:
        share = None if recipe.slot_decay == FLAT else float(recipe.slot_decay)
        return dataclasses.replace(config, decay_share=share)
    except ValueError as e:
        raise ConfigError(f"slot-decay must be {FLAT}, {SERVED} or a number > 0, got {recipe.slot_decay!r}") from e


def follow_rounds(config: ParallelLossConfig, rounds: Sequence[Sequence[int]], num_slots: int) -> ParallelLossConfig:
    """The settings with the slots' values in these rounds, where those are wanted."""
    return dataclasses.replace(config, values=slot_values(rounds, num_slots)) if config.is_served else config


def soft_kl(logits: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Forward KL per row from the logged top-k plus one bucket for the rest: (M, V), (M, k), (M, k) -> (M,)."""
    target = logprobs.exp() * (ids >= 0)
    rest = (1.0 - target.sum(-1)).clamp_min(0.0)
    entropy = -(torch.xlogy(target, target).sum(-1) + torch.xlogy(rest, rest))
    return soft_cross_entropy(logits, ids, logprobs) - entropy


@dataclass(kw_only=True, slots=True)
class _Rows:
    """M supervised rows: their logits' input and what they are compared with."""

    z: torch.Tensor  # (M, H), normed
    text: torch.Tensor  # (M,) int64 draft ids, as all below; -1 = outside the draft vocabulary
    previous: torch.Tensor  # (M,) int64, the token before; of first slots anything
    topk_ids: torch.Tensor  # (M, k) int64
    topk_logprobs: torch.Tensor  # (M, k) float32, given that the token is inside
    is_taught: torch.Tensor  # (M,) bool: what is to be learned lies inside
    slots: torch.Tensor  # (M,) int64
    temperatures: torch.Tensor  # (M,) float32
    is_edged: torch.Tensor  # (M,) bool: corrected; of first slots all or none
    is_side: torch.Tensor  # (M,) bool: teaches the calibration

    def take(self, rows: torch.Tensor) -> _Rows:
        return _Rows(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


def _row_losses(
    model: ParallelHeadModel, head: torch.Tensor, config: ParallelLossConfig, rows: _Rows
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token loss (M,), calibration loss of the side rows, cross-entropy of the first slots' rows, best token (M,)."""
    logits = F.linear(rows.z, head.to(rows.z.dtype)).float()
    if model.config.edge_rank:
        edged = rows.is_edged.nonzero()[:, 0]
        logits = logits.index_add(0, edged, model.edge_bias(rows.previous[edged]).float())
    if config.objective == "forward_kl":
        loss = soft_kl(logits, rows.topk_ids, rows.topk_logprobs)
    else:
        loss = F.cross_entropy(logits, rows.text.clamp_min(0), reduction="none")
    loss = loss * rows.is_taught
    fixed, side, first = logits.detach(), rows.is_side, rows.slots == 0
    scaled = calibrated(fixed[side], model.log_beta[:, rows.slots[side]].T, rows.temperatures[side])
    calibration = F.cross_entropy(scaled, rows.text[side], reduction="none")
    return loss, calibration, _text_nll(model, fixed[first], rows.text[first]), fixed.argmax(-1)


def _text_nll(model: ParallelHeadModel, logits: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Cross-entropy (N,) with the token in the text; all tokens outside the draft vocabulary are one."""
    nll = F.cross_entropy(logits, text.clamp_min(0), reduction="none")
    if model.config.draft_vocab_size is None:
        return nll
    log_coverage = model.get_buffer("log_coverage")
    outside = -torch.log1p(-log_coverage.exp().clamp_max(1 - 1e-6))
    return torch.where(text >= 0, nll - log_coverage, outside)


def parallel_training_loss(
    model: ParallelHeadModel,
    batch: RowBatch,
    tables: TargetTables,
    config: ParallelLossConfig,
    generator: torch.Generator,
    *,
    trains_backbone: bool = True,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of one batch (weighted mean per supervised slot) and detached sums for reporting.

    Args:
        generator: of the CPU; draws the anchors and the rows that are corrected or calibrated.
        trains_backbone: False computes hidden states without a graph (only norm, correction and calibration learn).
    Returns the loss and {"rows": anchors, "loss", "correct1" (histogram over 0..slots that learn of leading slots whose best token
    is the text's), "rows1", "nll1" (cross-entropy of the first slot with the text, summed)}.
    """
    num_slots = model.config.num_slots
    s = num_slots if config.num_learned_slots is None else config.num_learned_slots
    head = tables.head_of(model)
    anchors, is_real = draw_anchors(batch.is_output, config.num_anchors, generator)
    with torch.set_grad_enabled(torch.is_grad_enabled() and trains_backbone):
        hidden = anchored_forward(model, batch, tables.embed, anchors, s)
    last = batch.token_ids.shape[1] - 1
    at = anchors[..., None] + 1 + torch.arange(s, device=anchors.device)  # (B, A, S) positions that the slots predict
    inside = at.clamp_max(last)
    request = torch.arange(anchors.shape[0], device=anchors.device)[:, None, None].expand_as(at)
    is_supervised = is_real[..., None] & (at <= last) & batch.is_output[request, inside]
    to_draft = None
    if model.config.draft_vocab_size is not None:
        to_draft = draft_index(model.get_buffer("draft_token_ids"), model.config.vocab_size)
        is_drafted = to_draft[batch.token_ids[request, inside]] >= 0  # (B, A, S)
        is_supervised[..., 1:] &= is_drafted[..., :-1].cumprod(-1) > 0
    where = is_supervised.nonzero(as_tuple=True)
    slots, owner, position = where[2], request[where], at[where]
    draws = torch.rand(2, slots.numel(), generator=generator).to(slots.device)
    text, previous = batch.token_ids[owner, position], batch.token_ids[owner, position - 1]
    topk_ids, topk_logprobs = batch.topk_ids[owner, position], batch.topk_logprobs[owner, position]
    is_taught = torch.ones_like(text, dtype=torch.bool)
    if to_draft is not None:
        text, topk_ids, topk_logprobs, is_taught = in_draft_vocab(to_draft, text, topk_ids, topk_logprobs)
        previous = to_draft[previous]
        is_taught = is_taught if config.objective == "forward_kl" else text >= 0
    rows = _Rows(
        z=model.normed(hidden[where]),
        text=text,
        previous=previous,
        topk_ids=topk_ids,
        topk_logprobs=topk_logprobs,
        is_taught=is_taught,
        slots=slots,
        temperatures=batch.temperatures[owner],
        is_edged=(slots > 0) & (draws[0] < config.edge_share) | (slots == 0) & model.config.corrects_first,
        is_side=(draws[1] < config.calibration_share * (config.calibration_weight > 0)) & (text >= 0),
    )
    out = []
    most = max(1, _MAX_LOGITS // head.shape[0])
    for part in torch.arange(slots.numel(), device=slots.device).split(most):
        args = (model, head, config, rows.take(part) if slots.numel() > most else rows)
        if slots.numel() > most and torch.is_grad_enabled():
            out.append(checkpoint(_row_losses, *args, use_reentrant=False))
        else:
            out.append(_row_losses(*args))
    loss, calibration, first_nll, best = (torch.cat(parts) for parts in zip(*out, strict=True))
    weights = slot_weights(config, num_slots).to(slots.device)[slots]
    total = (loss * weights).sum() / (weights * rows.is_taught).sum().clamp_min(1e-9)
    side_weights = weights[rows.is_side]
    total = total + config.calibration_weight * (calibration * side_weights).sum() / side_weights.sum().clamp_min(1e-9)
    is_right = torch.zeros_like(is_supervised)
    is_right[where] = best == rows.text
    correct = is_right.long().cumprod(-1).sum(-1)[is_real]
    num_anchors = is_real.sum().float()
    report = {
        "rows": num_anchors,
        "loss": total.detach(),
        "correct1": torch.bincount(correct, minlength=s + 1).float(),
        "rows1": num_anchors,
        "nll1": first_nll.sum(),
    }
    return total, report


def held_out_loss(config: ParallelLossConfig) -> ParallelLossConfig:
    return dataclasses.replace(config, num_anchors=None, edge_share=1.0, calibration_weight=0.0)


def follow_reach(config: ParallelLossConfig, reach: Sequence[float], shape: ParallelHeadConfig) -> ParallelLossConfig:
    return dataclasses.replace(config, num_learned_slots=num_reached(reach, shape.num_slots))


def _family(serving: DrafterFamily) -> TrainingFamily:
    loss = ParallelLossConfig()

    def make_config(target: TargetHandle, shape: TargetShape, recipe: DrafterRecipe) -> ParallelHeadConfig:
        assert recipe.num_layers is not None and recipe.num_slots is not None
        return ParallelHeadConfig(
            is_causal=DRAFTER_TYPES[serving.name],
            **shape.sizes(target),
            num_layers=recipe.num_layers,
            num_slots=recipe.num_slots,
            edge_rank=recipe.edge_rank or 0,
            draft_vocab_size=recipe.draft_vocab_size,
        )

    def update_loss(model: ParallelHeadModel, trains_backbone: bool) -> ParallelLossConfig:
        """Logged rows are few, so every one of them is an anchor; without the backbone, all teach the calibration."""
        share = loss.calibration_share if trains_backbone else 1.0
        return dataclasses.replace(loss, num_anchors=None, calibration_share=share)

    return TrainingFamily(
        serving=serving,
        defaults={"learning_rate": 2e-3, "num_layers": 2, "num_slots": 8, "loss": loss},
        make_config=make_config,
        projection="cond_proj.weight",
        loss=parallel_training_loss,
        update_loss=update_loss,
        held_out_loss=held_out_loss,
        arms={"calibration": ("log_beta",), "head": ("log_beta", "final_norm", "edge_"), "full": None},
        choose_loss=choose_loss,
        follow_rounds=follow_rounds,
        follow_reach=follow_reach,
        refused=("shares_head",),
    )


JETSPEC, DFLASH = _family(drafter.JETSPEC), _family(drafter.DFLASH)
