"""The fp32 check of greedy answers."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from paceline.bench.common.lossless import LosslessChecker


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=48, hidden_size=32, num_hidden_layers=3, intermediate_size=64, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("target")
    Qwen3ForCausalLM(config).eval().save_pretrained(path)
    return path


def _greedy(path, prompt, count):
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_the_targets_own_greedy_answer_has_no_mismatch(checkpoint):
    prompt = [5, 9, 7]
    answer = _greedy(checkpoint, prompt, 24)
    report = LosslessChecker(checkpoint).check([(prompt, answer)])
    assert (report.checked, report.near_ties, report.mismatches) == (24, 0, 0)


def test_a_single_altered_token_is_found(checkpoint):
    prompt = [5, 9, 7]
    answer = _greedy(checkpoint, prompt, 24)
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        worst = int(model(torch.tensor([prompt + answer[:11]]), use_cache=False).logits[0, -1].argmin())
    report = LosslessChecker(checkpoint).check([(prompt, [*answer[:11], worst])])
    assert report.mismatches == 1 and report.checked == 12


def test_an_empty_answer_counts_nothing(checkpoint):
    assert LosslessChecker(checkpoint).check([([5], [])]).checked == 0


def test_a_token_is_held_against_the_rounding_that_is_measured_where_it_is_farther_off_than_expected(
    checkpoint, monkeypatch
):
    prompt = [5, 9, 7]
    answer = _greedy(checkpoint, prompt, 24)
    checker = LosslessChecker(checkpoint)
    second = int(checker.logits(prompt, answer)[11].topk(2).indices[1])
    changed = [*answer[:11], second]
    (gap,) = (checker.gaps(prompt, changed)[0] / checker.gaps(prompt, changed)[1])[11:].tolist()
    error = float(checker.rounding(prompt, changed)[11])
    assert 0 < error < 0.03 and gap > 0
    for bound, off_by in (
        (2.0, 0),
        (0.5, 1),
    ):  # as if the second best were so near, and so far, in multiples of the rounding
        monkeypatch.setattr(checker, "rounding", lambda p, o, bound=bound: torch.full((len(o),), gap / 2 * bound))
        monkeypatch.setattr("paceline.bench.common.lossless.NEAR_TIE_SHARE", gap / 4)
        report = checker.check([(prompt, changed)])
        assert (report.mismatches, report.near_ties) == (off_by, 1 - off_by)
