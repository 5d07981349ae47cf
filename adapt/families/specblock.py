"""SpecBlock training: the loss of logged requests, and how a drafter is made for a target, trained, updated and judged.

Shape legend: B requests of a batch, T rows (padded at the end), A selected rows of a request, K draft slots, H drafter
hidden size, F feature size, k logged target log-probs a token, N selected rows, V vocabulary.
Row j of a request is (feature at j, token at j + 1); slot s of a block whose inherited slots add up to `offset` predicts
the token at j + 2 + offset + s. Block >= 2 sees what it sees in serving: the own row's slots up to the inherited one, its
own block, and block 1 of earlier rows; rotary positions advance with the offset. The valid prefix compares the draft's
argmax with the token in the text, also across blocks; a token outside the draft vocabulary ends it; each row starts its
next block where serving would, at slot min(correct + 1, K); sums are divided by the number of rows, so that a few
surviving rows of a late slot do not dominate.
Source: SpecBlock (arXiv 2605.07243).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline.adapt.families.family import TrainingFamily, leave_out
from paceline.adapt.families.recipe import DrafterRecipe, TargetShape
from paceline.adapt.families.row_batch import RowBatch, calibrated, draft_index, head_loss, row_chunks
from paceline.adapt.families.target_handle import TargetHandle, TargetTables
from paceline.serving.drafters.network import rope_cos_sin
from paceline.serving.specblock import drafter
from paceline.serving.specblock.model import NUM_RANK_CLASSES, SpecBlockConfig, SpecBlockModel, rank_class


@dataclass(kw_only=True, slots=True)
class BlockState:
    """Hidden states of one block for selected rows, with what later blocks need."""

    hidden: torch.Tensor  # (B, A, K, H) before the final norm
    cond: torch.Tensor  # (B, A, H) what the block was conditioned on
    kv: list[tuple[torch.Tensor, torch.Tensor]]  # per layer (B, Hkv, A * K, Dh)


def block1_forward(model: SpecBlockModel, batch: RowBatch, embed: torch.Tensor) -> BlockState:
    """Block 1 of every row: causal over the flattened slots. embed: (V, E), the target's token embedding."""
    c = model.config
    _b, t = batch.features.shape[:2]
    weight = model.cond_proj.weight
    cond = F.linear(batch.features.to(weight.dtype), weight)
    x = model.fuse(cond, F.embedding(batch.token_ids[:, 1:], embed).to(cond.dtype))
    slots = torch.arange(c.num_slots, device=x.device)
    positions = (torch.arange(t, device=x.device)[:, None] + 1 + slots).flatten()
    cos, sin = rope_cos_sin(positions[None], c.head_dim, c.rope_theta)
    kv = []
    x = x.flatten(1, 2)
    for i, layer in enumerate(model.block_layers()):
        if i > 0:
            x = model.shift(i - 1, x.unflatten(1, (t, c.num_slots))).flatten(1, 2)
        q, k, v = layer.qkv(x, cos, sin)
        kv.append((k, v))
        out = F.scaled_dot_product_attention(
            q, k, v.to(k.dtype), is_causal=True, enable_gqa=c.num_heads != c.num_kv_heads
        )
        x = layer.finish(x, out)
    return BlockState(hidden=x.unflatten(1, (t, c.num_slots)), cond=cond, kv=kv)


