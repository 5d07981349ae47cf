"""min_tokens and allowed_token_ids act on the target's logits: the same tokens with and without a drafter."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import RequestError
from paceline.serving.engine.graphed import draw_kind
from paceline.serving.sampling.draw import SamplingBatch, TokenLimits, draw_tokens
from paceline.serving.sampling.request import GenerationRequest, GrammarSpec, SamplingParams
from tests.helpers.constrained import (
    PROMPT,
    VOCAB,
    Answers,
    answer,
    check_drafting_and_batching,
    make_drafter,
    make_engine,
    run,
    submit,
)
from tests.helpers.fakes import EOS_ID

SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 20}
ENDS = {"logit_bias": ((EOS_ID, 100.0),)}
"""Without a limit the first token is the end of the text."""
SOME = tuple(range(10, 20))
KINDS: dict[str, dict] = {
    "late": {**SAMPLED, "min_tokens": 9, "logit_bias": ((EOS_ID, 6.0),)},
    "late greedy": {**SAMPLED, **ENDS, "temperature": 0.0, "min_tokens": 9},
    "some": {**SAMPLED, "allowed_token_ids": SOME, "top_p": 0.9, "frequency_penalty": 0.5},
    "some greedy": {"temperature": 0.0, "max_tokens": 20, "allowed_token_ids": SOME},
    "both": {**SAMPLED, "allowed_token_ids": (EOS_ID, *SOME), "min_tokens": 6, "logit_bias": ((EOS_ID, 100.0),)},
    "free": {**SAMPLED, "ignore_eos": True},
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_ends_no_sooner_than_min_tokens_says_and_then_as_the_model_wants(temperature) -> None:
    params = {**SAMPLED, "temperature": temperature, **ENDS}
    assert answer(**params) == [EOS_ID]
    for num in (1, 2, 7):
        got = answer(**params, min_tokens=num)
        assert len(got) == num + 1 and got[-1] == EOS_ID and EOS_ID not in got[:-1]
    assert len(answer(**params, min_tokens=20)) == 20


def test_min_tokens_holds_back_the_requests_own_stop_tokens_too() -> None:
    params = {**SAMPLED, "ignore_eos": True, "logit_bias": ((7, 100.0),), "stop_token_ids": (7,)}
    assert answer(**params) == [7]
    got = answer(**params, min_tokens=5)
    assert len(got) == 6 and got[-1] == 7 and 7 not in got[:-1]


def test_only_allowed_tokens_are_drawn() -> None:
    assert answer(**SAMPLED, allowed_token_ids=(7,)) == [7] * 20
    assert set(answer(**SAMPLED, allowed_token_ids=SOME)) <= set(SOME)
    assert answer(**SAMPLED, allowed_token_ids=tuple(range(VOCAB))) == answer(**SAMPLED)


@pytest.mark.parametrize("drafter", ["random", "oracle", "lookup"])
def test_drafting_and_batching_change_nothing(drafter) -> None:
    want = {name: answer(**params) for name, params in KINDS.items()}
    assert len(want["both"]) == 7 and len(want["late greedy"]) == 10
    check_drafting_and_batching(drafter, KINDS, want, least=3)


def test_preempted_and_resumed_answers_keep_to_the_positions_of_their_limits() -> None:
    want = {name: answer(**params) for name, params in KINDS.items()}
    texts = {name: [*PROMPT, *tokens] for name, tokens in want.items()}
    engine, answers = make_engine(make_drafter("oracle", texts), max_running=6, num_pages=12), Answers()
    for name, params in KINDS.items():
        submit(engine, answers, name, **params)
    run(engine)
    assert engine.scheduler.num_preemptions > 0 and answers.tokens == want
    for cut in (1, 5):
        engine, answers = make_engine(make_drafter("random", texts)), Answers()
        for name, params in KINDS.items():
            own = GenerationRequest(
                request_id=name, prompt_token_ids=PROMPT, params=SamplingParams(**params),
                resumed_token_ids=tuple(want[name][:cut]),
            )  # fmt: skip
            engine.submit(own, answers)
        run(engine)
        assert {name: want[name][:cut] + tokens for name, tokens in answers.tokens.items()} == want


def test_a_limit_acts_at_its_positions_alone_and_leaves_other_rows_and_the_logits() -> None:
    logits = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=9)
    limits = TokenLimits(params, prompt_len=5, stop_token_ids={int(logits[0].argmax())}, vocab_size=12)
    batch = SamplingBatch.from_params([params, SamplingParams(temperature=0.0)], [0, 0], limits=[limits, None])
    before = logits.clone()
    rows, owner = logits[[0, 0, 0, 0]], torch.tensor([0, 0, 0, 1])
    first, second, third, other = draw_tokens(rows, owner, torch.tensor([5, 6, 7, 5]), batch).tolist()
    assert first == second != third == other == int(logits[0].argmax())
    assert torch.equal(logits, before) and not batch.is_all_greedy and draw_kind(batch) is None


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": (VOCAB,)},
        {"allowed_token_ids": (-1,)},
        {"allowed_token_ids": (EOS_ID,), "min_tokens": 1},
        {"min_tokens": -1},
        {"min_tokens": 31},
        {"min_tokens": 1, "grammar": GrammarSpec(kind="json_object")},
        {"allowed_token_ids": (5,), "grammar": GrammarSpec(kind="json_object")},
    ],
)
def test_limits_that_cannot_be_honoured_are_refused(params) -> None:
    with pytest.raises(RequestError, match="must"):
        submit(make_engine(), Answers(), "r", **params)


def test_a_batch_asks_for_the_limits_that_its_requests_have() -> None:
    with pytest.raises(ValueError, match="limits"):
        SamplingBatch.from_params([SamplingParams(min_tokens=1)], [0])
