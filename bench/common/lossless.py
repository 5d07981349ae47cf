"""Lossless check: answers are the target's own, greedy ones teacher-forced through it in fp32, sampled ones drawn again.

Shape legend: T output tokens, V vocabulary.
A draw is a function of (seed, position): the engine draws the first token whose cumulative probability exceeds a uniform u.
In fp32 the drawn token's share of the unit interval, [a, b), holds u, or rounding has moved one of its ends over u: if no
logit is off by more than d, the odds a / (1 - a) are off by a factor of at most exp(2 d / temperature).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.serving.loading.checkpoint import open_checkpoint
from paceline.serving.sampling.draw import SamplingBatch, has_limits, has_penalties
from paceline.serving.sampling.request import SamplingParams
from paceline.serving.target_model.int8 import round_to_int8

# bf16 keeps 8 significant bits, so one rounding moves a value by at most 2^-9 of its size. A logit passes through the
# rounded residual stream, the final norm and the head: four such roundings of the largest logit are an error that may be
# expected, and either of two candidates may have moved. What is farther off is held against the error that is measured.
NEAR_TIE_SHARE = 2 * 4 * 2.0**-9


@dataclass(frozen=True, kw_only=True, slots=True)
class LosslessReport:
    """Counts of greedy tokens against the fp32 target on the same prefix."""

    checked: int
    near_ties: int
    """Tokens that are not the fp32 maximum but whose logit lies within NEAR_TIE_SHARE x max |logit| of it, or within twice
    the largest error that bfloat16 makes in a logit there (one plain decoding in 15,000 of the bundled target does)."""
    mismatches: int
    largest_gap: float
    """Largest distance from the maximum among all checked tokens, as a share of max |logit|."""


class LosslessChecker:
    """Holds the target in fp32 and checks answers one by one."""

    def __init__(self, target_dir: Path, *, is_int8: bool = False) -> None:
        """is_int8: the target's linear weights are those of its 8-bit form, exactly."""
        self._target_dir, self._is_int8 = target_dir, is_int8
        self._model = self._load()

    def _load(self) -> Any:
        model = open_checkpoint(self._target_dir).model().float().eval()
        if self._is_int8:
            round_to_int8(model)
        return model

    @functools.cached_property
    def _rounded(self) -> Any:
        model = self._load()
        for parameter in model.parameters():  # not the angles of its positions, which stay exact wherever it is served
            parameter.data = parameter.data.to(torch.bfloat16)
        return model

    def logits(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> torch.Tensor:
        """(T, V) float32 logits behind which each of the T output tokens stands."""
        return _logits(self._model, prompt_token_ids, output_token_ids)

    def rounding(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> torch.Tensor:
        """(T,) largest error of a logit in bfloat16, as a share of max |logit|."""
        exact, rounded = (_logits(m, prompt_token_ids, output_token_ids) for m in (self._model, self._rounded))
        return (rounded - exact).abs().amax(1) / exact.abs().amax(1)

    def gaps(
        self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (T,) distances of each output token's logit from the maximum and (T,) largest |logit|."""
        logits = self.logits(prompt_token_ids, output_token_ids)
        chosen = logits.gather(1, torch.tensor(output_token_ids)[:, None])[:, 0]
        return logits.amax(1) - chosen, logits.abs().amax(1)

    @torch.inference_mode()
    def greedy(self, prompt_token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The target's own greedy tokens behind a prompt, decoded plainly; the end of text does not end them."""
        return greedy_tokens(self._model, prompt_token_ids, num_tokens)

    def check(self, answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> LosslessReport:
        """Check (prompt ids, output ids) pairs of greedy requests without penalties."""
        answers = [(prompt, output) for prompt, output in answers if output]
        found = [self.gaps(prompt, output) for prompt, output in answers]
        return _report([gap / scale for gap, scale in found], lambda i: self.rounding(*answers[i]))


@torch.inference_mode()
def _logits(model: Any, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor([[*prompt_token_ids, *output_token_ids]])
    return model(input_ids=ids[:, :-1], use_cache=False).logits[0, len(prompt_token_ids) - 1 :].float()


@torch.inference_mode()
def greedy_tokens(model: Any, prompt_token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy tokens of a transformers model behind a prompt, one forward each."""
    out: list[int] = []
    cache, ids = None, torch.tensor([list(prompt_token_ids)])
    while len(out) < num_tokens:
        found = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache, token = found.past_key_values, int(found.logits[0, -1].argmax())
        out.append(token)
        ids = torch.tensor([[token]])
    return out


def _report(shares: Sequence[torch.Tensor], rounding: Callable[[int], torch.Tensor]) -> LosslessReport:
    """shares: (T,) of each answer, distances as shares of max |logit|; NaN counts as off. rounding: (T,) of the i-th answer,
    asked where it decides."""
    if not shares:
        return LosslessReport(checked=0, near_ties=0, mismatches=0, largest_gap=0.0)
    near = [s <= NEAR_TIE_SHARE for s in shares]
    near = [
        n if bool(n.all()) else n | (s <= 2 * rounding(i)) for i, (n, s) in enumerate(zip(near, shares, strict=True))
    ]
    share, is_near = torch.cat(list(shares)), torch.cat(near)
    off = ~(share <= 0)
    return LosslessReport(
        checked=len(share),
        near_ties=int((off & is_near).sum()),
        mismatches=int((off & ~is_near).sum()),
        largest_gap=float(share.max()),
    )


Answer = tuple[Sequence[int], Sequence[int], SamplingParams]
"""Prompt ids, output ids, settings with a seed."""


def check_sampled(checker: LosslessChecker, answers: Sequence[Answer]) -> LosslessReport:
    """Check answers drawn at a temperature above 0 without filters; near ties and gaps as shares of max |logit|.

    Raises: ConfigError for settings other than temperature and seed, which change the distribution.
    """
    answers = [answer for answer in answers if answer[1]]
    found = [draw_gaps(checker.logits(p, out), len(p), out, params) for p, out, params in answers]
    return _report(found, lambda i: checker.rounding(*answers[i][:2]))


def draw_gaps(logits: torch.Tensor, first_position: int, output: Sequence[int], params: SamplingParams) -> torch.Tensor:
    """(T,) float64: by what share of max |logit| the logits must be off for each draw to be the target's; 0 = not at all.

    logits: (T, V) float32. first_position: of the first output token.
    """
    has_filter = (
        params.top_k
        or params.top_p < 1
        or params.min_p
        or params.logit_bias
        or params.grammar is not None
        or has_limits(params)
    )
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
