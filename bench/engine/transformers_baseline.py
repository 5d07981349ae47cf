"""Transformers baseline: generate() and its prompt lookup decoding on the same prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from paceline.serving.sampling.request import SamplingParams


class _FirstToken(StoppingCriteria):
    """Notes when generate() first asks whether to stop, which it does after every forward; never stops it."""

    def __init__(self) -> None:
        self.at_s: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        if self.at_s is None:
            self.at_s = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class TransformersBaseline:
    """Times `generate()` of an unmodified transformers model."""

    def __init__(self, model_dir: str, dtype: torch.dtype, pad_token_id: int, device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval().to(device)
        self._pad = pad_token_id
        self._device = torch.device(device)

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, lookup: bool) -> tuple[int, float]:
        """Generate for all prompts in one batch; returns (new tokens up to the end token, seconds).

        Prompt lookup takes one prompt at a time, as transformers requires.
        """
        token_ids, seconds, _ = self.generate(prompts, params, lookup=lookup)
        return sum(map(len, token_ids)), seconds

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, lookup: bool
    ) -> tuple[tuple[tuple[int, ...], ...], float, float]:
        """As `run`; returns (new token ids of each prompt up to its end token, seconds, seconds to the first token)."""
        length = max(len(p) for p in prompts)
        ids = torch.tensor([[self._pad] * (length - len(p)) + list(p) for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        options: dict = {
            "max_new_tokens": params.max_tokens,
            "pad_token_id": self._pad,
            "do_sample": params.temperature > 0,
        }
        if params.ignore_eos:
            options["min_new_tokens"] = params.max_tokens
        if params.temperature > 0:
            options |= {"temperature": params.temperature, "top_k": 0, "top_p": 1.0}
        if lookup:
            options["prompt_lookup_num_tokens"] = 8
        first = _FirstToken()
        torch.manual_seed(params.seed or 0)
        self._wait()
        began = time.perf_counter()
        out = self._model.generate(
            input_ids=ids, attention_mask=mask, stopping_criteria=StoppingCriteriaList([first]), **options
        )[:, length:].cpu()  # fmt: skip
        seconds = time.perf_counter() - began
        ends = torch.isin(out, torch.tensor(self._eos()))
        if params.ignore_eos:
            ends = torch.zeros_like(ends)
        first_end = torch.where(ends.any(1), ends.int().argmax(1) + 1, torch.tensor(out.shape[1]))
        token_ids = tuple(tuple(row[:n]) for row, n in zip(out.tolist(), first_end.tolist(), strict=True))
        return token_ids, seconds, (first.at_s or began) - began

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _eos(self) -> list[int]:
        eos = self._model.generation_config.eos_token_id
        return list(eos) if isinstance(eos, list | tuple) else [eos if eos is not None else -1]
