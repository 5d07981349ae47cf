"""Counted sizes are those of really built modules, at the full size of 8B targets (meta device) and in operations run."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from paceline.bench.engine.shapes import SHAPES
from paceline.bench.shapes.costs import (
    DRAFT_VOCAB,
    DRAFTERS,
    RANK_HIDDEN,
    SPECBLOCK_LAYERS,
    TAPS,
    DraftPlan,
    LayersCost,
    eagle3_forwards,
    num_params,
    specblock_forwards,
    table_forwards,
    total,
    verify_forward,
)
from paceline.bench.shapes.kernel_shapes import MODELS, NUM_SLOTS, Shape, floor_bytes, kv_bytes
from paceline.bench.shapes.run import LIMIT, context_at_limit, specblock_over_eagle3
from paceline.bench.shapes.timing import build_part, runner
from paceline.errors import ConfigError
from paceline.serving.specblock.model import SpecBlockConfig, SpecBlockModel

PLAN = DraftPlan()
BOTH = pytest.mark.parametrize("model", list(MODELS))


def specblock_config(shape: Shape) -> SpecBlockConfig:
    """The published SpecBlock of a target, as this project's own model takes it."""
    return SpecBlockConfig(
        hidden_size=shape.hidden_size, intermediate_size=shape.ffn_size, num_heads=shape.heads, num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, vocab_size=shape.vocab_size, feature_size=TAPS * shape.hidden_size,
        embed_size=shape.hidden_size, num_layers=SPECBLOCK_LAYERS, num_slots=NUM_SLOTS, draft_vocab_size=DRAFT_VOCAB,
        rank_hidden=RANK_HIDDEN,
    )  # fmt: skip


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@BOTH
def test_specblock_is_counted_as_our_model_of_the_published_size_has_it(model):
    with torch.device("meta"):
        built = SpecBlockModel(specblock_config(MODELS[model]))
    counted = num_params(specblock_forwards(MODELS[model], PLAN))
    assert _size(built) - built.log_beta.numel() == counted  # the released network has no score calibration
    assert round(counted / 1e6, 1) == {"llama-3.1-8b": 702.6, "qwen3-8b": 652.3}[model]


@BOTH
def test_eagle3_is_counted_as_a_llama_layer_with_a_doubled_attention_input(model):
    config = SHAPES["llama-3.1-8b"]()
    config.intermediate_size = MODELS[model].ffn_size
    h = config.hidden_size
    with torch.device("meta"):
        layer = LlamaDecoderLayer(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, nn.Linear(2 * h, old.out_features, bias=False))
        rest = nn.ModuleList([nn.Linear(3 * h, h, bias=False), nn.Linear(h, DRAFT_VOCAB, bias=False), nn.RMSNorm(h), nn.RMSNorm(h)])  # fmt: skip
    assert _size(layer) + _size(rest) == num_params(eagle3_forwards(MODELS[model], PLAN))


def test_dflash_is_counted_as_five_qwen3_layers_and_a_projection():
    config = SHAPES["qwen3-8b"]()
    h = config.hidden_size
    with torch.device("meta"):
        layers = nn.ModuleList(Qwen3DecoderLayer(config, i) for i in range(5))
        rest = nn.ModuleList([nn.Linear(5 * h, h, bias=False), nn.RMSNorm(h), nn.RMSNorm(h)])
    counted = num_params(table_forwards(MODELS["qwen3-8b"], PLAN))
    assert counted == _size(layers) + _size(rest) and round(counted / 1e9, 3) == 1.049


@BOTH
def test_the_target_is_counted_as_the_model_that_is_served(model):
    shape = replace(MODELS[model], context=1000, requests=3, nodes=0)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(SHAPES[model]())
    plain = verify_forward(shape)
    assert plain.weight_bytes == 2 * (_size(built) - built.model.embed_tokens.weight.numel())
    kept = 3 * shape.num_layers * shape.kv_width * 2
    assert plain.kv_bytes == kv_bytes(shape) + kept
    norms = plain.weight_bytes + kv_bytes(shape) - floor_bytes(shape)
    assert 0 < norms < 1e-4 * plain.weight_bytes  # the kernel benchmark's floor leaves norms out


