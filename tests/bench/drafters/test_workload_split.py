"""Claims of bench/drafters/workload_split.py."""

import numpy as np
import pytest
import torch

from paceline.bench.common.workloads import Question
from paceline.bench.drafters.run import BenchOptions, build_workloads
from paceline.bench.drafters.workload_split import (
    domain_workload,
    load_workloads,
    measure_entropy,
    question_tokens,
    random_workload,
)
from paceline.errors import ConfigError
from tests.helpers.fakes import EOS_ID, plain_logits, tiny_target

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab=64, layers=2, width=16, context=128)


def questions(count, words=4, category="d", seed=0):
    rng = np.random.default_rng(seed)
    texts = [" ".join("".join(rng.choice(list(LETTERS), 4)) for _ in range(words)) for _ in range(count)]
    return [
        Question(question_id=f"{category}{i}", category=category, turns=(t,), source="s", is_completion=True)
        for i, t in enumerate(texts)
    ]


def test_entropy_is_that_of_the_targets_own_distribution(target):
    prompts = [[5, 9, 7, 3, 20], [8, 8, 8, 8, 8]]
    for (entropy, nll), prompt in zip(measure_entropy(target, prompts), prompts, strict=True):
        probs = plain_logits(target, prompt)[:-1].double().softmax(-1)
        assert entropy == pytest.approx(float(-(probs * probs.log()).sum(-1).mean()), rel=1e-4)
        own = probs[torch.arange(4), torch.tensor(prompt[1:])]
        assert nll == pytest.approx(float(-own.log().mean()), rel=1e-4)


def test_tiers_are_thirds_of_the_measured_entropy_at_one_length(target):
    pools = {"d": questions(12), "e": questions(12, category="e", seed=1)}
    low, mixed, high = load_workloads(target, pools, num_tokens=24, count=6, seed=0)
    assert [w.name for w in (low, mixed, high)] == ["low-24", "mixed-24", "high-24"]
    assert {len(p) for w in (low, mixed, high) for p in (*w.prompts, *w.spare)} == {24}
    measured = [[e for e, _ in measure_entropy(target, w.prompts)] for w in (low, mixed, high)]
    assert max(measured[0]) <= min(measured[1]) and max(measured[1]) <= min(measured[2])
    assert low.facts["entropy_nats"]["mean"] == pytest.approx(np.mean(measured[0]))
    again = load_workloads(target, pools, num_tokens=24, count=6, seed=0)
    assert [w.ids for w in again] == [w.ids for w in (low, mixed, high)]


def test_a_length_that_no_domain_reaches_is_refused(target):
    with pytest.raises(ConfigError, match="isl must be at most"):
        load_workloads(target, {"d": questions(2)}, num_tokens=100, count=2, seed=0)


def test_a_domain_takes_unlike_prompts_that_fit_and_tells_which(target):
    pool = questions(20) + questions(3, words=30, category="long")
    got = domain_workload(target, "d", pool, count=6, max_prompt_tokens=60, seed=4)
    facts = got.as_dict()
    assert facts["num_too_long"] == 3 and facts["num_candidates"] == 20 and facts["seed"] == 4
    assert len(set(facts["ids"])) == 6 and facts["similarity"] <= facts["uniform_similarity"]
    assert got.prompts == tuple(question_tokens(target, q) for i in facts["ids"] for q in pool if q.question_id == i)
    assert not set(got.prompts) & set(got.spare), "warm-up prompts are none of those that count"
    assert got == domain_workload(target, "d", pool, count=6, max_prompt_tokens=60, seed=4)
    with pytest.raises(ConfigError, match="at most 5 tokens"):
        domain_workload(target, "d", pool, count=6, max_prompt_tokens=5, seed=4)


def test_prompts_repeat_only_when_there_are_too_few(target):
    got = domain_workload(target, "d", questions(3), count=8, max_prompt_tokens=60, seed=0)
    assert got.take(7) == [*got.prompts, *got.prompts, got.prompts[0]]
    assert got.take_spare(2) == list(reversed(got.prompts))[:2], "nothing is spare, so the last ones warm up"


def test_chat_questions_go_through_the_template(target):
    question = Question(question_id="1", category="c", turns=("hi",), source="s")
    assert target.tokenizer.decode(question_tokens(target, question)) == "user: hi\nassistant: "
    talk = Question(question_id="1", category="c", turns=("a", "c"), source="s", messages=(("user", "a"), ("assistant", "b"), ("user", "c")))  # fmt: skip
    assert target.tokenizer.decode(question_tokens(target, talk)) == "user: a\nassistant: b\nuser: c\nassistant: "


def test_every_turn_is_asked_behind_the_targets_own_answers(target):
    turns = [("ab", "cd", "ef"), ("gh",), ("ij", "x" * 400, "kl")]
    pool = [Question(question_id=f"q{i}", category="d", turns=t, source="s") for i, t in enumerate(turns)]
    got = domain_workload(target, "d", pool, count=3, max_prompt_tokens=90, seed=0, answer_tokens=6)
    prompts = dict(zip(got.ids, got.prompts, strict=True))
    assert sorted(prompts) == ["q0", "q0 turn 2", "q0 turn 3", "q1", "q2"], "a turn that is too long ends its talk"
    assert got.facts["num_questions"] == 3
    talk = [("user", "ab")]
    for name, turn in (("q0", "cd"), ("q0 turn 2", "ef")):
        answer, ids = [], list(prompts[name])
        for _ in range(6):
            answer.append(int(plain_logits(target, ids)[-1].argmax()))
            ids.append(answer[-1])
            if answer[-1] == EOS_ID:
                break
        talk += [("assistant", target.tokenizer.decode(answer, skip_special_tokens=True)), ("user", turn)]
        following = Question(question_id="", category="d", turns=("",), source="s", messages=tuple(talk))
        at = f"q0 turn {2 if turn == 'cd' else 3}"
        assert prompts[at] == question_tokens(target, following)
    alone = domain_workload(target, "d", pool, count=3, max_prompt_tokens=90, seed=0)
    assert sorted(alone.ids) == ["q0", "q1", "q2"]


def test_random_prompts_hold_no_end_token(target):
    got = random_workload(target, "random-9", num_tokens=9, count=200, seed=0)
    assert {len(p) for p in got.prompts} == {9} and EOS_ID not in {t for p in got.prompts for t in p}
    assert got.kind == "random" and len({t for p in got.prompts for t in p}) == 63


def test_a_bucket_that_is_named_twice_counts_once(target):
    options = BenchOptions(buckets=("tools", "random", "tools"), num_prompts=2, batches=(1,), max_tokens=8)
    workloads, _ = build_workloads(options, target)
    assert [w.name for w in workloads] == ["tools", "random"]
