"""Workloads of the drafter benchmark: unlike prompts of a domain, loads of known entropy, random tokens.

Shape legend: T tokens of a prompt, V vocabulary, N candidates, F terms, k chosen, E embedding size.
Qualitative buckets hold prompts of one domain that are as unlike one another as possible: greedy selection and local swaps
that minimise L(S) = sum over i != j in S of x_i . x_j over rows of length 1. Load buckets `low-64`, `mixed-64`, `high-64`, ...
hold prompts of exactly so many tokens in thirds of the target's own entropy. Next to them stand random token ids.
Source: SPEED-Bench, arXiv 2604.09557, Algorithm 1; its tiers go by the kind of task instead of by measurement.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy import sparse

from paceline.bench.common.engine_run import build_engine, encode
from paceline.bench.common.workloads import Question, question_text
from paceline.bench.engine.arms import BenchGroup, EngineArm, random_prompts
from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group
from paceline.errors import ConfigError
from paceline.serving.sampling.request import SamplingParams
from paceline.serving.target_model.model import TargetModel

EMBEDDINGS = ("tfidf", "hidden")
TIERS = ("low", "mixed", "high")
MAX_POOL = 2000
"""Candidates of a domain that the selection looks at: it holds all pairs of them."""
MAX_MEASURED = 384
"""Load prompts of one length whose entropy is measured."""
_LOGITS_AT_ONCE = 1 << 25
_ANSWERED_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The prompts of one bucket, in the order in which cells take them."""

    name: str
    kind: str
    """domain | load | random."""
    prompts: tuple[tuple[int, ...], ...]
    ids: tuple[str, ...]
    """Of `prompts`."""
    spare: tuple[tuple[int, ...], ...] = ()
    """Other prompts of the bucket, for groups that are not counted."""
    facts: dict[str, Any] = field(default_factory=dict)

    def take(self, count: int) -> list[tuple[int, ...]]:
        """The first `count` prompts, over again when there are fewer."""
        return [self.prompts[i % len(self.prompts)] for i in range(count)]

    def take_spare(self, count: int) -> list[tuple[int, ...]]:
        """Prompts for warming up: spare ones first, then counted ones from the end."""
        pool = [*self.spare, *reversed(self.prompts)]
        return [pool[i % len(pool)] for i in range(count)]

    def as_dict(self) -> dict[str, Any]:
        lengths = [len(p) for p in self.prompts]
        return {
            "kind": self.kind, "num_prompts": len(self.prompts), "ids": list(self.ids),
            "prompt_tokens": {"least": min(lengths), "mean": float(np.mean(lengths)), "most": max(lengths)}, **self.facts,
        }  # fmt: skip


def question_tokens(target: TargetModel, question: Question) -> tuple[int, ...]:
    """Token ids of a question as a model is asked (`question_text`)."""
    return tuple(encode(target, question_text(question, target.tokenizer)))


def domain_workload(
    target: TargetModel, name: str, questions: Sequence[Question], *, count: int, max_prompt_tokens: int, seed: int,
    embedding: str = "tfidf", answer_tokens: int = 0,
) -> Workload:  # fmt: skip
    """`count` questions of a domain that are as unlike one another as possible, in seeded random order.

    A question of several turns gives a prompt a turn, the earlier ones with the target's own greedy answers of at most
    answer_tokens tokens; 0 = the first turn alone. Prompts over max_prompt_tokens are left out. Raises: ConfigError when
    none is left.
    """
    rng = random.Random(f"{seed}-{name}")
    pool = list({q.question_id: q for q in questions}.values())
    if len(pool) > MAX_POOL:
        pool = rng.sample(pool, MAX_POOL)
    tokens = [question_tokens(target, q) for q in pool]
    fitting = [i for i, t in enumerate(tokens) if 1 <= len(t) <= max_prompt_tokens]
    if not fitting:
        raise ConfigError(
            f"bucket {name!r} must have prompts of at most {max_prompt_tokens} tokens (the model's context less the "
            f"answer), got none among {len(pool)}; a smaller --max-tokens leaves more room"
        )
    vectors = hidden_means(target, [tokens[i] for i in fitting]) if embedding == "hidden" else tfidf([" ".join(pool[i].turns) for i in fitting])  # fmt: skip
    chosen = select_diverse(vectors, count, seed=seed)
    order = [fitting[i] for i in chosen.indices]
    rng.shuffle(order)
    spare = [i for i in fitting if i not in set(order)]
    rng.shuffle(spare)
    asked = [(pool[i].question_id, tokens[i]) for i in order]
    if answer_tokens:
        asked = _all_turns(target, [pool[i] for i in order], asked, max_prompt_tokens, answer_tokens)
    return Workload(
        name=name, kind="domain", prompts=tuple(ids for _, ids in asked), ids=tuple(name for name, _ in asked),
        spare=tuple(tokens[i] for i in spare[:count]),
        facts={
            "seed": seed, "embedding": embedding, "num_questions": len(order), "num_candidates": len(fitting),
            "num_too_long": len(pool) - len(fitting), "similarity": chosen.similarity,
            "uniform_similarity": chosen.uniform_similarity, "num_swaps": chosen.num_swaps,
            "sources": sorted({pool[i].source for i in order}),
        },
    )  # fmt: skip


