"""What is a drafter's default recipe: text, shape, schedule, precision?"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig

from paceline.adapt.regenerate import RegenerateConfig
from paceline.adapt.specblock_loss import LossConfig
from paceline.adapt.target_handle import TargetHandle
from paceline.serving.specblock_model import SpecBlockConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterRecipe:
    """Text, shape and schedule of one drafter."""

    domains: tuple[str, ...] = ("tools", "code")
    """Empty: prompts come from the .jsonl and .txt files of the data folder."""
    text: RegenerateConfig = field(default_factory=RegenerateConfig)
    held_out_tokens: int = 8_000
    """Output tokens per domain, continued from held-out documents, for the report."""
    epochs: float = 3.0
    batch_rows: int = 1536
    """Rows of a batch, padding included."""
    max_rows: int = 1024
    """Longer requests are cut."""
    learning_rate: float = 2e-3
    warmup_share: float = 0.05
    final_share: float = 0.02
    """Learning rate at the end over its peak."""
    weight_decay: float = 0.0
    num_layers: int = 2
    num_slots: int = 4
    loss: LossConfig = field(default_factory=LossConfig)
    autocast: bool | None = None
    """bfloat16 autocast; None: when the hardware computes it natively and the drafter is wide enough to gain."""
    seed: int = 1


def drafter_config(target: TargetHandle, target_dir: Path, recipe: DrafterRecipe) -> SpecBlockConfig:
    """The default architecture: layers shaped like the target's."""
    t = AutoConfig.from_pretrained(target_dir, local_files_only=True).get_text_config()
    heads = t.num_attention_heads
    return SpecBlockConfig(
        hidden_size=t.hidden_size,
        intermediate_size=min(t.intermediate_size, 4 * t.hidden_size),
        num_heads=heads,
        num_kv_heads=getattr(t, "num_key_value_heads", None) or heads,
        head_dim=getattr(t, "head_dim", None) or t.hidden_size // heads,
        vocab_size=target.vocab_size,
        feature_size=target.feature_size,
        embed_size=target.embed_weight.shape[1],
        num_layers=recipe.num_layers,
        num_slots=recipe.num_slots,
        num_blocks=recipe.loss.num_blocks,
        rms_eps=getattr(t, "rms_norm_eps", 1e-6),
        rank_hidden=min(256, max(16, t.hidden_size // 2)),
        rank_topk=min(20, target.vocab_size),
    )


def has_native_bf16(device: torch.device) -> bool:
    """Whether bfloat16 products run in hardware."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return bool(getattr(torch.backends.mkldnn, "is_available", bool)()) and "avx512_bf16" in _cpu_flags()


def _cpu_flags() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8") if path.is_file() else ""
