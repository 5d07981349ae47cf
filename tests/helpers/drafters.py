"""Tiny drafters of every family with random weights, scripted requests, and what a proposal must equal."""

from __future__ import annotations

import dataclasses
import functools
import operator

import torch

from paceline.adapt.families.row_batch import RowBatch
from paceline.serving.drafters.interface import DraftInputs, Frontier
from paceline.serving.eagle3.model import EagleConfig, EagleModel
from paceline.serving.parallel_head.model import ParallelHeadConfig, ParallelHeadModel
from paceline.serving.sampling.request import RequestTrace
from paceline.serving.specblock.model import SpecBlockConfig, SpecBlockModel

V, FEATURES, EMBED = 50, 48, 32
HIDDEN, TOPK = 16, 4
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab_size": V,
    "feature_size": FEATURES,
}  # fmt: skip
TOLERANCE = 1e-4  # fp32, other reduction orders


def perturb(model):
    """Move the weights away from their initial values, some of which are zero; the calibration stays neutral."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
        model.log_beta.zero_()
    return model


def tiny_specblock(seed=0, **changes):
    """A model with weights away from their initial values, and the target's embedding."""
    torch.manual_seed(seed)
    config = SpecBlockConfig(**{**SIZES, "embed_size": EMBED, "rank_hidden": 8, **changes})
    return perturb(SpecBlockModel(config)), torch.randn(V, EMBED)


def specblock_for(target, seed=0, *, is_perturbed=False, **changes):
    """A model that fits a target, with its initial weights or away from them."""
    sizes = {"vocab_size": target.vocab_size, "feature_size": target.feature_size, "embed_size": target.hidden_size}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SpecBlockModel(SpecBlockConfig(**{**SIZES, **sizes, "rank_hidden": 8, **changes}))
        return perturb(model) if is_perturbed else model


