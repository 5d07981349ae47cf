"""Packed ragged forwards over paged KV equal ordinary forwards of the transformers model."""

import json
import os

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from paceline.errors import ConfigError
from paceline.kernels.cpu.library import choose_isa
from paceline.kernels.dispatch import select_kernels
from paceline.paths import model_version
from paceline.serving.loading.target import check_target, read_target
from paceline.serving.target_model.kv_cache import PageAllocator
from paceline.serving.target_model.model import TargetModel, default_tap_layers
from tests.helpers.fakes import plain_logits, prefill, tiny_model, tiny_target, tiny_tokenizer
from tests.helpers.trees import tree_batch, tree_path

# float32 sums in another order: about 1e-6 on logits of size 5.
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
TARGETS = {
    "llama-native": ("llama", None, "reference"),
    "qwen3-native": ("qwen3", None, "reference"),
    "llama-fused": ("llama", None, "reference"),
    "qwen3-fused": ("qwen3", None, "reference"),
    "llama-modules": ("llama", False, "reference"),
    "qwen3-modules": ("qwen3", False, "reference"),
    "qwen3_moe-modules": ("qwen3_moe", None, "reference"),
    "qwen3-triton": ("qwen3", None, "triton"),
    "llama-triton": ("llama", None, "triton"),
}
TREE = [-1, 0, 0, 1, 1, 2, 3]


@pytest.fixture(scope="module", params=TARGETS)
def target(request):
    kind, fast_path, backend = TARGETS[request.param]
    if backend == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    kernels = select_kernels("cpu", backend)
    forward = request.param.rpartition("-")[2]
    if forward == "native" and choose_isa() is None:
        pytest.skip("needs the compiled library")
    # The interpreter is slow; the native forward takes heads of whole vectors only.
    model = tiny_model(kind, layers=3 if backend == "triton" else 6, head_dim=8 if forward == "fused" else 16)
    made = TargetModel.from_model(model, tiny_tokenizer(), fast_path=fast_path, kernels=kernels)
    assert made.forward_name.startswith("kernels" if backend == "triton" else forward)
    return made


