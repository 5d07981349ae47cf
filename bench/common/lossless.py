"""Is greedy output the target's own? Teacher-forces answers through the target in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

# bf16 keeps 8 significant bits, so one rounding moves a value by at most 2^-9 of its size. A logit passes through the
# rounded residual stream, the final norm and the head: four such roundings of the largest logit bound the error that
# may swap two candidates, and either of the two may have moved.
NEAR_TIE_SHARE = 2 * 4 * 2.0**-9


@dataclass(frozen=True, kw_only=True, slots=True)
class LosslessReport:
    """Counts of greedy tokens against the fp32 target on the same prefix."""

    checked: int
    near_ties: int
    """Tokens that are not the fp32 maximum but whose logit lies within NEAR_TIE_SHARE x max |logit| of it."""
    mismatches: int
    largest_gap: float
    """Largest distance from the maximum among all checked tokens, as a share of max |logit|."""


class LosslessChecker:
    """Holds the target in fp32 and checks answers one by one."""

    def __init__(self, target_dir: Path, num_threads: int | None = None) -> None:
        if num_threads:
            torch.set_num_threads(num_threads)
        self._model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> torch.Tensor:
        """(T, V) float32 logits behind which each of the T output tokens stands."""
        ids = torch.tensor([[*prompt_token_ids, *output_token_ids]])
        return self._model(input_ids=ids[:, :-1], use_cache=False).logits[0, len(prompt_token_ids) - 1 :]

    def gaps(
        self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (T,) distances of each output token's logit from the maximum and (T,) largest |logit|."""
        logits = self.logits(prompt_token_ids, output_token_ids)
        chosen = logits.gather(1, torch.tensor(output_token_ids)[:, None])[:, 0]
        return logits.amax(1) - chosen, logits.abs().amax(1)

    def check(self, answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> LosslessReport:
        """Check (prompt ids, output ids) pairs of greedy requests without penalties."""
        checked = near = wrong = 0
        largest = 0.0
        for prompt, output in answers:
            if not output:
                continue
            gap, scale = self.gaps(prompt, output)
            share = gap / scale
            off = ~(gap <= 0)  # NaN counts as off
            checked += len(output)
            near += int((off & (share <= NEAR_TIE_SHARE)).sum())
            wrong += int((off & ~(share <= NEAR_TIE_SHARE)).sum())
            largest = max(largest, float(share.max()))
        return LosslessReport(checked=checked, near_ties=near, mismatches=wrong, largest_gap=largest)
