"""Lossless checks: prompts, drafters and engines on a tiny target whose undrafted answers are known."""

from __future__ import annotations

import functools

import torch

from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group
from paceline.serving.drafters.interface import Drafter
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.drafters.text import PromptLookupDrafter, SuffixDrafter
from paceline.serving.eagle3.drafter import EagleDrafter
from paceline.serving.eagle3.model import EagleConfig, EagleModel
from paceline.serving.engine.engine import Engine
from paceline.serving.loading.kv_size import pool_row_bytes
from paceline.serving.parallel_head.drafter import ParallelHeadDrafter
from paceline.serving.parallel_head.model import DRAFTER_TYPES, ParallelHeadConfig, ParallelHeadModel
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from paceline.serving.specblock.drafter import SpecBlockDrafter
from tests.helpers.drafters import specblock_for
from tests.helpers.fakes import greedy_continuation, plain_logits, tiny_target
from tests.helpers.scripted_drafters import OracleDrafter, RandomDrafter, RejectedDrafter, RepeatDrafter

VOCAB = 64
NUM_TOKENS = 24
NUM_PROMPTS = 8
PAGE = 4
DRAFTERS = ("repeat", "random", "oracle", "rejected", "lookup", "suffix", "specblock", "eagle3", "jetspec", "dflash")


@functools.cache
def target():
    return tiny_target(vocab=VOCAB, layers=6, width=32, seed=1)


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    generator = torch.Generator().manual_seed(7)
    lengths = (1, 3, 5, 9, 17, 26, 33, 40)
    out = [tuple(torch.randint(3, VOCAB, (n,), generator=generator).tolist()) for n in lengths]
    out[4] = out[4][:6] * 3  # repetition, so that the lookup drafter finds matches
    return tuple(out)


@functools.cache
def greedy_reference() -> tuple[tuple[int, ...], ...]:
    """Greedy tokens by plain forwards; stops at nothing (requests ignore EOS)."""
    return tuple(tuple(greedy_continuation(target(), list(p), NUM_TOKENS)) for p in prompts())


def tiny_specblock(seed: int) -> SpecBlockDrafter:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_slots": 3,
        "rank_hidden": 16,
        "shares_head": bool(seed % 2),
    }
    return SpecBlockDrafter(specblock_for(target(), seed, **sizes), target().embed_weight)


def tiny_eagle(seed: int, **changes) -> EagleDrafter:
    t = target()
    values = {
        "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "max_depth": 5,
        "vocab_size": VOCAB, "draft_vocab_size": VOCAB - 4, "embed_size": 32, "feature_size": t.feature_size, **changes,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = EagleModel(EagleConfig(**values))
    return EagleDrafter(model, t.embed_weight)


def tiny_parallel_head(name: str, seed: int) -> ParallelHeadDrafter:
    """The causal head scores candidates below each parent, the other one does not, and drafts a part of the vocabulary."""
    t = target()
    config = ParallelHeadConfig(
        is_causal=DRAFTER_TYPES[name], hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8,
        num_slots=4, vocab_size=VOCAB, feature_size=t.feature_size, edge_rank=4 if name == "jetspec" else 0,
        draft_vocab_size=VOCAB - 4 if name == "dflash" else None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ParallelHeadModel(config)
        if config.edge_rank:
            torch.nn.init.normal_(model.edge_out)
    return ParallelHeadDrafter(model, t.embed_weight, t.head_weight)


def make_drafter(name: str, seed: int = 0) -> Drafter:
    texts = {f"r{i}": [*p, *g] for i, (p, g) in enumerate(zip(prompts(), greedy_reference(), strict=True))}
    if name == "repeat":
        return RepeatDrafter(num_slots=4)
    if name == "random":
        return RandomDrafter(VOCAB, seed, is_product=bool(seed % 2))
    if name == "oracle":
        return OracleDrafter(texts, hit_rate=0.8 if seed else 1.0)
    if name == "rejected":
        return RejectedDrafter(0)
    if name == "lookup":
        return PromptLookupDrafter()
    if name == "suffix":
        return SuffixDrafter(recent_tokens=64 * (seed % 2))
    if name in DRAFTER_TYPES:
        return tiny_parallel_head(name, seed)
    return tiny_eagle(seed) if name == "eagle3" else tiny_specblock(seed)


def make_engine(drafter: Drafter | None, *, num_pages: int = 200, policy: str = "fixed", **config) -> Engine:
    slots = DrafterSlots(drafter, "v0") if drafter is not None else DrafterSlots()
    tree = TreeConfig(max_draft_tokens=8, policy=policy)
    row_bytes, _ = pool_row_bytes(target(), slots, has_traces=False)
    return Engine(
        target(), slots, EngineConfig(page_tokens=PAGE, kv_bytes=num_pages * PAGE * row_bytes, tree=tree, **config)
    )


class Outputs:
    """Collects the events of every request and checks their order."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, str] = {}

    def __call__(self, event) -> None:
        assert event.request_id not in self.finish, "an event after the last one"
        self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
        assert event.stats.num_emitted_tokens == len(self.tokens[event.request_id])
        assert 0 <= event.num_accepted_tokens <= len(event.token_ids)
        if event.finish_reason is not None:
            self.finish[event.request_id] = event.finish_reason


def submit(engine: Engine, i: int, outputs: Outputs, group: Group = Group.ADAPTIVE, **params) -> str:
    values = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **params}
    request = GenerationRequest(
        request_id=f"r{i}", prompt_token_ids=prompts()[i], params=SamplingParams(**values), group=group
    )
    engine.submit(request, outputs)
    return request.request_id


def run_until_idle(engine: Engine, max_steps: int = 2000) -> None:
    for _ in range(max_steps):
        if not engine.step():
            engine.check_integrity()
            assert engine.allocator.num_free_pages == engine.allocator.num_pages
            return
        engine.check_integrity()
    raise AssertionError("the engine does not come to an end")


def assert_same(i: int, got: list[int], want: tuple[int, ...]) -> None:
    """Equal up to the first near tie: there fp32 rounding of differently shaped forwards may decide."""
    if got == list(want):
        return
    at = next(k for k, (a, b) in enumerate(zip(got, want, strict=False)) if a != b)
    logits = plain_logits(target(), [*prompts()[i], *want[:at]])[-1]
    gap = float(logits.max() - logits[got[at]])
    assert gap < 1e-4, f"request {i} differs at output token {at}: {got[at]} != {want[at]}, logit gap {gap}"


SAMPLED = (
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 8},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "repetition_penalty": 1.4},
    {"temperature": 0.7, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0},
)


@functools.cache
def sampled_reference() -> tuple[tuple[int, ...], ...]:
    """Each request alone, without a drafter."""
    out = []
    for i, params in enumerate(SAMPLED):
        engine, outputs = make_engine(None), Outputs()
        submit(engine, i, outputs, seed=100 + i, **params)
        run_until_idle(engine)
        out.append(tuple(outputs.tokens[f"r{i}"]))
    return tuple(out)
