"""What does one EAGLE-3 forward compute around its attention: inputs, projections, MLP, output head?

Nothing here has a shape that depends on data. Exact identities only: norm weights and the softmax scale fold into
projections, the embedding's half of the input projection becomes a table, rotary pairs become adjacent.
Shape legend: R rows, T drafter tokens, H drafter hidden size, E target embedding size, F fused feature size, V target
vocabulary, Vd draft vocabulary, Q = (Hq + 2 * Hkv) * Dh, K candidates, P positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from paceline.kernels.dispatch import Kernels, select_kernels
from paceline.serving.drafters.ops import (
    adjacent_pairs,
    choose_ranking,
    head_logits,
    norm,
    pack_head,
    pair_angles,
    rotate_pairs,
)
from paceline.serving.eagle3.model import EagleConfig
from paceline.serving.specblock.model import rope_cos_sin

_MIN_TEMPERATURE = 0.05


class EagleForward:
    """The fused weights of one drafter and the operations around its attention calls."""

    def __init__(
        self,
        config: EagleConfig,
        embed: torch.Tensor,
        *,
        dtype: torch.dtype,
        head_dtype: torch.dtype,
        device: torch.device,
        num_candidates: int,
        kernels: Kernels | None = None,
    ) -> None:
        """embed: (V, E), the target's token embedding. kernels: None = those of the device."""
        self.config, self.dtype, self.head_dtype, self.device = config, dtype, head_dtype, device
        self.num_candidates = num_candidates
        self.weights: dict[str, torch.Tensor] = {}
        self._embed = embed
        self._rank = choose_ranking(kernels or select_kernels(device))

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights; every tensor keeps its storage. state: EagleModel.state_dict(), checked by the caller."""
        for name, value in _fuse_weights(self.config, state, self._embed, self.device).items():
            if value.is_floating_point() and name not in ("beta", "log_coverage"):
                value = value.to(self.dtype).contiguous()
            if name == "lm_head" and self.head_dtype != self.dtype:
                value = pack_head(value, self.head_dtype)
            if name in self.weights:
                self.weights[name].copy_(value)
            else:
                self.weights[name] = value

    def enter(self, hidden: torch.Tensor, token_ids: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Rows of hidden states (T, H) and the tokens behind them (T,) -> rotated queries, keys and values (T, Q)."""
        c, w = self.config, self.weights
        qkv = torch.addmm(w["token_table"].index_select(0, token_ids), norm(hidden, c.rms_eps), w["qkv"])
        rotate_pairs(qkv, angles, c.num_heads + c.num_kv_heads, c.head_dim)
        return qkv

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection and MLP: hidden (T, H), attended (T, Hq * Dh) -> the rows' own hidden states (T, H)."""
        w, eps = self.weights, self.config.rms_eps
        if self.config.norm_before_residual:
            hidden = norm(hidden, eps) * w["hidden_norm"]
        x = torch.addmm(hidden, attended, w["o"])
        gate, up = torch.mm(norm(x, eps), w["gate_up"]).chunk(2, dim=-1)
        return torch.addmm(x, F.silu(gate).mul_(up), w["down"])

    def heads(self, hidden: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Best K target tokens (T, K) int64 and their calibrated log-probabilities, falling. factor: (T, 1)."""
        w = self.weights
        logits = head_logits(norm(hidden, self.config.rms_eps), w["lm_head"], self.head_dtype)
        top, ids = self._rank(logits, factor, self.num_candidates)
        if self.config.draft_vocab_size is not None:
            return w["d2t"][ids], top + w["log_coverage"]
        return ids, top

    def scales(self, temperatures: torch.Tensor) -> torch.Tensor:
        """(steps, B) factors on the logits: exp(log_beta[class, step]) / T, with T = 1 for greedy requests."""
        t = temperatures.to(self.device, torch.float32)
        is_sampled = t > 0
        factors = self.weights["beta"].index_select(0, is_sampled.long())
        return (factors / torch.where(is_sampled, t.clamp_min(_MIN_TEMPERATURE), 1.0)[:, None]).T

    def angle_table(self, num_positions: int) -> torch.Tensor:
        """Rotations at positions 0..P-1, indexed by position."""
        c = self.config
        positions = torch.arange(num_positions, device=self.device)
        cos, sin = rope_cos_sin(positions, c.head_dim, c.rope_theta, c.rope_scaling)
        return pair_angles(cos, sin, self.dtype)


def _fuse_weights(
    config: EagleConfig, state: Mapping[str, torch.Tensor], embed: torch.Tensor, device: torch.device
) -> dict[str, torch.Tensor]:
    c, e = config, config.embed_size
    s = {k: v.detach().to(device, torch.float32 if v.is_floating_point() else v.dtype) for k, v in state.items()}
    heads, order = c.num_heads + c.num_kv_heads, adjacent_pairs(c.head_dim, device)
    qkv = s["qkv_proj.weight"].view(-1, c.head_dim, e + c.hidden_size).clone()
    qkv[:heads] = qkv[:heads][:, order]
    qkv[: c.num_heads] *= c.head_dim**-0.5
    qkv = qkv.view(-1, e + c.hidden_size)
    embedded = F.rms_norm(embed.to(device, torch.float32), (e,), s["embed_norm"], c.rms_eps)
    new = {  # projections are stored (in, out)
        "fc": s["fc.weight"].T,
        "token_table": embedded @ qkv[:, :e].T,  # (V, Q)
        "qkv": (qkv[:, e:] * s["hidden_norm"]).T,
        "o": s["o_proj.weight"].T,
        "gate_up": (s["gate_up_proj.weight"] * s["post_norm"]).T,
        "down": s["down_proj.weight"].T,
        "lm_head": (s["lm_head.weight"] * s["final_norm"]).T,
        "beta": s["log_beta"].exp(),
    }
    if c.norm_before_residual:
        new["hidden_norm"] = s["hidden_norm"]
    if c.draft_vocab_size is not None:
        new |= {"d2t": s["draft_token_ids"].clone(), "log_coverage": s["log_coverage"].clone()}
    return new
