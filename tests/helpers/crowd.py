"""Helpers of the losslessness properties: crowds of mixed requests, what each of them is answered alone, and one run in
which prefixes are shared, pages run out, requests are aborted and drafter versions change while the batch is full."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group, RoundStats
from paceline.machine import ManualClock
from paceline.serving.drafters.interface import Drafter
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.drafters.text import PromptLookupDrafter
from paceline.serving.engine.engine import Engine
from paceline.serving.engine.running import RunningRequest
from paceline.serving.loading.kv_size import pool_row_bytes
from paceline.serving.sampling.draw import SamplingBatch, TokenCounts, draw_tokens, has_penalties
from paceline.serving.sampling.request import GenerationRequest, GrammarSpec, RequestStatus, SamplingParams
from paceline.serving.specblock.drafter import SpecBlockDrafter
from paceline.serving.target_model.kv_cache import PageAllocator
from tests.helpers.constrained import JSON_OBJECT, KINDS, PAGE, VOCAB, Answers, factory, make_engine, target
from tests.helpers.drafters import specblock_for
from tests.helpers.engines import BrokenDrafter, RowDrafter
from tests.helpers.fakes import plain_logits, prefill
from tests.helpers.scripted_drafters import OracleDrafter, RandomDrafter, RejectedDrafter, RepeatDrafter

FIXED = TreeConfig(max_draft_tokens=8, policy="fixed")
ADAPTIVE = TreeConfig(max_draft_tokens=8)
NEAR_TIE = 1e-4
"""Logits that are less than this apart may change places with the shape of a forward, as in tests/e2e/test_lossless.py."""
NUM_ASKS = 72
MORE_KINDS: dict[str, dict] = {
    "greedy": {"ignore_eos": True},
    "greedy-penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "ignore_eos": True},
    "greedy-bias": {"logit_bias": ((7, 3.0), (9, -100.0), (20, 1.5)), "presence_penalty": 0.8, "ignore_eos": True},
    "json-greedy-penalties": {"grammar": JSON_OBJECT, "presence_penalty": 0.6, "logit_bias": ((54, 6.0),)},
    "json-sampled": {"grammar": JSON_OBJECT, "temperature": 1.2, "min_p": 0.02, "repetition_penalty": 1.1},
    "no-continuation": {"grammar": GrammarSpec(kind="regex", text="[ab]{6}(Q|QQ)")},  # ends with an error
    "top-k": {"temperature": 1.0, "top_k": 8, "ignore_eos": True},
    "top-p-penalties": {"temperature": 1.3, "top_p": 0.8, "frequency_penalty": 0.3, "ignore_eos": True},
    "min-p-bias": {"temperature": 1.0, "min_p": 0.05, "logit_bias": ((5, 2.0), (6, -5.0)), "ignore_eos": True},
    "stop-string": {"temperature": 0.9, "stop": ("ab", "e", "9 "), "ignore_eos": True},
    "stop-token": {"stop_token_ids": (11, 12, 13), "ignore_eos": True},
}  # fmt: skip
"""Besides those of constrained.py."""
DRAFTERS = ("good", "random", "lookup", "specblock", "rejected", "rows", "so-so", "repeat", "broken")


# ---- what is asked, and the answers of a plain engine that serves nobody else ------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """A prompt and how it is to be answered."""

    kind: str
    prompt: tuple[int, ...]
    params: SamplingParams


@functools.cache
def asks(seed: int) -> tuple[Ask, ...]:
    """Every kind with several prompts that begin alike."""
    rng = np.random.default_rng([seed, 1])
    base = rng.integers(3, VOCAB, 14).tolist()
    systems = [base, [*base[:9], *rng.integers(3, VOCAB, 5).tolist()], [10, 11, 12, 13] * 3]
    kinds, out = {**KINDS, **MORE_KINDS}, []
    for i in range(NUM_ASKS):
        kind = list(kinds)[i % len(kinds)]
        system = systems[int(rng.integers(len(systems)))]
        prompt = (*system[: int(rng.integers(4, len(system) + 1))], *rng.integers(3, VOCAB, int(rng.integers(0, 4))))
        params = {"temperature": 0.0, **kinds[kind], "max_tokens": int(rng.integers(16, 72)), "seed": 1000 * seed + i}
        out.append(Ask(kind=kind, prompt=tuple(int(t) for t in prompt), params=SamplingParams(**params)))
    return tuple(out)


@functools.cache
def answered_alone(seed: int) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Tokens and finish reason of every ask: one request at a time, no drafter, no prefix cache, pages enough."""
    engine, answers = make_engine(prefix_caching=False), Answers()
    for i, ask in enumerate(asks(seed)):
        request = GenerationRequest(request_id=str(i), prompt_token_ids=ask.prompt, params=ask.params)
        engine.submit(request, answers)
        while engine.step():
            pass
    return tuple((tuple(answers.tokens[str(i)]), str(answers.last[str(i)].finish_reason)) for i in range(NUM_ASKS))


