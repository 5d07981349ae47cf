"""Are sampled answers the target's own? A draw is a function of (seed, position), so that each one can be repeated in fp32.

Shape legend: T output tokens, V vocabulary.
The engine draws the first token whose cumulative probability exceeds a uniform u. In fp32 the drawn token's share of the
unit interval, [a, b), holds u, or rounding has moved one of its ends over u: if no logit is off by more than d, the odds
a / (1 - a) are off by a factor of at most exp(2 d / temperature).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.bench.common.lossless import NEAR_TIE_SHARE, LosslessChecker, LosslessReport
from paceline.errors import ConfigError
from paceline.serving.sampling.draw import SamplingBatch, has_penalties
from paceline.serving.sampling.request import SamplingParams

Answer = tuple[Sequence[int], Sequence[int], SamplingParams]
"""Prompt ids, output ids, settings with a seed."""


def check_sampled(checker: LosslessChecker, answers: Sequence[Answer]) -> LosslessReport:
    """Check answers drawn at a temperature above 0 without filters; near ties and gaps as shares of max |logit|.

    Raises: ConfigError for settings other than temperature and seed, which change the distribution.
    """
    checked = near = wrong = 0
    largest = 0.0
    for prompt, output, params in answers:
        if not output:
            continue
        shares = draw_gaps(checker.logits(prompt, output), len(prompt), output, params)
        off = ~(shares <= 0)  # NaN counts as off
        checked += len(output)
        near += int((off & (shares <= NEAR_TIE_SHARE)).sum())
        wrong += int((off & ~(shares <= NEAR_TIE_SHARE)).sum())
        largest = max(largest, float(shares.max()))
    return LosslessReport(checked=checked, near_ties=near, mismatches=wrong, largest_gap=largest)


def draw_gaps(logits: torch.Tensor, first_position: int, output: Sequence[int], params: SamplingParams) -> torch.Tensor:
    """(T,) float64: by what share of max |logit| the logits must be off for each draw to be the target's; 0 = not at all.

    logits: (T, V) float32. first_position: of the first output token.
    """
    has_filter = params.top_k or params.top_p < 1 or params.min_p or params.logit_bias or params.grammar is not None
    if has_filter or has_penalties(params) or params.temperature == 0 or params.seed is None:
        raise ConfigError("sampling must have a temperature above 0, a seed and nothing else to be checked")
    batch = SamplingBatch.from_params([params], [params.seed], [None], "cpu", [None])
    positions = torch.arange(first_position, first_position + len(output))
    u = batch.uniforms(torch.zeros_like(positions), positions)
    cumulative = (logits.double() / params.temperature).softmax(-1).cumsum(-1)
    drawn = torch.tensor(output)[:, None]
    high = cumulative.gather(1, drawn)[:, 0]
    low = torch.where(drawn[:, 0] > 0, cumulative.gather(1, (drawn - 1).clamp(min=0))[:, 0], 0.0)
    below = (low.logit() - u.logit()).where(u < low, torch.zeros_like(u))
    above = (u.logit() - high.logit()).where(u >= high, torch.zeros_like(u))
    return (below + above) * params.temperature / logits.abs().amax(1).double()
