"""Every request of a crowd of 1 to 64 is answered as if it were alone, whatever happens around it."""

from __future__ import annotations

import pytest
import torch

from paceline.serving.engine.decode import RoundRows
from paceline.serving.sampling.draw import argmax_rows
from paceline.serving.target_model.kv_cache import KVPool
from paceline.serving.trees.verify import AcceptPlan
from tests.helpers.constrained import VOCAB, target
from tests.helpers.crowd import ADAPTIVE, Crowd, Outcome, answered_alone, asks, is_near_tie
from tests.helpers.fakes import greedy_continuation

SIZES = (1, 2, 8, 13, 32, 63, 64)


def check(size: int, out: Outcome) -> None:
    """The run had in it what it is about; the answers were checked as they came."""
    assert out.reasons.total() == out.num_requests and out.num_near_ties <= 1, out
    assert min(out.reasons[r] for r in ("stop", "length", "abort")) > 0, out
    assert out.num_hit_tokens > 20 and out.num_checked_rows > 200 and out.num_swaps > 1, out
    assert out.num_drafted > 0 and out.num_accepted > 0 and out.num_drafting_versions > 2, out
    assert out.num_preemptions > 0 or size < 13, out


@pytest.mark.parametrize("size", SIZES)
def test_answers_of_a_crowd_are_those_of_requests_alone(size):
    out = Crowd(size, SIZES.index(size) % 2).run()  # odd seeds have another set of drafters
    check(size, out)
    assert out.most_running >= 0.9 * size and out.num_drafted_full > 0, out


@pytest.mark.parametrize("size", [1, 5, 33, 64])
def test_a_budget_that_adapts_changes_no_answer(size):
    check(size, Crowd(size, 2, ADAPTIVE).run())


@pytest.mark.parametrize("size", [8, 33, 64])
def test_a_shortage_of_pages_and_tiny_chunks_change_no_answer(size):
    out = Crowd(size, 3, pages_each=3, chunk_each=1).run()
    check(size, out)
    assert out.num_preemptions > size / 4, out


# ---- what the others rest on ----------------------------------------------------------------------------------------
def test_the_plain_engine_answers_as_the_model_does():
    num_checked = 0
    for ask, (tokens, _) in zip(asks(0), answered_alone(0), strict=True):
        if ask.kind in ("greedy", "free-greedy"):
            assert list(tokens) == greedy_continuation(target(), list(ask.prompt), len(tokens))
            num_checked += 1
    assert num_checked > 4


def test_near_ties_are_rare():
    """Nearly every other token, greedy or sampled, would be seen as a mistake."""
    num_near = num_checked = 0
    for ask, (tokens, _) in zip(asks(0), answered_alone(0), strict=True):
        at = len(tokens) // 2
        for token_id in set(range(0, VOCAB, 7)) - {tokens[at]}:
            num_near += is_near_tie(ask, tokens, at, token_id)
            num_checked += 1
    assert num_checked > 500 and num_near <= 2


def moves_nothing(_pool: KVPool, _src: torch.Tensor, _dst: torch.Tensor) -> None:
    """A commit that leaves accepted rows in scratch."""


def accepts_one_too_many(tree, logits, sampling, context_lens, accept) -> AcceptPlan:
    """A verification that takes the first draft token of every request unseen."""
    plan = accept(tree, argmax_rows(logits))
    plan.on_host()
    paths = plan.host
    assert paths is not None
    starts, counts = tree.cu_nodes[:-1].tolist(), tree.cu_nodes.diff().tolist()
    plan.host = [
        ([start, start + 1] if len(path) == 1 and count > 1 else path, bonus)
        for (path, bonus), start, count in zip(paths, starts, counts, strict=True)
    ]
    return plan


@pytest.mark.parametrize("fault", ["rows", "features", "tokens"])
def test_a_faulty_engine_is_found_out(fault, monkeypatch):
    if fault == "rows":
        monkeypatch.setattr(KVPool, "commit", moves_nothing)
    elif fault == "features":
        commit = RoundRows.commit
        monkeypatch.setattr(RoundRows, "commit", lambda self, requests, paths, _f: commit(self, requests, paths, None))
    else:
        monkeypatch.setattr("paceline.serving.engine.decode.verify", accepts_one_too_many)
    with pytest.raises(AssertionError):
        Crowd(8, 0).run()
