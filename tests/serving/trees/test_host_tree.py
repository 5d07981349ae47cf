"""The path for a lone request builds, accepts and learns exactly what the batch path does."""

from __future__ import annotations

import pytest
import torch

from paceline.bench.engine.scripted_drafters import RandomDrafter, ScriptedDrafter
from paceline.config import TreeConfig
from paceline.serving.budget.cost_model import CostModel
from paceline.serving.drafters.interface import DraftInputs, Frontier, Proposal
from paceline.serving.sampling.draw import SamplingBatch, TokenCounts
from paceline.serving.sampling.request import SamplingParams
from paceline.serving.trees.policy import DraftGroup, TreePolicy
from paceline.serving.trees.verify import accept, verify

VOCAB = 12


class TableDrafter(ScriptedDrafter):
    """Random proposals by (seed, call): sometimes absent, narrow or with equal tokens in a slot."""

    def __init__(self, seed: int, *, has_widths: bool, has_duplicates: bool) -> None:
        super().__init__("table", num_slots=3, num_candidates=4, is_reentrant=True)
        self._generator = torch.Generator().manual_seed(seed)
        self._has_widths, self._has_duplicates = has_widths, has_duplicates

    def _proposal(self, num_nodes: int) -> Proposal:
        g, (slots, k) = self._generator, (3, 4)
        logits = torch.randn(num_nodes, slots, VOCAB, generator=g) * 2
        logprobs, token_ids = logits.log_softmax(-1).topk(k, dim=-1)
        if self._has_duplicates:
            token_ids = torch.randint(0, 3, token_ids.shape, generator=g)
        logprobs = logprobs.masked_fill(torch.rand(logprobs.shape, generator=g) < 0.1, float("-inf"))
        widths = torch.randint(0, k + 1, (num_nodes, slots), generator=g) if self._has_widths else None
        return Proposal(token_ids=token_ids, logprobs=logprobs, widths=widths)

    def propose(self, inputs: DraftInputs) -> Proposal:
        return self._proposal(len(inputs.histories))

    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        return self._proposal(frontier.token_ids.numel())


def inputs_of_one() -> DraftInputs:
    zero = torch.zeros(1, dtype=torch.int64)
    return DraftInputs(
        request_ids=["r0"],
        context_lens=zero + 2,
        anchor_token_ids=zero + 5,
        temperatures=torch.zeros(1),
        slot_table=zero[:, None],
        cu_new=torch.arange(2),
        new_positions=zero,
        new_token_ids=zero,
        new_features=None,
        new_slots=zero,
        histories=[[1, 2, 5]],
    )


def make_policy(*, is_host: bool, policy: str) -> TreePolicy:
    ticks = iter(range(10**6))
    config = TreeConfig(max_draft_tokens=8, max_frontier=3, policy=policy)
    found = TreePolicy(config, cost=CostModel(lambda q: 5.0 + 0.1 * q), timer=lambda: next(ticks) * 1e-9)
    if not is_host:
        found._draft_one = lambda *_: False
    return found


@pytest.mark.parametrize("policy_name", ["fixed", "adaptive"])
@pytest.mark.parametrize(("has_widths", "has_duplicates"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("seed", range(4))
def test_a_lone_request_gets_the_trees_and_statistics_of_the_batch_path(seed, has_widths, has_duplicates, policy_name):
    key, anchor = ("v", "b", True), torch.tensor([5])
    kinds = (True, False)
    policies = [make_policy(is_host=h, policy=policy_name) for h in kinds]
    drafters = [TableDrafter(seed, has_widths=has_widths, has_duplicates=has_duplicates) for _ in kinds]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(40):
        drawn = torch.randint(0, 3 if has_duplicates else VOCAB, (9,), generator=generator)
        outs = []
        for policy, drafter in zip(policies, drafters, strict=True):
            group = DraftGroup(drafter=drafter, inputs=inputs_of_one(), rows=[0])
            out = policy.draft([group], [key], anchor, 3)
            plan = accept(out.tree, drawn[: out.tree.token_ids.numel()])
            policy.observe(out, plan, verify_s=6.0, round_s=8.0)
            outs.append((out, plan))
        (host, host_plan), (batch, batch_plan) = outs
        assert host.num_draft_tokens == batch.num_draft_tokens and host.is_drafted == batch.is_drafted
        for name in ("token_ids", "parents", "depths", "cu_nodes", "ancestors"):
            assert torch.equal(getattr(host.tree, name), getattr(batch.tree, name)), name
        torch.testing.assert_close(host.tree.scores, batch.tree.scores, atol=1e-5, rtol=1e-5)
        assert host_plan.on_host() == batch_plan.on_host()
        assert torch.equal(host_plan.path, batch_plan.path)
        assert torch.equal(host_plan.bonus_token_ids, batch_plan.bonus_token_ids)
        assert torch.equal(host_plan.num_accepted_tokens, batch_plan.num_accepted_tokens)
        tables = [p._calibration.table([key], 3) for p in policies]
        torch.testing.assert_close(tables[0], tables[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("params", [{}, {"top_p": 0.8}, {"presence_penalty": 1.5, "repetition_penalty": 1.3}])
@pytest.mark.parametrize("seed", range(6))
def test_sampled_verification_of_a_lone_request_equals_the_batch_walk(seed, params):
    policy = make_policy(is_host=True, policy="fixed")
    drafter = TableDrafter(seed, has_widths=False, has_duplicates=False)
    group = DraftGroup(drafter=drafter, inputs=inputs_of_one(), rows=[0])
    tree = policy.draft([group], [("v", "b", False)], torch.tensor([5]), 3).tree
    logits = torch.full((tree.token_ids.numel(), VOCAB), -1.0)
    logits[tree.parents[1:], tree.token_ids[1:]] = 1.0  # makes acceptance likely
    counts = TokenCounts([1, 2, 5], VOCAB) if len(params) > 1 else None
    sampling = SamplingBatch.from_params([SamplingParams(temperature=1.0, **params)], [seed], [counts])
    assert tree.host is not None
    host = verify(tree, logits, sampling, torch.tensor([2]))
    tree.host = None
    assert verify(tree, logits, sampling, torch.tensor([2])).on_host() == host.on_host()


@pytest.mark.parametrize("value", ["nan", "inf", "2.0"])
def test_invalid_log_probabilities_of_a_lone_request_are_a_failure(value):
    policy = make_policy(is_host=True, policy="adaptive")
    drafter = RandomDrafter(VOCAB, absent_share=0.0)
    proposal = drafter.propose(inputs_of_one())
    proposal.logprobs[0, -1, -1] = float(value)
    drafter.propose = lambda _: proposal
    group = DraftGroup(drafter=drafter, inputs=inputs_of_one(), rows=[0])
    out = policy.draft([group], [("v", "b", True)], torch.tensor([5]), 3)
    assert list(out.failures) == [0] and out.tree.token_ids.tolist() == [5] and out.is_drafted == [False]
