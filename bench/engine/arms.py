"""Arms: ways of generating that take turns at groups of requests, and where a group's time goes.

`batch` requests of a group run at once: when one ends, the next one starts, until none is left. Three stretches are told
apart: until the first `batch` requests have their first tokens, the full-batch part (from there to the end of the round
after which fewer than `batch` run), and the draining tail. Another arm begins each group, so that drift hits all alike.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from paceline.bench.common.recorders import CountedDrafter, DraftCalls, Round, RoundRecorder
from paceline.config import EngineConfig
from paceline.contracts import Group
from paceline.errors import PacelineError
from paceline.paths import resolve_model
from paceline.serving.drafters.interface import Drafter
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.engine.output import FeedbackSink
from paceline.serving.engine.traces import TraceSink
from paceline.serving.loading.checkpoint import open_checkpoint
from paceline.serving.loading.kv_size import pool_row_bytes
from paceline.serving.sampling.request import GenerationRequest, RoundEvent, SamplingParams
from paceline.serving.target_model.int8 import round_to_int8
from paceline.serving.target_model.model import TargetModel

GENERATE, LOOKUP = "transformers", "transformers_lookup"
"""Names of the arms that are not our engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchGroup:
    """Requests that run together, the same for every arm."""

    tag: str
    bucket: str
    prompts: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]
    batch: int
    """Requests that run at once."""
    buckets: tuple[str, ...] = ()
    """Of each request, where they differ; () = `bucket`."""
    tenant: str = ""
    """Whose requests they are: a drafter that drafts from recent answers knows those of the same tenant only."""

    @property
    def cell(self) -> tuple[str, int, float]:
        """(bucket, batch, temperature)."""
        return self.bucket, self.batch, self.params[0].temperature


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """A stretch of engine time: differences of two readings of the counters."""

    seconds: float
    num_tokens: int
    num_rounds: int
    part_s: dict[str, float]
    """Seconds of the decode rounds by part, as `Engine.stats()["round_part_s"]`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTiming:
    """What one arm did with one group."""

    token_ids: tuple[tuple[int, ...], ...]
    seconds: float
    ttft_s: tuple[float, ...]
    """From the start of the group (transformers: of each of its batches) to the first token, for the first `batch` requests."""
    prompts_s: float | None = None
    """Until the first tokens, summed over batches that run one after the other; None where there are none."""
    whole: Stretch | None = None
    """None for arms that are not an engine."""
    full_batch: Stretch | None = None
    """None when a request ended before the last one had its first token, and for arms that are not an engine."""
    num_request_rounds: int = 0
    """Rounds summed over requests: the denominator of the pooled acceptance length."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    submitted_s: tuple[float, ...] = ()
    """Per request, from the start of the group; () for arms that are not an engine, as for the next ones."""
    chunks: tuple[tuple[tuple[float, int], ...], ...] = ()
    """Per request, (seconds from the start of the group, tokens) of each event with tokens; the first is prefill's."""
    rounds: tuple[tuple[Round, ...], ...] = ()
    """Per request; () where the arm has no recorder."""
    calls: DraftCalls = field(default_factory=DraftCalls)
    last: tuple[RoundEvent, ...] = ()
    """Per request, its last event: totals and how it ended; () for arms that are not an engine."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def prefill_s(self) -> float:
        """Engine: everything outside decode rounds (prefill, admission); otherwise the time to the first token."""
        if self.whole is None:
            return max(self.ttft_s) if self.prompts_s is None else self.prompts_s
        return max(0.0, self.seconds - sum(self.whole.part_s.values()))


@dataclass(slots=True)
class _Progress:
    """What the events of a running group have said so far."""

    num_started: int = 0
    num_tokens: int = 0
    tokens: list[list[int]] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    submitted_s: list[float] = field(default_factory=list)
    chunks: list[list[tuple[float, int]]] = field(default_factory=list)
    last: dict[int, RoundEvent] = field(default_factory=dict)

    @property
    def num_running(self) -> int:
        return len(self.submitted_s) - len(self.last)


class EngineArm:
    """Steps one engine in the caller's thread."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        group: Group,
        timer: Callable[[], float] = time.perf_counter,
        *,
        recorder: RoundRecorder | None = None,
        drafter: CountedDrafter | None = None,
    ) -> None:
        """recorder: the engine's feedback sink, for timings with rounds. drafter: the engine's, for its calls."""
        self.name, self.engine = name, engine
        self._group, self._timer = group, timer
        self._recorder, self._drafter = recorder, drafter

    def supports(self, batch: int, temperature: float) -> bool:
        """Whether groups of this size can run."""
        return batch <= self.engine.config.max_running

    def run(self, group: BenchGroup) -> GroupTiming:
        """Run one group to its end; the counters are read four times a group, not once a round.

        Raises: PacelineError when a request fails.
        """
        engine, num_requests = self.engine, len(group.prompts)
        seen = _Progress(
            tokens=[[] for _ in group.prompts], ttft_s=[0.0] * num_requests, chunks=[[] for _ in group.prompts]
        )
        prefix = f"{self.name}-{group.tag}" if self.name else group.tag
        index = {f"{prefix}-{i}": i for i in range(num_requests)}
        calls = DraftCalls() if self._drafter is None else self._drafter.calls
        wait(engine.target.device)
        start = self._read(seen)
        began = start.seconds

        def on_event(event: RoundEvent) -> None:
            i = index[event.request_id]
            if event.token_ids:
                at = self._timer() - began
                seen.chunks[i].append((at, len(event.token_ids)))
                if not seen.tokens[i]:
                    seen.ttft_s[i] = at
                    seen.num_started += 1
            seen.tokens[i].extend(event.token_ids)
            seen.num_tokens += len(event.token_ids)
            if event.finish_reason is not None:
                seen.last[i] = event

        waiting = iter(index.items())

        def submit(count: int) -> None:
            for request_id, i in itertools.islice(waiting, count):
                request = GenerationRequest(
                    request_id=request_id, prompt_token_ids=group.prompts[i], params=group.params[i],
                    bucket=group.buckets[i] if group.buckets else group.bucket, group=self._group, tenant=group.tenant,
                )  # fmt: skip
                seen.submitted_s.append(self._timer() - began)
                engine.submit(request, on_event)

        submit(group.batch)
        full_start: Stretch | None = None
        full_end: Stretch | None = None
        while engine.step():
            submit(group.batch - seen.num_running)
            if full_end is None:
                is_full = seen.num_running == group.batch
                if full_start is not None and not is_full:
                    full_end = self._read(seen)
                elif full_start is None and is_full and seen.num_started >= group.batch:
                    full_start = self._read(seen)
        wait(engine.target.device)
        end = self._read(seen)
        for i in range(num_requests):
            event = seen.last.get(i)
            if event is None or event.finish_reason not in ("stop", "length"):
                why = "no last event" if event is None else event.error or event.finish_reason
                raise PacelineError(f"request {i} of group {group.tag} did not finish in arm {self.name!r}: {why}")
        last = tuple(seen.last[i] for i in range(num_requests))
        stats = [event.stats for event in last]
        whole = _between(start, end)
        return GroupTiming(
            token_ids=tuple(map(tuple, seen.tokens)),
            seconds=whole.seconds,
            ttft_s=tuple(seen.ttft_s[: group.batch]),
            whole=whole,
            full_batch=None if full_start is None or full_end is None else _between(full_start, full_end),
            num_request_rounds=sum(s.num_rounds for s in stats),
            num_draft_tokens=sum(s.num_draft_tokens for s in stats),
            num_accepted_tokens=sum(s.num_accepted_tokens for s in stats),
            submitted_s=tuple(seen.submitted_s),
            chunks=tuple(map(tuple, seen.chunks)),
            rounds=()
            if self._recorder is None
            else self._recorder.take(list(index), [p.max_tokens for p in group.params]),
            calls=DraftCalls() if self._drafter is None else self._drafter.calls - calls,
            last=last,
        )

    def _read(self, seen: _Progress) -> Stretch:
        """A reading of the counters; `seconds` is the timer's own."""
        stats: dict[str, Any] = self.engine.stats()
        return Stretch(
            seconds=self._timer(),
            num_tokens=seen.num_tokens,
            num_rounds=stats["num_rounds"],
            part_s=stats["round_part_s"],
        )