def _tokens(count, seed=0):
    return torch.randint(3, 64, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("chunk", [1, 5, 32])
def test_chunked_prefill_equals_one_ordinary_forward(target, chunk):
    kv, pages = target.new_kv_pool(8, 4, 0), PageAllocator(8, 4)
    tokens = _tokens(
        7 if target.forward_name == "kernels" else 23
    )  # the interpreter takes a tenth of a second a forward
    parts = [prefill(target, kv, pages, "a", tokens[i : i + chunk], i) for i in range(0, len(tokens), chunk)]
    torch.testing.assert_close(torch.cat([p.logits for p in parts]), plain_logits(target, tokens), **TOLERANCE)


def test_tree_rows_equal_sequential_decoding_of_their_paths(target):
    kv, pages = target.new_kv_pool(16, 4, 32), PageAllocator(16, 4)
    kv.data.fill_(float("nan"))  # rows that nobody wrote must not matter
    names, contexts, trees = ["a", "b", "c"], [7, 19, 1], [TREE, [-1], [-1, 0, 1]]
    prompts = [_tokens(n, seed=n) for n in contexts]
    for name, prompt in zip(names, prompts, strict=True):
        prefill(target, kv, pages, name, prompt)
    tokens = _tokens(11, seed=3)
    got = target.forward(tree_batch(pages, kv, names, contexts, trees, tokens), kv).logits
    at = 0
    for prompt, parents in zip(prompts, trees, strict=True):
        for i in range(len(parents)):
            path = [tokens[at + j] for j in tree_path(parents, i)]
            torch.testing.assert_close(got[at + i], plain_logits(target, prompt + path)[-1], **TOLERANCE)
        at += len(parents)


def test_accepted_rows_are_committed_and_rejected_rows_leave_no_trace(target):
    kv, pages = target.new_kv_pool(8, 4, 16), PageAllocator(8, 4)
    prompt, tokens = _tokens(9), _tokens(len(TREE), seed=5)
    prefill(target, kv, pages, "a", prompt)
    target.forward(tree_batch(pages, kv, ["a"], [9], [TREE], tokens), kv)
    path = tree_path(TREE, 4)
    pages.ensure("a", 9 + len(path) + 1)
    kv.commit(kv.scratch_rows(len(TREE))[path], pages.rows("a", 9, 9 + len(path)))
    kv.data[:, kv.scratch_start :] = float("nan")
    committed = prompt + [tokens[i] for i in path]
    got = prefill(target, kv, pages, "a", [11], len(committed)).logits
    torch.testing.assert_close(got[0], plain_logits(target, [*committed, 11])[-1], **TOLERANCE)


def test_rows_behind_the_context_need_no_scratch(target):
    kv, pages = target.new_kv_pool(8, 4, 16), PageAllocator(8, 4)
    prompt, tokens = _tokens(9), _tokens(len(TREE), seed=5)
    prefill(target, kv, pages, "a", prompt)
    batch = tree_batch(pages, kv, ["a"], [9], [TREE], tokens)
    expected = target.forward(batch, kv).logits
    pages.ensure("a", 9 + len(TREE))
    batch.out_rows = pages.rows("a", 9, 9 + len(TREE))
    torch.testing.assert_close(target.forward(batch, kv).logits, expected, **TOLERANCE)


def test_only_wanted_rows_get_logits_and_features_are_layer_outputs(target):
    kv, pages = target.new_kv_pool(8, 4, 16), PageAllocator(8, 4)
    prompt, tokens = _tokens(6), _tokens(len(TREE), seed=1)
    prefill(target, kv, pages, "a", prompt)
    full = target.forward(tree_batch(pages, kv, ["a"], [6], [TREE], tokens), kv)
    some = target.forward(tree_batch(pages, kv, ["a"], [6], [TREE], tokens, logit_rows=torch.tensor([4, 0])), kv)
    torch.testing.assert_close(some.logits, full.logits[[4, 0]], **TOLERANCE)
    assert some.features.shape == (len(TREE), target.feature_size)
    path = tree_path(TREE, 6)
    ids = torch.tensor([prompt + [tokens[i] for i in path]])
    with torch.inference_mode():
        states = target.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    expected = torch.cat([states[t + 1][0, -1] for t in target.tap_layers])
    torch.testing.assert_close(full.features[6], expected, **TOLERANCE)


def test_one_request_alone_equals_the_same_request_in_a_batch(target):
    kv, pages = target.new_kv_pool(16, 4, 32), PageAllocator(16, 4)
    for name, count in (("a", 5), ("b", 12)):
        prefill(target, kv, pages, name, _tokens(count, seed=count))
    tokens = _tokens(len(TREE) + 2, seed=8)
    both = target.forward(tree_batch(pages, kv, ["a", "b"], [5, 12], [TREE, [-1, 0]], tokens), kv).logits
    alone = target.forward(tree_batch(pages, kv, ["b"], [12], [[-1, 0]], tokens[-2:]), kv).logits
    torch.testing.assert_close(both[-2:], alone, **TOLERANCE)


def test_generate_of_the_wrapped_model_is_undisturbed(target):
    ids = torch.tensor([_tokens(8)])
    made = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    tokens = ids[0].tolist()
    for _ in range(6):
        tokens.append(int(plain_logits(target, tokens)[-1].argmax()))
    assert made[0].tolist() == tokens


@pytest.mark.parametrize(("head_dim", "forward"), [(8, "fused"), (16, "native")])
def test_bfloat16_forward_stays_near_the_modules(head_dim, forward):
    target = tiny_target("qwen3", dtype=torch.bfloat16, head_dim=head_dim)
    assert target.forward_name.startswith(forward) or choose_isa() is None
    kv, pages = target.new_kv_pool(8, 4, 0), PageAllocator(8, 4)
    tokens = _tokens(20)
    got, expected = prefill(target, kv, pages, "a", tokens), plain_logits(target, tokens)
    assert got.features.dtype == torch.bfloat16
    assert (got.logits - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("head_dim", [8, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 1), (1, 1)])
def test_odd_kv_heads_and_single_heads_run_fast(heads, kv_heads, head_dim):
    target = tiny_target("qwen3", heads=heads, kv_heads=kv_heads, head_dim=head_dim, layers=3)
    assert target.is_fast_path
    kv, pages = target.new_kv_pool(8, 4, 0), PageAllocator(8, 4)
    tokens = _tokens(9)
    torch.testing.assert_close(
        prefill(target, kv, pages, "a", tokens).logits, plain_logits(target, tokens), **TOLERANCE
    )


def test_saved_checkpoint_loads_with_its_version(tmp_path):
    made = tiny_target("llama")
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    loaded = read_target(tmp_path)
    assert loaded.version == model_version(tmp_path)
    assert len(loaded.version) == 16
    assert loaded.eos_token_ids == {1}
    assert loaded.kv_row_bytes == loaded.new_kv_pool(1, 1, 0).row_bytes
    tokens = _tokens(7)
    torch.testing.assert_close(plain_logits(loaded, tokens), plain_logits(made, tokens), **TOLERANCE)
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text() + "\n")
    assert model_version(tmp_path) != loaded.version


def test_versions_follow_the_weights():
    assert tiny_target(seed=0).version == tiny_target(seed=0).version
    assert tiny_target(seed=0).version != tiny_target(seed=1).version


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_target(tmp_path)
    with pytest.raises(ConfigError, match="tap_layers"):
        tiny_target(layers=4, tap_layers=(4,))
    with pytest.raises(ConfigError, match="fast_path"):
        TargetModel.from_model(tiny_model("qwen3_moe"), tiny_tokenizer(), fast_path=True)


