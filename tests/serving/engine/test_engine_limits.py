"""Drafts at the end of the context, and drafters that fail before they draft, cost no request anything."""

from __future__ import annotations

import pytest

from paceline.config import TreeConfig
from paceline.kernels.cpu.library import ISA_VARIABLE, choose_isa
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.drafters.text import SuffixDrafter
from paceline.serving.target_model.model import TargetModel
from tests.helpers.fakes import greedy_continuation, tiny_model, tiny_tokenizer
from tests.helpers.graph_engines import generate, make_engine
from tests.helpers.scripted_drafters import OracleDrafter
from tests.helpers.static_kernels import STATIC_KERNELS

CONTEXT = 48


@pytest.mark.parametrize("forward", ["native", "fused", "kernels"])
def test_a_tree_that_reaches_beyond_the_context_gives_the_tokens_within_it(forward, monkeypatch):
    if forward == "native" and choose_isa() is None:
        pytest.skip("needs the compiled library")
    if forward == "fused":
        monkeypatch.setenv(ISA_VARIABLE, "none")
    model = tiny_model("qwen3", layers=2, context=CONTEXT, head_dim=16)
    kernels = STATIC_KERNELS if forward == "kernels" else None
    target = TargetModel.from_model(model, tiny_tokenizer(), version="tiny", kernels=kernels)
    assert target.forward_name.startswith(forward)
    prompt = [3 + i % 60 for i in range(CONTEXT - 9)]
    text = [*prompt, *greedy_continuation(target, prompt, 9), *[5] * 40]
    tree = TreeConfig(max_draft_tokens=32, max_frontier=0, policy="fixed")
    engine = make_engine(
        target, DrafterSlots(OracleDrafter({"r0": text}, num_slots=32), "oracle"), tree=tree, max_context_tokens=CONTEXT
    )
    got = generate(engine, [(prompt, 0.0)], max_tokens=9)
    assert got["r0"] == text[len(prompt) : CONTEXT] and engine.stats()["num_drafter_failures"] == 0


@pytest.mark.parametrize("first", [1, 3])
def test_a_text_drafter_that_fails_to_look_ahead_costs_the_drafts_only(first, monkeypatch):
    target = TargetModel.from_model(tiny_model("qwen3", context=96), tiny_tokenizer(), version="tiny")
    drafter, calls = SuffixDrafter(), []

    def fail(*_):
        calls.append(1)
        if len(calls) >= first:
            raise RuntimeError("broken")
        return True

    monkeypatch.setattr(drafter, "expects", fail)
    prompts = [([7, 8, 9, 7, 8, 9, 7, 8], 0.0)] * 3
    engine = make_engine(target, DrafterSlots(drafter, "suffix"))
    assert generate(engine, prompts) == generate(make_engine(target, DrafterSlots()), prompts)
    assert engine.stats()["num_drafter_failures"] == 1
