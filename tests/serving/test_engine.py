"""The round loop: limits, stops, by-products, faults and its thread."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.clock import ManualClock
from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group
from paceline.errors import CapacityError, ConfigError, EngineStoppedError, RequestError
from paceline.serving.draft_weights import DrafterSlots
from paceline.serving.drafter import DrafterCaps, Proposal
from paceline.serving.engine import Engine
from paceline.serving.engine_thread import EngineThread
from paceline.serving.kv_budget import pool_row_bytes
from paceline.serving.request import GenerationRequest, SamplingParams
from paceline.serving.scripted_drafters import OracleDrafter, RandomDrafter, RepeatDrafter
from paceline.serving.sinks import ROUND_COLUMNS
from tests.fakes import EOS_ID, greedy_continuation, plain_logits, tiny_target

VOCAB = 64
PROMPT = (10, 11, 12, 13, 14)
TREE = TreeConfig(max_draft_tokens=6, node_buckets=(0, 2, 4, 6), is_adaptive=False)


@functools.cache
def target():
    return tiny_target(vocab=VOCAB, context=128)


@functools.cache
def greedy(prompt: tuple[int, ...] = PROMPT, num_tokens: int = 24) -> tuple[int, ...]:
    return tuple(greedy_continuation(target(), list(prompt), num_tokens))


class FeatureDrafter:
    """Checks the rows it is handed against the committed text and the plain model; proposes the newest token."""

    def __init__(self) -> None:
        self.caps = DrafterCaps(
            name="feature", num_slots=2, num_candidates=1, max_depth=2, is_reentrant=False, needs_features=True
        )
        self.rows: dict[str, list[torch.Tensor]] = {}
        self.largest_call = 0
        self.released: list[str] = []

    def alloc(self, num_pool_rows):
        self.num_pool_rows = num_pool_rows

    def ingest(self, inputs):
        offsets = inputs.cu_new.tolist()
        self.largest_call = max(self.largest_call, offsets[-1])
        for b, request_id in enumerate(inputs.request_ids):
            rows, text = self.rows.setdefault(request_id, []), inputs.histories[b]
            part = slice(offsets[b], offsets[b + 1])
            positions = inputs.new_positions[part].tolist()
            assert positions == list(range(len(rows), len(rows) + len(positions))), (
                "rows are handed over once, in order"
            )
            assert inputs.new_token_ids[part].tolist() == [text[p + 1] for p in positions]
            assert inputs.new_slots[part].tolist() == [int(inputs.slot_table[b, p]) for p in positions]
            assert all(0 <= s < self.num_pool_rows for s in inputs.new_slots[part].tolist())
            rows += inputs.new_features[part].unbind(0)

    def propose(self, inputs):
        self.ingest(inputs)
        for b, request_id in enumerate(inputs.request_ids):
            assert len(self.rows[request_id]) == int(inputs.context_lens[b]) == len(inputs.histories[b]) - 1
            assert int(inputs.anchor_token_ids[b]) == inputs.histories[b][-1]
        ids = inputs.anchor_token_ids[:, None, None].expand(-1, 2, 1)
        return Proposal(token_ids=ids, logprobs=torch.full(ids.shape, -0.5), widths=None)

    def release(self, request_id):
        self.released.append(request_id)
        self.rows.pop(request_id, None)


class BrokenDrafter(RepeatDrafter):
    """Works for a few calls, then fails in the given way."""

    def __init__(self, how: str) -> None:
        super().__init__(num_slots=3)
        self.how, self.calls = how, 0

    def propose(self, inputs):
        self.calls += 1
        proposal = super().propose(inputs)
        if self.calls < 3:
            return proposal
        if self.how == "raises":
            raise RuntimeError("broken")
        if self.how == "ids":
            proposal.token_ids = proposal.token_ids + VOCAB
            return proposal
        proposal.logprobs = torch.full_like(proposal.logprobs, float(self.how))
        return proposal


class Sinks:
    def __init__(self, wants=True) -> None:
        self.rows: list[dict] = []
        self.asked: list[str] = []
        self.traces: list = []
        self.is_wanted = wants

    def record_round(self, row):
        self.rows.append(dict(zip(ROUND_COLUMNS, row, strict=True)))

    def wants(self, request_id, bucket):
        self.asked.append(request_id)
        return self.is_wanted(request_id) if callable(self.is_wanted) else self.is_wanted

    def record_trace(self, trace):
        self.traces.append(trace)


class Run:
    """One request's events."""

    def __init__(self, engine: Engine, request_id: str = "r", prompt=PROMPT, **fields) -> None:
        self.events: list = []
        request = {k: fields.pop(k) for k in ("group", "bucket", "is_traced", "priority") if k in fields}
        params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **fields}
        engine.submit(
            GenerationRequest(
                request_id=request_id, prompt_token_ids=tuple(prompt), params=SamplingParams(**params), **request
            ),
            self.events.append,
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for e in self.events for t in e.token_ids)

    @property
    def last(self):
        return self.events[-1]


