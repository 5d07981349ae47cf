"""The replay walk equals real rounds, one by one, and refuses non-finite scores."""

import dataclasses

import numpy as np
import pytest
import torch

from paceline.adapt.gate.gate import RequestScore, pooled_acceptance_length
from paceline.adapt.gate.shadow import ShadowStoppedError, replay_rounds, shadow_scores, unseen_tokens
from paceline.errors import DrafterMismatchError
from paceline.serving.drafters.interface import DrafterCaps, Proposal
from paceline.serving.sampling.request import RequestTrace
from paceline.serving.trees.tree import TreeBatch
from tests.helpers.replay import whole_tree

VOCAB, SLOTS, WIDTH = 7, 3, 2


def mix(rows):
    """A number that depends on every (feature, token) row and its order."""
    value = 17
    for feature, token in rows:
        value = (value * 31 + int(feature) * 7 + token) % 10_007
    return value


def guesses(value):
    """(SLOTS, WIDTH) distinct tokens drafted behind a context of that number."""
    return [[(value // (s + 1) + s) % VOCAB, (value // (s + 1) + s + 3) % VOCAB] for s in range(SLOTS)]


class ContextDrafter:
    """Drafts from a hash of all rows of the request, read back from its own pool like a KV cache."""

    def __init__(self, poison=False):
        self.caps = DrafterCaps(
            name="context",
            num_slots=SLOTS,
            num_candidates=WIDTH,
            max_depth=SLOTS,
            is_reentrant=False,
            needs_features=True,
        )
        self.poison, self.pool, self.batch_sizes = poison, None, []

    def alloc(self, num_pool_rows):
        self.pool = [None] * num_pool_rows

    def ingest(self, inputs):
        for slot, f, t in zip(
            inputs.new_slots.tolist(), inputs.new_features[:, 0].tolist(), inputs.new_token_ids.tolist(), strict=True
        ):
            self.pool[slot] = (f, t)

    def propose(self, inputs):
        self.ingest(inputs)
        self.batch_sizes.append(len(inputs.request_ids))
        tokens = []
        for b, n in enumerate(inputs.context_lens.tolist()):
            rows = [self.pool[s] for s in inputs.slot_table[b, :n].tolist()]
            assert rows[-1][1] == int(inputs.anchor_token_ids[b]) == inputs.histories[b][-1]
            assert [t for _, t in rows] == inputs.histories[b][1:]
            tokens.append(guesses(mix(rows)))
        ids = torch.tensor(tokens)
        logprobs = torch.full(ids.shape, float("nan") if self.poison else -0.5)
        return Proposal(token_ids=ids, logprobs=logprobs, widths=None)

    def release(self, request_id):
        pass


def build_tree(drafter, inputs):
    """Greedy chain with one alternative per slot: nodes root, then (chain, alternative) per slot."""
    p = drafter.propose(inputs)
    num = len(inputs.request_ids)
    n = 1 + SLOTS * WIDTH
    parents = torch.tensor([-1] + [0 if s == 0 else 1 + (s - 1) * WIDTH for s in range(SLOTS) for _ in range(WIDTH)])
    depths = torch.tensor([0] + [s + 1 for s in range(SLOTS) for _ in range(WIDTH)])
    ancestors = torch.eye(n, dtype=torch.bool)
    for i in range(1, n):
        ancestors[i] |= ancestors[parents[i]]
    tokens = torch.cat([inputs.anchor_token_ids[:, None], p.token_ids.flatten(1)], dim=1)
    scores = torch.cat([torch.zeros(num, 1), p.logprobs.flatten(1)], dim=1)
    return TreeBatch(
        token_ids=tokens.flatten(),
        parents=parents.repeat(num),
        depths=depths.repeat(num),
        scores=scores.flatten(),
        cu_nodes=torch.arange(num + 1) * n,
        ancestors=ancestors.repeat(num, 1),
    )


def make_trace(i, prompt_len, num_outputs):
    g = torch.Generator().manual_seed(i)
    total = prompt_len + num_outputs
    return RequestTrace(
        request_id=f"r{i}",
        bucket="b",
        temperature=0.8 * (i % 2),
        prompt_len=prompt_len,
        token_ids=torch.randint(0, VOCAB, (total,), generator=g).tolist(),
        features=torch.randint(0, 50, (total - 1, 1), generator=g).float(),
        topk_ids=torch.zeros(num_outputs, 1, dtype=torch.int32),
        topk_logprobs=torch.zeros(num_outputs, 1),
        target_version="t",
    )


def reference_rounds(trace):
    """One request, one round at a time, by hand."""
    tokens, features = trace.token_ids, trace.features[:, 0].tolist()
    n, out = trace.prompt_len, []
    while n < len(tokens) - 1:
        g = guesses(mix([(features[j], tokens[j + 1]) for j in range(n)]))
        accepted = 0
        for s in range(SLOTS):
            if n + 1 + s >= len(tokens) or tokens[n + 1 + s] not in g[s]:
                break
            accepted += 1
            if tokens[n + 1 + s] != g[s][0]:
                break  # an alternative has no children
        out.append(accepted)
        n += accepted + 1
    return out


# (prompt tokens, output tokens)
SHAPES = [(1, 2), (1, 30), (9, 12), (5, 1), (20, 40), (3, 25), (2, 3)]
TRACES = [make_trace(i, p, o) for i, (p, o) in enumerate(SHAPES)]


def test_every_round_equals_the_reference():
    rounds = replay_rounds(ContextDrafter(), TRACES, whole_tree(build_tree))
    assert rounds == [reference_rounds(t) for t in TRACES]
    assert any(max(r) > 1 for r in rounds if r) and rounds[3] == []


@pytest.mark.parametrize("max_batch, ingest_rows", [(1, 1), (2, 3), (64, 512)])
def test_batching_and_chunked_ingestion_change_nothing(max_batch, ingest_rows):
    drafter = ContextDrafter()
    found = replay_rounds(drafter, TRACES, whole_tree(build_tree), max_batch=max_batch, ingest_rows=ingest_rows)
    assert found == [reference_rounds(t) for t in TRACES]
    assert max(drafter.batch_sizes) <= max_batch


def test_row_limit_splits_batches():
    found = replay_rounds(ContextDrafter(), TRACES, whole_tree(build_tree), max_rows=40)
    assert found == [reference_rounds(t) for t in TRACES]


def test_scores_count_tokens_behind_the_first_and_skip_requests_without_rounds():
    scores = shadow_scores({"a": ContextDrafter(), "b": ContextDrafter()}, TRACES, num_nodes=SLOTS * WIDTH)
    assert scores["a"] == scores["b"]
    assert [s.request_id for s in scores["a"]] == ["r0", "r1", "r2", "r4", "r5", "r6"]
    for s in scores["a"]:
        trace = TRACES[int(s.request_id[1:])]
        assert s.num_tokens == len(trace.token_ids) - trace.prompt_len - 1
        assert s.num_rounds == len(reference_rounds(trace))
        assert s.acceptance_length == (s.num_tokens + s.num_unseen_tokens) / s.num_rounds


def test_no_usable_trace_gives_no_scores():
    assert shadow_scores({"a": ContextDrafter()}, [TRACES[3]], num_nodes=4) == {"a": []}


def test_non_finite_scores_are_refused():
    with pytest.raises(DrafterMismatchError, match="must be numbers"):
        replay_rounds(ContextDrafter(poison=True), TRACES, whole_tree(build_tree))
    with pytest.raises(DrafterMismatchError, match="must be numbers"):
        shadow_scores({"a": ContextDrafter(poison=True)}, TRACES, num_nodes=4)


def test_scoring_stops_when_asked():
    with pytest.raises(ShadowStoppedError):
        replay_rounds(ContextDrafter(), TRACES, whole_tree(build_tree), should_stop=lambda: True)


def make_text(num_outputs, finish_reason="length"):
    return dataclasses.replace(make_trace(0, 1, num_outputs), finish_reason=finish_reason)


def test_a_round_that_the_text_holds_entirely_has_nothing_beyond():
    # 9 tokens behind the first: rounds of 4 + 3 + 2, the last with its bonus token.
    assert unseen_tokens([make_text(10)], [[3, 2, 1]]) == [0.0]


def test_a_cut_round_is_continued_like_the_rounds_that_got_as_far():
    # The second text ends after 2 accepted tokens of its last round. Of 4 (then 3) whole rounds that got to depth 2,
    # one went on to depth 3 and none beyond: a bonus token and a quarter (a third) of a draft token are missing.
    whole, cut = make_text(12), make_text(6)
    assert unseen_tokens([whole, cut], [[3, 2, 0, 2], [2, 2]]) == [0.0, pytest.approx(1 + 1 / 4)]
    assert unseen_tokens([whole, cut], [[3, 2, 1, 1], [2, 2]]) == [0.0, pytest.approx(1 + 1 / 3)]


def test_a_round_without_a_draft_before_the_token_limit_has_nothing_beyond():
    # One token is left: the engine does not draft, the bonus token is the last one.
    assert unseen_tokens([make_text(5)], [[2, 1]]) == [0.0]
    assert unseen_tokens([make_text(5, "stop")], [[2, 1]])[0] > 0  # the engine could not know that the text would end


@pytest.mark.parametrize("stay", [0.3, 0.6, 0.85])
@pytest.mark.parametrize("num_outputs", [12, 40])
def test_the_end_of_the_text_does_not_bias_the_acceptance_length(stay, num_outputs):
    rng, depth = np.random.default_rng(0), 6
    texts, seen, real = [], [], []
    for _ in range(3000):
        accepted, left = [], num_outputs - 1
        while left > 0:
            a = 0 if left == 1 else min(int(rng.geometric(1 - stay)) - 1, depth)
            real.append(a + 1)
            accepted.append(min(a, left))
            left -= a + 1
        texts.append(make_text(num_outputs))
        seen.append(accepted)
    scores = [
        RequestScore("r", num_outputs - 1, len(r), u) for r, u in zip(seen, unseen_tokens(texts, seen), strict=True)
    ]
    truth = np.mean(real)
    assert pooled_acceptance_length(scores) == pytest.approx(truth, rel=0.01)
    cut = sum(s.num_tokens for s in scores) / sum(s.num_rounds for s in scores)
    assert cut < pooled_acceptance_length(scores)
