"""Drafter requests: random weights, scripted requests, and what a proposal must equal."""

from __future__ import annotations

import dataclasses
import functools
import operator

import torch

from paceline.adapt.families.row_batch import RowBatch
from paceline.serving.drafters.interface import DraftInputs

V, FEATURES, EMBED = 50, 24, 12
TOLERANCE = 1e-4  # fp32, other reduction orders


def perturb(model):
    """Move the weights away from their initial values, some of which are zero; the calibration stays neutral."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
        model.log_beta.zero_()
    return model


class Request:
    """A scripted request: its text, features, pool rows and how far it has been committed and ingested."""

    def __init__(self, name, rng, length, prompt, pool_rows):
        self.name, self.length = name, length
        self.tokens = rng.integers(V, size=length).tolist()
        self.features = torch.tensor(rng.normal(size=(length - 1, FEATURES)), dtype=torch.float32)
        self.slots = torch.tensor(pool_rows)
        self.context, self.done = prompt, 0

    def rows(self, start, stop):
        return {
            "positions": list(range(start, stop)),
            "tokens": self.tokens[start + 1 : stop + 1],
            "features": self.features[start:stop],
            "slots": self.slots[start:stop],
        }


def make_inputs(requests, spans, temperature=0.0):
    parts = [r.rows(*span) for r, span in zip(requests, spans, strict=True)]
    longest = max(r.context for r in requests)
    table = torch.full((len(requests), longest), 10**6, dtype=torch.int64)  # entries past a context are undefined
    for i, r in enumerate(requests):
        table[i, : min(r.context, longest)] = r.slots[: r.context]
    return DraftInputs(
        request_ids=[r.name for r in requests],
        context_lens=torch.tensor([r.context for r in requests]),
        anchor_token_ids=torch.tensor([r.tokens[r.context] for r in requests]),
        temperatures=torch.full((len(requests),), temperature),
        slot_table=table,
        cu_new=torch.tensor([0, *[b - a for a, b in spans]]).cumsum(0),
        new_positions=torch.tensor(functools.reduce(operator.iadd, (p["positions"] for p in parts), [])),
        new_token_ids=torch.tensor(functools.reduce(operator.iadd, (p["tokens"] for p in parts), [])),
        new_features=torch.cat([p["features"] for p in parts]),
        new_slots=torch.cat([p["slots"] for p in parts]),
        histories=[r.tokens[: r.context + 1] for r in requests],
    )


def pool_rows(rng, count, length, scattered):
    if not scattered:
        return [list(range(i * length, (i + 1) * length)) for i in range(count)]
    return rng.permutation(count * length).reshape(count, length).tolist()


def new_requests(drafter, count, rng, scattered=False, length=60):
    """Requests of different lengths in a pool that holds all of them; nothing of them is ingested."""
    drafter.alloc(count * length)
    rows = pool_rows(rng, count, length, scattered)
    return [Request(f"r{i}", rng, length, 5 + 4 * i, own) for i, own in enumerate(rows)]


def prefill_chunked(drafter, requests):
    """Ingest all rows but the newest, whose token is the anchor, in two chunks."""
    for r in requests:
        drafter.ingest(make_inputs([r], [(0, 2)]))
        drafter.ingest(make_inputs([r], [(2, r.context - 1)]))
        r.done = r.context - 1


def text_batch(features, tokens):
    """A training batch of one text: features (n, FEATURES), tokens."""
    n = len(tokens)
    return RowBatch(
        features=features[None],
        token_ids=torch.tensor(tokens)[None],
        is_output=torch.ones(1, n, dtype=torch.bool),
        topk_ids=torch.zeros(1, n, 1, dtype=torch.int64),
        topk_logprobs=torch.zeros(1, n, 1),
        temperatures=torch.zeros(1),
    )


@torch.no_grad()
def assert_proposal_matches(proposal, index, logits):
    expected = torch.log_softmax(logits, -1)
    got = proposal.logprobs[index]
    assert torch.allclose(got, expected.gather(-1, proposal.token_ids[index]), atol=TOLERANCE)
    assert torch.allclose(got, expected.topk(got.shape[-1]).values, atol=TOLERANCE)


@dataclasses.dataclass
class FakeTarget:
    embed_weight: torch.Tensor
    head_weight: torch.Tensor | None = None
    version: str = "abc"
    vocab_size: int = V
    feature_size: int = FEATURES
    device: str = "cpu"
