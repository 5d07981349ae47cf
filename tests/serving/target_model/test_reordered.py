"""Claims of reordered linears: the same logits, bit for bit, without a second copy of a weight, where it can be."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.serving.target_model.kv_cache import PageAllocator
from paceline.serving.target_model.model import TargetModel
from paceline.serving.target_model.reordered import ReorderedLinear, reorder_linears, supports_reordered
from tests.helpers.fakes import prefill, tiny_model, tiny_tokenizer


def biased_model(*, is_tied=False, dtype=torch.bfloat16):
    """A Llama with biases, which neither the compiled nor the fused forward takes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=96, intermediate_size=200, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True, mlp_bias=True, initializer_range=0.2, tie_word_embeddings=is_tied,
        max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_()
    return model.to(dtype).eval()


needs_onednn = pytest.mark.skipif(not supports_reordered(biased_model()), reason="needs bfloat16 of oneDNN")


@needs_onednn
@pytest.mark.parametrize("is_tied", [False, True])
def test_logits_are_those_of_the_plain_modules_bit_for_bit(is_tied):
    plain = TargetModel.from_model(biased_model(is_tied=is_tied), tiny_tokenizer(), fast_path=False)
    target = TargetModel.from_model(biased_model(is_tied=is_tied), tiny_tokenizer())
    assert (plain.forward_name, target.forward_name) == ("modules", "modules-reordered")
    for count in (1, 5, 40):
        tokens = torch.randint(3, 64, (count,), generator=torch.Generator().manual_seed(count)).tolist()
        outputs = [prefill(t, t.new_kv_pool(8, 8, 0), PageAllocator(8, 8), "a", tokens) for t in (plain, target)]
        assert torch.equal(outputs[0].logits, outputs[1].logits)
        assert torch.equal(outputs[0].features, outputs[1].features)


@needs_onednn
@pytest.mark.parametrize("is_tied", [False, True])
def test_only_weights_that_others_hold_are_in_memory_twice(is_tied):
    target = TargetModel.from_model(biased_model(is_tied=is_tied), tiny_tokenizer())
    linears = [m for m in target.model.modules() if isinstance(m, ReorderedLinear)]
    assert len(linears) == 3 * 7 + 1 and not any(isinstance(m, torch.nn.Linear) for m in target.model.modules())
    left = {id(p): p.numel() for p in target.model.parameters() if p.ndim == 2}
    assert sum(left.values()) == target.embed_weight.numel()
    assert target.head_weight.shape == (64, 96) and target.num_weights > sum(left.values())


@needs_onednn
def test_it_can_be_taken_back():
    model, before = biased_model(), biased_model().state_dict()
    undo = reorder_linears(model, (model.get_input_embeddings().weight, model.lm_head.weight))
    undo()
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[k], before[k]) for k in before)


@needs_onednn
def test_logits_that_changed_leave_the_modules_as_they_were(monkeypatch):
    def shifted(self, x):
        return torch.nn.functional.linear(x, self.weight.to_dense(), self.bias) * 1.01

    monkeypatch.setattr(ReorderedLinear, "forward", shifted)
    target = TargetModel.from_model(biased_model(), tiny_tokenizer())
    assert target.forward_name == "modules"
    assert all(isinstance(m, torch.nn.Linear) for n, m in target.model.named_modules() if n.endswith("_proj"))


def test_other_number_types_and_faster_forwards_keep_their_weights():
    assert TargetModel.from_model(biased_model(dtype=torch.float32), tiny_tokenizer()).forward_name == "modules"
    fast = TargetModel.from_model(tiny_model(dtype=torch.bfloat16), tiny_tokenizer())
    assert fast.is_fast_path and not fast.has_reordered_linears
