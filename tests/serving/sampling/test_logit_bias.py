"""Token biases change what is drawn, with and without a drafter in the same way, and nothing else."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import RequestError
from paceline.serving.sampling.draw import SamplingBatch, TokenCounts, draw_tokens
from paceline.serving.sampling.request import SamplingParams
from tests.helpers.constrained import VOCAB, Answers, answer, check_drafting_and_batching, make_engine, run, submit

FREE = {"ignore_eos": True, "max_tokens": 20}
GREEDY = {**FREE, "temperature": 0.0}
SAMPLED = {**FREE, "temperature": 1.0, "seed": 5}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_a_hundred_forces_a_token_and_minus_a_hundred_bans_one(params) -> None:
    free = answer(**params)
    assert answer(**params, logit_bias=((7, 100.0),)) == [7] * 20
    banned = free[3]
    got = answer(**params, logit_bias=((banned, -100.0),))
    assert banned not in got and got[:3] == [t for t in free[:3] if t != banned][: len(got[:3])]
    assert answer(**params, logit_bias=((banned, 0.0),)) == free


@pytest.mark.parametrize("drafter", ["random", "oracle", "lookup"])
def test_drafting_and_batching_change_nothing(drafter) -> None:
    bias = tuple((t, 3.0 if t % 2 else -3.0) for t in range(3, 40))
    kinds = {
        "greedy": {**GREEDY, "logit_bias": bias},
        "sampled": {**SAMPLED, "logit_bias": bias},
        "penalised": {**SAMPLED, "logit_bias": bias, "frequency_penalty": 1.0, "top_p": 0.8},
        "forced": {**GREEDY, "logit_bias": ((7, 100.0),)},
        "free": GREEDY,
        "free sampled": SAMPLED,
    }
    want = {name: answer(**params) for name, params in kinds.items()}
    assert want["greedy"] != want["free"] and want["sampled"] != want["free sampled"]
    check_drafting_and_batching(drafter, kinds, want, least=6)


def test_a_bias_is_added_before_penalties_and_temperature() -> None:
    logits = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))
    biased = logits.clone()
    biased[:, 4] += 1.5
    biased[:, 7] -= 2.5
    params = {"temperature": 0.7, "repetition_penalty": 1.5, "presence_penalty": 0.3}
    counts = TokenCounts([4, 5], 12)
    counts.add([7])
    owner = torch.arange(2).repeat_interleave(300)
    positions = torch.arange(300).repeat(2)
    rows = owner
    both = [SamplingParams(**params, logit_bias=((4, 1.5), (7, -2.5))), SamplingParams(temperature=1.0)]
    without = [SamplingParams(**params), SamplingParams(temperature=1.0)]
    batch = SamplingBatch.from_params(both, [1, 2], [counts, None])
    twin = SamplingBatch.from_params(without, [1, 2], [counts, None])
    mixed = torch.where(owner[:, None] == 0, biased[rows], logits[rows])
    before = logits.clone()
    assert (
        draw_tokens(logits[rows], owner, positions, batch).tolist()
        == draw_tokens(mixed, owner, positions, twin).tolist()
    )
    assert torch.equal(logits, before)


def test_only_biased_batches_leave_the_argmax() -> None:
    greedy = SamplingParams(temperature=0.0)
    biased = SamplingParams(temperature=0.0, logit_bias=((3, 1.0),))
    assert SamplingBatch.from_params([greedy, greedy], [0, 0]).is_all_greedy
    assert not SamplingBatch.from_params([greedy, biased], [0, 0]).is_all_greedy


def test_logprobs_do_not_know_of_the_bias() -> None:
    engine, events = make_engine(), []
    submit(engine, events.append, "r", **GREEDY, logit_bias=((7, 100.0),), logprobs=1)
    run(engine)
    entries = [entry for e in events for entry in e.logprobs or ()]
    assert [e.token_id for e in entries] == [7] * 20
    assert any(e.top[0][0] != 7 and e.logprob < e.top[0][1] for e in entries)


@pytest.mark.parametrize(
    "bias", [((VOCAB, 1.0),), ((-1, 1.0),), ((3, 1.0), (3, 2.0)), ((3, 101.0),), ((3, float("nan")),)]
)
def test_biases_that_cannot_be_honoured_are_refused(bias) -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        submit(make_engine(), Answers(), "r", logit_bias=bias)