def run_group(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, group: Group, bucket: str, tag: str
) -> GroupTiming:  # fmt: skip
    """Run prompts together, to the last one's end. Raises: PacelineError when a request ends in an error."""
    texts = tuple(map(tuple, prompts))
    together = BenchGroup(tag=tag, bucket=bucket, prompts=texts, params=tuple(params), batch=len(texts))
    return EngineArm("", engine, group).run(together)


def wait(device: torch.device) -> None:
    """Let the device finish what was given to it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _between(a: Stretch, b: Stretch) -> Stretch:
    return Stretch(
        seconds=b.seconds - a.seconds,
        num_tokens=b.num_tokens - a.num_tokens,
        num_rounds=b.num_rounds - a.num_rounds,
        part_s={k: v - a.part_s.get(k, 0.0) for k, v in b.part_s.items()},
    )


class _FirstToken(StoppingCriteria):
    """Notes when generate() first asks whether to stop, which it does after every forward; never stops it."""

    def __init__(self) -> None:
        self.at_s: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        if self.at_s is None:
            self.at_s = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class TransformersArm:
    """transformers' own generate(), or its prompt lookup decoding, which takes one request at a time."""

    def __init__(self, name: str, model: Any, pad_token_id: int, *, lookup: bool) -> None:
        """model: an unmodified AutoModelForCausalLM where it is to run."""
        self.name = name
        self._model, self._pad, self._lookup = model, pad_token_id, lookup

    def supports(self, batch: int, temperature: float) -> bool:
        return batch == 1 or not self._lookup

    def run(self, group: BenchGroup) -> GroupTiming:
        token_ids: list[tuple[int, ...]] = []
        seconds, ttft_s = 0.0, list[float]()
        for at in range(0, len(group.prompts), group.batch):  # generate() has no continuous batching
            texts, took_s, first_s = self._generate(group.prompts[at : at + group.batch], group.params[at])
            token_ids += texts
            seconds += took_s
            ttft_s.append(first_s)
        return GroupTiming(token_ids=tuple(token_ids), seconds=seconds, ttft_s=tuple(ttft_s), prompts_s=sum(ttft_s))

    @torch.inference_mode()
    def _generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> tuple[list[tuple[int, ...]], float, float]:
        """(New token ids of each prompt up to its end token, seconds, seconds to the first token) of one batch."""
        length, device = max(len(p) for p in prompts), self._model.device
        ids = torch.tensor([[self._pad] * (length - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts], device=device)
        # what the checkpoint's generation_config.json asks for beside the settings of a request holds for no other arm
        options: dict[str, Any] = {"do_sample": params.temperature > 0, "repetition_penalty": 1.0}
        if params.ignore_eos:
            options["min_new_tokens"] = params.max_tokens
        if params.temperature > 0:
            options |= {"temperature": params.temperature, "top_k": 0, "top_p": 1.0}
        if self._lookup:
            options["prompt_lookup_num_tokens"] = 8
        first = _FirstToken()
        torch.manual_seed(params.seed or 0)
        wait(device)
        began = time.perf_counter()
        out = self._model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=params.max_tokens, pad_token_id=self._pad,
            stopping_criteria=StoppingCriteriaList([first]), **options,
        )[:, length:].cpu()  # fmt: skip
        seconds = time.perf_counter() - began
        eos = self._model.generation_config.eos_token_id
        ends = torch.isin(out, torch.tensor(-1 if eos is None else eos)) & (not params.ignore_eos)
        first_end = torch.where(ends.any(1), ends.int().argmax(1) + 1, out.shape[1])
        token_ids = [tuple(row[:n]) for row, n in zip(out.tolist(), first_end.tolist(), strict=True)]
        return token_ids, seconds, (first.at_s or began) - began