def next_block_forward(
    model: SpecBlockModel,
    embed: torch.Tensor,
    first: BlockState,
    previous: Sequence[tuple[BlockState, torch.Tensor]],
    *,
    rows: torch.Tensor,
    starts: torch.Tensor,
    offsets: torch.Tensor,
    cond: torch.Tensor,
    token_ids: torch.Tensor,
) -> BlockState:
    """One later block of selected rows.

    Args:
        first: block 1 of all rows (keys of earlier rows and of the own row).
        previous: (block, starts) of the blocks between block 1 and this one, for the same rows, oldest first.
        rows: (B, A) int64 row numbers; padding may repeat any row.
        starts: (B, A) int64, M of block 1: how many of its slots lie on the path (1..K).
        offsets: (B, A) int64, slots on the path over all blocks so far.
        cond: (B, A, H) hidden state of the inherited slot.
        token_ids: (B, A) int64, token on the path behind the inherited slot.
    """
    c = model.config
    k = c.num_slots
    b, a = rows.shape
    x = model.fuse(cond, F.embedding(token_ids, embed).to(cond.dtype)).flatten(1, 2)
    slots = torch.arange(k, device=rows.device)
    advance = torch.zeros_like(offsets) if c.compat_rope else offsets
    cos, sin = rope_cos_sin(((rows + 1 + advance)[..., None] + slots).flatten(1), c.head_dim, c.rope_theta)
    keys = torch.arange(first.kv[0][0].shape[2], device=rows.device)
    visible = keys <= (rows * k + starts - 1)[..., None]  # (B, A, T * K): a prefix of the flattened slots of block 1
    parts = [visible[:, :, None].expand(-1, -1, k, -1).flatten(1, 2)]
    same = torch.eye(a, dtype=torch.bool, device=rows.device)
    for _, count in previous:
        own = same[None, :, :, None] & (slots < count[:, None, :, None])  # (B, A, A, K)
        parts.append(own.flatten(2)[:, :, None].expand(-1, -1, k, -1).flatten(1, 2))
    causal = torch.ones(k, k, dtype=torch.bool, device=rows.device).tril()
    current = same[:, None, :, None] & causal[None, :, None, :]  # (A, K, A, K)
    if c.block2_mask == "train_compat":
        earlier = (rows[:, :, None] > rows[:, None, :])[:, :, None, :, None]
        current = current | earlier.expand(-1, -1, k, -1, k)  # (B, A, K, A, K)
    parts.append(current.reshape(-1, a * k, a * k).expand(b, -1, -1))
    mask = torch.cat(parts, dim=2)[:, None]  # (B, 1, A * K, keys)
    kv = []
    for i, layer in enumerate(model.block_layers()):
        if i > 0:
            x = model.shift(i - 1, x.unflatten(1, (a, k))).flatten(1, 2)
        q, key, value = layer.qkv(x, cos, sin)
        kv.append((key, value))
        every_k = torch.cat([first.kv[i][0], *(p.kv[i][0] for p, _ in previous), key], dim=2)
        every_v = torch.cat([first.kv[i][1], *(p.kv[i][1] for p, _ in previous), value], dim=2).to(every_k.dtype)
        out = F.scaled_dot_product_attention(q, every_k, every_v, mask, enable_gqa=c.num_heads != c.num_kv_heads)
        x = layer.finish(x, out)
    return BlockState(hidden=x.unflatten(1, (a, k)), cond=cond, kv=kv)