def make_engine(
    drafter=None, *, num_pages: int = 64, sinks: Sinks | None = None, packs_prompts: bool | None = None, **config
) -> Engine:
    slots = drafter if isinstance(drafter, DrafterSlots) else DrafterSlots(drafter, "v0" if drafter else "")
    row_bytes, _ = pool_row_bytes(target(), slots, has_traces=sinks is not None)
    values = {"page_tokens": 4, "kv_bytes": num_pages * 4 * row_bytes, "tree": TREE, **config}
    return Engine(
        target(), slots, EngineConfig(**values), feedback=sinks, traces=sinks, trace_topk=4, packs_prompts=packs_prompts
    )


def finish(engine: Engine) -> int:
    steps = 0
    while engine.step():
        engine.check_integrity()
        steps += 1
        assert steps < 1000
    engine.check_integrity()
    return steps


# ---- ends of a request ----------------------------------------------------------------------------------------------
def test_max_tokens_ends_with_length_even_in_the_middle_of_an_accepted_path():
    for num_tokens in range(1, 8):
        engine = make_engine(RandomDrafter(VOCAB))
        run = Run(engine, max_tokens=num_tokens)
        finish(engine)
        assert run.tokens == greedy()[:num_tokens] and run.last.finish_reason == "length"


def test_a_stop_token_is_the_last_token_emitted():
    stop = greedy()[5]
    at = greedy().index(stop)
    engine = make_engine(RandomDrafter(VOCAB))
    run = Run(engine, max_tokens=20, stop_token_ids=(stop,))
    finish(engine)
    assert run.tokens == greedy()[: at + 1] and run.last.finish_reason == "stop" and run.last.stop_match is None


def test_eos_stops_unless_ignored():
    prompt = next(p for p in ((a, b) for a in range(3, 40) for b in range(3, 9)) if EOS_ID in greedy(p, 12))
    engine = make_engine()
    stopped, ignored = Run(engine, "a", prompt, ignore_eos=False), Run(engine, "b", prompt)
    finish(engine)
    assert stopped.tokens[-1] == EOS_ID and EOS_ID not in stopped.tokens[:-1]
    assert stopped.last.finish_reason == "stop"
    assert ignored.tokens == greedy(prompt, 12)


@pytest.mark.parametrize("has_drafter", [False, True])
def test_a_stop_string_that_spans_tokens_ends_the_request_at_the_completing_token(has_drafter):
    text = target().tokenizer.decode(greedy(), skip_special_tokens=True)
    stop = text[6:9]
    at = text.index(stop) + len(stop)
    engine = make_engine(RandomDrafter(VOCAB) if has_drafter else None)
    run = Run(engine, max_tokens=20, stop=("never there", stop))
    finish(engine)
    emitted = target().tokenizer.decode(run.tokens, skip_special_tokens=True)
    assert emitted == text[:at] and run.last.stop_match == stop and run.last.finish_reason == "stop"


def test_the_end_of_the_context_ends_with_length():
    engine = make_engine(RepeatDrafter(), max_context_tokens=20)
    run = Run(engine, max_tokens=100)
    finish(engine)
    assert len(run.tokens) == 20 - len(PROMPT) and run.last.finish_reason == "length"


def test_a_pool_smaller_than_the_context_bounds_it():
    engine = make_engine(RepeatDrafter(), num_pages=4)
    run = Run(engine, max_tokens=100)
    finish(engine)
    assert len(run.tokens) == 16 - len(PROMPT) and run.last.finish_reason == "length"


# ---- bad requests ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prompt", [(), (VOCAB,), (-1,), tuple([5] * 128)])
def test_prompts_that_cannot_be_served_are_refused(prompt):
    engine = make_engine()
    with pytest.raises(RequestError, match="got"):
        Run(engine, prompt=prompt)
    assert engine.is_idle


def test_a_full_queue_and_a_used_id_are_refused():
    engine = make_engine(max_waiting=2)
    Run(engine, "a")
    with pytest.raises(RequestError, match="unique"):
        Run(engine, "a")
    Run(engine, "b")
    with pytest.raises(CapacityError):
        Run(engine, "c")
    finish(engine)
    again = Run(engine, "a")
    finish(engine)
    assert again.tokens == greedy()[:12], "a finished id may be used again"


def test_a_pool_without_room_is_a_config_error():
    with pytest.raises(ConfigError, match="kv_bytes"):
        make_engine(num_pages=1)


