"""The replay walk on logged traces equals what the engine did when it served them, round for round, in fp32."""

import pytest

from paceline.adapt.gate.shadow import fixed_rounds, replay_rounds, shadow_scores
from paceline.adapt.online.trainer import ShadowConfig
from tests.helpers.replay import whole_tree
from tests.helpers.served import FRONTIER, NODES, engine_rounds, make_chain_drafter, make_drafter, serve
from tests.helpers.trees import draft_fixed


@pytest.fixture(scope="module", params=["specblock", "eagle3-slots-1", "eagle3-slots-4"])
def served(request):
    return request.param, *serve(8, family=request.param)


def test_replay_equals_served_rounds(served):
    family, target, sink = served
    assert len(sink.traces) == 8
    rounds = replay_rounds(
        make_drafter(target, 0, family=family), sink.traces, whole_tree(lambda d, i: draft_fixed(d, i, NODES, FRONTIER))
    )
    assert any(a > 0 for r in rounds for a in r)
    for trace, replayed in zip(sink.traces, rounds, strict=True):
        rows = engine_rounds(sink, trace.request_id)
        assert [r["num_accepted_tokens"] for r in rows][:-1] == replayed[:-1]
        assert len(rows) == len(replayed)  # the last round is cut by the end of the text


def test_scores_equal_served_tokens_per_round(served):
    family, target, sink = served
    scores = shadow_scores(
        {f"v{seed}": make_drafter(target, seed, family=family) for seed in (0, 1)},
        sink.traces,
        num_nodes=NODES,
        max_frontier=FRONTIER,
        is_calibrated=False,
    )
    for score in scores["v0"]:
        rows = engine_rounds(sink, score.request_id)
        assert score.num_rounds == len(rows)
        assert score.num_tokens == sum(r["num_emitted_tokens"] for r in rows)
    assert [s.num_tokens for s in scores["v0"]] == [s.num_tokens for s in scores["v1"]]
    assert scores["v0"] != scores["v1"]


@pytest.mark.parametrize("family", ["specblock", "eagle3-slots-1"])
@pytest.mark.parametrize("chain", [3, 5])
def test_a_chain_is_foretold_exactly_and_a_tree_says_more(family, chain):
    """What engines with one candidate a slot do, such as vLLM; few tokens, so that guesses hit often."""
    target, sink = serve(16, family=family, make=make_chain_drafter, num_nodes=chain, vocab=16)
    walk = {"traces": sink.traces, "is_calibrated": False}
    tree = ShadowConfig(chain=chain).tree
    scores = shadow_scores({"v0": make_chain_drafter(target, 0, family=family)}, **tree, **walk)["v0"]
    for score in scores:
        rows = engine_rounds(sink, score.request_id, chain)
        assert score.num_rounds == len(rows)
        assert score.num_tokens == sum(r["num_emitted_tokens"] for r in rows)
    wide = shadow_scores({"v0": make_drafter(target, 0, family=family)}, **ShadowConfig().tree, **walk)["v0"]
    assert sum(s.num_rounds for s in wide) < 0.97 * sum(s.num_rounds for s in scores)


def test_acceptance_length_is_that_of_the_engine_before_truncation():
    """Exactly, where the text holds the last round; elsewhere the score continues it from the other rounds."""
    target, sink = serve(48, stop_token_ids=tuple(range(3, 12)))  # texts that often end inside a round
    drafters, tree = {"v0": make_drafter(target, 0)}, {"num_nodes": NODES, "max_frontier": FRONTIER}
    scores = shadow_scores(drafters, sink.traces, is_calibrated=False, **tree)["v0"]
    cut = 0
    for score in scores:
        rows = engine_rounds(sink, score.request_id)
        real = sum(r["num_accepted_tokens"] for r in rows) / len(rows) + 1
        if rows[-1]["num_emitted_tokens"] == rows[-1]["num_accepted_tokens"] + 1:
            assert score.num_unseen_tokens == 0 and score.acceptance_length == pytest.approx(real)
        else:
            cut += 1
            assert score.num_unseen_tokens >= 1  # the bonus token at least
            assert real >= score.num_tokens / score.num_rounds
    assert 0 < cut < len(scores)


def test_replay_learns_the_score_calibration_of_the_engine():
    """Requests one after the other, shortest first, so that engine and replay learn in the same order."""
    target, sink = serve(8, max_running=1, learns=True, overconfidence=4.0, vocab=16)  # few tokens: guesses hit often
    real = [[r["num_accepted_tokens"] for r in engine_rounds(sink, t.request_id)] for t in sink.traces]
    learnt, raw = (
        replay_rounds(make_drafter(target, 0, 4.0), sink.traces, accept_round, max_batch=1)
        for accept_round in (fixed_rounds(NODES, FRONTIER), whole_tree(lambda d, i: draft_fixed(d, i, NODES, FRONTIER)))
    )
    assert [r[:-1] for r in learnt] == [r[:-1] for r in real]
    assert [len(r) for r in learnt] == [len(r) for r in real]
    assert raw != learnt  # the calibration did move nodes