class RowGrid:
    """Selected rows of a batch laid out as (B, A): row n sits at [request[n], column[n]]; the rest is zero."""

    def __init__(self, request: torch.Tensor, num_requests: int) -> None:
        counts = torch.bincount(request, minlength=num_requests)
        self.request = request  # (N,) int64, rising
        self.column = torch.arange(request.numel(), device=request.device) - (counts.cumsum(0) - counts)[request]
        self.shape = (num_requests, int(counts.max()))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(N, ...) -> (B, A, ...)."""
        grid = values.new_zeros(*self.shape, *values.shape[1:])
        return grid.index_put((self.request, self.column), values)

    def regrid(self, state: BlockState, columns: torch.Tensor) -> BlockState:
        """Move a block's rows from their old columns to this grid's."""
        slots = state.hidden.shape[2]

        def move(x: torch.Tensor) -> torch.Tensor:
            rows = x.unflatten(2, (-1, slots))[self.request, :, columns]  # (N, Hkv, K, Dh)
            return self.spread(rows).transpose(1, 2).flatten(2, 3)

        return BlockState(
            hidden=self.spread(state.hidden[self.request, columns]),
            cond=self.spread(state.cond[self.request, columns]),
            kv=[(move(k), move(v)) for k, v in state.kv],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """What is trained on a batch and how it is weighted."""

    num_blocks: int = 2
    slot_decay: float = 0.8
    """Weight of slot s is slot_decay ** s, inside a block."""
    rank_weight: float = 0.1
    calibration_weight: float = 0.1
    side_share: float = 0.25
    """Share of rows whose rank and calibration losses are computed."""
    next_block_share: float = 0.5
    """Share of rows that go on into block 2 (and of those into block 3)."""
    early_start_share: float = 0.25
    """Share of rows that start their next block at an earlier correct slot, as leaves of the greedy chain do."""
    has_valid_prefix: bool = True
    """False (ablation): every slot of every row is trained, whether the slots before it were right or not."""


@dataclass(kw_only=True, slots=True)
class BlockLoss:
    """Sums over the rows of one block."""

    token: torch.Tensor  # () decayed soft cross-entropy, summed over valid slots
    rank: torch.Tensor  # ()
    calibration: torch.Tensor  # ()
    correct: torch.Tensor  # (N,) int64, leading slots whose argmax is the token in the text
    num_slot_rows: list[int]  # rows that reached slot s
    first_nll: torch.Tensor  # () cross-entropy of slot 0 without decay, summed, detached


def block_loss(
    model: SpecBlockModel,
    head: torch.Tensor,
    hidden: torch.Tensor,
    batch: RowBatch,
    *,
    request: torch.Tensor,
    positions: torch.Tensor,
    block: int,
    config: LossConfig,
    generator: torch.Generator,
) -> BlockLoss:
    """Losses of one block at N rows; the output head runs only where the valid prefix still holds.

    Args:
        head: (Vd, H), the output head.
        hidden: (N, K, H) before the final norm.
        request: (N,) int64, index into the batch.
        positions: (N,) int64, token position that slot 0 predicts.
        block: 0 for block 1.
    """
    c = model.config
    n, k = hidden.shape[:2]
    device = hidden.device
    zero = hidden.new_zeros((), dtype=torch.float32)
    token_loss, rank_loss, calibration_loss, first_nll = zero, zero, zero, zero
    correct = torch.zeros(n, dtype=torch.int64, device=device)
    counts: list[int] = []
    z = model.normed(hidden)
    is_side = torch.rand(n, generator=generator).to(device) < config.side_share
    alive = torch.arange(n, device=device)
    on_prefix = torch.ones(n, dtype=torch.bool, device=device)
    last = batch.token_ids.shape[1] - 1
    to_draft = draft_index(model.draft_token_ids, c.vocab_size) if c.draft_vocab_size is not None else None  # type: ignore[arg-type]
    for slot in range(k):
        at = positions[alive] + slot
        is_valid = (at <= last) & batch.is_output[request[alive], at.clamp_max(last)]
        alive = alive[is_valid]
        counts.append(alive.numel())
        if alive.numel() == 0:
            counts += [0] * (k - slot - 1)
            break
        passed = []
        for part in row_chunks(alive, c.num_draft_ids):
            where = (request[part], positions[part] + slot)
            text, ids, logprobs = batch.token_ids[where], batch.topk_ids[where], batch.topk_logprobs[where]
            if to_draft is not None:
                text, ids = to_draft[text], to_draft[ids]
            head_in = z[part, slot]
            loss, best, logits = head_loss(head, head_in, ids, logprobs, num_rows=alive.numel())
            token_loss = token_loss + config.slot_decay**slot * loss.sum()
            if slot == 0:
                first_nll = first_nll + loss.detach().sum()
            passed.append((best == text) & (text >= 0))
            side = is_side[part] & (text >= 0)
            if bool(side.any()) and (config.rank_weight or config.calibration_weight):
                picked = (
                    F.linear(head_in[side], head).detach().float() if logits is None else logits[side].detach().float()
                )
                rank_part, calibration_part = _side_losses(
                    model,
                    head_in[side].detach(),
                    picked,
                    text[side],
                    batch.temperatures[request[part][side]],
                    block,
                    slot,
                )
                rank_loss, calibration_loss = rank_loss + rank_part, calibration_loss + calibration_part
        is_right = torch.cat(passed)
        on_prefix[alive] &= is_right
        correct[alive] += on_prefix[alive]
        if config.has_valid_prefix:
            alive = alive[is_right]
    return BlockLoss(
        token=token_loss,
        rank=rank_loss,
        calibration=calibration_loss,
        correct=correct,
        num_slot_rows=counts,
        first_nll=first_nll,
    )


def _side_losses(
    model: SpecBlockModel,
    z: torch.Tensor,
    logits: torch.Tensor,
    text: torch.Tensor,
    temperatures: torch.Tensor,
    block: int,
    slot: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank-class loss and calibration loss, summed over rows; neither reaches the backbone.

    The rank target is soft over neighbouring classes and over-confident ("too small rank") errors weigh more; the
    calibration loss is the text's negative log-likelihood as a function of log_beta alone.
    """
    label = rank_class((logits > logits.gather(1, text[:, None])).sum(-1))
    rank_logits = model.rank_logits(z, logits.topk(model.config.rank_topk, dim=-1).values).float()
    classes = torch.arange(NUM_RANK_CLASSES, device=z.device)
    short = label[:, None] - classes  # > 0: class c underestimates the rank
    soft = (1.0 + short.abs() + short.clamp_min(0)).float().pow(-2)
    soft = soft / soft.sum(-1, keepdim=True)
    guess = label - rank_logits.argmax(-1)
    distance = (1 + guess.abs() + guess.clamp_min(0)).float()
    counts = torch.bincount(label, minlength=NUM_RANK_CLASSES).float()
    frequency = (10.0 / counts.clamp_min(1.0)).clamp_max(1.0)[label]
    cross_entropy = -(soft * rank_logits.log_softmax(-1)).sum(-1)
    rank_loss = (distance * frequency * cross_entropy).sum() / frequency.sum() * label.numel()
    beta = model.log_beta[:, min(block, model.config.num_blocks - 1), slot].expand(len(text), 2)
    return rank_loss, F.cross_entropy(calibrated(logits, beta, temperatures), text, reduction="sum")


