"""Replayed rounds of a SpecBlock drafter equal the rounds that produced the text."""

import pytest
import torch

from paceline.adapt.gate.shadow import fixed_rounds, follow_text, replay_rounds
from paceline.serving.drafters.interface import DraftInputs
from paceline.serving.sampling.request import RequestTrace
from paceline.serving.specblock.drafter import SpecBlockDrafter
from paceline.serving.specblock.model import SpecBlockConfig, SpecBlockModel
from paceline.serving.trees.tree import TreeBatch
from tests.helpers.replay import whole_tree
from tests.helpers.trees import draft_fixed

VOCAB, EMBED, FEATURES, NODES = 24, 8, 12, 10
CONFIG = SpecBlockConfig(
    hidden_size=16, intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=4, vocab_size=VOCAB,
    feature_size=FEATURES, embed_size=EMBED,
)  # fmt: skip


def make_drafter(seed=0):
    torch.manual_seed(seed)
    model = SpecBlockModel(CONFIG)
    with torch.no_grad():
        model.lm_head.weight.mul_(40)  # sharp enough for deep trees
    return SpecBlockDrafter(model, torch.randn(VOCAB, EMBED))


def served_request(drafter, i, *, prompt_len, num_outputs, num_nodes, max_frontier):
    """Serve one request with real drafting and an imagined target: rounds accept a random path of the drafted tree.

    Returns (trace, num_accepted_tokens of every round).
    """
    g = torch.Generator().manual_seed(i)
    tokens = torch.randint(0, VOCAB, (prompt_len + 1,), generator=g).tolist()
    features = torch.randn(prompt_len + num_outputs + 12, FEATURES, generator=g)
    temperature = 0.7 * (i % 2)
    drafter.alloc(prompt_len + num_outputs + 12)
    seen, rounds, total = 0, [], prompt_len + num_outputs
    while len(tokens) < total:
        n = len(tokens) - 1
        rows = torch.arange(seen, n)
        inputs = DraftInputs(
            request_ids=["x"], context_lens=torch.tensor([n]), anchor_token_ids=torch.tensor(tokens[-1:]),
            temperatures=torch.tensor([temperature]), slot_table=torch.arange(n)[None], cu_new=torch.tensor([0, n - seen]),
            new_positions=rows, new_token_ids=torch.tensor(tokens[seen + 1 : n + 1]), new_features=features[seen:n],
            new_slots=rows, histories=[tokens],
        )  # fmt: skip
        tree = draft_fixed(drafter, inputs, num_nodes, max_frontier)
        node, accepted = 0, 0
        while True:
            children = [c for c in range(tree.parents.numel()) if int(tree.parents[c]) == node]
            if not children or float(torch.rand((), generator=g)) < 0.25:
                break
            node = children[int(torch.randint(len(children), (1,), generator=g))]
            tokens.append(int(tree.token_ids[node]))
            accepted += 1
        taken = {int(tree.token_ids[c]) for c in children}
        tokens.append(next(t for t in torch.randperm(VOCAB, generator=g).tolist() if t not in taken))
        over = max(0, len(tokens) - total)
        rounds.append(min(accepted, accepted + 1 - over))
        tokens = tokens[:total]
        seen = n
    outputs = total - prompt_len
    trace = RequestTrace(
        request_id=f"r{i}", bucket="b", temperature=temperature, prompt_len=prompt_len, token_ids=tokens,
        features=features[: total - 1], topk_ids=torch.zeros(outputs, 1, dtype=torch.int32),
        topk_logprobs=torch.zeros(outputs, 1), target_version="t",
    )  # fmt: skip
    return trace, rounds


def serve_all(drafter, num_nodes, max_frontier):
    shapes = [(1, 20), (7, 33), (12, 6), (3, 50), (20, 11), (2, 2)]
    served = [
        served_request(drafter, i, prompt_len=p, num_outputs=o, num_nodes=num_nodes, max_frontier=max_frontier)
        for i, (p, o) in enumerate(shapes)
    ]
    return [t for t, _ in served], [r for _, r in served]


@pytest.mark.parametrize("num_nodes, max_frontier", [(1, 4), (4, 4), (NODES, 4), (32, 8), (NODES, 0), (0, 4)])
@pytest.mark.parametrize("seed", [0, 1])
def test_replay_equals_the_rounds_that_produced_the_text(seed, num_nodes, max_frontier):
    drafter = make_drafter(seed)
    traces, rounds = serve_all(drafter, num_nodes, max_frontier)
    whole = replay_rounds(drafter, traces, whole_tree(lambda d, i: draft_fixed(d, i, num_nodes, max_frontier)))
    assert whole == replay_rounds(drafter, traces, fixed_rounds(num_nodes, max_frontier, is_calibrated=False))
    # The last round may have drafted beyond the end of the text; replay counts what the text holds.
    assert [r[:-1] for r in whole] == [r[:-1] for r in rounds]
    for trace, r in zip(traces, whole, strict=True):
        emitted = len(trace.token_ids) - trace.prompt_len - 1 - sum(a + 1 for a in r[:-1])
        assert r[-1] in (emitted, emitted - 1)  # without or with a bonus token inside the text
    if num_nodes >= NODES:
        assert max(max(r) for r in whole) >= (4 if max_frontier else 2)


def test_another_drafter_scores_differently_on_the_same_text():
    drafter = make_drafter(0)
    traces, _ = serve_all(drafter, NODES, 4)
    own, other = (
        sum(map(len, replay_rounds(d, traces, fixed_rounds(NODES, 4, is_calibrated=False))))
        for d in (drafter, make_drafter(5))
    )
    assert own < 0.7 * other


def test_a_row_follows_the_text_when_its_whole_path_does():
    # root - 1 - 2 - 3 and root - 5 - 3; the second tree is a root alone
    tree = TreeBatch(
        token_ids=torch.tensor([0, 1, 5, 2, 3, 3, 0]),
        parents=torch.tensor([-1, 0, 0, 1, 2, 3, -1]),
        depths=torch.tensor([0, 1, 1, 2, 2, 3, 0]),
        scores=torch.tensor([0.0, -1.0, -2.0, -3.0, -4.0, -5.0, 0.0]),
        cu_nodes=torch.tensor([0, 6, 7]),
        ancestors=torch.tensor([
            [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0], [1, 0, 1, 0, 1, 0],
            [1, 1, 0, 1, 0, 1], [1, 0, 0, 0, 0, 0],
        ]).bool(),
    )  # fmt: skip

    def match(*tokens):
        return follow_text(tree, torch.tensor([tokens, [9] * len(tokens)])).tolist()

    assert match(1, 2, 3) == [0, 1, 3, 5, 6]
    assert match(5, 3, 3) == [0, 2, 4, 6]
    assert match(1, 3, 3) == [0, 1, 6]
    assert match(4, 2, 3) == [0, 6]
    assert match(1, 2) == [0, 1, 3, 6]  # the text ends
    assert match(1, -1, -1) == [0, 1, 6]
