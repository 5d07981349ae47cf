"""Prefix caching in the engine: the same tokens, the same proposals, the same traces, fewer computed rows."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import EngineConfig
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from tests.helpers.engines import VOCAB, FeatureDrafter, Run, Sinks, finish, greedy, make_engine, target
from tests.helpers.scripted_drafters import RandomDrafter
from tests.helpers.shared_prefix import (
    PROMPTS,
    SYSTEM,
    RecordingDrafter,
    assert_same_proposals,
    serve,
    specblock_state,
    submit,
)


@pytest.mark.parametrize("together", [False, True])
def test_a_shared_prefix_is_computed_once_and_the_tokens_are_the_targets(together):
    engine = make_engine(RandomDrafter(VOCAB), prefill_chunk_tokens=8)
    runs = serve(engine, PROMPTS, together=together)
    assert [r.tokens for r in runs] == [greedy(p, 10) for p in PROMPTS]
    # 24 tokens are 6 pages of 4; the last one is followed by another token in every prompt.
    assert [r.last.stats.num_cached_tokens for r in runs] == [0, 20, 20, 20]
    stats = engine.stats()
    assert stats["num_prefill_rows"] == 4 * 27 - 60 and stats["num_prefix_hit_tokens"] == 60
    assert (stats["num_prefix_lookups"], stats["num_prefix_hits"]) == (4, 3)
    assert stats["num_free_pages"] == stats["num_pages"] and stats["num_cached_pages"] > 6


def test_the_same_prompt_again_computes_its_last_page_only():
    engine = make_engine()
    first, second = serve(engine, [SYSTEM, SYSTEM])
    assert first.tokens == second.tokens == greedy(SYSTEM, 10)
    assert second.last.stats.num_cached_tokens == 20


def test_prompts_of_one_chunk_wait_for_the_one_that_computes_their_prefix():
    engine = make_engine(prefill_chunk_tokens=256)
    runs = serve(engine, PROMPTS, together=True)
    assert [r.last.stats.num_cached_tokens for r in runs] == [0, 20, 20, 20]
    assert [r.tokens for r in runs] == [greedy(p, 10) for p in PROMPTS]


def test_an_answer_is_cached_for_the_next_turn():
    engine = make_engine(RandomDrafter(VOCAB))
    (first,) = serve(engine, [SYSTEM], num_tokens=12)
    turn = (*SYSTEM, *first.tokens, 40, 41)
    (second,) = serve(engine, [turn], prefix="next")
    assert second.tokens == greedy(turn, 10)
    # 36 committed tokens; the row of the last one was never computed, so 8 pages of 4 and the token behind them.
    assert second.last.stats.num_cached_tokens == 32


def test_switched_off_nothing_is_shared():
    engine = make_engine(RandomDrafter(VOCAB), prefix_caching=False)
    runs = serve(engine, [SYSTEM, SYSTEM])
    assert [r.tokens for r in runs] == [greedy(SYSTEM, 10)] * 2
    assert engine.stats()["num_prefix_lookups"] == engine.stats()["num_cached_pages"] == 0
    assert engine.stats()["num_prefill_rows"] == 48 and engine.kv.features is None


def test_tenants_share_with_themselves_only():
    engine = make_engine()
    cached = [submit(engine, f"r{i}", tenant=t)[-1].stats.num_cached_tokens for i, t in enumerate(("a", "b", "a", ""))]
    assert cached == [0, 0, 20, 0]


def test_a_request_for_prompt_logprobs_computes_its_whole_prompt():
    engine = make_engine()
    submit(engine, "first")
    assert submit(engine, "second", prompt_logprobs=0)[-1].stats.num_cached_tokens == 0
    assert engine.stats()["num_prefill_rows"] == 48


# ---- drafters -------------------------------------------------------------------------------------------------------
def proposals_without_cache(prompts, seed: int = 0, num_tokens: int = 10):
    drafter = RecordingDrafter(seed)
    serve(make_engine(drafter, prefix_caching=False), prompts, num_tokens=num_tokens)
    return drafter


@pytest.mark.parametrize("together", [False, True])
def test_proposals_after_a_hit_equal_those_without(together):
    want = proposals_without_cache(PROMPTS)
    drafter = RecordingDrafter()
    engine = make_engine(drafter, prefill_chunk_tokens=8)
    runs = serve(engine, PROMPTS, together=together)
    assert engine.stats()["num_prefix_hit_tokens"] == 60
    assert_same_proposals(drafter, want)
    assert [r.tokens for r in runs] == [greedy(p, 10) for p in PROMPTS]
    if not together:
        assert drafter.num_rows == want.num_rows - 60, "rows with drafter KV of the same weights are not ingested again"


def test_a_preempted_request_proposes_as_if_it_had_kept_its_rows():
    want = proposals_without_cache(PROMPTS, num_tokens=30)
    drafter = RecordingDrafter()
    engine = make_engine(drafter, num_pages=26)
    runs = serve(engine, PROMPTS, together=True, num_tokens=30)
    assert engine.stats()["num_preemptions"] > 0 and engine.stats()["num_prefix_hits"] > 0
    assert_same_proposals(drafter, want)
    assert [r.tokens for r in runs] == [greedy(p, 30) for p in PROMPTS]


def test_new_weights_ingest_cached_rows_again():
    want = proposals_without_cache(PROMPTS[1:2], seed=1)
    first, second = RecordingDrafter(0), RecordingDrafter(1)
    slots = DrafterSlots(first, "v0")
    engine = make_engine(slots)
    serve(engine, PROMPTS[:1])
    assert slots.stage("v1", second)
    slots.publish()
    (run,) = serve(engine, PROMPTS[1:2], prefix="new")
    assert run.last.stats.num_cached_tokens == 20 and run.last.stats.drafter_version == "v1"
    assert_same_proposals(second, want)
    assert second.num_rows == want.num_rows, "every row, the cached ones from their kept features"


def test_features_of_a_cached_answer_are_those_that_it_was_decoded_with():
    first, second = RecordingDrafter(0), RecordingDrafter(1)
    slots = DrafterSlots(first, "v0")
    engine = make_engine(slots)
    (run,) = serve(engine, PROMPTS[:1], num_tokens=12)
    turn = (*PROMPTS[0], *run.tokens, 40, 41)
    want = proposals_without_cache([turn], seed=1)
    assert slots.stage("v1", second)
    slots.publish()
    (run,) = serve(engine, [turn], prefix="next")
    assert run.last.stats.num_cached_tokens == 36
    assert_same_proposals(second, want)


def test_weights_loaded_into_the_same_slot_do_not_trust_the_old_ones_rows():
    """A and B take turns; the third version lies in the slot whose rows the first one wrote."""
    want = proposals_without_cache(PROMPTS[1:2], seed=2)
    drafter = RecordingDrafter(0)
    slots = DrafterSlots(drafter, "v0", spawn=lambda: RecordingDrafter(9))
    engine = make_engine(slots)
    serve(engine, PROMPTS[:1])
    for version, seed in (("v1", 1), ("v2", 2)):
        assert slots.stage(version, specblock_state(seed).state_dict())
        slots.publish()
    drafter.proposals.clear()
    serve(engine, PROMPTS[1:2], prefix="new")
    assert slots.live_version == "v2" and drafter.proposals
    assert_same_proposals(drafter, want)


def test_a_drafter_with_state_of_its_own_is_handed_every_row():
    drafter = FeatureDrafter()  # checks that rows come once, in order, from the first on
    engine = make_engine(drafter)
    runs = serve(engine, PROMPTS)
    assert engine.stats()["num_prefix_hit_tokens"] == 60 and engine.stats()["num_drafter_failures"] == 0
    assert [r.tokens for r in runs] == [greedy(p, 10) for p in PROMPTS]


def test_a_drafter_that_needs_features_nobody_keeps_is_named_and_costs_no_token():
    slots = DrafterSlots(RandomDrafter(VOCAB), "v0")
    engine = make_engine(slots)
    serve(engine, PROMPTS[:1])
    assert engine.kv.features is None and slots.stage("v1", FeatureDrafter())
    slots.publish()
    (run,) = serve(engine, PROMPTS[1:2], prefix="new")
    assert "hidden states" in engine.stats()["drafter_failures"]["v1"]
    assert run.tokens == greedy(PROMPTS[1], 10)


def test_a_trace_after_a_hit_holds_every_row():
    sinks = Sinks()
    engine = make_engine(sinks=sinks)
    serve(engine, PROMPTS[:2])
    assert engine.stats()["num_prefix_hit_tokens"] == 20
    trace = sinks.traces[1]
    with torch.inference_mode():
        out = target().model(input_ids=torch.tensor([trace.token_ids]), use_cache=False, output_hidden_states=True)
    want = torch.cat([out.hidden_states[t + 1] for t in target().tap_layers], -1)[0, :-1]
    torch.testing.assert_close(trace.features, want, atol=2e-3, rtol=2e-3)


# ---- memory ---------------------------------------------------------------------------------------------------------
def test_kept_features_are_part_of_the_byte_budget():
    row_bytes = target().kv_row_bytes + target().feature_row_bytes
    engine = Engine(target(), DrafterSlots(FeatureDrafter(), "v0"), EngineConfig(kv_bytes=30 * 16 * row_bytes))
    assert engine.allocator.num_pages == 30 and engine.kv.features.shape == (480, target().feature_size)
    assert engine.kv.features.dtype == target().dtype


def test_shared_rows_are_never_written():
    engine = make_engine(RandomDrafter(VOCAB))
    serve(engine, PROMPTS[:1])
    before = engine.kv.data.clone()
    run = Run(engine, "again", PROMPTS[0], max_tokens=10)
    engine.step()
    rows = engine.allocator.rows("again", 0, 24)
    finish(engine)
    assert run.last.stats.num_cached_tokens == 24 and torch.equal(engine.kv.data[:, rows], before[:, rows])


# ---- everything together --------------------------------------------------------------------------------------------
@functools.cache
def reference(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    return greedy(prompt, num_tokens)


@settings(max_examples=25)
@given(
    picks=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 23), st.integers(-1, 1)), min_size=2, max_size=7),
    num_pages=st.sampled_from([16, 24, 64]),
    chunk=st.sampled_from([3, 16, 64]),
    aborted=st.integers(0, 6),
    packs_prompts=st.booleans(),
)
def test_greedy_tokens_are_the_same_with_shared_prefixes_preemption_and_aborts(
    picks, num_pages, chunk, aborted, packs_prompts
):
    engine = make_engine(
        RecordingDrafter(), num_pages=num_pages, prefill_chunk_tokens=chunk, max_running=4, packs_prompts=packs_prompts
    )
    events: dict[str, list] = {}
    prompts = {}
    for i, (variant, length, priority) in enumerate(picks):
        name, prompts[f"r{i}"] = f"r{i}", (*SYSTEM[:length], *range(20 + variant, 24))
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        request = GenerationRequest(request_id=name, prompt_token_ids=prompts[name], params=params, priority=priority)
        engine.submit(request, events.setdefault(name, []).append)
        engine.step()
        engine.check_integrity()
        if i == aborted:
            engine.abort(name)
    finish(engine)
    for name, prompt in prompts.items():
        tokens = tuple(t for e in events[name] for t in e.token_ids)
        assert tokens == reference(prompt, 8)[: len(tokens)]
        assert events[name][-1].finish_reason in (("abort", "length") if name == f"r{aborted}" else ("length",))
    assert engine.allocator.num_free_pages == engine.allocator.num_pages
