"""Every fault of SPEED-Bench's reference harness is a case here: what it reports wrong, these metrics report right."""

import json

import numpy as np
import pytest

from paceline.bench.common.recorders import CountedDrafter, Round, RoundRecorder
from paceline.bench.drafters.metrics import (
    acceptance,
    depth_counts,
    joint_rates,
    mean_length,
    round_times,
    stream_metrics,
)
from paceline.bench.engine.arms import BenchGroup, EngineArm, GroupTiming, new_engine
from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group
from paceline.serving.sampling.request import SamplingParams
from tests.helpers.fakes import EOS_ID, greedy_continuation, tiny_target
from tests.helpers.scripted_drafters import OracleDrafter


def rounds(*accepted, drafted=3, ms=20.0, room=1000):
    return [
        Round(num_draft_tokens=drafted, num_accepted_tokens=a, num_emitted_tokens=a + 1, round_ms=ms, room=room)
        for a in accepted
    ]


def timing(chunks, submitted_s=0.0):
    tokens = (0,) * sum(n for _, n in chunks)
    return GroupTiming(token_ids=(tokens,), seconds=chunks[-1][0], ttft_s=(chunks[0][0],), submitted_s=(submitted_s,), chunks=(tuple(chunks),))  # fmt: skip


# ---- the reference harness' faults ------------------------------------------------------------------------------------
def test_time_to_first_token_is_no_round():
    """2 s to the first token, then 25 rounds of 20 ms: it reports a mean step of 96 ms."""
    seen = stream_metrics([timing([(5.0 + 2.0 + 0.02 * i, 1 if i == 0 else 3) for i in range(26)], submitted_s=5.0)], ["p"])  # fmt: skip
    assert seen["ttft_ms"]["p50"] == pytest.approx(2000)
    assert seen["gap_ms"]["p50"] == seen["gap_ms"]["max"] == pytest.approx(20)
    assert seen["user_tokens_per_s"]["mean"] == pytest.approx(150)
    assert round_times([("p", rounds(*[2] * 25))])["p99"] == pytest.approx(20)


@pytest.mark.parametrize("max_tokens", [100, 98, 99, 97])
def test_a_perfect_drafter_of_three_tokens_has_acceptance_length_four(max_tokens):
    """It reports 3.85: prefill's token and the round that the limit cuts count as rounds. Counted in a real engine."""
    prompt = (5, 9, 7)
    timing, arm = run_oracle(prompt, max_tokens)
    (own,) = timing.rounds
    got = acceptance([(prompt, own)])
    assert got["acceptance_length"]["pooled"] == 4.0 == got["acceptance_length"]["per_request"]
    assert [(d["conditional"], d["joint"]) for d in got["depths"]] == [(1.0, 1.0)] * 3
    assert sum(r.num_emitted_tokens for r in own) == max_tokens - 1, "the first token is prefill's"
    rest = (max_tokens - 1) % 4
    assert (got["num_cut"], got["num_limited"]) == (int(rest > 1), int(rest == 1))
    assert got["draft_tokens_per_round"] == 3 and timing.calls.num_propose == got["num_rounds"]
    # what counting emitted tokens over all rounds would say
    naive = max_tokens / (len(own) + 1)
    assert naive < 4.0
    if max_tokens == 100:
        assert round(naive, 2) == 3.85
    arm.engine.check_integrity()


def run_oracle(prompt, max_tokens, *, ignore_eos=True, hit_rate=1.0, stop=()):
    target = tiny_target(vocab=64, layers=2, width=16, context=128)
    text = greedy_continuation(target, list(prompt), max_tokens + 8)
    drafter = CountedDrafter(OracleDrafter({"oracle-g-0": [*prompt, *text]}, num_slots=3, hit_rate=hit_rate))
    tree = TreeConfig(max_draft_tokens=3, max_frontier=0, policy="fixed")
    config = EngineConfig(max_running=1, page_tokens=8, prefix_caching=False, tree=tree)
    recorder = RoundRecorder()
    engine = new_engine(target, drafter, version="o", num_tokens=512, config=config, feedback=recorder)
    arm = EngineArm("oracle", engine, Group.ADAPTIVE, recorder=recorder, drafter=drafter)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stop)
    timing = arm.run(BenchGroup(tag="g", bucket="b", prompts=(prompt,), params=(params,), batch=1))
    assert list(timing.token_ids[0]) == text[: len(timing.token_ids[0])], "greedy output is the target's"
    return timing, arm


def test_a_length_that_never_occurs_has_its_place():
    """Rounds of length 1 and 3 only: its profile reads the missing length 2 as P(>= 2) = 0."""
    got = acceptance([("p", rounds(*[0] * 50, *[2] * 50))])
    assert [h["num_rounds"] for h in got["histogram"]] == [50, 0, 50]
    assert [(d["num_at_risk"], d["num_accepted"], d["conditional"], d["joint"]) for d in got["depths"]] == [
        (100, 50, 0.5, 0.5),
        (50, 50, 1.0, 0.5),
    ]
    assert got["acceptance_length"]["pooled"] == 2.0


