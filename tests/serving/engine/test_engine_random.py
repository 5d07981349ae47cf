"""Ten thousand random operations on one engine: pages balance, drafter rows stay true, tokens are the target's."""

from __future__ import annotations

import functools

import numpy as np
import torch

from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group
from paceline.errors import CapacityError
from paceline.machine import ManualClock
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from paceline.serving.target_model.model import TargetModel
from tests.helpers.engines import RowDrafter
from tests.helpers.fakes import tiny_target

VOCAB, PAGE = 64, 4
NUM_OPERATIONS = 10_000
NUM_TOKENS = 12


@functools.cache
def target() -> TargetModel:
    return tiny_target(vocab=VOCAB, layers=2, width=16, context=64)


class TraceCheck:
    """Takes every second trace; each must have the features of the text that it claims to be."""

    def __init__(self) -> None:
        self.features: dict[tuple[int, ...], torch.Tensor] = {}
        self.num_traces = 0

    def wants(self, request_id: str, bucket: str) -> bool:
        return int(request_id) % 2 == 0

    def record_trace(self, trace) -> None:
        self.num_traces += 1
        text = tuple(trace.token_ids)
        known = self.features.setdefault(text, trace.features)
        torch.testing.assert_close(trace.features, known, atol=1e-3, rtol=1e-3)


def make_engine(
    drafter: RowDrafter | None, clock: ManualClock, num_pages: int, *, caching: bool, traces=None
) -> Engine:
    slots = DrafterSlots(drafter, "v0" if drafter else "", spawn=RowDrafter if drafter else None)
    keeps_features = slots.needs_features or traces is not None
    row_bytes = target().kv_row_bytes + (target().feature_row_bytes if keeps_features else 0)
    config = EngineConfig(
        page_tokens=PAGE, kv_bytes=num_pages * PAGE * row_bytes, max_running=6, max_waiting=24, prefill_chunk_tokens=16,
        min_prefill_tokens=4, priority_aging_s=5.0, prefix_caching=caching,
        tree=TreeConfig(max_draft_tokens=2, policy="fixed"),
    )  # fmt: skip
    return Engine(target(), slots, config, clock=clock, traces=traces, rng=np.random.default_rng(0))


def prompts() -> list[tuple[int, ...]]:
    """48 prompts: four system prompts that partly begin alike, cut at several lengths, with several endings."""
    rng = np.random.default_rng(7)
    base = rng.integers(3, VOCAB, 40).tolist()
    systems = [base, [*base[:9], *rng.integers(3, VOCAB, 20)], [*base[:16], *rng.integers(3, VOCAB, 20)], rng.integers(3, VOCAB, 32)]  # fmt: skip
    out = []
    for system in systems:
        for length in (1, 12, 17, 26):
            for _ in range(3):
                out.append(tuple(int(t) for t in (*system[:length], *rng.integers(3, VOCAB, int(rng.integers(0, 6))))))
    return out


def expected(texts: list[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Greedy continuations of all prompts by an engine without drafter and cache, one request at a time."""
    engine = make_engine(None, ManualClock(0.0), 64, caching=False)
    out = {}
    for text in texts:
        tokens: list[int] = []
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        request = GenerationRequest(request_id="r", prompt_token_ids=text, params=params)
        engine.submit(request, lambda e, tokens=tokens: tokens.extend(e.token_ids))
        while engine.step():
            pass
        out[text] = tuple(tokens)
    return out


def test_pages_balance_after_ten_thousand_random_operations():
    texts = prompts()
    want = expected(texts)
    rng, clock, traces = np.random.default_rng(11), ManualClock(0.0), TraceCheck()
    drafter = RowDrafter()
    engine = make_engine(drafter, clock, 34, caching=True, traces=traces)
    slots = engine.slots
    answers: dict[str, tuple[tuple[int, ...], list[int]]] = {}
    reasons: dict[str, int] = {}
    count = {"submit": 0, "step": 0, "abort": 0, "clock": 0, "swap": 0, "clear": 0}
    cached_tokens = num_refused = 0

    def on_event(event) -> None:
        nonlocal cached_tokens
        text, tokens = answers[event.request_id]
        tokens.extend(event.token_ids)
        assert tuple(tokens) == want[text][: len(tokens)], "caching changed the tokens"
        if event.finish_reason is not None:
            reasons[event.finish_reason] = reasons.get(event.finish_reason, 0) + 1
            assert event.stats.num_cached_tokens < len(text)
            cached_tokens += event.stats.num_cached_tokens
            del answers[event.request_id]

    def submit(i: int) -> None:
        nonlocal num_refused
        text = texts[int(rng.integers(len(texts)))]
        request = GenerationRequest(
            request_id=str(i), prompt_token_ids=text, tenant=("", "", "t1")[int(rng.integers(3))],
            params=SamplingParams(temperature=0.0, max_tokens=int(rng.integers(1, NUM_TOKENS + 1)), ignore_eos=True),
            group=(Group.ADAPTIVE, Group.ADAPTIVE, Group.PLAIN)[int(rng.integers(3))],
            priority=int(rng.integers(-1, 2)), deadline_s=clock.now() + 0.4 if rng.random() < 0.2 else None,
            prompt_logprobs=0 if rng.random() < 0.05 else None,
        )  # fmt: skip
        answers[str(i)] = (text, [])
        try:
            engine.submit(request, on_event)
        except CapacityError:
            num_refused += 1
            del answers[str(i)]

    names, odds = list(count), np.array([0.24, 0.65, 0.03, 0.06, 0.015, 0.005])
    for i in range(NUM_OPERATIONS):
        name = names[int(rng.choice(len(names), p=odds))]
        count[name] += 1
        if name == "submit":
            submit(i)
        elif name == "step":
            engine.step()
        elif name == "abort":
            engine.abort(str(rng.choice([*answers, "unknown"])))
        elif name == "clock":
            clock.advance(float(rng.random()))
        elif name == "swap":
            if slots.stage(f"v{i}", {"weights": torch.tensor(i)}):
                engine.call_between_rounds(slots.publish)
        else:
            engine.call_between_rounds(engine.allocator.clear_cache)
        if i % 4 == 0:
            engine.check_integrity()
    while engine.step():
        pass
    engine.check_integrity()

    allocator, stats = engine.allocator, engine.stats()
    assert engine.is_idle and not answers
    assert allocator.num_free_pages == allocator.num_pages == 34
    assert engine.prefix_cache.num_nodes == engine.prefix_cache.num_idle > 0, "cached pages have no holder"
    assert allocator.ensure("all", 34 * PAGE), "every cached page can be evicted"
    allocator.release("all")
    engine.check_integrity()
    assert engine.prefix_cache.num_nodes == 0 and slots.num_pins() == {"A": 0, "B": 0, "first": 0}
    assert stats["num_drafter_failures"] == 0 and stats["num_callback_errors"] == 0
    # Everything that the test is about has happened, and often.
    assert min(reasons[r] for r in ("length", "abort", "deadline")) > 20, reasons
    assert stats["num_preemptions"] > 50 and stats["num_prefix_evictions"] > 100 and stats["num_swaps"] > 10, stats
    assert cached_tokens > 1000 and traces.num_traces > 100 and drafter.num_checked > 10_000