def head_for(target, seed=0, **changes):
    """A parallel head that fits a target, with weights away from their initial ones."""
    sizes = {
        "vocab_size": target.vocab_size, "feature_size": target.feature_size, "hidden_size": target.hidden_size,
        "is_causal": True, "num_slots": 5,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return perturb(ParallelHeadModel(ParallelHeadConfig(**{**SIZES, **sizes, **changes})))


def eagle_for(target, seed=0, **changes):
    """An EAGLE-3 drafter that fits a target, with weights away from their initial ones."""
    sizes = {
        "vocab_size": target.vocab_size, "feature_size": target.feature_size, "hidden_size": target.hidden_size,
        "embed_size": target.hidden_size, "num_slots": 1, "max_depth": 4,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return perturb(EagleModel(EagleConfig(**{**SIZES, **sizes, **changes})))


def tiny_eagle(seed=0, **changes):
    """A model with weights away from their initial values, and the target's embedding."""
    torch.manual_seed(seed)
    model = EagleModel(EagleConfig(**{**SIZES, "embed_size": EMBED, "num_slots": 3, **changes}))
    return perturb(model), torch.randn(V, EMBED)


def tiny_head(is_causal=True, seed=0, **changes):
    """A model with weights away from their initial values, and the target's embedding and output head."""
    torch.manual_seed(seed)
    model = ParallelHeadModel(ParallelHeadConfig(**{**SIZES, "is_causal": is_causal, "num_slots": 5, **changes}))
    width = model.config.hidden_size
    return perturb(model), torch.randn(V, width), torch.randn(V, width) * 0.5


def logged_text(seed, length, prompt_len, temperature=0.0, has_topk=True):
    """A logged request of random tokens and features, with the target's best log-probabilities."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(V, (length,), generator=g)
    logprobs = torch.randn(length - prompt_len, V, generator=g).mul(3).log_softmax(-1).topk(TOPK, dim=-1)
    return RequestTrace(
        request_id=str(seed), bucket="b", temperature=temperature, prompt_len=prompt_len, token_ids=tokens.tolist(),
        features=torch.randn(length - 1, FEATURES, generator=g),
        topk_ids=logprobs.indices.int() if has_topk else None,
        topk_logprobs=logprobs.values if has_topk else None,
        target_version="t",
    )  # fmt: skip


def make_trace(request_id="r", *, bucket="math", prompt_len=3, num_outputs=5, size=6, topk=2, dtype=torch.float32):
    """A request as a trace store holds it."""
    g = torch.Generator().manual_seed(len(request_id) + num_outputs)
    total = prompt_len + num_outputs
    return RequestTrace(
        request_id=request_id,
        bucket=bucket,
        temperature=0.5,
        prompt_len=prompt_len,
        token_ids=torch.randint(0, 50, (total,), generator=g).tolist(),
        features=torch.randn(total - 1, size, generator=g).to(dtype),
        topk_ids=torch.randint(0, 50, (num_outputs, topk), generator=g, dtype=torch.int32),
        topk_logprobs=-torch.rand(num_outputs, topk, generator=g),
        target_version="abc_1",
        finish_reason="stop",
        extra={"seed": 3},
    )


class Request:
    """A scripted request: its text, features, pool rows and how far it has been committed and ingested."""

    def __init__(self, name, rng, length, prompt, pool_rows, num_features=FEATURES):
        self.name, self.length = name, length
        self.tokens = rng.integers(V, size=length).tolist()
        self.features = torch.tensor(rng.normal(size=(length - 1, num_features)), dtype=torch.float32)
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


def scattered_requests(rng, count, scattered, length):
    """Requests of different lengths."""
    requests = [
        Request(f"r{i}", rng, length, int(rng.integers(3, 20)), rows)
        for i, rows in enumerate(pool_rows(rng, count, length, scattered))
    ]
    return requests


def random_frontier(rng, count, k, vocab, max_leaves):
    leaves = [
        (i, int(rng.integers(k)), int(rng.integers(vocab)))
        for i in range(count)
        for _ in range(int(rng.integers(0, max_leaves + 1)))
    ] or [(0, 1, 2)]
    rng.shuffle(leaves)
    request, slot, token_ids = (torch.tensor(column) for column in zip(*leaves, strict=True))
    return Frontier(request=request, slot=slot, token_ids=token_ids)


def assert_same_proposal(got, expected):
    for name in ("logprobs", "hidden", "edge_logprobs"):
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.equal(got.token_ids, expected.token_ids)
    assert (got.widths is None) == (expected.widths is None)
    assert got.widths is None or torch.equal(got.widths, expected.widths)


def padded(inputs, rows, requests, width, padding_slots):
    """The same round in the sizes of a captured one."""
    n, b = inputs.new_token_ids.numel(), inputs.context_lens.numel()

    def pad(tensor, size, value=0):
        return torch.cat((tensor, tensor.new_full((size - len(tensor), *tensor.shape[1:]), value)))

    table = torch.zeros(requests, width, dtype=torch.int64)
    table[:b, : inputs.slot_table.shape[1]] = inputs.slot_table
    return dataclasses.replace(
        inputs,
        context_lens=pad(inputs.context_lens, requests),
        anchor_token_ids=pad(inputs.anchor_token_ids, requests),
        temperatures=pad(inputs.temperatures, requests),
        slot_table=table,
        cu_new=pad(inputs.cu_new, requests + 1, n),
        new_positions=pad(inputs.new_positions, rows),
        new_token_ids=pad(inputs.new_token_ids, rows),
        new_features=pad(inputs.new_features, rows),
        new_slots=torch.cat((inputs.new_slots, padding_slots[n:rows])),
        request_ids=[],
        histories=[],
    )


def even_frontier(rng, count, proposal, num_leaves, node=None):
    """As many leaves of every request, in the order of requests; node: below a later proposal of so many rows each."""
    request = torch.arange(count).repeat_interleave(num_leaves)
    slot = torch.from_numpy(rng.integers(proposal.logprobs.shape[1], size=count * num_leaves))
    token_ids = torch.from_numpy(rng.integers(V, size=count * num_leaves))
    nodes = None if node is None else request * node + torch.from_numpy(rng.integers(node, size=count * num_leaves))
    return Frontier(request=request, slot=slot, token_ids=token_ids, node=nodes)


def first_requests(frontier, count):
    """The part of a frontier that the first requests have."""
    mine = frontier.request < count
    node = None if frontier.node is None else frontier.node[mine]
    return Frontier(
        request=frontier.request[mine], slot=frontier.slot[mine], token_ids=frontier.token_ids[mine], node=node
    )


def assert_rounds_agree(eager, graphed, requests, rng, num_rounds, max_leaves=3):
    """Both drafters propose the same in rounds of all their blocks, each over some of the requests."""
    c = eager.config
    for drafter in (eager, graphed):
        drafter.ingest(make_inputs(requests, [(0, r.context - 1) for r in requests]))
    for r in requests:
        r.done = r.context - 1
    for _ in range(num_rounds):
        active = [r for r in requests if rng.random() < 0.8] or requests[:1]
        inputs = make_inputs(active, [(r.done, r.context) for r in active], float(rng.choice([0.0, 0.7])))
        first, expected = graphed.propose(inputs), eager.propose(inputs)
        assert_same_proposal(first, expected)
        if eager.caps.is_reentrant:
            frontier = random_frontier(rng, len(active), c.num_slots, c.vocab_size, max_leaves)
            assert_same_proposal(graphed.expand(inputs, first, frontier), eager.expand(inputs, expected, frontier))
        for r in active:
            r.done = r.context
            r.context += int(rng.integers(1, 6))
