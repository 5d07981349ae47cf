"""What transformers itself does on the same prompts: generate() and its prompt lookup decoding."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from paceline.serving.request import SamplingParams


class TransformersBaseline:
    """Times `generate()` of an unmodified transformers model."""

    def __init__(self, model_dir: str, dtype: torch.dtype, pad_token_id: int) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
        self._pad = pad_token_id

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, lookup: bool) -> tuple[int, float]:
        """Generate for all prompts in one batch; returns (new tokens up to the end token, seconds).

        Prompt lookup takes one prompt at a time, as transformers requires.
        """
        length = max(len(p) for p in prompts)
        ids = torch.tensor([[self._pad] * (length - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
        options: dict = {
            "max_new_tokens": params.max_tokens,
            "pad_token_id": self._pad,
            "do_sample": params.temperature > 0,
        }
        if params.temperature > 0:
            options |= {"temperature": params.temperature, "top_k": 0, "top_p": 1.0}
        if lookup:
            options["prompt_lookup_num_tokens"] = 8
        torch.manual_seed(params.seed or 0)
        began = time.perf_counter()
        out = self._model.generate(input_ids=ids, attention_mask=mask, **options)[:, length:]
        seconds = time.perf_counter() - began
        ends = torch.isin(out, torch.tensor(self._eos()))
        first_end = torch.where(ends.any(1), ends.int().argmax(1) + 1, torch.tensor(out.shape[1]))
        return int(first_end.sum()), seconds

    def _eos(self) -> list[int]:
        eos = self._model.generation_config.eos_token_id
        return list(eos) if isinstance(eos, list | tuple) else [eos if eos is not None else -1]