# ---- abort, callbacks, calls ----------------------------------------------------------------------------------------
def test_abort_takes_effect_at_the_next_boundary_in_every_state():
    engine = make_engine(RandomDrafter(VOCAB), max_running=2, prefill_chunk_tokens=2)
    runs = [Run(engine, f"r{i}") for i in range(3)]
    engine.step()  # two in prefill, one waiting
    for i in (0, 2):
        engine.abort(f"r{i}")
    engine.abort("unknown")
    finish(engine)
    assert [r.last.finish_reason for r in runs] == ["abort", "length", "abort"]
    assert runs[1].tokens == greedy()[:12] and engine.allocator.num_free_pages == 64


def test_a_callback_that_raises_ends_only_its_own_request():
    engine = make_engine(RepeatDrafter())
    good = Run(engine, "good")

    def broken(event):
        raise RuntimeError("event loop is closed")

    engine.submit(
        GenerationRequest(request_id="bad", prompt_token_ids=PROMPT, params=SamplingParams(temperature=0)), broken
    )
    finish(engine)
    assert good.tokens == greedy()[:12] and engine.stats()["num_aborted"] == 1


def test_calls_run_between_rounds_and_give_their_result_or_error():
    engine = make_engine()
    value, error = engine.call_between_rounds(lambda: 7), engine.call_between_rounds(lambda: 1 // 0)
    engine.step()
    assert value.result(0) == 7
    with pytest.raises(ZeroDivisionError):
        error.result(0)


# ---- drafters -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_pages", [200, 22])
def test_the_drafter_gets_every_row_once_with_the_features_of_the_plain_model(num_pages):
    drafter, sinks = FeatureDrafter(), Sinks(wants=False)
    engine = make_engine(drafter, num_pages=num_pages, prefill_chunk_tokens=16, sinks=sinks)
    prompts = [tuple(3 + (7 * i + k * k) % 60 for k in range(n)) for i, n in enumerate((3, 50, 20, 41))]
    runs = [Run(engine, f"r{i}", p, max_tokens=16) for i, p in enumerate(prompts)]
    checked = 0
    while engine.step():
        engine.check_integrity()
        for run_id, rows in list(drafter.rows.items()):
            request = engine.output.by_id.get(run_id)
            if request is None or len(rows) < 8:
                continue
            with torch.inference_mode():
                hidden = (
                    target()
                    .model(input_ids=torch.tensor([request.tokens]), use_cache=False, output_hidden_states=True)
                    .hidden_states
                )
            want = torch.cat([hidden[t + 1] for t in target().tap_layers], -1)[0, : len(rows)]
            torch.testing.assert_close(torch.stack(rows), want, atol=2e-3, rtol=2e-3)
            checked += 1
    assert checked > 10 and drafter.largest_call <= 16 + 4 * 33
    assert all(run.tokens == greedy(p, 16) for run, p in zip(runs, prompts, strict=True))
    assert set(drafter.released) == {"r0", "r1", "r2", "r3"} and not drafter.rows
    assert (engine.scheduler.num_preemptions > 0) == (num_pages == 22)


@pytest.mark.parametrize("how", ["raises", "nan", "inf", "2.5", "ids"])
def test_a_broken_drafter_costs_speed_only(how, caplog):
    sinks = Sinks()
    engine = make_engine(BrokenDrafter(how), sinks=sinks)
    first = Run(engine, "first", max_tokens=20)
    finish(engine)
    second = Run(engine, "second", max_tokens=20)
    finish(engine)
    assert first.tokens == second.tokens == greedy()[:20]
    assert engine.stats()["num_drafter_failures"] == 1 and "v0" in engine.stats()["drafter_failures"]
    assert second.last.stats.drafter_version == ""
    assert {r["drafter_version"] for r in sinks.rows if r["request_id"] == "second"} == {""}
    (line,) = [r.getMessage() for r in caplog.records if "decode plainly" in r.getMessage()]
    assert line.endswith(": first")


def test_a_drafter_that_fails_while_it_catches_up_is_contained():
    class FailsInIngest(FeatureDrafter):
        def ingest(self, inputs):
            raise RuntimeError("out of memory")

    engine = make_engine(FailsInIngest(), num_pages=100)
    run = Run(engine, prompt=tuple([9, 17] * 25), max_tokens=8)
    finish(engine)
    assert run.last.finish_reason == "length" and engine.stats()["num_drafter_failures"] == 1


def test_a_swap_leaves_running_requests_on_their_version():
    sinks = Sinks()
    engine = make_engine(DrafterSlots(RandomDrafter(VOCAB, 1), "v1", first_version="v1"), sinks=sinks)
    old = Run(engine, "old", max_tokens=20)
    engine.step()
    assert engine.slots.stage("v2", RandomDrafter(VOCAB, 2))
    pause = engine.call_between_rounds(engine.slots.publish)
    new, static, plain = (
        Run(engine, "new"),
        Run(engine, "static", group=Group.STATIC),
        Run(engine, "plain", group=Group.PLAIN),
    )
    finish(engine)
    assert pause.result(0) < 50
    versions = {name: {r["drafter_version"] for r in sinks.rows if r["request_id"] == name} for name in ("old", "new", "static", "plain")}  # fmt: skip
    assert versions == {"old": {"v1"}, "new": {"v2"}, "static": {"v1"}, "plain": {""}}
    for run in (old, new, static, plain):
        assert run.tokens == greedy()[: len(run.tokens)]
    assert sum(r["num_draft_tokens"] for r in sinks.rows if r["request_id"] == "plain") == 0


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


@settings(max_examples=30, deadline=None)
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


# ---- memory ---------------------------------------------------------------------------------------------------------
def test_nothing_grows_over_many_requests():
    engine = make_engine(RandomDrafter(VOCAB))
    rows = engine.kv.num_rows
    for i in range(40):
        Run(engine, f"r{i}", max_tokens=3)
        finish(engine)
    assert engine.kv.num_rows == rows and engine.allocator.num_free_pages == 64
    assert not engine.output.by_id and engine.is_idle


# ---- thread ---------------------------------------------------------------------------------------------------------
def test_the_thread_serves_many_submitters_and_drains_on_stop():
    engine = make_engine(RandomDrafter(VOCAB), max_running=4)
    thread = EngineThread(engine)
    thread.start()
    done = threading.Semaphore(0)
    answers: dict[str, list[int]] = {}

    def submit(i: int) -> None:
        def on_event(event):
            answers.setdefault(event.request_id, []).extend(event.token_ids)
            if event.finish_reason is not None:
                done.release()

        engine.submit(
            GenerationRequest(
                request_id=f"r{i}",
                prompt_token_ids=PROMPT,
                params=SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
            ),
            on_event,
        )

    submitters = [threading.Thread(target=submit, args=(i,)) for i in range(12)]
    for t in submitters:
        t.start()
    for _ in range(6):
        assert done.acquire(timeout=60)
    for t in submitters:
        t.join()
    assert thread.stop(drain=True, timeout_s=60) and thread.error is None
    assert all(tuple(a) == greedy()[:12] for a in answers.values()) and len(answers) == 12
    with pytest.raises(EngineStoppedError):
        Run(engine, "late")


def test_stopping_without_drain_ends_requests_with_an_error():
    engine = make_engine(RepeatDrafter())
    thread = EngineThread(engine)
    run = Run(engine, max_tokens=100)
    assert thread.heartbeat_age_s() < 60
    thread.start(is_warmed_up=True)
    assert thread.stop(drain=False, timeout_s=60)
    assert run.last.finish_reason in ("error", "length")
    assert engine.allocator.num_free_pages == engine.allocator.num_pages


def test_a_failing_target_ends_every_request_with_an_error_and_stops_the_thread(monkeypatch):
    engine = make_engine(RepeatDrafter())
    ended = threading.Event()
    events = []

    def on_event(event):
        events.append(event)
        if event.finish_reason is not None:
            ended.set()

    def fail(batch, kv):
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine, "target", engine.target)
    monkeypatch.setattr(
        engine._decode, "_target", type("T", (), {"forward": staticmethod(fail), "device": engine.target.device})()
    )
    thread = EngineThread(engine)
    thread.start(is_warmed_up=True)
    engine.submit(GenerationRequest(request_id="r", prompt_token_ids=PROMPT, params=SamplingParams()), on_event)
    assert ended.wait(60)
    assert events[-1].finish_reason == "error"
    assert "device lost" not in events[-1].error, "what went wrong may quote other requests: it belongs in the log"
    assert isinstance(thread.error, RuntimeError)
    with pytest.raises(EngineStoppedError):
        Run(engine, "late")


def test_several_requests_are_taken_all_or_none():
    engine = make_engine(max_waiting=3)

    def ask(*ids: str) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=2)
        engine.submit_all(
            [GenerationRequest(request_id=i, prompt_token_ids=PROMPT, params=params) for i in ids], ends.append
        )

    ends: list = []
    ask("a", "b")
    with pytest.raises(CapacityError, match="room for 1 of 2"):
        ask("c", "d")
    with pytest.raises(RequestError, match="at most 3"):
        ask("c", "d", "e", "f")
    with pytest.raises(RequestError, match="unique"):
        ask("b")
    ask("c")
    finish(engine)
    assert sorted(e.request_id for e in ends if e.finish_reason) == ["a", "b", "c"]
    engine.check_integrity()
