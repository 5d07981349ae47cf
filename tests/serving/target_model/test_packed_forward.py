"""Prompt rows and tree rows in one forward: what two forwards give, in half as many calls."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from paceline.kernels.cpu.library import ISA_VARIABLE
from paceline.kernels.dispatch import select_kernels
from paceline.serving.budget.cost_model import CostModel
from paceline.serving.target_model.kv_cache import PageAllocator
from paceline.serving.target_model.model import TargetBatch, forward_together
from tests.helpers.engines import VOCAB, FeatureDrafter, Run, Sinks, finish, greedy, make_engine, target
from tests.helpers.fakes import prefill, tiny_target
from tests.helpers.scripted_drafters import RandomDrafter

PROMPTS = [tuple(3 + (7 * i + k * k) % 60 for k in range(n)) for i, n in enumerate((3, 50, 20, 41))]


def tree_batch(pages: PageAllocator, scratch: torch.Tensor) -> TargetBatch:
    """Two trees: a root with two children behind 5 rows, and a lone root behind 9."""
    return TargetBatch(
        token_ids=torch.tensor([20, 21, 22, 23]),
        positions=torch.tensor([5, 6, 6, 9]),
        cu_rows=torch.tensor([0, 3, 4]),
        context_lens=torch.tensor([5, 9]),
        slot_table=pages.table(["a", "b"], 9),
        out_rows=scratch[:4],
        ancestors=torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1], [1, 0, 0]], dtype=torch.bool),
    )


def prompt_batch(pages: PageAllocator) -> TargetBatch:
    """7 rows of a prompt behind 6 known ones, and the first 4 rows of another."""
    return TargetBatch(
        token_ids=torch.arange(30, 41),
        positions=torch.tensor([*range(6, 13), *range(4)]),
        cu_rows=torch.tensor([0, 7, 11]),
        context_lens=torch.tensor([6, 0]),
        slot_table=pages.table(["c", "d"], 6),
        out_rows=torch.cat((pages.rows("c", 6, 13), pages.rows("d", 0, 4))),
        logit_rows=torch.tensor([6, 10]),
    )


@torch.inference_mode()
def test_one_forward_gives_what_two_give():
    results = []
    for is_joined in (False, True):
        pages = PageAllocator(32, 4)
        kv = target().new_kv_pool(32, 4, 8)
        for name, count in (("a", 5), ("b", 9), ("c", 6)):
            prefill(target(), kv, pages, name, list(range(10, 10 + count)))
        assert pages.ensure("c", 13) and pages.ensure("d", 4)
        trees, prompts = tree_batch(pages, kv.scratch_rows(4)), prompt_batch(pages)
        if is_joined:
            outs = forward_together(target(), kv, trees, prompts)
        else:
            outs = (target().forward(trees, kv), target().forward(prompts, kv))
        results.append([o for out in outs for o in (out.logits, out.features)] + [kv.data])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_pages", [200, 30])
def test_engines_that_pack_and_that_do_not_emit_the_same_tokens(num_pages):
    num_calls = {}
    for packs_prompts in (False, True):
        drafter, sinks = FeatureDrafter(), Sinks()
        counted = CountedTarget(target())
        engine = make_engine(
            drafter, num_pages=num_pages, prefill_chunk_tokens=16, sinks=sinks, packs_prompts=packs_prompts, model=counted
        )  # fmt: skip
        runs = [Run(engine, f"r{i}", p, max_tokens=16) for i, p in enumerate(PROMPTS)]
        finish(engine)
        assert [r.tokens for r in runs] == [greedy(p, 16) for p in PROMPTS]
        assert engine.stats()["num_drafter_failures"] == 0 and len(sinks.traces) == 4
        num_calls[packs_prompts] = counted.num_calls
        assert counted.num_mixed == 0 or packs_prompts
        assert counted.num_mixed > 3 or not packs_prompts
    assert num_calls[True] < num_calls[False]


class CountedTarget:
    """The target, with its forwards counted."""

    def __init__(self, inner) -> None:
        self._inner, self.num_calls, self.num_mixed = inner, 0, 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def forward(self, batch, kv):
        self.num_calls += 1
        self.num_mixed += batch.ancestors is not None and batch.logit_rows is not None
        return self._inner.forward(batch, kv)


def test_prompts_get_a_forward_of_their_own_where_attention_pads(monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, "none")
    engine = make_engine(RandomDrafter(VOCAB), model=tiny_target(vocab=VOCAB, context=128))
    assert not select_kernels("cpu").is_capturable and not engine._packs_prompts


def test_prompts_ride_along_where_the_kernels_take_ragged_rows():
    capturable = CountedTarget(target())
    capturable.kernels = dataclasses.replace(target().kernels, is_capturable=True)
    assert make_engine(RandomDrafter(VOCAB), model=capturable)._packs_prompts


def test_the_prompts_share_of_the_forward_is_no_part_of_the_rounds_time():
    """A timer that stands still except in forwards, where every row takes a second."""
    sinks = Sinks()
    now = [0.0]

    class Timed(CountedTarget):
        def forward(self, batch, kv):
            now[0] += batch.token_ids.numel()
            return super().forward(batch, kv)

    timed = Timed(target())
    engine = make_engine(sinks=sinks, packs_prompts=True, prefill_chunk_tokens=8, model=timed)
    engine._decode._timer = lambda: now[0]
    engine.policy.budget.costs.verify = CostModel(float)
    Run(engine, "decodes", (5, 6), max_tokens=12)
    engine.step()
    Run(engine, "prompt", PROMPTS[1], max_tokens=1)
    finish(engine)
    assert timed.num_mixed > 3
    assert {(r["verify_ms"], r["share_ms"]) for r in sinks.rows} == {(1000.0, 1000.0)}, "one row a round"
