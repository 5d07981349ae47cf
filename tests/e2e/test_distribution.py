"""Sampled output follows the target's own distribution: chi-square of many seeded requests against exact probabilities."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.config import EngineConfig, TreeConfig
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.loading.families import load_drafter
from paceline.serving.loading.target import read_target
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from paceline.serving.specblock.drafter import SpecBlockDrafter
from paceline.serving.target_model.model import TargetModel
from tests.helpers.drafters import specblock_for
from tests.helpers.fakes import plain_logits, tiny_target

MIN_EXPECTED = 5.0
SMALLEST_P = 1e-4
MODELS = Path(__file__).parents[2] / "paceline" / "models"
ENGINE = EngineConfig(
    max_running=16, max_waiting=100_000, kv_bytes=16 * 2**20,
    # drafts in every round: what is tested is not when drafting pays
    tree=TreeConfig(max_draft_tokens=8, policy="fixed"),
)  # fmt: skip


def p_value(counts: Counter, probabilities: dict) -> float:
    """Chi-square goodness of fit; cells expected less than MIN_EXPECTED times are one cell, "the rest"."""
    n = sum(counts.values())
    assert set(counts) <= set(probabilities), "a token that the target never draws"
    large = sorted((c for c, p in probabilities.items() if n * p >= MIN_EXPECTED), key=lambda c: -probabilities[c])
    observed = [counts[c] for c in large]
    expected = [n * probabilities[c] for c in large]
    rest = n - sum(observed), n - sum(expected)
    if rest[1] >= MIN_EXPECTED:
        observed.append(rest[0])
        expected.append(rest[1])
    else:
        observed[-1] += rest[0]
        expected[-1] += rest[1]
    assert len(observed) >= 3, "the law is too narrow to test"
    return float(stats.chisquare(observed, expected).pvalue)


def law(target: TargetModel, token_ids: list[int], temperature: float) -> list[float]:
    """Probability of every next token, from one plain forward of the transformers model."""
    return torch.softmax(plain_logits(target, token_ids)[-1].double() / temperature, 0).tolist()


def draw(engine: Engine, prompt: list[int], num_samples: int, num_tokens: int, temperature: float) -> list[tuple]:
    """`num_tokens` sampled tokens behind the prompt, once for each seed 0 .. num_samples - 1."""
    texts: dict[str, list[int]] = {str(seed): [] for seed in range(num_samples)}
    accepted = 0

    def on_event(event) -> None:
        nonlocal accepted
        texts[event.request_id] += event.token_ids
        accepted += event.num_accepted_tokens

    for seed, name in enumerate(texts):
        # one more than looked at: the last token of a request is never drafted
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=num_tokens + 1, ignore_eos=True)
        engine.submit(GenerationRequest(request_id=name, prompt_token_ids=tuple(prompt), params=params), on_event)
    while engine.step():
        pass
    assert accepted > 0, "no drafted token was accepted: only bonus tokens would be tested"
    assert all(len(t) == num_tokens + 1 for t in texts.values())
    return [tuple(t[:num_tokens]) for t in texts.values()]


def tiny_specblock(target: TargetModel) -> SpecBlockDrafter:
    return SpecBlockDrafter(specblock_for(target, num_slots=3), target.embed_weight)


@pytest.fixture(scope="module")
def samples() -> tuple[TargetModel, list[int], list[tuple]]:
    target, prompt = tiny_target(vocab=64, seed=2), [5, 9, 33, 12]
    engine = Engine(target, DrafterSlots(tiny_specblock(target), "v0"), ENGINE)
    return target, prompt, draw(engine, prompt, 5000, 3, 1.0)


@pytest.mark.slow
def test_pairs_of_tokens_follow_the_targets_joint_law(samples) -> None:
    target, prompt, texts = samples
    first = law(target, prompt, 1.0)
    joint = {}
    for a, p in enumerate(first):
        joint.update({(a, b): p * q for b, q in enumerate(law(target, [*prompt, a], 1.0))})
    assert abs(sum(joint.values()) - 1) < 1e-9
    assert p_value(Counter(t[0] for t in texts), dict(enumerate(first))) > SMALLEST_P
    assert p_value(Counter(t[:2] for t in texts), joint) > SMALLEST_P
    second = {b: sum(joint[a, b] for a in range(64)) for b in range(64)}
    assert p_value(Counter(t[1] for t in texts), second) > SMALLEST_P


@pytest.mark.slow
def test_the_third_token_follows_the_law_behind_frequent_pairs(samples) -> None:
    target, prompt, texts = samples
    frequent = Counter(t[:2] for t in texts).most_common(3)
    assert frequent[0][1] >= 100
    for pair, _ in frequent:
        counts = Counter(t[2] for t in texts if t[:2] == pair)
        assert p_value(counts, dict(enumerate(law(target, [*prompt, *pair], 1.0)))) > SMALLEST_P


def test_the_test_itself_tells_a_wrong_law() -> None:
    """Drawn at temperature 0.9 and called 1.0: refused. It would see an acceptance rule that favours drafted tokens."""
    target, prompt = tiny_target(vocab=64), [5, 9, 33, 12]
    rng = np.random.default_rng(0)
    right, wrong = law(target, prompt, 1.0), law(target, prompt, 0.9)
    for drawn_from, is_refused in ((right, False), (wrong, True)):
        counts = Counter(rng.choice(64, size=6000, p=np.array(drawn_from) / sum(drawn_from)).tolist())
        assert (p_value(counts, dict(enumerate(right))) < SMALLEST_P) == is_refused


@pytest.mark.slow
@pytest.mark.skipif(
    not all((MODELS / name / "config.json").is_file() for name in ("target", "specblock")), reason="no bundled models"
)
def test_the_bundled_target_keeps_its_law_with_its_drafter() -> None:
    """First token (prefill) and second token (drafted) at temperature 0.8, fp32."""
    temperature, num_samples = 0.8, 1500
    target = read_target(MODELS / "target", dtype="float32")
    drafter = load_drafter(MODELS / "specblock", target)
    engine = Engine(target, DrafterSlots(drafter, "v0"), ENGINE)
    prompt = target.tokenizer.encode("The sum of 12 and", add_special_tokens=False)
    texts = draw(engine, prompt, num_samples, 2, temperature)
    first = law(target, prompt, temperature)
    assert p_value(Counter(t[0] for t in texts), dict(enumerate(first))) > SMALLEST_P
    joint = {}
    for a in set(itertools.chain((t[0] for t in texts), np.argsort(first)[-8:].tolist())):
        joint.update({(a, b): first[a] * q for b, q in enumerate(law(target, [*prompt, a], temperature))})
    assert p_value(Counter(t[:2] for t in texts), joint) > SMALLEST_P
