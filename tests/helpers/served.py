"""Requests served by the real engine with a tiny drafter, their rounds and traces."""

import torch

from paceline.config import EngineConfig, TreeConfig
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.eagle3.drafter import EagleDrafter
from paceline.serving.eagle3.model import EagleConfig, EagleModel
from paceline.serving.engine.engine import Engine
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from paceline.serving.specblock.drafter import SpecBlockDrafter
from paceline.serving.specblock.model import SpecBlockConfig, SpecBlockModel
from paceline.serving.trees.policy import TreePolicy
from tests.helpers.fakes import tiny_target
from tests.helpers.feedback import dicts_of

NODES, FRONTIER = 8, 4


class Collector:
    """Feedback and trace sink that keeps everything."""

    def __init__(self):
        self.rows, self.traces = [], []

    def record_rounds(self, rows):
        self.rows += dicts_of(rows)

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


def make_drafter(target, seed, overconfidence=0.0, family="specblock", **options):
    if family.startswith("eagle3"):
        torch.manual_seed(seed)
        return EagleDrafter(EagleModel(EagleConfig(
            hidden_size=16, intermediate_size=32, num_heads=2, num_kv_heads=1, head_dim=8, vocab_size=target.vocab_size,
            feature_size=target.feature_size, embed_size=target.hidden_size, num_slots=int(family[-1]),
        )), target.embed_weight, **options)  # fmt: skip
    config = SpecBlockConfig(
        hidden_size=16, intermediate_size=32, num_heads=2, num_kv_heads=1, head_dim=8, vocab_size=target.vocab_size,
        feature_size=target.feature_size, embed_size=target.hidden_size, rank_topk=min(20, target.vocab_size),
    )  # fmt: skip
    torch.manual_seed(seed)
    model = SpecBlockModel(config)
    with torch.no_grad():
        model.log_beta[..., 1:] += overconfidence  # later slots claim to be surer than the first
    return SpecBlockDrafter(model, target.embed_weight, **options)


def make_chain_drafter(*args, **options):
    """As make_drafter, with one candidate a slot."""
    return make_drafter(*args, num_candidates=1, **options)


def serve(
    num_requests, *, max_running=4, learns=False, overconfidence=0.0, vocab=32, family="specblock", make=None,
    num_nodes=NODES, **params
):  # fmt: skip
    """Requests, greedy and sampled, of different lengths, served by the real engine."""
    target, sink = tiny_target(vocab=vocab), Collector()
    tree = TreeConfig(max_draft_tokens=num_nodes, max_frontier=FRONTIER, policy="fixed")
    slots = DrafterSlots((make or make_drafter)(target, 0, overconfidence, family), "v0")
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


def engine_rounds(sink, request_id, num_nodes=NODES):
    rows = sorted((r for r in sink.rows if r["request_id"] == request_id), key=lambda r: r["round_index"])
    assert all(r["num_draft_tokens"] == num_nodes and r["drafter_version"] == "v0" for r in rows[:-1])
    return rows