def is_near_tie(ask: Ask, want: tuple[int, ...], at: int, token_id: int) -> bool:
    """Whether moving two logits of the plain model by half of NEAR_TIE draws `token_id` where `want[at]` was drawn."""
    text = [*ask.prompt, *want[:at]]
    logits = plain_logits(target(), text)[-1:].clone()
    logits[0, token_id] += NEAR_TIE / 2
    logits[0, want[at]] -= NEAR_TIE / 2
    counts, grammar, params = None, None, ask.params
    if has_penalties(params):
        counts = TokenCounts(ask.prompt, VOCAB)
        counts.add(want[:at])
    if params.grammar is not None:
        grammar = factory().start(params.grammar, stop_token_ids=params.stop_token_ids, ignores_eos=params.ignore_eos)
        for token in want[:at]:
            grammar.advance(token)
    assert params.seed is not None
    batch = SamplingBatch.from_params([params], [params.seed], [counts], grammars=[grammar])
    return int(draw_tokens(logits, torch.tensor([0]), torch.tensor([len(text)]), batch)[0]) == token_id


# ---- drafters -------------------------------------------------------------------------------------------------------
def specblock(seed: int) -> SpecBlockDrafter:
    """Random weights of a size that gives sharp proposals."""
    return SpecBlockDrafter(specblock_for(target(), seed, is_perturbed=True, num_slots=3), target().embed_weight)


def make_drafter(name: str, seed: int, texts: dict[str, list[int]]) -> Drafter:
    """texts: request id -> prompt and answer, for those that know it."""
    if name in ("good", "so-so"):
        return OracleDrafter(texts, hit_rate=1.0 if name == "good" else 0.7, seed=seed)
    if name == "random":
        return RandomDrafter(VOCAB, seed, is_product=bool(seed % 2))
    if name == "rejected":
        return RejectedDrafter(lambda history: history[-1] ^ 1)
    if name == "rows":
        return RowDrafter(seed)
    if name == "repeat":
        return RepeatDrafter()
    if name == "broken":
        return BrokenDrafter(("raises", "nan", "2.5", "ids")[seed % 4])
    return PromptLookupDrafter() if name == "lookup" else specblock(seed)


# ---- one run --------------------------------------------------------------------------------------------------------
class RoundSink:
    """In which rounds requests had draft tokens."""

    def __init__(self) -> None:
        self.num_drafted: Counter[int] = Counter()  # by batch size: requests with draft tokens, over all rounds
        self.num_accepted: Counter[int] = Counter()
        self.versions: set[str] = set()

    def record_rounds(self, rows: RoundStats) -> None:
        for i, num_draft_tokens in enumerate(rows.num_draft_tokens):
            if num_draft_tokens:
                self.num_drafted[rows.batch_size[i]] += 1
                self.num_accepted[rows.batch_size[i]] += rows.num_accepted_tokens[i]
                self.versions.add(rows.drafter_version[i])


class Ticks:
    """A clock for durations that does not depend on the machine, so that the budget controller decides alike anywhere."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng, self._now = rng, 0.0

    def __call__(self) -> float:
        self._now += float(self._rng.exponential(1e-3))
        return self._now


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What happened in one run or in several."""

    num_requests: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    num_near_ties: int = 0
    num_rounds: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_failures: int = 0
    """Drafter versions that were meant to fail and did."""
    num_hit_tokens: int = 0
    num_checked_rows: int = 0
    most_running: int = 0
    num_drafted: int = 0
    """Times that a request had draft tokens, over all rounds."""
    num_drafted_full: int = 0
    """The same in rounds with at least nine tenths of the batch."""
    num_accepted: int = 0
    num_drafting_versions: int = 0