class Arm(Protocol):
    """One way of generating."""

    name: str

    def supports(self, batch: int, temperature: float) -> bool:
        """Whether groups of this size can run."""
        ...

    def run(self, group: BenchGroup) -> GroupTiming:
        """Run one group to its end. Raises: PacelineError when a request fails."""
        ...


def transformers_arms(names: Sequence[str], model: str, target: TargetModel, device: str) -> list[TransformersArm]:
    """Arms among GENERATE and LOOKUP, with one copy of the model in the number type of the target's activations."""
    loaded = open_checkpoint(resolve_model(model)).model(target.dtype).eval().to(device)
    if target.is_int8:
        round_to_int8(loaded)
    pad = target.tokenizer.pad_token_id or 0
    return [TransformersArm(n, loaded, pad, lookup=n == LOOKUP) for n in names]


def new_engine(
    target: TargetModel,
    drafter: Drafter | None,
    *,
    version: str,
    num_tokens: int,
    config: EngineConfig,
    feedback: FeedbackSink | None = None,
    traces: TraceSink | None = None,
    spawn: Callable[[], Drafter] | None = None,
    is_warm: bool = True,
) -> Engine:
    """An engine whose pool holds num_tokens rows, whatever the drafter adds to a row, with measured verify costs.

    Two engines of one benchmark thus have the same number of pages.
    spawn: makes the twin that takes weights which are staged. feedback, traces: as Engine has them. is_warm: False leaves
    out `warm_up`, without which there are no graphs and no costs that a policy could ask for.
    """
    slots = DrafterSlots(drafter, version, spawn=spawn) if drafter is not None else DrafterSlots()
    num_pages = -(-num_tokens // config.page_tokens)
    row_bytes, _ = pool_row_bytes(target, slots, has_traces=traces is not None)
    config = dataclasses.replace(config, kv_bytes=num_pages * config.page_tokens * row_bytes)
    engine = Engine(target, slots, config, feedback=feedback, traces=traces)
    if is_warm:
        engine.warm_up()
    return engine


def make_groups(
    prompts: Sequence[tuple[int, ...]],
    *,
    bucket: str,
    batch: int,
    group_size: int,
    temperature: float,
    max_tokens: int,
    seed: int,
    ignore_eos: bool = False,
    label: str = "",
) -> list[BenchGroup]:
    """Cut prompts into groups of group_size requests, of which `batch` run at once; a rest that fills no group is left out.

    Request i of the list draws with seed + i in every arm. label: part of the tag, where a cell has several lists. Every list has
    a tenant of its own, since others ran the same prompts, and another one whenever it begins again.
    """
    out, num_seen = [], Counter[tuple[int, ...]]()
    for i, at in enumerate(range(0, len(prompts) - group_size + 1, group_size)):
        params = tuple(
            SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + at + j, ignore_eos=ignore_eos)
            for j in range(group_size)
        )
        cell = f"{bucket}-{batch}-{temperature:g}"
        texts = tuple(prompts[at : at + group_size])
        tenant = f"{cell}-{label}-{max(num_seen[text] for text in texts)}"
        num_seen.update(set(texts))
        out.append(
            BenchGroup(
                tag=f"{cell}-{label}{i}", bucket=bucket, prompts=texts, params=params, batch=batch, tenant=tenant
            )
        )
    return out


def run_alternating(
    arms: Sequence[Arm], groups: Sequence[BenchGroup], *, num_warmup: int, on_group: Callable[[], None]
) -> dict[str, list[GroupTiming]]:
    """Run all groups in all arms in turn; timings by arm, without those of the first num_warmup groups.

    on_group: called after each group. Raises: PacelineError when a request fails.
    """
    timings: dict[str, list[GroupTiming]] = {a.name: [] for a in arms}
    for i, group in enumerate(groups):
        turn = i % len(arms)
        for arm in itertools.chain(arms[turn:], arms[:turn]):
            timing = arm.run(group)
            if i >= num_warmup:
                timings[arm.name].append(timing)
        on_group()
    return timings


def random_prompts(target: TargetModel, count: int, num_tokens: int, seed: int) -> list[tuple[int, ...]]:
    """Prompts of uniformly random token ids without end tokens: a bound that real text never reaches."""
    rng = np.random.default_rng(seed)
    allowed = np.setdiff1d(np.arange(target.vocab_size), sorted(target.eos_token_ids))
    return [tuple(row) for row in rng.choice(allowed, (count, num_tokens)).tolist()]
