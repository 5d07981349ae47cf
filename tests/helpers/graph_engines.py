"""Engines whose graphs are counted, with the SpecBlock drafter."""

from __future__ import annotations

import torch

from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group
from paceline.serving.drafters.interface import DrafterCaps, Proposal
from paceline.serving.engine.engine import Engine
from paceline.serving.loading.families import build_drafter
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from tests.helpers.drafters import eagle_for, head_for, specblock_for

CONTEXT, NUM_TOKENS = 96, 14
TREE = TreeConfig(max_draft_tokens=8, max_frontier=3, policy="fixed")


def specblock(target, seed=0):
    """A function that makes equal drafters, and their weights."""
    model = specblock_for(target, seed, is_perturbed=True)
    settings, state = {**model.config.to_dict(), "drafter_type": "specblock"}, model.state_dict()
    return lambda: build_drafter(settings, state, target, target_version=target.version), state


def parallel_head(target, *, is_causal):
    """A function that makes equal drafters."""
    model = head_for(target, is_causal=is_causal, edge_rank=3 * is_causal)
    settings = {**model.config.to_dict(), "drafter_type": "jetspec" if is_causal else "dflash"}
    return lambda: build_drafter(settings, model.state_dict(), target, target_version=target.version)


def eagle(target, **changes):
    """A function that makes equal drafters."""
    model = eagle_for(target, **changes)
    settings = {**model.config.to_dict(), "drafter_type": "eagle3"}
    return lambda: build_drafter(settings, model.state_dict(), target, target_version=target.version)


class StaticOracle:
    """Captured drafting that proposes what comes next in known texts, with a wrong sibling beside every token."""

    caps = DrafterCaps(
        name="oracle", num_slots=4, num_candidates=2, max_depth=4, is_reentrant=False, needs_features=False
    )
    version = "oracle"

    def __init__(self, texts, vocab_size):
        self._vocab_size = vocab_size
        self._next = torch.zeros(max(map(len, texts)), vocab_size, 4, dtype=torch.int64)
        for text in texts:
            for position in range(len(text) - 4):
                self._next[position, text[position]] = torch.tensor(text[position + 1 : position + 5])

    def make_static(self, kernels, **limits):
        self.padding_slots = torch.full((512,), -1)
        return self

    def takes(self, num_requests, width):
        return True

    def alloc(self, num_pool_rows):
        """It keeps nothing."""

    def release(self, request_id):
        """It keeps nothing."""

    def ingest(self, inputs):
        """It reads nothing."""

    def propose(self, inputs):
        ids = self._next[inputs.context_lens, inputs.anchor_token_ids]
        logprobs = torch.tensor([0.7, 0.2]).log().expand(*ids.shape, 2)
        return Proposal(
            token_ids=torch.stack((ids, (ids + 1) % self._vocab_size), -1), logprobs=logprobs.contiguous(), widths=None
        )


class CountingGraphs:
    """EagerGraphs that count replays; nothing runs at capture, which test_graphed_target and others show to work."""

    def __init__(self):
        self.num_replays = 0

    def capture(self, run):
        return _Counted(self, run)


class _Counted:
    def __init__(self, backend, run):
        self.backend, self.run = backend, run

    def replay(self):
        self.backend.num_replays += 1
        self.run()


def make_engine(target, slots, backend=None, policy=None, traces=None, **changes):
    settings = {"max_running": 8, "kv_bytes": 64 * 2**20, "page_tokens": 4, "max_context_tokens": CONTEXT, "tree": TREE}
    config = EngineConfig(**{**settings, **changes})
    engine = Engine(target, slots, config, graph_backend=backend, policy=policy, traces=traces)
    if backend is not None:
        engine.graphs.capture()
    return engine


def generate(engine, prompts, on_round=None, groups=(Group.ADAPTIVE,), **params):
    """Tokens of each request. groups: of the requests, in turn."""
    tokens = {f"r{i}": [] for i in range(len(prompts))}
    for i, (prompt, temperature) in enumerate(prompts):
        values = {"temperature": temperature, "max_tokens": NUM_TOKENS - i, "ignore_eos": True, "seed": i, **params}
        request = GenerationRequest(
            request_id=f"r{i}",
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(**values),
            group=groups[i % len(groups)],
        )
        engine.submit(request, lambda e: tokens[e.request_id].extend(e.token_ids))
    count = 0
    while engine.step():
        count += 1
        if on_round is not None:
            on_round(count)
        if engine.is_idle:
            break
    engine.check_integrity()
    return tokens
