"""What runs in each bucket of the drafter benchmark: unlike prompts of a domain, loads of known entropy, random tokens?

Shape legend: T tokens of a prompt, V vocabulary.
Qualitative buckets hold unlike prompts of one domain (diversity.py). Load buckets `low-64`, `mixed-64`, `high-64`, ...
hold prompts of exactly so many tokens in thirds of the target's own entropy. Next to them stand random token ids.
Method: SPEED-Bench, arXiv 2604.09557, whose tiers go by the kind of task instead of by measurement.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from paceline.bench.common.engine_run import encode
from paceline.bench.common.workload_sources import Question
from paceline.bench.drafters.diversity import hidden_means, select_diverse, tfidf
from paceline.bench.engine.groups import random_prompts
from paceline.errors import ConfigError
from paceline.serving.target_model.model import TargetModel

EMBEDDINGS = ("tfidf", "hidden")
TIERS = ("low", "mixed", "high")
MAX_POOL = 2000
"""Candidates of a domain that the selection looks at: it holds all pairs of them."""
MAX_MEASURED = 384
"""Load prompts of one length whose entropy is measured."""
_LOGITS_AT_ONCE = 1 << 25


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
    """Token ids of a question: through the tokenizer's chat template unless it is a text to complete."""
    if question.is_completion:
        return tuple(encode(target, question.turns[0]))
    messages = question.messages or (("user", question.turns[0]),)
    if target.tokenizer.chat_template:
        chat = [{"role": role, "content": text} for role, text in messages]
        text = target.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    else:
        text = "".join(f"{role}: {text}\n" for role, text in messages) + "assistant:"
    return tuple(encode(target, str(text)))


def domain_workload(
    target: TargetModel, name: str, questions: Sequence[Question], *, count: int, max_prompt_tokens: int, seed: int,
    embedding: str = "tfidf",
) -> Workload:  # fmt: skip
    """`count` prompts of a domain that are as unlike one another as possible, in seeded random order.

    Prompts over max_prompt_tokens are left out. Raises: ConfigError when none is left.
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
    return Workload(
        name=name, kind="domain", prompts=tuple(tokens[i] for i in order), ids=tuple(pool[i].question_id for i in order),
        spare=tuple(tokens[i] for i in spare[:count]),
        facts={
            "seed": seed, "embedding": embedding, "num_candidates": len(fitting),
            "num_too_long": len(pool) - len(fitting), "similarity": chosen.similarity,
            "uniform_similarity": chosen.uniform_similarity, "num_swaps": chosen.num_swaps,
            "sources": sorted({pool[i].source for i in order}),
        },
    )  # fmt: skip


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