def test_taps_may_be_off_and_default_to_three():
    target = tiny_target(tap_layers=())
    assert target.feature_size == 0
    assert prefill(target, target.new_kv_pool(1, 8, 0), PageAllocator(1, 8), "a", [3, 4]).features is None
    assert default_tap_layers(32) == (1, 15, 28)
    assert len(default_tap_layers(2)) == 3


def test_a_sliding_window_limits_the_context():
    model = tiny_model("qwen3")
    model.config.sliding_window = 40
    model.config.layer_types = ["sliding_attention"] * model.config.num_hidden_layers
    target = TargetModel.from_model(type(model)(model.config), tiny_tokenizer())
    assert target.context_tokens == 40
    assert not target.is_fast_path


@pytest.mark.parametrize(
    "family", ["gpt2", "opt", "gpt_neox", "bloom", "falcon", "gptj", "stablelm", "mamba", "t5", "diffllama"]
)
def test_families_that_cannot_be_served_are_refused_in_one_sentence(tmp_path, family):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    own = {
        "gptj": {"rotary_dim": 4}, "opt": {"word_embed_proj_dim": 32}, "stablelm": {"intermediate_size": 64},
        "diffllama": {"intermediate_size": 64, "num_key_value_heads": 2},
    }  # fmt: skip
    config = AutoConfig.for_model(family, **sizes, **own.get(family, {}))
    kind = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    kind.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="model") as e:
        read_target(tmp_path)
    assert len(str(e.value)) < 500 and "\n" not in str(e.value)
    if family not in ("falcon", "gptj", "stablelm", "mamba", "diffllama"):  # those show when they run
        with pytest.raises(ConfigError, match="family that can be served"):
            check_target(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"num_attention_heads": 5}, "not a multiple"), ({"hidden_size": "wide"}, "hidden_size"), (None, "config.json")],
)
def test_sizes_that_do_not_go_together_are_refused_in_one_sentence(tmp_path, change, words):
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(change and {**json.loads(config.read_text()), **change}))
    for read in (check_target, read_target):
        with pytest.raises(ConfigError, match=words) as e:
            read(tmp_path)
        assert "\n" not in str(e.value)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "phi3", "gemma3_text", "granite", "olmo2"])
def test_other_families_are_served_by_their_own_modules(family):
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 64, "pad_token_id": 0, "head_dim": 8, "max_position_embeddings": 128,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()
    target = TargetModel.from_model(model, tiny_tokenizer())
    tokens = _tokens(9)
    got = prefill(target, target.new_kv_pool(8, 4, 0), PageAllocator(8, 4), "a", tokens).logits
    torch.testing.assert_close(got, plain_logits(target, tokens), **TOLERANCE)


def _rope_model(family, rope):
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 64, "pad_token_id": 0, "head_dim": 8, "max_position_embeddings": 128,
    }  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, **sizes, eos_token_id=1, initializer_range=0.3, original_max_position_embeddings=32,
        rope_parameters={"rope_theta": 10_000.0, "factor": 4.0, **rope},
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        (
            "phi3",
            {
                "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 4.0, 8.0, 16.0],
                "partial_rotary_factor": 1.0,
            },
        ),
        ("llama", {"rope_type": "dynamic"}),
    ],
)  # fmt: skip
def test_rope_is_that_of_the_whole_context_whatever_else_is_in_the_forward(family, rope):
    tokens, short = _tokens(120), _tokens(9, seed=1)
    with torch.inference_mode():
        whole = _rope_model(family, rope)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    target = TargetModel.from_model(_rope_model(family, rope), tiny_tokenizer())
    kv, pages = target.new_kv_pool(100, 4, 16), PageAllocator(100, 4)
    parts = [prefill(target, kv, pages, "a", tokens[i : i + 20], i).logits for i in range(0, 120, 20)]
    torch.testing.assert_close(torch.cat(parts), whole, **TOLERANCE)
    prefill(target, kv, pages, "b", short)
    tree = [-1, 0]
    alone = target.forward(tree_batch(pages, kv, ["b"], [9], [tree], [5, 6]), kv).logits
    path = [-1, *range(12)]  # drafts of the neighbour that reach beyond the end of the context
    both = target.forward(
        tree_batch(pages, kv, ["a", "b"], [120, 9], [path, tree], [*_tokens(13, seed=2), 5, 6]), kv
    ).logits
    torch.testing.assert_close(both[-2:], alone, **TOLERANCE)
    again = target.forward(tree_batch(pages, kv, ["b"], [9], [tree], [5, 6]), kv).logits
    torch.testing.assert_close(again, alone, **TOLERANCE)
