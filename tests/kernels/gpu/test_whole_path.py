"""The target and the engine over Triton kernels give what they give over the references."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from paceline.config import EngineConfig, TreeConfig
from paceline.kernels.dispatch import select_kernels
from paceline.kernels.gpu import tree_attention
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.sampling.request import GenerationRequest, SamplingParams
from paceline.serving.target_model.model import TargetBatch, TargetModel
from tests.helpers.fakes import tiny_model, tiny_tokenizer
from tests.helpers.launches import launches
from tests.helpers.scripted_drafters import RandomDrafter

VOCAB = 64
SCRATCH = 40
PROMPTS = [5, 0, 9]
TREES = [[-1, 0, 0, 1], [], [-1, 0]]
# float32 sums in another order: about 1e-6 on logits of size 5.
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


def make_target(kernels, device="cpu", kind="qwen3", **model_args) -> TargetModel:
    model = tiny_model(kind, vocab=VOCAB, layers=2, **model_args).to(device)
    return TargetModel.from_model(model, tiny_tokenizer(VOCAB), version="v", fast_path=False, kernels=kernels)


def batches(padding: int) -> list[TargetBatch]:
    """A ragged prefill and a ragged tree batch over it; request 1 has no rows; `padding` rows follow the last."""

    def batch(counts, contexts, positions, out_rows, ancestors) -> TargetBatch:
        count = sum(counts)
        tokens = torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(count))
        if ancestors is not None:
            ancestors = torch.cat((ancestors, torch.zeros(padding, ancestors.shape[1], dtype=torch.bool)))
        zeros = torch.zeros(padding, dtype=torch.int64)
        return TargetBatch(
            token_ids=torch.cat((tokens, zeros)),
            positions=torch.cat((torch.tensor(positions), zeros)),
            cu_rows=torch.tensor([0, *counts]).cumsum(0),
            context_lens=torch.tensor(contexts),
            slot_table=torch.arange(36).view(3, 12),
            out_rows=torch.cat((torch.tensor(out_rows), zeros - 1)),
            ancestors=ancestors,
        )

    rows = [12 * b + i for b, n in enumerate(PROMPTS) for i in range(n)]
    own = torch.zeros(6, 4, dtype=torch.bool)
    for i, seen in enumerate(([0], [0, 1], [0, 2], [0, 1, 3], [0], [0, 1])):
        own[i, seen] = True
    return [
        batch(PROMPTS, [0, 0, 0], [i for n in PROMPTS for i in range(n)], rows, None),
        batch([4, 0, 2], PROMPTS, [5, 6, 6, 7, 9, 10], range(SCRATCH, SCRATCH + 6), own),
    ]


def run(target: TargetModel, padding: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    kv = target.new_kv_pool(10, 4, 8)
    kv.data.fill_(float("nan"))
    out = []
    for batch in batches(padding):
        names = [f.name for f in dataclasses.fields(batch)]
        moved = {n: v.to(target.device) for n in names if (v := getattr(batch, n)) is not None}
        out.append(target.forward(TargetBatch(**moved), kv).logits.cpu())
    return out, kv.data.cpu()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_logits_of_prefill_and_ragged_trees_equal_the_reference(device, kernels, kind):
    # The reference plans on the host and has neither padding rows nor requests without rows to skip over.
    with launches(tree_attention._own_kernel) as ran:
        expected, expected_kv = run(make_target(select_kernels("cpu", "reference"), kind=kind), 0)
    assert not ran.names
    target = make_target(kernels, device, kind)  # checks its forward while it is made
    with launches(tree_attention._own_kernel) as ran:
        got, got_kv = run(target, 0)
    assert len(ran.names) == 2 * 2, "two forwards of two layers"
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)
    torch.testing.assert_close(got_kv, expected_kv, equal_nan=True, **TOLERANCE)


def test_padding_rows_change_nothing(device, kernels):
    """A batch padded to a fixed shape: padding rows have out_rows -1, lie past cu_rows[-1] and yield finite logits."""
    target = make_target(kernels, device)
    (prefill, trees), kv = run(target, 0)
    (padded_prefill, padded_trees), padded_kv = run(target, 5)
    torch.testing.assert_close(padded_prefill[:14], prefill, **TOLERANCE)
    torch.testing.assert_close(padded_trees[:6], trees, **TOLERANCE)
    assert torch.isfinite(padded_prefill).all() and torch.isfinite(padded_trees).all()
    torch.testing.assert_close(padded_kv, kv, equal_nan=True, **TOLERANCE)


def generate(target: TargetModel, max_tokens: int) -> list[tuple[int, ...]]:
    """Greedy tokens of three requests that join one after another, over a drafter that is often wrong."""
    tree = TreeConfig(max_draft_tokens=4, policy="fixed")
    config = EngineConfig(page_tokens=4, kv_bytes=64 * 4 * target.kv_row_bytes, tree=tree, prefill_chunk_tokens=6)
    engine = Engine(target, DrafterSlots(RandomDrafter(VOCAB), "v0"), config)
    outputs: list[list[int]] = []
    for i, prompt in enumerate(((10, 11, 12), (20, 21, 22, 23, 24, 25, 26), (30,))):
        outputs.append([])
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = GenerationRequest(request_id=f"r{i}", prompt_token_ids=prompt, params=params)
        engine.submit(request, lambda event, out=outputs[-1]: out.extend(event.token_ids))
        engine.step()
    for _ in range(100):
        if not engine.step():
            break
        engine.check_integrity()
    return [tuple(out) for out in outputs]


def test_engine_generates_the_references_tokens():
    if select_kernels("cpu", "auto").backend != "reference":
        pytest.skip("the CPU runs another backend by request")
    pytest.importorskip("triton")
    from paceline.kernels.gpu.launch import is_interpreted

    if not is_interpreted():
        pytest.skip("needs TRITON_INTERPRET=1")
    small = {"width": 16, "heads": 2, "kv_heads": 1}
    expected = generate(make_target(select_kernels("cpu", "reference"), **small), 6)
    assert [len(tokens) for tokens in expected] == [6, 6, 6]
    assert generate(make_target(select_kernels("cpu", "triton"), **small), 6) == expected
