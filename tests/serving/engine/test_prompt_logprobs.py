"""The engine's log-probabilities of prompt tokens: right, whatever the chunks, neighbours and preemptions."""

from __future__ import annotations

import functools

import pytest
import torch

from paceline.config import EngineConfig
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.engine.prefill import bound_chunks
from paceline.serving.sampling.request import GenerationRequest, RequestTrace, RoundEvent, SamplingParams, TokenLogprob
from tests.helpers.fakes import greedy_continuation, plain_logits, tiny_target
from tests.helpers.scripted_drafters import RepeatDrafter

PROMPT = tuple(3 + (i * 7) % 50 for i in range(40))


@functools.cache
def target():
    return tiny_target(vocab=64, context=128)


def expected(prompt: tuple[int, ...]) -> list[float]:
    """Log-probabilities of prompt[1:] by one ordinary forward."""
    logprobs = plain_logits(target(), list(prompt)).log_softmax(-1)
    return [float(logprobs[i, t]) for i, t in enumerate(prompt[1:])]


def new_engine(**config: int) -> Engine:
    return Engine(target(), DrafterSlots(RepeatDrafter(), "r"), EngineConfig(**{"kv_bytes": 2 * 2**20, **config}))


def submit(engine: Engine, name: str, prompt: tuple[int, ...], **fields: object) -> list[RoundEvent]:
    events: list[RoundEvent] = []
    limit = fields.pop("max_tokens", 4)
    params = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True, logprobs=fields.pop("logprobs", None))  # type: ignore[arg-type]
    request = GenerationRequest(request_id=name, prompt_token_ids=prompt, params=params, **fields)  # type: ignore[arg-type]
    engine.submit(request, events.append)
    return events


def run(engine: Engine) -> None:
    while engine.step():
        pass
    engine.check_integrity()


def check(scores: tuple[TokenLogprob | None, ...] | None, prompt: tuple[int, ...], num_top: int) -> None:
    assert scores is not None and scores[0] is None
    rest = [s for s in scores[1:] if s is not None]
    assert [s.token_id for s in rest] == list(prompt[1:])
    torch.testing.assert_close(
        torch.tensor([s.logprob for s in rest]), torch.tensor(expected(prompt)), rtol=0, atol=2e-4
    )
    assert all(len(s.top) == num_top for s in rest)
    order = plain_logits(target(), list(prompt)).argsort(-1, descending=True)
    ranks = [int((order[i] == t).nonzero()) + 1 for i, t in enumerate(prompt[1:])]
    assert [s.rank for s in rest] == ranks
    for s in rest:
        values = [v for _, v in s.top]
        assert values == sorted(values, reverse=True)
        assert not values or values[0] >= s.logprob


@pytest.mark.parametrize("chunk", [1, 7, 39, 40, 256])
def test_scores_equal_a_plain_forward_in_any_chunks(chunk: int) -> None:
    engine = new_engine(prefill_chunk_tokens=chunk)
    events = submit(engine, "a", PROMPT, prompt_logprobs=2)
    run(engine)
    check(events[0].prompt_logprobs, PROMPT, 2)
    assert all(e.prompt_logprobs is None for e in events[1:])
    assert [t for e in events for t in e.token_ids] == greedy_continuation(target(), list(PROMPT), 4)


def test_requests_with_and_without_scores_share_a_chunk() -> None:
    engine = new_engine()
    prompts = {"a": PROMPT, "b": PROMPT[:5], "c": PROMPT[3:20], "d": PROMPT[7:8]}
    events = {n: submit(engine, n, p, prompt_logprobs=None if n == "b" else 1) for n, p in prompts.items()}
    run(engine)
    assert events["b"][0].prompt_logprobs is None
    for name in "ac":
        check(events[name][0].prompt_logprobs, prompts[name], 1)
    assert events["d"][0].prompt_logprobs == (None,)
    for name, prompt in prompts.items():
        tokens = [t for e in events[name] for t in e.token_ids]
        assert tokens == greedy_continuation(target(), list(prompt), 4)


def test_logits_of_a_chunk_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = functools.partial(bound_chunks, max_elements=10 * 64)
    monkeypatch.setattr("paceline.serving.engine.prefill.bound_chunks", bound)
    engine = new_engine()
    sizes: list[int] = []
    forward = engine.target.forward

    def spy(batch, kv):
        out = forward(batch, kv)
        if batch.ancestors is None:
            sizes.append(out.logits.shape[0])
        return out

    monkeypatch.setattr(engine.target, "forward", spy)
    events = [submit(engine, n, PROMPT, prompt_logprobs=0) for n in "ab"]
    run(engine)
    for own in events:
        check(own[0].prompt_logprobs, PROMPT, 0)
    assert max(sizes) <= 10 + 2  # two prompts may end in one chunk, each with the row of its first output token


def test_scoring_alone_draws_nothing() -> None:
    engine = new_engine()
    events = submit(engine, "a", PROMPT, prompt_logprobs=0, max_tokens=0, logprobs=3)
    run(engine)
    (event,) = events
    assert (event.token_ids, event.finish_reason, event.logprobs) == ((), "length", ())
    assert (event.stats.num_emitted_tokens, event.stats.num_rounds) == (0, 0)
    check(event.prompt_logprobs, PROMPT, 0)


def test_scoring_alone_is_not_traced() -> None:
    class Traces:
        """Keeps every trace."""

        def __init__(self) -> None:
            self.ids: list[str] = []

        def wants(self, request_id: str, bucket: str) -> bool:
            return True

        def record_trace(self, trace: RequestTrace) -> None:
            self.ids.append(trace.request_id)

    traces = Traces()
    engine = Engine(target(), DrafterSlots(), EngineConfig(kv_bytes=2 * 2**20), traces=traces)
    submit(engine, "scored", PROMPT, prompt_logprobs=0, max_tokens=0)
    submit(engine, "written", PROMPT, prompt_logprobs=0)
    run(engine)
    assert traces.ids == ["written"]


def test_a_preempted_prefill_scores_every_token_once() -> None:
    engine = new_engine(prefill_chunk_tokens=16)
    events = submit(engine, "a", PROMPT, prompt_logprobs=1)
    engine.step()
    (request,) = engine.scheduler.active
    assert 1 < len(request.prompt_logprobs) < len(PROMPT)
    engine.scheduler.preempt(request)
    run(engine)
    check(events[0].prompt_logprobs, PROMPT, 1)
    assert [t for e in events for t in e.token_ids] == greedy_continuation(target(), list(PROMPT), 4)


def test_a_request_preempted_while_it_decodes_is_not_scored_again() -> None:
    engine = new_engine()
    events = submit(engine, "a", PROMPT, prompt_logprobs=1, max_tokens=12)
    engine.step()
    (request,) = engine.scheduler.active
    engine.scheduler.preempt(request)
    run(engine)
    assert [e.prompt_logprobs is not None for e in events] == [True] + [False] * (len(events) - 1)
    assert [t for e in events for t in e.token_ids] == greedy_continuation(target(), list(PROMPT), 12)
