"""Drafter recipe: text, shape, schedule and precision, with their defaults."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated as A
from typing import Any

import torch
from transformers import AutoConfig

from paceline.adapt.data.regenerate import RegenerateConfig
from paceline.records import Setting, record
from paceline.serving.drafters.network import TargetHandles


@record()
class DrafterRecipe:
    """Text, shape and schedule of one drafter; what is None, its family decides."""

    drafter: A[
        str, Setting("Kind of drafter (`drafter_type` of the result): specblock | eagle3 | jetspec | dflash.")
    ] = "specblock"
    domains: A[
        tuple[str, ...],
        Setting(
            "Comma list of domains whose prompts are continued; '' = the .jsonl and .txt files of the data folder."
        ),
    ] = ("tools", "code")
    text: RegenerateConfig = field(default_factory=RegenerateConfig)
    epochs: A[float, Setting("Passes over that text.", ge=0.01)] = 3.0
    held_out_tokens: int = 8_000
    """Output tokens per domain, continued from held-out documents, for the report."""
    batch_rows: int = 1536
    """Rows of a batch, padding included."""
    max_rows: int = 1024
    """Longer requests are cut."""
    learning_rate: A[
        float | None, Setting("Peak of the learning rate; default: the kind's own.", ge=1e-8, le=1.0)
    ] = None  # fmt: skip
    warmup_share: float = 0.05
    final_share: float = 0.02
    """Learning rate at the end over its peak."""
    weight_decay: float = 0.0
    num_layers: int | None = None
    num_slots: int | None = None
    """Draft tokens of a call."""
    draft_vocab_size: A[
        int | None,
        Setting(
            "Draft only the tokens that the target writes most often, so many of them; default: all.",
            flag="draft-vocab",
        ),
    ] = None
    edge_rank: A[
        int | None,
        Setting("Rank of the previous-token correction of jetspec and dflash scores; default: no correction."),
    ] = None
    without: A[
        tuple[str, ...],
        Setting(
            "Comma list of SpecBlock's parts to leave out (ablations): shift, inheritance, valid-prefix, rank-head."
        ),
    ] = ()
    loss: Any = None
    """The family's loss settings, a dataclass."""
    autocast: bool | None = None
    """bfloat16 autocast; None: when the hardware computes it natively and the drafter is wide enough to gain."""
    seed: A[int, Setting("Seed of prompts, sampling and weights.", ge=0)] = 1


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
    """Read the sizes from a checkpoint folder; an MLP wider than four times the hidden size counts as that wide."""
    t = AutoConfig.from_pretrained(target_dir, local_files_only=True).get_text_config()
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
        return torch.cuda.is_bf16_supported()
    return bool(getattr(torch.backends.mkldnn, "is_available", bool)()) and "avx512_bf16" in _cpu_flags()


def _cpu_flags() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8") if path.is_file() else ""
