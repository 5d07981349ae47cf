"""The replay walk on logged traces equals what the engine did when it served them, round for round, in fp32."""

import pytest
import torch

from paceline.adapt.replay_round import whole_tree
from paceline.adapt.shadow import replay_rounds, shadow_scores
from paceline.config import EngineConfig, TreeConfig
from paceline.serving.draft_weights import DrafterSlots
from paceline.serving.engine import Engine
from paceline.serving.request import GenerationRequest, SamplingParams
from paceline.serving.sinks import ROUND_COLUMNS
from paceline.serving.specblock_drafter import SpecBlockDrafter
from paceline.serving.specblock_model import SpecBlockConfig, SpecBlockModel
from paceline.serving.tree_policy import TreePolicy, draft_fixed
from tests.fakes import tiny_target

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

    def wants_draft(self, keys, context_rows):
        return [k is not None for k in keys]

    def observe(self, draft, plan, *, verify_s, round_s):
        pass


def make_drafter(target, seed):
    config = SpecBlockConfig(
        hidden_size=16, intermediate_size=32, num_heads=2, num_kv_heads=1, head_dim=8, vocab_size=target.vocab_size,
        feature_size=target.feature_size, embed_size=target.hidden_size,
    )  # fmt: skip
    torch.manual_seed(seed)
    return SpecBlockDrafter(SpecBlockModel(config), target.embed_weight)


@pytest.fixture(scope="module")
def served():
    """Requests, greedy and sampled, of different lengths, served together by the real engine."""
    target, sink = tiny_target(vocab=32), Collector()
    tree = TreeConfig(max_draft_tokens=NODES, max_frontier=FRONTIER, is_adaptive=False)
    slots = DrafterSlots(make_drafter(target, 0), "v0")
    engine = Engine(
        target, slots, EngineConfig(tree=tree, kv_bytes=8 * 2**20, max_running=4, prefill_chunk_tokens=16),
        feedback=sink, traces=sink, policy=FixedPolicy(tree),
    )  # fmt: skip
    events = []
    g = torch.Generator().manual_seed(1)
    for i in range(8):
        prompt = torch.randint(3, 32, (3 + 5 * i,), generator=g).tolist()
        params = SamplingParams(temperature=0.9 * (i % 2), max_tokens=10 + 3 * i, ignore_eos=True, seed=i)
        engine.submit(
            GenerationRequest(request_id=f"r{i}", prompt_token_ids=tuple(prompt), params=params), events.append
        )
    for _ in range(500):
        if not engine.step():
            break
    assert sum(e.finish_reason is not None for e in events) == 8 and not any(e.error for e in events)
    return target, sink


def engine_rounds(sink, request_id):
    rows = sorted((r for r in sink.rows if r["request_id"] == request_id), key=lambda r: r["round_index"])
    assert all(r["num_draft_tokens"] == NODES and r["drafter_version"] == "v0" for r in rows[:-1])
    return rows


def test_replay_equals_served_rounds(served):
    target, sink = served
    assert len(sink.traces) == 8
    rounds = replay_rounds(
        make_drafter(target, 0), sink.traces, whole_tree(lambda d, i: draft_fixed(d, i, NODES, FRONTIER))
    )
    assert any(a > 0 for r in rounds for a in r)
    for trace, replayed in zip(sink.traces, rounds, strict=True):
        rows = engine_rounds(sink, trace.request_id)
        assert [r["num_accepted_tokens"] for r in rows][:-1] == replayed[:-1]
        assert len(rows) == len(replayed)  # the last round is cut by the end of the text


def test_scores_equal_served_tokens_per_round(served):
    target, sink = served
    scores = shadow_scores(
        {"v0": make_drafter(target, 0), "v1": make_drafter(target, 1)},
        sink.traces,
        num_nodes=NODES,
        max_frontier=FRONTIER,
    )
    for score in scores["v0"]:
        rows = engine_rounds(sink, score.request_id)
        assert score.num_rounds == len(rows)
        assert score.num_tokens == sum(r["num_emitted_tokens"] for r in rows)
    assert [s.num_tokens for s in scores["v0"]] == [s.num_tokens for s in scores["v1"]]
    assert scores["v0"] != scores["v1"]
