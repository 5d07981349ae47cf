"""Text does not depend on drafting: greedy output equals sequential decoding, seeded output equals undrafted output.

The greedy reference is the transformers model alone: one ordinary forward over the whole text per token, no KV cache.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.bench.common.engine_run import build_engine, load_named_drafter, load_target
from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group
from paceline.kernels.cpu.library import choose_isa
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from tests.helpers.fakes import greedy_continuation, tiny_target
from tests.helpers.lossless import (
    DRAFTERS,
    NUM_PROMPTS,
    NUM_TOKENS,
    SAMPLED,
    VOCAB,
    Outputs,
    assert_same,
    greedy_reference,
    make_drafter,
    make_engine,
    prompts,
    run_until_idle,
    sampled_reference,
    submit,
)
from tests.helpers.scripted_drafters import OracleDrafter, RandomDrafter


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_output_is_token_identical_to_sequential_decoding(name, policy, batch):
    engine, outputs = make_engine(make_drafter(name), policy=policy), Outputs()
    for i in range(NUM_PROMPTS):
        submit(engine, i, outputs)
        if batch == 1:
            run_until_idle(engine)
    run_until_idle(engine)
    for i, want in enumerate(greedy_reference()):
        assert outputs.finish[f"r{i}"] == "length"
        assert_same(i, outputs.tokens[f"r{i}"], want)


def test_an_oracle_is_accepted_and_a_rejected_drafter_is_not():
    accepted = {}
    for name in ("oracle", "rejected"):
        engine, last = make_engine(make_drafter(name)), {}
        for i in range(NUM_PROMPTS):
            submit(engine, i, lambda e, last=last: last.__setitem__(e.request_id, e))
        run_until_idle(engine)
        accepted[name] = sum(e.stats.num_accepted_tokens for e in last.values())
        if name == "oracle":  # the first token comes from prefill, 8 + 1 of the rest per round
            assert all(e.stats.num_rounds <= 4 for e in last.values())
    assert accepted["oracle"] >= NUM_PROMPTS * (NUM_TOKENS - 1) * 0.7
    assert accepted["rejected"] == 0


operation = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, NUM_PROMPTS - 1), st.sampled_from(list(Group))),
    st.tuples(st.just("abort"), st.integers(0, NUM_PROMPTS - 1), st.none()),
    st.tuples(st.just("step"), st.integers(1, 6), st.none()),
    st.tuples(st.just("swap"), st.sampled_from(range(len(DRAFTERS))), st.integers(0, 3)),
    st.tuples(st.just("fail"), st.none(), st.none()),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    start=st.sampled_from(DRAFTERS),
    num_pages=st.sampled_from([17, 24, 40, 200]),
    max_running=st.integers(1, 8),
    chunk=st.sampled_from([3, 8, 64]),
    operations=st.lists(operation, min_size=4, max_size=30),
)
def test_greedy_output_survives_aborts_preemption_swaps_and_failures(start, num_pages, max_running, chunk, operations):
    engine = make_engine(make_drafter(start), num_pages=num_pages, max_running=max_running, prefill_chunk_tokens=chunk)
    outputs: dict[int, Outputs] = {}
    version = 0
    for name, value, extra in operations:
        if name == "submit" and (value not in outputs or f"r{value}" in outputs[value].finish):
            outputs[value] = Outputs()
            submit(engine, value, outputs[value], extra)
        elif name == "abort":
            engine.abort(f"r{value}")
        elif name == "step":
            for _ in range(value):
                engine.step()
                engine.check_integrity()
        elif name == "swap":
            version += 1
            if engine.slots.stage(f"v{version}", make_drafter(DRAFTERS[value], extra)):
                engine.call_between_rounds(engine.slots.publish)
        elif name == "fail":
            engine.slots.mark_failed("A", "test")
    run_until_idle(engine)
    assert not any(engine.slots.num_pins().values())
    for i, out in outputs.items():
        reason = out.finish[f"r{i}"]
        assert reason in ("length", "abort")
        got = out.tokens.get(f"r{i}", [])
        assert_same(i, got, greedy_reference()[i][: len(got)])
        assert reason == "abort" or len(got) == NUM_TOKENS


def test_a_tiny_pool_preempts_and_text_stays_the_same():
    for name in DRAFTERS:
        engine, outputs = make_engine(make_drafter(name), num_pages=24, max_running=8), Outputs()
        for i in (0, 1, 2, 3, 7):
            submit(engine, i, outputs)
        run_until_idle(engine)
        assert engine.scheduler.num_preemptions > 0
        for i in (0, 1, 2, 3, 7):
            assert_same(i, outputs.tokens[f"r{i}"], greedy_reference()[i])


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("num_pages", [200, 40])
def test_seeded_sampled_output_is_the_same_with_and_without_drafting(name, num_pages):
    texts = {f"r{i}": [*prompts()[i], *want] for i, want in enumerate(sampled_reference())}
    drafter = OracleDrafter(texts, hit_rate=0.9) if name == "oracle" else make_drafter(name, seed=1)
    engine, outputs = make_engine(drafter, num_pages=num_pages), Outputs()
    for i, params in enumerate(SAMPLED):
        submit(engine, i, outputs, seed=100 + i, **params)
    run_until_idle(engine)
    for i, want in enumerate(sampled_reference()):
        assert outputs.tokens[f"r{i}"] == list(want), f"request {i}: {SAMPLED[i]}"


def test_unseeded_requests_draw_different_seeds():
    engine, texts = make_engine(None), set()
    for _ in range(3):
        outputs = Outputs()
        submit(engine, 3, outputs, temperature=1.5)
        run_until_idle(engine)
        texts.add(tuple(outputs.tokens["r3"]))
    assert len(texts) > 1


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_other_families_are_lossless_too(kind):
    model = tiny_target(kind, vocab=VOCAB)
    slots = DrafterSlots(RandomDrafter(VOCAB), "v0")
    engine = Engine(model, slots, EngineConfig(tree=TreeConfig(policy="fixed")))
    outputs = Outputs()
    for i in range(4):
        submit(engine, i, outputs)
    run_until_idle(engine)
    for i in range(4):
        want = greedy_continuation(model, list(prompts()[i]), NUM_TOKENS)
        assert outputs.tokens[f"r{i}"] == want


@pytest.mark.skipif(choose_isa() is None, reason="needs the compiled forward")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "auto") for name in ("specblock", "eagle3", "jetspec", "dflash", "suffix")),
        ("specblock", "int8"),
        ("dflash", "int8"),
    ],
)
def test_the_bundled_target_gives_the_same_text_with_and_without_drafting(name, dtype):
    """Where the compiled forward runs there are no near ties: tree rows are bit for bit those of plain decoding."""
    target = load_target("bundled", dtype, drafters=[name])
    assert target.dtype == torch.bfloat16 and target.forward_name.startswith("native")
    texts = ["def add(a, b):", "The sum of 12 and 30 is", "Q: What is 7 times 8?\nA:", '{"name": "mocha", "size":'] * 3
    answers = []
    for drafter in (None, load_named_drafter(name, target)):
        tree = TreeConfig(max_draft_tokens=8, policy="fixed")
        engine = build_engine(target, drafter, EngineConfig(max_running=5, kv_bytes=2**26, tree=tree))
        found: dict[str, list[int]] = {}
        for i, text in enumerate(texts):
            params = SamplingParams(max_tokens=60, temperature=0.8 * (i % 2), seed=i)
            ids = tuple(target.tokenizer.encode(text, add_special_tokens=False))
            request = GenerationRequest(request_id=str(i), prompt_token_ids=ids, params=params)
            engine.submit(request, lambda e, found=found: found.setdefault(e.request_id, []).extend(e.token_ids))
        run_until_idle(engine)
        answers.append(found)
    assert answers[0] == answers[1] and sum(map(len, answers[0].values())) > 300
