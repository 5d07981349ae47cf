"""The forward by kernels launches few kernels: ten a layer, whatever the batch, and few beside the layers."""

from __future__ import annotations

import functools
import os

import pytest
import torch

from paceline.kernels.dispatch import select_kernels
from paceline.serving.target_model.kv_cache import PageAllocator
from paceline.serving.target_model.model import TargetModel
from tests.helpers.fakes import tiny_model, tiny_tokenizer
from tests.helpers.launch_count import counted_launches
from tests.helpers.trees import tree_batch

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
MAX_A_LAYER, MAX_BESIDE = 10, 9


@functools.cache  # that a target is right by its kernels is found out by the slow interpreter
def make_target(kind, num_layers):
    model = tiny_model(kind, layers=num_layers, width=16, heads=2, kv_heads=1, context=512)
    target = TargetModel.from_model(
        model, tiny_tokenizer(), kernels=select_kernels("cpu", "triton"), tap_layers=(0, 1), version="tiny"
    )
    assert target.forward_name == "kernels"
    return target


def verify_launches(kind, num_layers, trees, context=3):
    """Kernels of a verify forward behind prompts of `context` tokens and some more."""
    target = make_target(kind, num_layers)
    names, contexts = [f"r{i}" for i in range(len(trees))], [context + 2 * i for i in range(len(trees))]
    pages, kv = PageAllocator(64, 16), target.new_kv_pool(64, 16, 16)
    for name, length in zip(names, contexts, strict=True):
        assert pages.ensure(name, length)  # what its rows hold is all the same to a count
    tokens = list(range(5, 5 + sum(map(len, trees))))
    batch = tree_batch(pages, kv, names, contexts, trees, tokens)
    with counted_launches() as count:
        target.forward(batch, kv)
    return count


@pytest.mark.parametrize(
    ("kind", "trees", "context"),
    [
        ("qwen3", [[-1]], 300),  # a long context is dear in the interpreter
        ("qwen3", [[-1, 0, 0, 1], [-1, 0], [-1]], 3),
        ("llama", [[-1, 0, 0, 1], [-1, 0], [-1]], 3),
    ],
    ids=["one row", "three trees", "three trees of llama"],
)
def test_a_layer_takes_ten_launches(kind, trees, context):
    two, three = (verify_launches(kind, num, trees, context) for num in (2, 3))
    a_layer = three.total - two.total
    assert a_layer == (MAX_A_LAYER if context > 200 else MAX_A_LAYER - 1), three.names - two.names  # parts of a context
    assert two.total - 2 * a_layer <= MAX_BESIDE, two.names


def test_the_modules_keep_their_parameters_as_views_of_the_joined_ones():
    target = make_target("qwen3", 2)
    model, plain = target.model, tiny_model("qwen3", layers=2, width=16, heads=2, kv_heads=1, context=512)
    for (name, own), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, other) and not own.is_inference(), name
    attention = model.get_decoder().layers[0].self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
