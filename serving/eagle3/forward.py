"""EAGLE-3 forward: the fused weights of one drafter and the operations around its attention calls.

Shape legend: T drafter tokens, K candidates, H drafter hidden size, Hq/Hkv query/KV heads, Dh head dim, V/Vd target/draft
vocabulary, Q = (Hq + 2 * Hkv) * Dh.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from paceline.serving.drafters.forward import DrafterForward, Own
from paceline.serving.drafters.network import rms_norm, rotate_pairs
from paceline.serving.eagle3.model import EagleConfig


class EagleForward(DrafterForward):
    """The fused weights of one drafter and the operations around its attention calls."""

    config: EagleConfig

    def _fused(self, own: Own) -> Iterator[tuple[str, torch.Tensor]]:
        c, e = self.config, self.config.embed_size
        yield "beta", own("log_beta").exp()
        yield from self._fused_ids(own)
        if self.is_native:
            return
        qkv = self._paired_heads(own("qkv_proj.weight"))
        embedded = rms_norm(self.embed_weight.to(self.device, torch.float32), own("embed_norm"), c.rms_eps)
        yield "fc", own("fc.weight").T
        yield "token_table", embedded @ qkv[:, :e].T  # (V, Q)
        yield "qkv", (qkv[:, e:] * own("hidden_norm")).T
        yield from self._fused_output(own)
        yield "lm_head", self._fused_head(own, is_shared=c.shares_head)
        if c.norm_before_residual:
            yield "hidden_norm", own("hidden_norm")

    def enter(self, hidden: torch.Tensor, token_ids: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Rows of hidden states (T, H) and the tokens behind them (T,) -> rotated queries, keys and values (T, Q)."""
        c, w = self.config, self.weights
        qkv = torch.addmm(w["token_table"].index_select(0, token_ids), self.norm(hidden), w["qkv"])
        rotate_pairs(qkv, angles, c.num_heads + c.num_kv_heads, c.head_dim)
        return qkv

    def finish(
        self, x: torch.Tensor, attended: torch.Tensor, i: int = 0, others: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As DrafterForward.finish: the rows' own hidden states (T, H)."""
        if self.config.norm_before_residual:
            x = self.norm(x) * self.weights["hidden_norm"]
        return super().finish(x, attended, i, others)

    def heads(self, logits: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Best K target tokens (T, K) int64 and their calibrated log-probabilities, falling.

        logits: (T, Vd), which may be overwritten. factor: (T, 1) on them.
        """
        top, ids = self.in_target_vocab(*self.rank(logits, factor, self.num_candidates))
        return ids, top