def training_loss(
    model: SpecBlockModel,
    batch: RowBatch,
    tables: TargetTables,
    config: LossConfig,
    generator: torch.Generator,
    *,
    trains_backbone: bool = True,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of one batch (mean per supervised row) and detached sums for reporting.

    trains_backbone False: hidden states are computed without a graph (only heads and calibration learn).
    Returns the loss and {"rows", "loss", "correct{b}" (histogram over 0..K), "rows{b}"} per block b = 1, 2, ...
    """
    k = model.config.num_slots
    learns = torch.is_grad_enabled() and trains_backbone
    with torch.set_grad_enabled(learns):
        state = first = block1_forward(model, batch, tables.embed)
    request, row = batch.is_output[:, 2:].nonzero(as_tuple=True)
    num_rows = max(1, request.numel())
    column, offset = row, torch.zeros_like(row)
    total = torch.zeros((), device=row.device)
    report: dict[str, torch.Tensor] = {"rows": torch.tensor(float(request.numel()))}
    path: list[tuple[BlockState, torch.Tensor, torch.Tensor]] = []  # blocks so far: state, column and M of each row
    last = batch.token_ids.shape[1] - 1
    weight = 1.0
    for block in range(config.num_blocks):
        hidden = state.hidden[request, column]
        sums = block_loss(
            model, tables.head_of(model), hidden, batch, request=request, positions=row + 2 + offset, block=block, config=config, generator=generator
        )  # fmt: skip
        side = config.rank_weight * sums.rank + config.calibration_weight * sums.calibration
        total = total + weight * (sums.token + side / max(config.side_share, 1e-6))
        report[f"correct{block + 1}"] = torch.bincount(sums.correct, minlength=k + 1).float()
        report[f"rows{block + 1}"] = torch.tensor(float(sums.num_slot_rows[0]))
        report[f"nll{block + 1}"] = sums.first_nll
        if block + 1 == config.num_blocks:
            break
        start = _draw_starts(sums.correct, k, config.early_start_share, generator)
        at = row + 2 + offset + start
        keep = (at <= last) & batch.is_output[request, at.clamp_max(last)]
        keep &= torch.rand(at.numel(), generator=generator).to(at.device) < config.next_block_share
        kept = keep.nonzero()[:, 0]
        if kept.numel() == 0:
            break
        weight = weight / config.next_block_share  # rows that go on stand for those that were not drawn
        path = [(s, at_column[kept], m[kept]) for s, at_column, m in [*path, (state, column, start)]]
        cond = hidden[kept, start[kept] - 1] if model.config.inherits_hidden else first.cond[request[kept], row[kept]]
        request, row, offset = request[kept], row[kept], (offset + start)[kept]
        grid = RowGrid(request, batch.token_ids.shape[0])
        with torch.set_grad_enabled(learns):
            state = next_block_forward(
                model,
                tables.embed,
                first,
                [(grid.regrid(s, at_column), grid.spread(m)) for s, at_column, m in path[1:]],
                rows=grid.spread(row),
                starts=grid.spread(path[0][2] - 1) + 1,
                offsets=grid.spread(offset),
                cond=grid.spread(cond),
                token_ids=grid.spread(batch.token_ids[request, row + 1 + offset]),
            )
        column = grid.column
    total = total / num_rows
    report["loss"] = total.detach()
    return total, report


def _draw_starts(correct: torch.Tensor, num_slots: int, early_share: float, generator: torch.Generator) -> torch.Tensor:
    """(N,) slots of a block that lie on the path, M in 1..K: min(correct + 1, K), or earlier for some rows."""
    start = (correct + 1).clamp_max(num_slots)
    draws = torch.rand(2, start.numel(), generator=generator).to(start.device)
    return torch.where(draws[0] < early_share, (draws[1] * start).long() + 1, start)


_CALIBRATION = ("log_beta", "rank_in.", "rank_out.")
_PARTS = {
    "shift": "has_shift",
    "inheritance": "inherits_hidden",
    "valid-prefix": "has_valid_prefix",
    "rank-head": "has_rank_head",
}


def make_config(target: TargetHandle, shape: TargetShape, recipe: DrafterRecipe) -> SpecBlockConfig:
    """Layers shaped like the target's. recipe: complete."""
    assert recipe.num_layers is not None and recipe.num_slots is not None
    assert isinstance(recipe.loss, LossConfig)
    whole = SpecBlockConfig(
        **shape.sizes(target),
        embed_size=target.embed_weight.shape[1],
        num_layers=recipe.num_layers,
        num_slots=recipe.num_slots,
        num_blocks=recipe.loss.num_blocks,
        draft_vocab_size=recipe.draft_vocab_size,
        shares_head=recipe.shares_head,
        rank_hidden=min(256, max(16, shape.hidden_size // 2)),
        rank_topk=min(20, target.vocab_size),
    )
    return leave_out(whole, recipe.without, _PARTS)


def update_loss(model: SpecBlockModel, trains_backbone: bool) -> LossConfig:
    """Without the backbone a row is cheap, so every row teaches calibration; otherwise the default share does."""
    return LossConfig() if trains_backbone else LossConfig(side_share=1.0)


def held_out_loss(config: LossConfig) -> LossConfig:
    return LossConfig(
        num_blocks=config.num_blocks, rank_weight=0, calibration_weight=0, next_block_share=1.0, early_start_share=0
    )


FAMILY = TrainingFamily(
    serving=drafter.FAMILY,
    defaults={"learning_rate": 2e-3, "num_layers": 2, "num_slots": 4, "loss": LossConfig()},
    make_config=make_config,
    projection="cond_proj.weight",
    loss=training_loss,
    update_loss=update_loss,
    held_out_loss=held_out_loss,
    arms={"calibration": _CALIBRATION, "head": (*_CALIBRATION, "lm_head.", "final_norm"), "full": None},
    parts=_PARTS,
)
