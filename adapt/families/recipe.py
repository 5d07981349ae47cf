"""Drafter recipe: text, shape, schedule and precision, and what a fresh drafter takes over from its training text.

Shape legend: H drafter hidden size, F fused feature size, m tapped layers, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated as A
from typing import Any

import torch

from paceline.adapt.data.regenerate import RegenerateConfig
from paceline.adapt.families.target_handle import TargetHandle
from paceline.records import Setting, count, record
from paceline.serving.drafters.network import TargetHandles
from paceline.serving.loading.checkpoint import open_checkpoint
from paceline.serving.sampling.request import RequestTrace

OBJECTIVES = ("forward_kl", "cross_entropy")
MAX_SEED = 2**32 - 1
"""Seeds are multiplied, and torch takes 64 bits."""


@record()
class DrafterRecipe:
    """Text, shape and schedule of one drafter; what is None, its family decides."""

    drafter: A[str, Setting("Kind of drafter of the result: specblock | eagle3 | jetspec | dflash.")] = "specblock"
    domains: A[
        tuple[str, ...], Setting("Comma list of domains that are continued; '' = the .jsonl and .txt files of --data.")
    ] = ("tools", "code")
    text: RegenerateConfig = field(default_factory=RegenerateConfig)
    epochs: A[float, Setting("Passes over that text.", ge=0.01)] = 3.0
    held_out_tokens: A[
        int,
        Setting(
            "Tokens a domain that the target continues held-out documents by, to judge it.",
            flag="held-out",
            parser=count,
            ge=1,
        ),
    ] = 8_000
    validation_tokens: int = 2_000
    """Of these, over all domains, those that choose the weights to keep; the report is on the others."""
    validate_every: A[
        int | None,
        Setting("Steps between validations, of which the best weights are kept; default: 1/20 of the run.", ge=1),
    ] = None
    num_nodes: A[int, Setting("Draft nodes of the trees that judge it: as many as are served.", flag="nodes", ge=1)] = 8
    batch_rows: A[int, Setting("Rows of a step, padding included: fewer make more steps of the same text.", ge=32)] = (
        768
    )
    max_rows: int = 1024
    """Longer requests are cut."""
    learning_rate: A[float | None, Setting("Its peak; default: the kind's own.", ge=1e-8, le=1.0)] = None
    warmup_share: float = 0.05
    final_share: float = 0.02
    """Learning rate at the end over its peak."""
    weight_decay: float = 0.0
    num_layers: int | None = None
    num_slots: int | None = None
    """Draft tokens of a call."""
    draft_vocab_size: A[
        int | None,
        Setting("Draft only so many tokens, those the target writes most; default: all.", flag="draft-vocab"),
    ] = None
    shares_head: A[
        bool,
        Setting("specblock, eagle3: draft through the target's own output head, not a trained one.", flag="share-head"),
    ] = False
    objective: A[
        str | None,
        Setting("jetspec, dflash: learn the target's distribution or the tokens of its text.", choices=OBJECTIVES),
    ] = None
    slot_decay: A[
        str | None,
        Setting("jetspec, dflash: weights of slots: flat, served, or a share D: slot s of S weighs exp(-s / (D * S))."),
    ] = None
    edge_rank: A[int | None, Setting("Rank of jetspec's and dflash's previous-token correction; default: none.")] = None
    without: A[
        tuple[str, ...], Setting("SpecBlock's parts to leave out: shift, inheritance, valid-prefix, rank-head.")
    ] = ()
    weights: A[
        str,
        Setting(
            "Type of the matrices in the file; bfloat16 halves it, and rounds what a device in float32 drafts with.",
            choices=("float32", "bfloat16"),
        ),
    ] = "float32"
    loss: Any = None
    """The family's loss settings, a dataclass."""
    autocast: bool | None = None
    """bfloat16 autocast; None: when the hardware computes it natively and the drafter is wide enough to gain."""
    seed: A[int, Setting("Seed of prompts, sampling and weights.", ge=0, le=MAX_SEED)] = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetShape:
    """Sizes of the target's layers, which a drafter's layers take over."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    rms_eps: float

    def sizes(self, target: TargetHandles) -> dict[str, Any]:
        """Fields of a DrafterConfig whose layers are shaped like these and which reads this target."""
        own = dataclasses.asdict(self)
        del own["num_layers"]  # a drafter's own
        return {**own, "vocab_size": target.vocab_size, "feature_size": target.feature_size}


def target_shape(target_dir: Path) -> TargetShape:
    """Read the sizes from a checkpoint; an MLP wider than four times the hidden size counts as that wide."""
    t = open_checkpoint(target_dir).config().get_text_config()
    heads = t.num_attention_heads
    return TargetShape(
        hidden_size=t.hidden_size,
        intermediate_size=min(t.intermediate_size, 4 * t.hidden_size),
        num_heads=heads,
        num_kv_heads=getattr(t, "num_key_value_heads", None) or heads,
        head_dim=getattr(t, "head_dim", None) or t.hidden_size // heads,
        num_layers=t.num_hidden_layers,
        rms_eps=getattr(t, "rms_norm_eps", 1e-6),
    )


def has_native_bf16(device: torch.device) -> bool:
    """Whether bfloat16 products run in hardware."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    flags = Path("/proc/cpuinfo")
    has_flag = flags.is_file() and "avx512_bf16" in flags.read_text(encoding="utf-8")
    return has_flag and bool(getattr(torch.backends.mkldnn, "is_available", bool)())


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
    """Choose the reduced draft vocabulary of a model (buffers draft_token_ids and log_coverage)."""
    ids, log_coverage = most_frequent_tokens(traces, model.config.draft_vocab_size, model.config.vocab_size)
    model.draft_token_ids.copy_(ids)
    model.log_coverage.copy_(log_coverage)


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
