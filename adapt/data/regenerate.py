"""Training text for a drafter: the target continues prompts at several temperatures, in batches, into trace shards.

Shape legend: B requests of a batch, C columns (left-padded prompt and output), V vocab, k logged log-probs a token,
F fused feature size, Hkv KV heads, Dh head dim.
A batch is a function of (seed, batch number) alone, so a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated as A
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from paceline.adapt.data import corpus
from paceline.adapt.data.trace_store import TraceStore
from paceline.errors import ConfigError
from paceline.records import Setting, count, record
from paceline.serving.sampling.request import RequestTrace
from paceline.serving.target_model.model import TargetModel

log = logging.getLogger(__name__)
_ATTENTION = "paceline_static"
_LOOP_TOKENS, _MAX_PERIOD, _LOOP_KEPT, _LOOP_EVERY = 64, 24, 16, 16
_CANDIDATES = 4
"""Prompts drawn per prompt used: a batch takes neighbours in length, so that it pads little."""


@record()
class RegenerateConfig:
    """What text is drawn and how."""

    num_tokens: A[
        int,
        Setting(
            "Tokens that the target writes as training text, at least, over all domains; 128 requests at a time.",
            flag="tokens", parser=count, ge=1,
        ),
    ] = 400_000  # fmt: skip
    max_new_tokens: int = 160
    max_prompt_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 0.8, 1.0)
    temperature_shares: tuple[float, ...] = (0.35, 0.45, 0.2)
    truncation_share: float = 0.25
    """Share of prompts that end anywhere in a document instead of where an answer begins."""
    batch_requests: int = 128
    topk: int = 8
    """Target log-probabilities kept per output token."""
    seed: int = 1

    def __post_init__(self) -> None:
        if len(self.temperatures) != len(self.temperature_shares) or abs(sum(self.temperature_shares) - 1) > 1e-6:
            raise ConfigError(f"temperature_shares must add up to 1 over temperatures, got {self.temperature_shares}")


def prompt_documents(domain: str, data: Path | None) -> list[str]:
    """Documents of one domain, training side."""
    return corpus.documents(domain, data, "train")


def folder_documents(folder: Path, tokenizer: Any) -> list[str]:
    """Prompts from the .jsonl and .txt files of a folder.

    A .jsonl line holds "prompt", "text" or "messages" (through the tokenizer's chat template); a .txt file is cut into
    paragraphs. Raises: ConfigError when there is nothing to read.
    """
    out: list[str] = []
    for path in sorted(folder.rglob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            row = json.loads(line)
            if "messages" in row:
                out.append(tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True))
            elif "prompt" in row or "text" in row:
                out.append(row["prompt"] if "prompt" in row else row["text"])
            else:
                raise ConfigError(f"{path}:{number} must hold 'prompt', 'text' or 'messages', got {sorted(row)}")
    for path in sorted(folder.rglob("*.txt")):
        out += [p for p in path.read_text(encoding="utf-8").split("\n\n") if len(p) > 40]
    if not out:
        raise ConfigError(f"data must hold .jsonl or .txt files with prompts, found none below {folder}")
    return out


def draw_prompt(document: str, tokenizer: Any, rng: np.random.Generator, config: RegenerateConfig) -> list[int]:
    """Token ids of one prompt: up to an answer's beginning (any turn's), or up to a random token."""
    ends = [m.end() for m in re.finditer(re.escape(corpus.ASSISTANT), document)]
    is_cut = not ends or rng.random() < config.truncation_share
    text = document if is_cut else document[: ends[int(rng.integers(len(ends)))]]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) > config.max_prompt_tokens and not is_cut:
        text, is_cut = document[: ends[0]], False
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if is_cut or len(ids) > config.max_prompt_tokens:
        stop = min(len(ids), config.max_prompt_tokens)
        ids = ids[: int(rng.integers(min(4, stop), stop + 1))]
    return ids


def loop_rows(tail: np.ndarray) -> np.ndarray:
    """(B, n) last tokens -> (B,) bool: whether they repeat exactly with a period of at most 24."""
    found = np.zeros(len(tail), dtype=bool)
    for period in range(1, _MAX_PERIOD + 1):
        found |= (tail[:, period:] == tail[:, :-period]).all(axis=1)
    return found


def draw(logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens (B,) drawn by inverse CDF at each row's temperature from logits (B, V); argmax where it is 0."""
    out = logits.argmax(-1)
    hot = (temperatures > 0).nonzero()[:, 0]
    if hot.numel():
        cdf = (logits[hot] / temperatures[hot, None]).softmax(-1).cumsum_(-1)
        wanted = uniforms[hot, None] * cdf[:, -1:]
        out[hot] = torch.searchsorted(cdf, wanted, right=True)[:, 0].clamp_max(logits.shape[1] - 1)
    return out