def _all_turns(
    target: TargetModel, questions: Sequence[Question], first: list[tuple[str, tuple[int, ...]]], max_prompt_tokens: int,
    answer_tokens: int,
) -> list[tuple[str, tuple[int, ...]]]:  # fmt: skip
    """(name, prompt) of every turn, question after question; a conversation ends before a turn that is too long.

    first: of the first turns, or of the conversations that questions go on with, which have no later ones.
    """
    found = [[one] for one in first]
    talks = [[("user", q.turns[0])] for q in questions]
    going = [i for i, q in enumerate(questions) if len(q.turns) > 1 and not (q.messages or q.is_completion)]
    config = EngineConfig(max_running=_ANSWERED_AT_ONCE, prefix_caching=False, tree=TreeConfig(max_draft_tokens=1))
    arm = EngineArm("", build_engine(target, None, config), Group.PLAIN) if going else None
    turn = 1
    while going:
        assert arm is not None
        params = (SamplingParams(temperature=0.0, max_tokens=answer_tokens),) * len(going)
        prompts = tuple(found[i][-1][1] for i in going)
        group = BenchGroup(tag=f"turn-{turn}", bucket="", prompts=prompts, params=params, batch=_ANSWERED_AT_ONCE)
        left = []
        for i, answer in zip(going, arm.run(group).token_ids, strict=True):
            question = questions[i]
            said = target.tokenizer.decode(answer, skip_special_tokens=True)
            talks[i] += [("assistant", said), ("user", question.turns[turn])]
            ids = question_tokens(target, dataclasses.replace(question, messages=tuple(talks[i])))
            if len(ids) <= max_prompt_tokens:
                found[i].append((f"{question.question_id} turn {turn + 1}", ids))
                if turn + 1 < len(question.turns):
                    left.append(i)
        going, turn = left, turn + 1
    return [one for turns in found for one in turns]


