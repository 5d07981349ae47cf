"""The replay walk on logged traces equals what the engine did when it served them, round for round, in fp32."""

import pytest
import torch

from paceline.adapt.gate import shadow
from paceline.adapt.gate.replay_round import calibrated, whole_tree
from paceline.adapt.gate.shadow import replay_rounds, shadow_scores
from paceline.config import EngineConfig, TreeConfig
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.eagle3.drafter import EagleDrafter
from paceline.serving.eagle3.model import EagleConfig, EagleModel
from paceline.serving.engine.engine import Engine
from paceline.serving.engine.output import ROUND_COLUMNS
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from paceline.serving.specblock.drafter import SpecBlockDrafter
from paceline.serving.specblock.model import SpecBlockConfig, SpecBlockModel
from paceline.serving.trees.policy import TreePolicy, draft_fixed
from tests.helpers.fakes import tiny_target

NODES, FRONTIER = 8, 4


class Collector:
    """Feedback and trace sink that keeps everything."""

    def __init__(self):
        self.rows, self.traces = [], []

    def record_round(self, row):
        self.rows.append(dict(zip(ROUND_COLUMNS, row, strict=True)))

    def wants(self, request_id, bucket):
        return True

    def record_trace(self, trace):
        self.traces.append(trace)


class FixedPolicy(TreePolicy):
    """Trees of a fixed size from the drafter's own scores: nothing is learnt between rounds."""

    def wants_draft(self, keys, context_rows, *_loads):
        return [k is not None for k in keys]

    def observe(self, draft, plan, **times):
        pass


def make_drafter(target, seed, overconfidence=0.0, family="specblock"):
    if family.startswith("eagle3"):
        torch.manual_seed(seed)
        return EagleDrafter(EagleModel(EagleConfig(
            hidden_size=16, intermediate_size=32, num_heads=2, num_kv_heads=1, head_dim=8, vocab_size=target.vocab_size,
            feature_size=target.feature_size, embed_size=target.hidden_size, num_slots=int(family[-1]),
        )), target.embed_weight)  # fmt: skip
    config = SpecBlockConfig(
        hidden_size=16, intermediate_size=32, num_heads=2, num_kv_heads=1, head_dim=8, vocab_size=target.vocab_size,
        feature_size=target.feature_size, embed_size=target.hidden_size, rank_topk=min(20, target.vocab_size),
    )  # fmt: skip
    torch.manual_seed(seed)
    model = SpecBlockModel(config)
    with torch.no_grad():
        model.log_beta[..., 1:] += overconfidence  # later slots claim to be surer than the first
    return SpecBlockDrafter(model, target.embed_weight)


def serve(num_requests, *, max_running=4, learns=False, overconfidence=0.0, vocab=32, family="specblock", **params):
    """Requests, greedy and sampled, of different lengths, served by the real engine."""
    target, sink = tiny_target(vocab=vocab), Collector()
    tree = TreeConfig(max_draft_tokens=NODES, max_frontier=FRONTIER, policy="fixed")
    slots = DrafterSlots(make_drafter(target, 0, overconfidence, family), "v0")
    engine = Engine(
        target, slots, EngineConfig(tree=tree, kv_bytes=8 * 2**20, max_running=max_running, prefill_chunk_tokens=16),
        feedback=sink, traces=sink, policy=None if learns else FixedPolicy(tree),
    )  # fmt: skip
    events = []
    g = torch.Generator().manual_seed(1)
    for i in range(num_requests):
        prompt = torch.randint(3, vocab, (3 + 5 * (i % 8),), generator=g).tolist()
        sampling = SamplingParams(
            temperature=0.9 * (i % 2), max_tokens=10 + 3 * (i % 8), ignore_eos=True, seed=i, **params
        )
        engine.submit(
            GenerationRequest(request_id=f"r{i}", prompt_token_ids=tuple(prompt), params=sampling), events.append
        )
    for _ in range(500):
        if not engine.step():
            break
    assert sum(e.finish_reason is not None for e in events) == num_requests and not any(e.error for e in events)
    return target, sink


@pytest.fixture(scope="module", params=["specblock", "eagle3-slots-1", "eagle3-slots-4"])
def served(request):
    return request.param, *serve(8, family=request.param)


def engine_rounds(sink, request_id):
    rows = sorted((r for r in sink.rows if r["request_id"] == request_id), key=lambda r: r["round_index"])
    assert all(r["num_draft_tokens"] == NODES and r["drafter_version"] == "v0" for r in rows[:-1])
    return rows


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


def test_replay_learns_the_score_calibration_of_the_engine(monkeypatch):
    """Requests one after the other, shortest first, so that engine and replay learn in the same order."""
    monkeypatch.setattr(shadow, "MAX_BATCH", 1)
    target, sink = serve(8, max_running=1, learns=True, overconfidence=4.0, vocab=16)  # few tokens: guesses hit often
    real = [[r["num_accepted_tokens"] for r in engine_rounds(sink, t.request_id)] for t in sink.traces]
    learnt, raw = (
        replay_rounds(make_drafter(target, 0, 4.0), sink.traces, accept_round)
        for accept_round in (calibrated(NODES, FRONTIER), whole_tree(lambda d, i: draft_fixed(d, i, NODES, FRONTIER)))
    )
    assert [r[:-1] for r in learnt] == [r[:-1] for r in real]
    assert [len(r) for r in learnt] == [len(r) for r in real]
    assert raw != learnt  # the calibration did move nodes