class _StaticCache:
    """Left-padded KV of a batch, (layers, 2, B, Hkv, C, Dh), with the mask of what each row sees."""

    def __init__(self, target: TargetModel, pads: torch.Tensor, columns: int) -> None:
        shape = (target.num_layers, 2, len(pads), target.num_kv_heads, columns, target.head_dim)
        self.kv = torch.zeros(shape, dtype=target.dtype, device=target.device)
        self.pads = pads
        self.start = self.stop = 0
        self.bias = torch.empty(0)

    def begin(self, start: int, stop: int) -> None:
        """Prepare a forward of columns start..stop-1."""
        self.start, self.stop = start, stop
        keys = torch.arange(stop, device=self.kv.device)
        queries = torch.arange(start, stop, device=self.kv.device)
        seen = (keys >= self.pads[:, None, None]) & (keys <= queries[:, None])
        seen |= keys == queries[:, None]  # padding sees itself
        self.bias = torch.zeros(seen.shape, dtype=self.kv.dtype, device=seen.device).masked_fill_(~seen, float("-inf"))

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all other requests."""
        self.kv = self.kv.index_select(2, rows)
        self.pads = self.pads[rows]


def _static_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    static_cache: _StaticCache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    assert static_cache is not None
    c = static_cache
    keys, values = c.kv[module.layer_idx]  # type: ignore[index]
    keys[:, :, c.start : c.stop] = key
    values[:, :, c.start : c.stop] = value
    b, h, n, d = query.shape
    groups = h // key.shape[1]
    folded = query.reshape(b, key.shape[1], groups * n, d)
    bias = c.bias.repeat(1, groups, 1)[:, None] if groups > 1 and n > 1 else c.bias[:, None]
    out = F.scaled_dot_product_attention(
        folded, keys[:, :, : c.stop], values[:, :, : c.stop], bias.expand(-1, -1, groups * n, -1), scale=scaling
    )
    return out.view(b, h, n, d).transpose(1, 2), None


class Regenerator:
    """Continues batches of prompts with a target; owns the target's attention while it lives."""

    def __init__(self, target: TargetModel) -> None:
        AttentionInterface.register(_ATTENTION, _static_attention)
        AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
        self.target = target
        target.model.set_attn_implementation(_ATTENTION)
        self._tapped: dict[int, torch.Tensor] = {}
        for tap in set(target.tap_layers):
            target.model.get_decoder().layers[tap].register_forward_hook(self._hook(tap))

    def _hook(self, tap: int) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            self._tapped[tap] = output[0] if isinstance(output, tuple) else output

        return hook

    def _forward(self, cache: _StaticCache, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the columns ids (B, n) at the cache's span; logits (B, V) of the last column, features (B, n, F)."""
        positions = (torch.arange(cache.start, cache.stop, device=ids.device) - cache.pads[:, None]).clamp_min(0)
        out = self.target.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=ids.device),  # 4-D: none is built
            use_cache=False,
            logits_to_keep=1,
            static_cache=cache,
        )
        features = torch.cat([self._tapped[t] for t in self.target.tap_layers], dim=-1)
        self._tapped.clear()
        return out.logits[:, -1].float(), features

    @torch.inference_mode()
    def run(
        self,
        prompts: Sequence[list[int]],
        temperatures: Sequence[float],
        *,
        max_new_tokens: int,
        topk: int,
        generator: torch.Generator,
        bucket: str,
        name: str,
    ) -> list[RequestTrace]:
        """Continue each prompt until the end token, max_new_tokens or an exact short loop (which is cut off)."""
        target, device = self.target, self.target.device
        count, width = len(prompts), max(len(p) for p in prompts)
        columns = min(width + max_new_tokens, max(width + 1, target.context_tokens))
        pads = torch.tensor([width - len(p) for p in prompts])
        ids = torch.zeros(count, columns, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt) : width] = torch.tensor(prompt)
        features = torch.zeros(count, columns, target.feature_size, dtype=target.dtype)
        top_ids = torch.zeros(count, columns, topk, dtype=torch.int32)
        top_logprobs = torch.zeros(count, columns, topk)
        stops = torch.full((count,), columns)
        reasons = ["length"] * count
        cache = _StaticCache(target, pads.to(device), columns)
        rows = torch.arange(count)  # requests still in the batch
        heat = torch.tensor(list(temperatures), device=device)
        eos = torch.tensor(sorted(target.eos_token_ids) or [-1], device=device)
        cache.begin(0, width)
        logits, new = self._forward(cache, ids[:, :width].to(device))
        features[:, :width] = new.cpu()
        for column in range(width, columns):
            logprobs = logits.log_softmax(-1)
            best = logprobs.topk(topk, dim=-1)
            drawn = draw(logits, heat, torch.rand(len(rows), generator=generator).to(device))
            ids[rows, column] = drawn.cpu()
            top_ids[rows, column] = best.indices.int().cpu()
            top_logprobs[rows, column] = best.values.cpu()
            ended = torch.isin(drawn, eos).cpu()
            done = column + 1 - width
            looped = torch.zeros_like(ended)
            if done >= _LOOP_TOKENS and done % _LOOP_EVERY == 0:
                looped = torch.from_numpy(loop_rows(ids[rows, column + 1 - _LOOP_TOKENS : column + 1].numpy())) & ~ended
            for i in rows[ended].tolist():
                stops[i], reasons[i] = column + 1, "stop"
            for i in rows[looped].tolist():
                stops[i], reasons[i] = column + 1 - _LOOP_TOKENS + _LOOP_KEPT, "loop"
            left = ~(ended | looped)
            if not bool(left.any()) or column + 1 == columns:
                break
            if not bool(left.all()):
                keep = left.nonzero()[:, 0]
                rows, heat, drawn = rows[keep], heat[keep.to(device)], drawn[keep.to(device)]
                cache.keep(keep.to(device))
            cache.begin(column, column + 1)
            logits, new = self._forward(cache, drawn[:, None])
            features[rows, column] = new[:, 0].cpu()
        traces = []
        for i, prompt in enumerate(prompts):
            start, stop = int(pads[i]), int(stops[i])
            traces.append(
                RequestTrace(
                    request_id=f"{name}-{i}",
                    bucket=bucket,
                    temperature=float(temperatures[i]),
                    prompt_len=len(prompt),
                    token_ids=ids[i, start:stop].tolist(),
                    features=features[i, start : stop - 1].clone(),
                    topk_ids=top_ids[i, width:stop].clone(),
                    topk_logprobs=top_logprobs[i, width:stop].clone(),
                    target_version=target.version,
                    finish_reason=reasons[i],
                )
            )
        return traces


