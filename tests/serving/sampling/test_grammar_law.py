"""Inside a grammar tokens are drawn by the target's law, renormalised over what the grammar allows."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch

from paceline.serving.sampling.draw import SamplingBatch
from paceline.serving.sampling.grammar import GrammarFactory
from paceline.serving.sampling.request import GrammarSpec, SamplingParams
from paceline.serving.trees.tree import TreeBatch
from paceline.serving.trees.verify import draw_all, verify
from tests.helpers.constrained import REGEX, VOCAB, factory
from tests.helpers.fakes import EOS_ID, tiny_tokenizer


def test_the_law_is_the_targets_renormalised_over_what_the_grammar_allows() -> None:
    """Integer weights w: with the midpoints of a grid of sum(w) uniforms, w of them draw each token. Exact."""
    vocab, history = 9, [3, 4]  # ids 3.. are a, b, c, d, e, f
    compiler = GrammarFactory(tiny_tokenizer(vocab), vocab, [EOS_ID])
    spec = GrammarSpec(kind="regex", text="(a|b|d)(a|c)?|cf?e")
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 5, size=(vocab, vocab))  # of the next token, by the newest token
    host_tree = make_tree([(4, 0), (3, 1), (5, 0), (8, 3), (6, 0), (EOS_ID, 1)], anchor=history[-1])
    params = SamplingParams(temperature=1.0, grammar=spec)
    law: Counter = Counter()
    want: Counter = Counter()

    def allowed(path: list[int]) -> list[int]:
        state = compiler.start(spec)
        for token in path:
            state.advance(token)
        mask = state.allowed()
        return [] if mask is None else mask.nonzero()[0].tolist()

    def decode(points: list[float]) -> list[int]:
        """The answer's first tokens when the draw at output position i takes the uniform points[i]."""
        table = torch.tensor([*points, *[0.5] * 8], dtype=torch.float64)

        class Drawn(SamplingBatch):
            def uniforms(self, _owner: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
                return table[at - len(history)]

        state, out = compiler.start(spec), []
        made = SamplingBatch.from_params([params], [0], grammars=[state])
        batch = Drawn(**{f.name: getattr(made, f.name) for f in dataclasses.fields(made)})
        while len(out) < len(points) and EOS_ID not in out:
            anchor = [*history, *out][-1]
            tree = TreeBatch.roots(torch.tensor([anchor])) if out else host_tree
            logits = torch.from_numpy(np.log(weights[tree.token_ids.numpy()])).float()
            plan = verify(tree, logits, batch, torch.tensor([len(history) + len(out) - 1]))
            path, bonus = plan.on_host()[0]
            new = [*(int(tree.token_ids[r]) for r in path[1:]), bonus]
            if EOS_ID in new:
                new = new[: new.index(EOS_ID) + 1]
            state.keep(len(new))
            out += new
        return out[: len(points)]

    for first in allowed([]):
        for second in allowed([first]):
            want[first, second] = int(weights[history[-1], first] * weights[first, second])
    total = int(weights[history[-1], allowed([])].sum())
    for k in range(total):
        first = decode([(k + 0.5) / total])[0]
        inner = int(weights[first, allowed([first])].sum())
        for j in range(inner):
            pair = decode([(k + 0.5) / total, (j + 0.5) / inner])
            law[tuple(pair)] += 1
    assert law == want and len(law) > 8


def make_tree(nodes: list[tuple[int, int]], anchor: int) -> TreeBatch:
    """(token, parent row) in order, as one request's tree."""
    tokens, parents = [anchor, *(t for t, _ in nodes)], [-1, *(p for _, p in nodes)]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    ancestors = np.eye(len(tokens), dtype=bool)
    for row in range(1, len(tokens)):
        ancestors[row] |= ancestors[parents[row]]
    return TreeBatch(
        token_ids=torch.tensor(tokens), parents=torch.tensor(parents), depths=torch.tensor(depths),
        scores=torch.zeros(len(tokens)), cu_nodes=torch.tensor([0, len(tokens)]), ancestors=torch.from_numpy(ancestors),
    )  # fmt: skip


def test_a_draw_at_every_row_is_refused() -> None:
    state = factory().start(REGEX)
    batch = SamplingBatch.from_params([SamplingParams(grammar=REGEX)], [0], grammars=[state])
    tree = make_tree([(3, 0)], anchor=3)
    with pytest.raises(ValueError, match="level by level"):
        draw_all(tree, torch.zeros(2, VOCAB), batch, torch.tensor([1]))
    with pytest.raises(ValueError, match="GrammarState"):
        SamplingBatch.from_params([SamplingParams(grammar=REGEX)], [0])