def test_rounds_are_pooled_and_requests_are_averaged_under_their_own_names():
    """12 tokens at 4 a round and 100 tokens at 1 a round: it reports 2.50 as the mean of its rounds."""
    got = acceptance([("short", rounds(3, 3, 3)), ("long", rounds(*[0] * 100))])
    assert got["acceptance_length"]["pooled"] == pytest.approx(112 / 103)
    assert round(got["acceptance_length"]["pooled"], 3) == 1.087
    assert got["acceptance_length"]["per_request"] == 2.5


def test_a_lagging_reader_changes_no_acceptance():
    """Chunks that hold several rounds: it reports 7.46 where 4 is the most."""
    prompt = (5, 9, 7)
    timing, _ = run_oracle(prompt, 60)
    assert max(r.num_emitted_tokens for r in timing.rounds[0]) == 4
    first, *others = timing.chunks[0]
    merged = [first, *((b[0], a[1] + b[1]) for a, b in zip(others[::2], others[1::2], strict=False))]
    assert max(n for _, n in merged) == 8, "what a reader that comes every second round sees"
    got = acceptance([(prompt, timing.rounds[0])])
    assert got["acceptance_length"]["pooled"] == 4.0 and len(got["depths"]) == 3


def test_short_rounds_keep_their_digits():
    """A round of 0.31 ms: it writes the text '0.0003'."""
    ms = json.loads(json.dumps(round_times([("p", rounds(1, 1, ms=0.31))])))["p50"]
    assert isinstance(ms, float) and ms == pytest.approx(0.31, abs=1e-6)


# ---- cut rounds -------------------------------------------------------------------------------------------------------
def test_what_lies_behind_a_stop_is_not_accepted():
    """A stop token inside the tree: the engine verified what follows, but it is no text of the answer."""
    prompt = (5, 9, 7)
    free, _ = run_oracle(prompt, 40)
    text = free.token_ids[0]
    at = next(i for i in range(6, 40) if (i - 1) % 4 == 1 and text[i] not in text[:i] and text[i] != EOS_ID)
    timing, _ = run_oracle(prompt, 40, stop=(text[at],))
    assert len(timing.token_ids[0]) == at + 1
    (own,) = timing.rounds
    last = own[-1]
    assert last.is_cut and (last.num_accepted_tokens, last.num_emitted_tokens, last.num_known) == (3, 2, 2)
    counts = depth_counts(own, 3)
    assert counts.tolist() == [[len(own), len(own), len(own) - 1]] * 2, "depth 3 of the last round was not at risk"


def test_the_pooled_length_is_accepted_over_rounds_plus_one_where_nothing_was_cut():
    rng = np.random.default_rng(0)
    for _ in range(20):
        own = rounds(*rng.integers(0, 6, 30).tolist(), drafted=8)
        got = acceptance([("p", own)])
        assert got["acceptance_length"]["pooled"] == pytest.approx(1 + sum(r.num_accepted_tokens for r in own) / 30)
        joint = [d["joint"] for d in got["depths"]]
        assert joint == sorted(joint, reverse=True) and 1 + sum(joint) == pytest.approx(got["acceptance_length"]["pooled"])  # fmt: skip


def test_censoring_undoes_the_bias_of_short_answers():
    """Rounds of true length 1 + Binomial-like runs, cut by answers of a few tokens: leaving the cut out would be biased."""
    rng = np.random.default_rng(1)
    rate, depth = 0.8, 7
    truth = 1 + sum(rate**i for i in range(1, depth + 1))
    own = []
    for _ in range(3000):
        left = int(rng.integers(2, 12))
        while left > 1:
            accepted = int((np.cumprod(rng.random(depth) < rate)).sum())
            emitted = min(accepted + 1, left)
            own.append(Round(num_draft_tokens=depth, num_accepted_tokens=accepted, num_emitted_tokens=emitted, room=left))  # fmt: skip
            left -= emitted
    pooled = float(mean_length(depth_counts(own, depth)))
    emitted = np.mean([r.num_emitted_tokens for r in own])
    whole = np.mean([r.num_emitted_tokens for r in own if not r.is_cut])
    assert abs(pooled - truth) < 0.08 and emitted < truth - 0.5 and whole < truth - 0.5


# ---- intervals --------------------------------------------------------------------------------------------------------
def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(60):
        means = rng.beta(4, 4, 16)  # prompts differ
        requests = [(i, rounds(*rng.binomial(1, m, 20).tolist())) for i, m in enumerate(means)]
        low, high = acceptance(requests)["acceptance_length"]["interval"]
        hits += low <= 1.5 <= high
    assert hits >= 52


def test_repeating_a_prompt_adds_no_certainty():
    rng = np.random.default_rng(3)
    own = [(i, rounds(*rng.integers(0, 4, 10).tolist())) for i in range(8)]
    once, often = (acceptance(r)["acceptance_length"] for r in (own, own * 5))
    assert once["num_prompts"] == often["num_prompts"] == 8
    assert often["interval"] == pytest.approx(once["interval"]) and often["pooled"] == pytest.approx(once["pooled"])
    assert acceptance(own[:1])["acceptance_length"]["interval"] is None


def test_nothing_drafted_and_nothing_counted():
    assert acceptance([("p", rounds(0, 0, drafted=0))])["acceptance_length"]["pooled"] == 1.0
    only_limited = acceptance([("p", rounds(0, room=1))])
    assert only_limited["acceptance_length"] is None and only_limited["num_limited"] == 1
    assert joint_rates(np.zeros((2, 3))).tolist() == [0, 0, 0]