def regenerate(
    target: TargetModel,
    store: TraceStore,
    documents: dict[str, list[str]],
    config: RegenerateConfig,
    *,
    state_file: Path,
    sources: Mapping[str, str] | None = None,
    progress: Callable[[int, int, dict], None] = lambda done, total, info: None,
) -> dict[str, Any]:
    """Write shards until `num_tokens` output tokens are there; domains take turns, one batch and shard each.

    `state_file` remembers finished batches; a second call with the same settings goes on after the last one.
    sources: where the documents of a domain come from; the first call's are kept in the state.
    Returns {"batches", "tokens", "seconds", "loops", "requests", "sources"}. Raises: ConfigError when the state is another run's.
    """
    settings = {"target_version": target.version, "domains": sorted(documents), "seed": config.seed}
    state: dict[str, Any] = {
        **settings,
        "batches": 0,
        "tokens": 0,
        "requests": 0,
        "loops": 0,
        "seconds": 0.0,
        "sources": dict(sources or {}),
    }
    if state_file.is_file():
        state = json.loads(state_file.read_text(encoding="utf-8"))
        if any(state.get(k) != v for k, v in settings.items()):
            raise ConfigError(f"{state_file} belongs to another target, domain list or seed; delete its folder")
    writer = Regenerator(target)
    names = sorted(documents)
    while state["tokens"] < config.num_tokens:
        began = time.perf_counter()
        number = state["batches"]
        domain = names[number % len(names)]
        rng = np.random.default_rng([config.seed, number])
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + number)
        prompts = _draw_prompts(documents[domain], target, rng, config)
        heat = rng.choice(config.temperatures, size=len(prompts), p=config.temperature_shares).tolist()
        traces = writer.run(
            prompts,
            heat,
            max_new_tokens=config.max_new_tokens,
            topk=min(config.topk, target.vocab_size),
            generator=generator,
            bucket=domain,
            name=f"{domain}-{config.seed}-{number}",
        )
        store.write_shard(traces, domain)
        new_tokens = sum(len(t.token_ids) - t.prompt_len for t in traces)
        seconds = time.perf_counter() - began
        state["batches"] += 1
        state["tokens"] += new_tokens
        state["requests"] += len(traces)
        state["loops"] += sum(t.finish_reason == "loop" for t in traces)
        state["seconds"] += seconds
        tmp = state_file.with_suffix(".tmp")
        tmp.write_text(json.dumps(state), encoding="utf-8")
        tmp.replace(state_file)
        progress(
            min(state["tokens"], config.num_tokens),
            config.num_tokens,
            {"tokens_per_s": new_tokens / seconds, "domain": domain},
        )
    return state


def _draw_prompts(
    documents: list[str], target: TargetModel, rng: np.random.Generator, config: RegenerateConfig
) -> list[list[int]]:
    room = target.context_tokens - 8
    picks = rng.integers(len(documents), size=_CANDIDATES * config.batch_requests)
    drawn = [draw_prompt(documents[i], target.tokenizer, rng, config)[:room] for i in picks]
    drawn = sorted((p for p in drawn if p), key=len)
    if len(drawn) < config.batch_requests:
        raise ConfigError(f"documents must tokenize to at least one token, {len(drawn)} of {len(picks)} did")
    at = int(rng.integers(len(drawn) - config.batch_requests + 1))
    return drawn[at : at + config.batch_requests]
