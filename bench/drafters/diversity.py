"""Which prompts of a pool are as unlike one another as possible?

Shape legend: N candidates, F terms, k chosen, E embedding size.
Greedy selection and local swaps that minimise L(S) = sum over i != j in S of x_i . x_j over rows of length 1.
Source: SPEED-Bench, arXiv 2604.09557, Algorithm 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse

from paceline.serving.target_model.model import TargetModel


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
