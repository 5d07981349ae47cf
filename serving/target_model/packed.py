"""Packed forward: prompt rows and draft-tree rows of one round in one target forward.

One forward reads the weights once. It pays where the attention kernel takes ragged rows as they are (kernels that can be
captured). The CPU reference pads every request to the one with most rows: with a chunk of 64 rows beside 16 requests of 5
rows it needs twice the time of two forwards, with 64 requests three times, so there prompts keep a forward of their own.

Shape legend: N tree rows, P prompt rows, M prompt rows whose logits are wanted, W/Wt/Wp widest request of all / of the
trees / of the prompts, L longest context.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from paceline.serving.target_model.kv_cache import KVPool
from paceline.serving.target_model.model import TargetBatch, TargetModel, TargetOutput


def forward_together(
    target: TargetModel, kv: KVPool, trees: TargetBatch, prompts: TargetBatch
) -> tuple[TargetOutput, TargetOutput]:
    """Run the rows of both batches in one forward; returns what each would have got from a forward of its own.

    Args:
        trees: ancestors given, logits of all rows wanted.
        prompts: causal (no ancestors), logit_rows given.
    """
    num_rows = trees.token_ids.numel()
    out = target.forward(join_batches(trees, prompts), kv)
    features = out.features
    return (
        TargetOutput(logits=out.logits[:num_rows], features=None if features is None else features[:num_rows]),
        # A copy: what requests keep of it would keep the rows of the whole round alive.
        TargetOutput(logits=out.logits[num_rows:], features=None if features is None else features[num_rows:].clone()),
    )


def join_batches(trees: TargetBatch, prompts: TargetBatch) -> TargetBatch:
    """One batch of (N + P) rows, trees first; a prompt row's ancestors are the earlier rows of its request."""
    assert trees.ancestors is not None and prompts.ancestors is None
    assert trees.logit_rows is None and prompts.logit_rows is not None
    num_rows, device = trees.token_ids.numel(), trees.token_ids.device
    counts = prompts.cu_rows.diff()
    local = torch.arange(prompts.token_ids.numel(), device=device) - prompts.cu_rows[:-1].repeat_interleave(counts)
    width = max(trees.ancestors.shape[1], int(counts.max()))
    causal = torch.arange(width, device=device) <= local[:, None]  # (P, W) bool
    length = max(trees.slot_table.shape[1], prompts.slot_table.shape[1])
    tables = [pad(b.slot_table, (0, length - b.slot_table.shape[1])) for b in (trees, prompts)]
    return TargetBatch(
        token_ids=torch.cat((trees.token_ids, prompts.token_ids)),
        positions=torch.cat((trees.positions, prompts.positions)),
        cu_rows=torch.cat((trees.cu_rows, prompts.cu_rows[1:] + num_rows)),
        context_lens=torch.cat((trees.context_lens, prompts.context_lens)),
        slot_table=torch.cat(tables),
        out_rows=torch.cat((trees.out_rows, prompts.out_rows)),
        ancestors=torch.cat((pad(trees.ancestors, (0, width - trees.ancestors.shape[1])), causal)),
        logit_rows=torch.cat((torch.arange(num_rows, device=device), prompts.logit_rows + num_rows)),
    )
