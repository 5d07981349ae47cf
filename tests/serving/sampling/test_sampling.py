"""Draws follow the processed target distribution exactly and depend on (seed, position) only."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.serving.sampling import draw
from paceline.serving.sampling.draw import (
    SamplingBatch,
    TokenCounts,
    draw_tokens,
    has_penalties,
    token_logprobs,
    token_ranks,
)
from paceline.serving.sampling.request import SamplingParams


def reference_weights(logits, params, prompt=(), output=()):
    """Slow, obvious: (V,) float64 probabilities of the processed distribution."""
    x = logits.double().numpy().copy()
    for t in set(prompt) | set(output):
        x[t] = x[t] / params.repetition_penalty if x[t] > 0 else x[t] * params.repetition_penalty
    for t in set(output):
        x[t] -= params.presence_penalty + params.frequency_penalty * list(output).count(t)
    if params.temperature == 0:
        return np.eye(len(x))[x.argmax()]
    p = np.exp((x - x.max()) / params.temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda t: (-p[t], t))
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        total, run, kept = sum(p[t] for t in order), 0.0, []
        for t in order:
            if kept and run >= params.top_p * total:
                break
            kept.append(t)
            run += p[t]
        order = kept
    order = [t for t in order if p[t] >= params.min_p * p.max()]
    out = np.zeros(len(p))
    out[order] = p[order]
    return out / out.sum()


CASES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0, top_k=7),
    SamplingParams(temperature=1.0, top_p=0.6),
    SamplingParams(temperature=1.0, top_p=0.0),
    SamplingParams(temperature=3.0, top_p=0.99),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=1.5, top_k=50, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=1.0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=-0.7, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.7, presence_penalty=1.0),
    SamplingParams(temperature=0.0),
]


@pytest.mark.parametrize("vocab", [5, 64, 700])
def test_draws_invert_the_reference_distribution(vocab):
    gen = torch.Generator().manual_seed(vocab)
    prompt, output = [1, 2, 3], [2, 4, 4]
    counts = []
    for p in CASES:
        c = TokenCounts(prompt, vocab) if has_penalties(p) else None
        if c:
            c.add(output)
        counts.append(c)
    batch = SamplingBatch.from_params(CASES, range(len(CASES)), counts)
    num = 40
    owner = torch.arange(len(CASES)).repeat(num)
    positions = torch.arange(num).repeat_interleave(len(CASES))
    logits = torch.randn(len(owner), vocab, generator=gen) * 2
    drawn = draw_tokens(logits, owner, positions, batch)
    uniforms = batch.uniforms(owner, positions)
    for i, b in enumerate(owner.tolist()):
        has = counts[b] is not None
        probs = reference_weights(logits[i], CASES[b], prompt if has else (), output if has else ())
        cdf = probs.cumsum()
        token = int(drawn[i])
        assert probs[token] > 0
        if CASES[b].temperature > 0:
            low = cdf[token] - probs[token]
            assert low - 1e-5 <= uniforms[i] <= cdf[token] + 1e-5


def test_ties_at_the_cut_keep_the_lower_ids():
    batch = SamplingBatch.from_params([SamplingParams(temperature=1.0, top_k=3)], [0])
    positions = torch.arange(500)
    drawn = draw_tokens(torch.zeros(500, 300), torch.zeros(500, dtype=torch.int64), positions, batch)
    assert set(drawn.tolist()) == {0, 1, 2}


def test_flat_distribution_with_top_p_needs_the_full_sort():
    batch = SamplingBatch.from_params([SamplingParams(temperature=1.0, top_p=0.5)], [0])
    drawn = draw_tokens(torch.zeros(4000, 1000), torch.zeros(4000, dtype=torch.int64), torch.arange(4000), batch)
    assert drawn.max() == 499 and len(set(drawn.tolist())) > 450


@pytest.mark.parametrize("on_host", [True, False])
def test_a_top_k_of_the_whole_vocabulary_is_none(monkeypatch, on_host):
    """A device looks at the likeliest tokens only; no two weigh the same here."""
    monkeypatch.setattr(draw, "_sorts_on_host", lambda weights: on_host)
    vocab, num = 1000, 1500
    logits = torch.linspace(0.0, 0.1, vocab).repeat(num, 1)
    positions, owner = torch.arange(num), torch.zeros(num, dtype=torch.int64)
    found = []
    for top_k in (0, vocab, 5000, 300):
        batch = SamplingBatch.from_params([SamplingParams(temperature=1.0, top_k=top_k)], [3])
        found.append(draw_tokens(logits, owner, positions, batch))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]) and len(found[0].unique()) > 700
    assert int(found[3].min()) >= vocab - 300


def test_extra_tokens_count_like_committed_ones():
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0, repetition_penalty=1.2)
    a, b = TokenCounts([0], 16), TokenCounts([0], 16)
    b.add([3, 3, 5])
    logits = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    owner, positions = torch.zeros(6, dtype=torch.int64), torch.arange(6)
    extra = torch.tensor([[3, 5, 3, -1]]).expand(6, -1)
    one = draw_tokens(logits, owner, positions, SamplingBatch.from_params([params], [0], [a]), extra)
    two = draw_tokens(logits, owner, positions, SamplingBatch.from_params([params], [0], [b]))
    assert one.tolist() == two.tolist()


def test_draw_depends_on_seed_and_position_only():
    params = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=5),
    ]
    logits = torch.randn(30, 200, generator=torch.Generator().manual_seed(1))
    owner, positions = torch.arange(30) % 3, torch.arange(30) // 3
    batch = SamplingBatch.from_params(params, [11, 12, -(2**70)])
    together = draw_tokens(logits, owner, positions, batch)
    for i in range(30):
        b = int(owner[i])
        alone = SamplingBatch.from_params([params[b]], [[11, 12, -(2**70)][b]])
        got = draw_tokens(logits[i : i + 1], torch.zeros(1, dtype=torch.int64), positions[i : i + 1], alone)
        assert got[0] == together[i]


@given(seed=st.integers(-(2**70), 2**70), first=st.integers(0, 2**40), offsets=st.lists(st.integers(0, 40), min_size=1))
@settings(max_examples=200)
def test_a_lone_request_gets_the_uniforms_of_a_batch(seed, first, offsets):
    batch = SamplingBatch.from_params([SamplingParams(temperature=1.0)], [seed])
    positions = torch.tensor(offsets) + first
    expected = batch.uniforms(torch.zeros_like(positions), positions)
    assert torch.equal(batch.uniforms_of_one(first, offsets), expected)


def test_uniforms_are_uniform_and_uncorrelated():
    batch = SamplingBatch.from_params([SamplingParams()] * 200, range(200))
    u = batch.uniforms(torch.arange(200)[:, None], torch.arange(200)[None]).numpy()
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 5e-3 and abs(u.var() - 1 / 12) < 2e-3
    assert abs(np.corrcoef(u[:, 0], u[:, 1])[0, 1]) < 0.25 and abs(np.corrcoef(u[0], u[1])[0, 1]) < 0.25
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.02


def test_all_greedy_takes_the_argmax():
    logits = torch.randn(9, 77)
    batch = SamplingBatch.from_params([SamplingParams(temperature=0.0)], [0])
    assert batch.is_all_greedy
    got = draw_tokens(logits, torch.zeros(9, dtype=torch.int64), torch.arange(9), batch)
    assert got.tolist() == logits.argmax(-1).tolist()


def test_tiny_temperature_and_impossible_tokens_do_not_break_the_draw():
    logits = torch.full((3, 130), -torch.inf)
    logits[:, 7] = 1e4
    logits[:, 100] = 9e3
    batch = SamplingBatch.from_params([SamplingParams(temperature=1e-6)], [0])
    drawn = draw_tokens(logits, torch.zeros(3, dtype=torch.int64), torch.arange(3), batch)
    assert drawn.tolist() == [7, 7, 7]


def test_missing_counts_are_refused():
    with pytest.raises(ValueError, match="TokenCounts"):
        SamplingBatch.from_params([SamplingParams(presence_penalty=1.0)], [0])


def test_logprobs_are_of_the_unprocessed_distribution():
    logits = torch.randn(3, 20)
    own, ids, values = token_logprobs(logits, torch.tensor([1, 2, 3]), 4)
    expected = logits.log_softmax(-1)
    assert torch.allclose(own, expected[torch.arange(3), torch.tensor([1, 2, 3])])
    assert torch.allclose(values, expected.gather(1, ids)) and ids.shape == (3, 4)


def test_ranks_count_the_tokens_that_are_at_least_as_likely():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, -3.0]]).repeat(5, 1)
    assert token_ranks(logits, torch.arange(5)).tolist() == [4, 2, 3, 2, 5]
