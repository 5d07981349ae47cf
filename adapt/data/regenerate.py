"""Training text for a drafter: the engine continues prompts at several temperatures, in batches, into trace shards.

A batch is a function of (seed, batch number) alone, so a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated as A
from typing import Any

import numpy as np

from paceline.adapt.data import corpus
from paceline.adapt.data.trace_store import TraceStore
from paceline.config import EngineConfig, TreeConfig
from paceline.errors import ConfigError
from paceline.paths import write_atomic
from paceline.records import Setting, count, record
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.loading.kv_size import pool_row_bytes
from paceline.serving.sampling.request import GenerationRequest, RequestTrace, RoundEvent, SamplingParams
from paceline.serving.target_model.model import TargetModel

log = logging.getLogger(__name__)
_LOOP_TOKENS, _MAX_PERIOD, _LOOP_KEPT, _LOOP_EVERY = 64, 24, 16, 16
_CANDIDATES = 4
"""Prompts drawn per prompt used: a batch takes neighbours in length, so that its requests end at about the same time."""
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
_PIECES = re.compile(r".{1,4000}(?!\S)|.{4000}", re.DOTALL)
"""Parts of a paragraph, at spaces where it has some: a file without blank lines is not one prompt."""
_TOKEN_CHARS = 16
"""Characters of a token, far above the mean: what lies behind those of a prompt need not be made tokens."""
_PREFILL_TOKENS = 2048
"""Prompt rows of a round: nobody waits for an answer."""


@record()
class RegenerateConfig:
    """What text is drawn and how."""

    num_tokens: A[
        int,
        Setting("Tokens of text that the target writes at least, over all domains.", flag="tokens", parser=count, ge=1),
    ] = 400_000
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


def folder_documents(folder: Path) -> list[str]:
    """Prompts from the .jsonl and .txt files of a folder.

    A .jsonl line holds "prompt", "text" or "messages" (a chat); a .txt file is cut into paragraphs, and long ones into pieces.
    Raises: ConfigError when there is nothing to read.
    """
    out: list[str] = []
    for path in _files(folder, ".jsonl"):
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if line.strip():
                out.append(_document(line, f"{path}:{number}"))
    for path in _files(folder, ".txt"):
        try:
            paragraphs = _BLANK_LINE.split(path.read_text(encoding="utf-8-sig"))
            out += [piece for p in paragraphs for piece in _PIECES.findall(p) if len(piece) > 40]
        except UnicodeDecodeError as e:
            raise ConfigError(f"{path} must be UTF-8 text: {e}") from e
    if not out:
        raise ConfigError(f"data must hold .jsonl or .txt files with prompts, found none below {folder}")
    return out


def _files(folder: Path, suffix: str) -> list[Path]:
    return sorted(path for path in folder.rglob(f"*{suffix}") if path.is_file())


def _document(line: bytes, place: str) -> str:
    """The prompt of a .jsonl line; raises ConfigError with the place."""
    document = _text_of(line, place)
    try:
        document.encode()
    except UnicodeEncodeError as e:
        raise ConfigError(
            f"{place} must be text of whole characters, got half a surrogate pair ({document[e.start]!r})"
        ) from e
    return document


def _text_of(line: bytes, place: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError is one
        raise ConfigError(f"{place} must be JSON: {e}") from e
    kind = next((k for k in ("messages", "prompt", "text") if isinstance(row, dict) and k in row), None)
    if kind is None:
        got = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ConfigError(f"{place} must hold 'prompt', 'text' or 'messages', got {got}")
    if kind == "messages":
        try:
            return corpus.chat_document(row[kind])
        except ConfigError as e:
            raise ConfigError(f"{place}: {e}") from None
    if not isinstance(row[kind], str):
        raise ConfigError(f"{place}: {kind} must be text, got {str(row[kind])[:200]}")
    return row[kind]


def draw_prompt(document: str, tokenizer: Any, rng: np.random.Generator, config: RegenerateConfig) -> list[int]:
    """Token ids of one prompt: up to an answer's beginning (any turn's), or up to a random token; [] of a blank document.

    With the tokens that the tokenizer puts around a text, as a service has them. A tokenizer without our turn marks gets a chat
    by its own template.
    """
    if not document.strip():
        return []
    ends = [m.end() for m in re.finditer(re.escape(corpus.ASSISTANT), document)]
    is_cut = not ends or rng.random() < config.truncation_share
    if ends and getattr(tokenizer, "chat_template", None) and not has_marks(tokenizer):
        return _chat_prompt(document, ends, tokenizer, rng, config, is_cut=is_cut)
    num_chars = _TOKEN_CHARS * config.max_prompt_tokens if is_cut else ends[int(rng.integers(len(ends)))]
    ids = tokenizer(document[:num_chars])["input_ids"]
    if len(ids) > config.max_prompt_tokens and not is_cut:
        ids = tokenizer(document[: ends[0]])["input_ids"]
    if is_cut or len(ids) > config.max_prompt_tokens:
        stop = min(len(ids), config.max_prompt_tokens)
        ids = ids[: int(rng.integers(min(4, stop), stop + 1))]
    return ids


def has_marks(tokenizer: Any) -> bool:
    """Whether a tokenizer knows our turn marks as tokens."""
    return tokenizer.convert_tokens_to_ids(corpus.ASSISTANT) not in (None, tokenizer.unk_token_id)


def _chat_prompt(
    document: str, ends: list[int], tokenizer: Any, rng: np.random.Generator, config: RegenerateConfig, *, is_cut: bool
) -> list[int]:
    """A chat up to an answer, of which some words are given when `is_cut`.

    Long ones lose their oldest turns, but no instructions of the system; the end of one that is too long even so. Empty where no user has said anything.
    """
    end = ends[int(rng.integers(len(ends)))]
    turns, given = corpus.messages(document[: end - len(corpus.ASSISTANT)]), ""
    if is_cut:
        answer = corpus.messages(document[end - len(corpus.ASSISTANT) :])[0]["content"]
        given = answer[: int(rng.integers(len(answer) + 1))]
    ids: list[int] = []
    system = [turn for turn in turns[:1] if turn["role"] == "system"]
    for start, turn in enumerate(turns):
        if turn["role"] != "user":
            continue
        chat = [*system, *turns[start:]]
        try:
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + given
        except Exception as e:  # templates raise whatever their author chose, for instance on the order of roles
            raise ConfigError(f"data must hold chats that the model's chat template takes, which says: {e}") from e
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) <= config.max_prompt_tokens:
            break
    return ids[: config.max_prompt_tokens]


def loop_start(output: Sequence[int]) -> int | None:
    """Where an answer begins to be an exact short loop: 64 tokens, looked at every 16, with a period of at most 24."""
    for stop in range(_LOOP_TOKENS, len(output) + 1, _LOOP_EVERY):
        tail = output[stop - _LOOP_TOKENS : stop]
        if any(tail[period:] == tail[:-period] for period in range(1, _MAX_PERIOD + 1)):
            return stop - _LOOP_TOKENS
    return None


def cut_loop(trace: RequestTrace) -> RequestTrace:
    """The trace up to some tokens into an exact short loop of its answer, with finish reason 'loop'; others as they are."""
    start = loop_start(trace.token_ids[trace.prompt_len :])
    if start is None:
        return trace
    count = start + _LOOP_KEPT
    stop = trace.prompt_len + count
    return dataclasses.replace(
        trace, token_ids=trace.token_ids[:stop], features=trace.features[: stop - 1], topk_ids=trace.topk_ids[:count],
        topk_logprobs=trace.topk_logprobs[:count], finish_reason="loop",
    )  # fmt: skip


class Regenerator:
    """Continues batches of prompts by an engine without a drafter; takes its traces."""

    def __init__(self, target: TargetModel, *, batch_requests: int, max_request_tokens: int, topk: int) -> None:
        """max_request_tokens: prompt and output of one request. topk: target log-probabilities kept per output token."""
        slots, config = DrafterSlots(), EngineConfig(max_running=batch_requests)
        pages = batch_requests * -(-min(max_request_tokens, target.context_tokens) // config.page_tokens)
        row_bytes, _ = pool_row_bytes(target, slots, has_traces=True)
        config = dataclasses.replace(
            config,
            max_waiting=batch_requests,
            kv_bytes=pages * config.page_tokens * row_bytes,
            prefill_chunk_tokens=_PREFILL_TOKENS,
            prefix_caching=False,  # a batch does not depend on those before it
            capture_s=0.0,  # no graphs, and one node a tree: nothing is drafted
            tree=TreeConfig(max_draft_tokens=1),
        )
        self.engine = Engine(target, slots, config, traces=self, trace_topk=topk)
        self._traces: dict[str, RequestTrace] = {}

    def wants(self, request_id: str, bucket: str) -> bool:
        """Every request is traced."""
        return True

    def record_trace(self, trace: RequestTrace) -> None:
        """Keep a trace for `run`."""
        self._traces[trace.request_id] = trace

    def run(
        self,
        prompts: Sequence[list[int]],
        temperatures: Sequence[float],
        *,
        max_new_tokens: int,
        seed: int,
        bucket: str,
        name: str,
    ) -> list[RequestTrace]:
        """Continue each prompt until the end token, max_new_tokens or an exact short loop (which is cut off).

        seed: of all draws. name: request ids are `name-0`, `name-1`, ...
        Raises: RuntimeError when the engine could not serve a request.
        """
        events: list[RoundEvent] = []
        seeds = np.random.default_rng(seed).integers(2**31, size=len(prompts)).tolist()
        for i, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True)):
            params = SamplingParams(temperature=float(temperature), max_tokens=max_new_tokens, seed=seeds[i])
            request = GenerationRequest(
                request_id=f"{name}-{i}", prompt_token_ids=tuple(prompt), params=params, bucket=bucket
            )
            self.engine.submit(request, events.append)
        while self.engine.step():
            pass
        failed = [e for e in events if e.error]
        if failed or len(self._traces) != len(prompts):
            reason = failed[0].error if failed else "a trace was lost"
            raise RuntimeError(f"the target could not write {len(prompts) - len(self._traces)} texts: {reason}")
        traces = [cut_loop(self._traces.pop(f"{name}-{i}")) for i in range(len(prompts))]
        return [dataclasses.replace(t, bucket=bucket) for t in traces]  # the engine may count it under another name


def read_state(state_file: Path) -> dict[str, Any] | None:
    """What `regenerate` remembers of finished batches; None: nothing. Raises: ConfigError when the file is damaged."""
    try:
        state = json.loads(state_file.read_bytes()) if state_file.is_file() else None
    except ValueError:
        state = ()
    names = ("target_version", "domains", "seed", "batches", "tokens")
    if state is not None and not (isinstance(state, dict) and all(name in state for name in names)):
        raise ConfigError(
            f"{state_file} is damaged; delete it, and {state_file.with_suffix('')} beside it, to start again"
        )
    return state


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
    """Write shards until `num_tokens` output tokens are there; domains take turns, one batch and shard each at least.

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
    if (found := read_state(state_file)) is not None:
        state = found
        if any(state.get(k) != v for k, v in settings.items()):
            raise ConfigError(f"{state_file} belongs to another target, domain list or seed; delete its folder")
    writer = Regenerator(
        target,
        batch_requests=config.batch_requests,
        max_request_tokens=config.max_prompt_tokens + config.max_new_tokens,
        topk=min(config.topk, target.vocab_size),
    )
    names = sorted(documents)
    while state["tokens"] < config.num_tokens or state["batches"] < len(names):
        began = time.perf_counter()
        number = state["batches"]
        domain = names[number % len(names)]
        rng = np.random.default_rng([config.seed, number])
        prompts = _draw_prompts(documents[domain], target, rng, config)
        heat = rng.choice(config.temperatures, size=len(prompts), p=config.temperature_shares).tolist()
        traces = writer.run(
            prompts,
            heat,
            max_new_tokens=config.max_new_tokens,
            seed=config.seed * 1_000_003 + number,
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
        write_atomic(state_file, json.dumps(state))
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
