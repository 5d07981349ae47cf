"""Engines whose graphs are counted, with the SpecBlock drafter."""

from __future__ import annotations

from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group
from paceline.serving.engine.engine import Engine
from paceline.serving.loading.families import build_drafter
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from tests.helpers.drafters import head_for, specblock_for

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


def make_engine(target, slots, backend=None, policy=None, **changes):
    settings = {"max_running": 8, "kv_bytes": 64 * 2**20, "page_tokens": 4, "max_context_tokens": CONTEXT, "tree": TREE}
    engine = Engine(target, slots, EngineConfig(**{**settings, **changes}), graph_backend=backend, policy=policy)
    if backend is not None:
        engine.graphs.capture()
    return engine


def generate(engine, prompts, on_round=None, **params):
    tokens = {f"r{i}": [] for i in range(len(prompts))}
    for i, (prompt, temperature) in enumerate(prompts):
        values = {"temperature": temperature, "max_tokens": NUM_TOKENS - i, "ignore_eos": True, "seed": i, **params}
        request = GenerationRequest(
            request_id=f"r{i}", prompt_token_ids=tuple(prompt), params=SamplingParams(**values), group=Group.ADAPTIVE
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