@BOTH
def test_every_timed_module_has_the_counted_parameters(model):
    shape = replace(MODELS[model], context=64, requests=2, nodes=4)
    forwards = [f for forwards_of in DRAFTERS.values() for f in forwards_of(shape, PLAN)] + [verify_forward(shape)]
    with torch.device("meta"):
        for forward in forwards:
            for part in forward.parts:
                each = part.num_params // (part.count if isinstance(part, LayersCost) else 1)
                assert _size(build_part(part)) == each, (forward.name, part.name)


@pytest.mark.parametrize("name", [*DRAFTERS, "verify"])
def test_counted_operations_are_those_that_run(name):
    """All matrix products of every forward, run on small layers of the same layout."""
    shape = replace(MODELS["qwen3-8b"], hidden_size=32, ffn_size=48, heads=4, kv_heads=2, head_dim=8, vocab_size=96, context=12, requests=2, nodes=5)  # fmt: skip
    plan = DraftPlan(depth=6, topk=3, leaves=5, accepted=2)
    forwards = [verify_forward(shape)] if name == "verify" else DRAFTERS[name](shape, plan)
    for part in [p for f in forwards for p in f.parts]:
        call = runner(build_part(part), part)
        counter = FlopCounterMode(display=False)
        with counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            call()
        assert counter.get_total_flops() * (part.count if isinstance(part, LayersCost) else 1) == part.flops, part.name


def test_kv_of_a_committed_token_is_what_the_layouts_keep():
    """32 KiB for SpecBlock's four slots in two layers, 4 KiB for EAGLE-3's layer, 20 KiB for five layers."""
    shape = MODELS["llama-3.1-8b"]
    for name, forward, kib in (("specblock", 0, 32), ("specblock", 1, 32), ("eagle3", 0, 4), ("eagle3", 7, 4), ("dflash", 0, 20)):  # fmt: skip
        a, b = (DRAFTERS[name](replace(shape, context=c), PLAN)[forward].kv_bytes for c in (100, 101))
        assert b - a == kib * 1024, (name, forward)


@BOTH
def test_specblock_moves_at_most_0_52_of_eagle3s_bytes_at_equal_depth(model):
    shape = replace(MODELS[model], context=1024, requests=1, nodes=60)
    ratio = specblock_over_eagle3(shape, PLAN)
    assert 0.44 <= ratio["weight_bytes"] <= ratio["bytes"] <= LIMIT
    assert len(specblock_forwards(shape, PLAN)) == 2 and len(eagle3_forwards(shape, PLAN)) == PLAN.depth
    assert len(specblock_forwards(shape, DraftPlan(depth=4))) == 1


@BOTH
def test_the_context_at_which_the_limit_is_passed_is_exact(model):
    shape = MODELS[model]
    at = context_at_limit(shape, PLAN)
    assert at is not None

    def excess(context: int) -> float:
        ours, theirs = (total(DRAFTERS[n](replace(shape, context=context), PLAN))["bytes"] for n in ("specblock", "eagle3"))  # fmt: skip
        return ours - LIMIT * theirs

    assert excess(at) <= 0 < excess(at + 1)
    assert context_at_limit(shape, DraftPlan(depth=5)) is None  # a second block for one token deeper costs too much


def test_batches_share_weights_and_not_kv():
    one, eight = (total(specblock_forwards(replace(MODELS["qwen3-8b"], context=1000, requests=b), PLAN)) for b in (1, 8))  # fmt: skip
    assert eight["weight_bytes"] == one["weight_bytes"] and eight["kv_bytes"] == 8 * one["kv_bytes"]


@pytest.mark.parametrize("bad", [{"depth": 0}, {"depth": 9}, {"topk": 0}, {"leaves": 0}, {"accepted": -1}])
def test_plans_that_no_drafter_can_follow_are_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        DraftPlan(**bad)
