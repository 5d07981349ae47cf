"""Rows that a parallel head ingested for one request serve every request that begins with the same text."""

import pytest
import torch

from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.parallel_head.drafter import ParallelHeadDrafter
from paceline.serving.parallel_head.model import ParallelHeadConfig, ParallelHeadModel
from tests.helpers.engines import VOCAB, greedy, make_engine, target
from tests.helpers.shared_prefix import PROMPTS, assert_same_proposals, serve

KINDS = pytest.mark.parametrize("is_causal", [True, False], ids=["jetspec", "dflash"])


class RecordingHead(ParallelHeadDrafter):
    """Keeps what it proposed at each text and counts the rows it was handed."""

    def __init__(self, is_causal, seed=0):
        torch.manual_seed(seed)
        config = ParallelHeadConfig(
            is_causal=is_causal, hidden_size=target().hidden_size, intermediate_size=24, num_heads=4, num_kv_heads=2,
            head_dim=8, vocab_size=VOCAB, feature_size=target().feature_size, num_slots=4,
        )  # fmt: skip
        super().__init__(ParallelHeadModel(config), target().embed_weight, target().head_weight)
        self.proposals, self.num_rows = {}, 0

    def ingest(self, inputs):  # `propose` ingests through it
        self.num_rows += inputs.new_positions.numel()
        super().ingest(inputs)

    def propose(self, inputs):
        proposal = super().propose(inputs)
        for b, history in enumerate(inputs.histories):
            self.proposals[tuple(history)] = (proposal.token_ids[b].clone(), proposal.logprobs[b].clone())
        return proposal


def without_cache(prompts, is_causal, seed=0):
    drafter = RecordingHead(is_causal, seed)
    serve(make_engine(drafter, prefix_caching=False), prompts)
    return drafter


@KINDS
def test_proposals_after_a_hit_equal_those_without(is_causal):
    want, drafter = without_cache(PROMPTS, is_causal), RecordingHead(is_causal)
    engine = make_engine(drafter, prefill_chunk_tokens=8)
    runs = serve(engine, PROMPTS)
    assert engine.stats()["num_prefix_hit_tokens"] == 60
    assert_same_proposals(drafter, want)
    assert [r.tokens for r in runs] == [greedy(p, 10) for p in PROMPTS]
    assert drafter.num_rows == want.num_rows - 60, "rows with drafter KV of the same weights are not ingested again"


@KINDS
def test_new_weights_ingest_cached_rows_again(is_causal):
    want, second = without_cache(PROMPTS[1:2], is_causal, seed=1), RecordingHead(is_causal, 1)
    slots = DrafterSlots(RecordingHead(is_causal), "v0")
    engine = make_engine(slots)
    serve(engine, PROMPTS[:1])
    assert slots.stage("v1", second)
    slots.publish()
    (run,) = serve(engine, PROMPTS[1:2], prefix="new")
    assert run.last.stats.num_cached_tokens == 20 and run.last.stats.drafter_version == "v1"
    assert_same_proposals(second, want)
    assert second.num_rows == want.num_rows