class Crowd:
    """`size` requests in every round while there are enough; checks every answer as it comes in."""

    def __init__(
        self, size: int, seed: int, tree: TreeConfig = FIXED, *, pages_each: int = 8, chunk_each: int = 16
    ) -> None:
        """pages_each, chunk_each: KV pages, and prompt rows of a round, per request of the batch."""
        self.size, self.seed = size, seed
        self.rng = np.random.default_rng([seed, size, 2])
        self.clock, self.rounds = ManualClock(0.0), RoundSink()
        self.out = Outcome(num_requests=3 * size + 10)
        self.asked_seed = seed % 2
        """Seed of what is asked: runs of several seeds share the slow answers alone."""
        self.picks = {f"r{i}": int(self.rng.integers(NUM_ASKS)) for i in range(self.out.num_requests)}
        alone = answered_alone(self.asked_seed)
        self.texts = {name: [*asks(self.asked_seed)[k].prompt, *alone[k][0]] for name, k in self.picks.items()}
        self.broken: set[str] = set()
        """Drafter versions that will fail."""
        self.wrong: list[str] = []
        self.answers: dict[str, list[int]] = {}
        self.is_ended: set[str] = set()
        self.is_free: set[str] = set()
        """Requests that took the other side of a near tie: the rest of their answer is another one."""
        first = make_drafter("rows" if seed % 2 else "specblock", seed, self.texts)  # of a fifth of the requests
        self.slots = DrafterSlots(make_drafter("good", seed, self.texts), "v0", first=first, first_version="first")
        self.engine = self._engine(tree, 22 + pages_each * size, 32 + chunk_each * size)

    def _engine(self, tree: TreeConfig, num_pages: int, num_chunk_rows: int) -> Engine:
        row_bytes, _ = pool_row_bytes(target(), self.slots, has_traces=False)
        config = EngineConfig(
            page_tokens=PAGE, kv_bytes=num_pages * PAGE * row_bytes, max_running=self.size, max_waiting=400,
            prefill_chunk_tokens=num_chunk_rows, min_prefill_tokens=4 + self.size, priority_aging_s=5.0, tree=tree,
        )  # fmt: skip
        return Engine(
            target(), self.slots, config, clock=self.clock, feedback=self.rounds, packs_prompts=self.seed % 2 == 0,
            timer=Ticks(np.random.default_rng([self.seed, self.size, 3])),
        )  # fmt: skip

    def run(self) -> Outcome:
        """Submit, abort, swap and step until nothing is left; returns what happened."""
        engine, rng, waiting = self.engine, self.rng, list(self.picks)
        for at in range(5000):
            while waiting and engine.num_waiting < (self.size if at == 0 else 0) + 2 + self.size // 4:
                self._submit(waiting.pop(0))
            if at > 10 and (rng.random() < 0.02 + 0.003 * self.size or at == 12):
                engine.abort(str(rng.choice(sorted(self.answers.keys() - self.is_ended) or ["unknown"])))
            if at % 5 == 2:
                self._swap(at)
            self.clock.advance(float(rng.random()))
            is_busy = engine.step()
            assert not self.wrong, self.wrong[0]
            assert engine.slots.failures().keys() <= self.broken, engine.slots.failures()
            engine.check_integrity()
            self.out.most_running = max(self.out.most_running, engine.scheduler.num_running)
            if at % 4 == 1:
                self._check_rows()
            if not is_busy and not waiting:
                return self._finish()
        raise AssertionError("the engine does not come to an end")

    def _swap(self, at: int) -> None:
        """Bring in a drafter of the next kind, unless both slots are in use."""
        name, version = DRAFTERS[(self.seed + at // 5) % len(DRAFTERS)], f"v{at}"
        if self.slots.stage(version, make_drafter(name, at, self.texts)):
            self.engine.call_between_rounds(self.slots.publish)
        if name == "broken":
            self.broken.add(version)

    def _submit(self, name: str) -> None:
        rng, ask = self.rng, asks(self.asked_seed)[self.picks[name]]
        self.answers[name] = []
        groups = (Group.ADAPTIVE, Group.ADAPTIVE, Group.ADAPTIVE, Group.STATIC, Group.PLAIN)
        request = GenerationRequest(
            request_id=name, prompt_token_ids=ask.prompt, params=ask.params, group=groups[int(rng.integers(5))],
            priority=(-1, 0, 0, 1)[int(rng.integers(4))], bucket=f"b{int(rng.integers(2))}",
            tenant="other" if rng.random() < 0.1 else "",
        )  # fmt: skip
        self.engine.submit(request, self._on_event)

    def _on_event(self, event) -> None:
        """Compare with the answer alone. What is wrong is noted and not raised: the engine contains what owners raise."""
        name = event.request_id
        got = self.answers[name]
        got.extend(event.token_ids)
        ask = asks(self.asked_seed)[self.picks[name]]
        want, reason = answered_alone(self.asked_seed)[self.picks[name]]
        what = (
            f"{name} of {self.size}, seed {self.seed}, {ask.kind}: {got} {event.finish_reason}, alone {want} {reason}"
        )
        if name in self.is_ended:
            self.wrong.append(f"an event after the last one, {what}")
        if name not in self.is_free and tuple(got) != want[: len(got)]:
            at = next(k for k, token in enumerate(got) if k >= len(want) or token != want[k])
            if at >= len(want) or not is_near_tie(ask, want, at, got[at]):
                self.wrong.append(f"other tokens, {what}")
            self.is_free.add(name)
            self.out.num_near_ties += 1
        if event.finish_reason is None:
            return
        self.is_ended.add(name)
        self.out.reasons[event.finish_reason] += 1
        self.out.num_tokens += len(got)
        is_whole = (tuple(got), event.finish_reason) == (want, reason)
        if event.finish_reason != "abort" and name not in self.is_free and not is_whole:
            self.wrong.append(f"another end, {what}")

    def _check_rows(self) -> None:
        """K/V and features of a running request's rows are those of one forward over its text."""
        running = [r for r in self.engine.scheduler.active if r.status is RequestStatus.RUNNING]
        if running:
            self.out.num_checked_rows += check_rows(self.engine, running[int(self.rng.integers(len(running)))])

    def _finish(self) -> Outcome:
        engine, out, stats = self.engine, self.out, self.engine.stats()
        engine.check_integrity()
        assert engine.is_idle and self.is_ended == set(self.picks)
        assert engine.allocator.num_free_pages == engine.allocator.num_pages
        assert not any(self.slots.num_pins().values())
        assert stats["num_callback_errors"] == 0
        out.num_rounds, out.num_swaps = stats["num_rounds"], stats["num_swaps"]
        out.num_failures = stats["num_drafter_failures"]
        out.num_preemptions, out.num_hit_tokens = stats["num_preemptions"], stats["num_prefix_hit_tokens"]
        out.num_drafted, out.num_drafting_versions = self.rounds.num_drafted.total(), len(self.rounds.versions)
        full = [size for size in self.rounds.num_drafted if size >= 0.9 * self.size]
        out.num_drafted_full = sum(self.rounds.num_drafted[size] for size in full)
        out.num_accepted = self.rounds.num_accepted.total()
        return out


def check_rows(engine: Engine, request: RunningRequest) -> int:
    """Compare the pool rows of a request's context with those of one plain forward; returns their number."""
    num_rows, model = request.context_len, engine.target
    pages = PageAllocator(-(-num_rows // PAGE), PAGE)
    kv = model.new_kv_pool(pages.num_pages, PAGE, 0)
    out = prefill(model, kv, pages, "alone", request.tokens[:num_rows])
    assert request.rows is not None and engine.kv.features is not None
    rows = request.rows[:num_rows]
    torch.testing.assert_close(engine.kv.data[:, rows], kv.data[:, :num_rows], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(engine.kv.features[rows], out.features, atol=2e-3, rtol=2e-3)
    return num_rows
