"""Claims of bench/common/lossless.py, on answers that the engine drew."""

import pytest
import torch

from paceline.bench.common.lossless import NEAR_TIE_SHARE, draw_gaps
from paceline.bench.engine.arms import BenchGroup, EngineArm, new_engine
from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group
from paceline.errors import ConfigError
from paceline.serving.sampling.request import SamplingParams
from tests.helpers.fakes import plain_logits, tiny_target
from tests.helpers.scripted_drafters import RandomDrafter

PROMPT = (5, 9, 7)


@pytest.fixture(scope="module")
def drawn():
    target = tiny_target(vocab=64, layers=2, width=16, context=128)
    tree = TreeConfig(max_draft_tokens=4, policy="fixed")
    config = EngineConfig(max_running=2, page_tokens=8, prefix_caching=False, tree=tree)
    arm = EngineArm("r", new_engine(target, RandomDrafter(64), version="r", num_tokens=512, config=config), Group.ADAPTIVE)  # fmt: skip
    params = tuple(SamplingParams(temperature=0.8, seed=s, max_tokens=60, ignore_eos=True) for s in (3, 4))
    run = arm.run(BenchGroup(tag="g", bucket="b", prompts=(PROMPT, PROMPT), params=params, batch=2))
    assert run.num_draft_tokens > 0
    return target, params, run.token_ids


def gaps(drawn, i, **changed):
    target, params, answers = drawn
    logits = plain_logits(target, [*PROMPT, *answers[i]])[len(PROMPT) - 1 : -1]
    values = {"temperature": 0.8, "seed": params[i].seed, **changed}
    return draw_gaps(logits, len(PROMPT), answers[i], SamplingParams(**values))


def test_draws_of_the_speculative_engine_are_the_targets_own(drawn):
    for i in range(2):
        assert gaps(drawn, i).max() < 1e-5, "fp32 on both sides: what is left is the order of sums"


@pytest.mark.parametrize("changed", [{"seed": 99}, {"temperature": 1.6}])
def test_draws_of_another_distribution_are_found(drawn, changed):
    assert int((gaps(drawn, 0, **changed) > NEAR_TIE_SHARE).sum()) > 5


def test_a_single_altered_token_is_found(drawn):
    target, params, answers = drawn
    answer = list(answers[0][:20])
    logits = plain_logits(target, [*PROMPT, *answer])[len(PROMPT) - 1 : -1]
    answer[-1] = int(logits[-1].argmin())
    shares = draw_gaps(logits, len(PROMPT), answer, params[0])
    assert shares[-1] > NEAR_TIE_SHARE and shares[:-1].max() < 1e-5


def test_filters_are_refused_since_they_change_the_distribution():
    with pytest.raises(ConfigError, match="temperature above 0, a seed and nothing else"):
        draw_gaps(torch.zeros(1, 8), 0, [1], SamplingParams(temperature=0.8, seed=1, top_p=0.9))
