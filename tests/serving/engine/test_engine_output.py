"""What leaves the engine besides tokens: statistics, traces, acceptance counts, buckets, log-probabilities, totals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import EngineConfig
from paceline.machine import ManualClock
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from tests.helpers.engines import PROMPT, TREE, VOCAB, Run, Sinks, finish, greedy, make_engine, target
from tests.helpers.fakes import plain_logits
from tests.helpers.scripted_drafters import OracleDrafter, RandomDrafter, RepeatDrafter


# ---- by-products ----------------------------------------------------------------------------------------------------
def test_one_statistics_row_per_request_and_round():
    sinks = Sinks()
    engine = make_engine(RandomDrafter(VOCAB), sinks=sinks)
    engine.output.is_training = True
    runs = [Run(engine, f"r{i}", bucket=f"b{i}", max_tokens=10 + i) for i in range(2)]
    finish(engine)
    for i, run in enumerate(runs):
        rows = [r for r in sinks.rows if r["request_id"] == f"r{i}"]
        assert [r["round_index"] for r in rows] == list(range(1, len(rows) + 1))
        assert sum(r["num_emitted_tokens"] for r in rows) == len(run.tokens) - 1, "prefill emits the first token"
        assert sum(r["num_accepted_tokens"] for r in rows) == run.last.stats.num_accepted_tokens
        assert sum(r["num_draft_tokens"] for r in rows) == run.last.stats.num_draft_tokens
        assert run.last.stats.num_rounds == len(rows)
        assert {(r["bucket"], r["group"], r["is_greedy"], r["is_training"]) for r in rows} == {(f"b{i}", "adaptive", True, True)}  # fmt: skip
        assert all(r["share_ms"] > r["verify_ms"] > 0 for r in rows)
    assert {r["batch_size"] for r in sinks.rows} <= {1, 2}


@pytest.mark.parametrize("num_pages", [64, 14])
def test_a_trace_holds_every_row_of_the_finished_request(num_pages):
    sinks = Sinks()
    engine = make_engine(RandomDrafter(VOCAB), num_pages=num_pages, sinks=sinks, prefill_chunk_tokens=4)
    prompts = [tuple(3 + (5 * i + 3 * k) % 60 for k in range(9 + i)) for i in range(4)]
    runs = [Run(engine, f"r{i}", p, bucket="b", max_tokens=15) for i, p in enumerate(prompts)]
    finish(engine)
    assert (engine.scheduler.num_preemptions > 0) == (num_pages == 14)
    assert len(sinks.traces) == 4
    for trace in sinks.traces:
        i = int(trace.request_id[1:])
        assert trace.token_ids == [*prompts[i], *runs[i].tokens] and trace.prompt_len == len(prompts[i])
        assert trace.target_version == target().version and trace.finish_reason == "length"
        with torch.inference_mode():
            out = target().model(input_ids=torch.tensor([trace.token_ids]), use_cache=False, output_hidden_states=True)
        want = torch.cat([out.hidden_states[t + 1] for t in target().tap_layers], -1)[0, :-1]
        torch.testing.assert_close(trace.features, want, atol=2e-3, rtol=2e-3)
        top = out.logits[0, len(prompts[i]) - 1 : -1].float().log_softmax(-1).topk(4)
        assert trace.topk_ids.dtype == torch.int32 and trace.topk_ids.shape == (15, 4)
        torch.testing.assert_close(trace.topk_logprobs, top.values, atol=2e-3, rtol=2e-3)
        assert not trace.features.is_inference() and not trace.topk_logprobs.is_inference()


def test_no_trace_for_requests_that_opt_out_abort_or_are_not_sampled():
    sinks = Sinks()
    engine = make_engine(sinks=sinks)
    Run(engine, "opted-out", is_traced=False)
    Run(engine, "aborted")
    engine.step()
    engine.abort("aborted")
    sinks.is_wanted = False
    Run(engine, "not-sampled")
    finish(engine)
    assert sinks.traces == []


def test_tracing_is_decided_once_at_admission_and_the_others_collect_nothing():
    sinks = Sinks(wants=lambda request_id: request_id in ("r1", "r3"))
    engine = make_engine(RandomDrafter(VOCAB), num_pages=14, sinks=sinks)  # so few pages that requests are preempted
    for i in range(4):
        Run(engine, f"r{i}", max_tokens=15)
    seen = set()
    while engine.step():
        seen |= {(r.request_id, r.trace is not None) for r in engine.output.by_id.values() if r.is_pinned}
    assert engine.scheduler.num_preemptions > 0
    assert seen == {("r0", False), ("r1", True), ("r2", False), ("r3", True)}
    assert sorted(sinks.asked) == ["r0", "r1", "r2", "r3"], "asked once per request"
    assert {t.request_id for t in sinks.traces} == {"r1", "r3"}


# ---- acceptance counts ----------------------------------------------------------------------------------------------
def oracle(num_requests: int) -> OracleDrafter:
    """Only right draft tokens for r0, r1, ..."""
    return OracleDrafter({f"r{i}": [*PROMPT, *greedy(num_tokens=40)] for i in range(num_requests)})


@settings(max_examples=30)
@given(
    num_pages=st.sampled_from([12, 17, 64]),
    num_tokens=st.integers(1, 24),
    num_requests=st.integers(1, 3),
    cut=st.sampled_from(["length", "token", "string"]),
    at=st.integers(0, 20),
)
def test_accepted_emitted_and_truncated_tokens_balance_however_a_request_ends(
    num_pages, num_tokens, num_requests, cut, at
):
    text = target().tokenizer.decode(greedy(), skip_special_tokens=True)
    ends = {"token": {"stop_token_ids": (greedy()[at],)}, "string": {"stop": (text[at : at + 2],)}}.get(cut, {})
    sinks = Sinks()
    engine = make_engine(oracle(num_requests), num_pages=num_pages, sinks=sinks)
    runs = [Run(engine, f"r{i}", max_tokens=num_tokens, **ends) for i in range(num_requests)]
    finish(engine)
    for i, run in enumerate(runs):
        stats, rows = run.last.stats, [r for r in sinks.rows if r["request_id"] == f"r{i}"]
        assert stats.num_emitted_tokens == len(run.tokens)
        assert stats.num_emitted_tokens == 1 + stats.num_rounds + stats.num_accepted_tokens - stats.num_truncated_tokens
        assert stats.num_rounds == len(rows)
        for key in ("num_accepted_tokens", "num_draft_tokens"):
            assert sum(r[key] for r in rows) == getattr(stats, key), "rows and response pool to the same"
        assert sum(r["num_emitted_tokens"] for r in rows) == stats.num_emitted_tokens - 1, "prefill emits the first"
        assert all(r["num_emitted_tokens"] == r["num_accepted_tokens"] + 1 for r in rows[:-1]), "only the end cuts"
        assert stats.acceptance_length == pytest.approx(
            (stats.num_emitted_tokens - 1 + stats.num_truncated_tokens) / stats.num_rounds if stats.num_rounds else 1.0
        )


def test_the_round_that_a_stop_token_cuts_keeps_its_acceptance():
    engine = make_engine(oracle(1))
    # Prefill emits token 0, every round 7 more (TREE has 6 draft tokens).
    at = next(k for k, t in enumerate(greedy()) if k % 7 in (2, 3) and t not in greedy()[:k])
    run = Run(engine, "r0", max_tokens=24, stop_token_ids=(greedy()[at],))
    finish(engine)
    stats = run.last.stats
    assert len(run.tokens) == at + 1 and stats.num_truncated_tokens == 7 - at % 7
    assert stats.acceptance_length == 7.0, "the oracle is always right; the cut does not count against it"


def test_tokens_that_wait_for_a_page_are_accepted_once():
    sinks = Sinks()
    engine = make_engine(oracle(3), num_pages=12, sinks=sinks)
    for i in range(3):
        Run(engine, f"r{i}", max_tokens=20)
    finish(engine)
    last = {r["request_id"]: r["round_index"] for r in sinks.rows}
    early = [r for r in sinks.rows if r["round_index"] < last[r["request_id"]]]
    assert any(r["num_accepted_tokens"] < 6 for r in early), "a path was cut for want of pages"
    assert all(r["num_emitted_tokens"] == r["num_accepted_tokens"] + 1 for r in early)


# ---- buckets --------------------------------------------------------------------------------------------------------
def test_names_beyond_the_limit_are_served_and_counted_under_other():
    sinks = Sinks()
    engine = make_engine(RandomDrafter(VOCAB), sinks=sinks, max_buckets=3)
    names = ["a", "default", "b", "c", "a", "other", "d", "b"]
    runs = [Run(engine, f"r{i}", bucket=name) for i, name in enumerate(names)]
    finish(engine)
    used = ["a", "default", "b", "other", "a", "other", "other", "b"]
    assert [r.last.stats.bucket for r in runs] == used
    assert all(r.tokens == greedy()[:12] for r in runs)
    for i, bucket in enumerate(used):
        assert {r["bucket"] for r in sinks.rows if r["request_id"] == f"r{i}"} == {bucket}
    assert {t.bucket for t in sinks.traces} == set(used)
    assert (engine.stats()["num_buckets"], engine.stats()["num_bucket_capped"]) == (3, 2)


def test_a_flood_of_names_makes_a_bounded_number_of_buckets():
    sinks = Sinks()
    engine = make_engine(RandomDrafter(VOCAB), max_buckets=4, max_waiting=100, sinks=sinks)
    for i in range(40):
        Run(engine, f"r{i}", bucket=f"hostile-{i}", max_tokens=4)
    finish(engine)
    assert {r["bucket"] for r in sinks.rows} == {"hostile-0", "hostile-1", "hostile-2", "other"}
    assert engine.stats()["num_buckets"] == 4 and engine.stats()["num_bucket_capped"] == 37


def test_logprobs_are_those_of_the_unprocessed_target():
    engine = make_engine(RandomDrafter(VOCAB))
    plain, wanted = Run(engine, "a"), Run(engine, "b", temperature=0.7, seed=3, logprobs=2)
    finish(engine)
    assert all(e.logprobs is None for e in plain.events)
    entries = [entry for e in wanted.events for entry in e.logprobs]
    assert tuple(e.token_id for e in entries) == wanted.tokens
    want = plain_logits(target(), [*PROMPT, *wanted.tokens]).log_softmax(-1)[len(PROMPT) - 1 : -1]
    for row, entry in zip(want, entries, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=2e-3)
        assert [i for i, _ in entry.top] == row.topk(2).indices.tolist()


def test_events_carry_running_totals():
    clock = ManualClock(100.0)
    engine = Engine(target(), DrafterSlots(RepeatDrafter(), "v0"), EngineConfig(tree=TREE), clock=clock)
    run = Run(engine)
    clock.advance(2.0)
    finish(engine)
    assert run.last.stats.total_ms == 2000.0 and run.last.stats.num_emitted_tokens == 12
    assert run.events[0].stats.num_emitted_tokens == len(run.events[0].token_ids) == 1