def load_workloads(
    target: TargetModel, questions: dict[str, list[Question]], *, num_tokens: int, count: int, seed: int
) -> list[Workload]:
    """The three tiers of one input length, each with `count` prompts of exactly num_tokens tokens.

    A prompt is a question with others of its domain in front of it, cut off at the front. Tiers are thirds by the mean
    entropy of the target's next-token distribution over the prompt. Raises: ConfigError when the text does not reach.
    """
    rng = random.Random(f"{seed}-{num_tokens}")
    per_domain = -(-MAX_MEASURED // len(questions))
    found: list[tuple[str, str, tuple[int, ...]]] = []
    for domain, pool in questions.items():
        pool = rng.sample(pool, min(len(pool), MAX_POOL))
        for i, question in enumerate(pool[:per_domain]):
            tokens, at = question_tokens(target, question), i
            while len(tokens) < num_tokens and at + 1 < i + len(pool):
                at += 1
                tokens = question_tokens(target, pool[at % len(pool)]) + tokens
            if len(tokens) >= num_tokens:
                found.append((domain, question.question_id, tokens[-num_tokens:]))
    if len(found) < len(TIERS):
        raise ConfigError(f"isl must be at most what a domain's prompts have together, got {num_tokens}")
    measured = measure_entropy(target, [tokens for *_, tokens in found])
    order = np.argsort([entropy for entropy, _ in measured], kind="stable").tolist()
    out = []
    for i, tier in enumerate(TIERS):
        third = order[i * len(order) // 3 : (i + 1) * len(order) // 3]
        rng.shuffle(third)
        own, spare = third[:count], third[count : 2 * count]
        entropies = [measured[j][0] for j in own]
        out.append(
            Workload(
                name=f"{tier}-{num_tokens}", kind="load", prompts=tuple(found[j][2] for j in own),
                ids=tuple(f"{found[j][0]}:{found[j][1]}" for j in own), spare=tuple(found[j][2] for j in spare),
                facts={
                    "seed": seed, "tier": tier, "isl": num_tokens, "num_candidates": len(found),
                    "entropy_nats": {"least": min(entropies), "mean": float(np.mean(entropies)), "most": max(entropies)},
                    "nll_nats": float(np.mean([measured[j][1] for j in own])),
                },
            )
        )  # fmt: skip
    return out


def random_workload(target: TargetModel, name: str, *, num_tokens: int, count: int, seed: int) -> Workload:
    """Prompts of random token ids."""
    prompts = random_prompts(target, count, num_tokens, seed)
    ids = tuple(f"{name}-{i}" for i in range(count))
    return Workload(name=name, kind="random", prompts=tuple(prompts), ids=ids, facts={"seed": seed, "isl": num_tokens})


@torch.inference_mode()
def measure_entropy(target: TargetModel, prompts: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
    """Mean entropy of the target's next-token distribution over each prompt, and mean NLL of its tokens, in nats.

    prompts: of equal length T >= 2.
    """
    out: list[tuple[float, float]] = []
    rows = max(1, _LOGITS_AT_ONCE // (len(prompts[0]) * target.vocab_size))
    for at in range(0, len(prompts), rows):
        ids = torch.tensor([list(p) for p in prompts[at : at + rows]], device=target.device)
        logprobs = target.model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)  # (b, T - 1, V)
        entropy = -(logprobs.exp() * logprobs).sum(-1).mean(1)
        nll = -logprobs.gather(2, ids[:, 1:, None])[..., 0].mean(1)
        out += zip(entropy.tolist(), nll.tolist(), strict=True)
    return out


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What was chosen, and what it is worth."""

    indices: tuple[int, ...]
    """k candidates in the order in which they were chosen; swapped-in ones take the place of what they replace."""
    similarity: float | None
    """Mean similarity of two different chosen ones; None for k = 1."""
    uniform_similarity: float | None
    """What a uniformly drawn set has on average: the mean over all pairs of the pool."""
    num_swaps: int


def tfidf(texts: Sequence[str]) -> sparse.csr_matrix:
    """(N, F) rows of length 1 (0 for texts without words): counts of words times 1 + ln((1 + N) / (1 + texts with it)).

    The weights are those of scikit-learn's TfidfVectorizer with one-letter words kept.
    """
    rows, columns, vocabulary = [], [], dict[str, int]()
    for i, text in enumerate(texts):
        for word in re.findall(r"\w+", text.lower()):
            rows.append(i)
            columns.append(vocabulary.setdefault(word, len(vocabulary)))
    shape = (len(texts), max(len(vocabulary), 1))
    counts = sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=shape)  # equal places add up
    num_with = np.asarray((counts > 0).sum(0)).ravel()
    weights = counts.multiply(1 + np.log((1 + len(texts)) / (1 + num_with))).tocsr()
    length = np.sqrt(np.asarray(weights.multiply(weights).sum(1)).ravel())
    return sparse.diags(1 / np.where(length > 0, length, 1)) @ weights


@torch.inference_mode()
def hidden_means(target: TargetModel, token_ids: Sequence[Sequence[int]]) -> np.ndarray:
    """(N, E) float64, rows of length 1: the target's last hidden states, averaged over the tokens of each prompt."""
    decoder = target.model.get_decoder()
    rows = [
        decoder(input_ids=torch.tensor([list(ids)], device=target.device), use_cache=False)
        .last_hidden_state[0].double().mean(0).cpu().numpy()
        for ids in token_ids
    ]  # fmt: skip
    vectors = np.stack(rows)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def select_diverse(
    vectors: np.ndarray | sparse.csr_matrix, count: int, *, seed: int = 0, max_swaps: int = 1000
) -> Selection:
    """Choose `count` of N rows; all of them when there are no more. Ties go to the lower index.

    Args:
        vectors: (N, F or E), rows of length 1. Needs N x N float64.
    """
    gram = vectors @ vectors.T
    gram = gram.toarray() if sparse.issparse(gram) else np.asarray(gram)
    num = gram.shape[0]
    uniform = float((gram.sum() - np.trace(gram)) / (num * (num - 1))) if num > 1 else None
    count = min(count, num)
    first = int(np.random.default_rng(seed).integers(num))
    chosen, mass = [first], gram[first].copy()  # mass: similarity of each candidate to the chosen ones, itself included
    is_free = np.ones(num, dtype=bool)
    is_free[first] = False
    while len(chosen) < count:
        new = int(np.where(is_free, mass, np.inf).argmin())
        chosen.append(new)
        is_free[new] = False
        mass += gram[new]
    num_swaps = 0
    while num_swaps < max_swaps and is_free.any():
        free, held = np.flatnonzero(is_free), np.array(chosen)
        gains = (mass[free][None] - gram[np.ix_(held, free)]) - (mass[held] - gram[held, held])[:, None]  # (k, N - k)
        at, place = np.unravel_index(int(gains.argmin()), gains.shape)
        if not gains[at, place] < -1e-12:
            break
        out, new = chosen[at], int(free[place])
        chosen[at], is_free[out], is_free[new] = new, True, False
        mass += gram[new] - gram[out]
        num_swaps += 1
    own = gram[np.ix_(chosen, chosen)]
    similarity = float((own.sum() - np.trace(own)) / (count * (count - 1))) if count > 1 else None
    return Selection(indices=tuple(chosen), similarity=similarity, uniform_similarity=uniform, num_swaps=num_swaps)
