"""The round loop: limits, stops, refusals, aborts, drafters that fail or are swapped."""

from __future__ import annotations

import functools

import pytest
import torch

from paceline.bench.engine.scripted_drafters import RandomDrafter, RepeatDrafter
from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group
from paceline.errors import CapacityError, ConfigError, RequestError
from paceline.serving.drafters.interface import DrafterCaps, Proposal
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.engine.output import ROUND_COLUMNS
from paceline.serving.loading.kv_size import pool_row_bytes
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from tests.helpers.fakes import EOS_ID, greedy_continuation, tiny_target

VOCAB = 64
PROMPT = (10, 11, 12, 13, 14)
TREE = TreeConfig(max_draft_tokens=6, policy="fixed")


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


# ---- memory ---------------------------------------------------------------------------------------------------------
def test_nothing_grows_over_many_requests():
    engine = make_engine(RandomDrafter(VOCAB))
    rows = engine.kv.num_rows
    for i in range(40):
        Run(engine, f"r{i}", max_tokens=3)
        finish(engine)
    assert engine.kv.num_rows == rows and engine.allocator.num_free_pages == 64
    assert not engine.output.by_id and engine.is_idle
