"""Claims of GGUF targets: the file's weights, sizes, text and end tokens are the target's; what cannot be read is refused
in one sentence."""

import struct

import pytest
import torch
from transformers import GPT2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from paceline.adapt.families.recipe import target_shape
from paceline.adapt.families.target_handle import load_target_handle
from paceline.errors import ConfigError
from paceline.paths import model_version, resolve_model
from paceline.serving.loading.checkpoint import open_checkpoint
from paceline.serving.loading.gguf_file import BLOCK_TYPES, PLAIN_TYPES
from paceline.serving.loading.gguf_model import ROPE_FACTORS
from paceline.serving.loading.target import check_target, read_target
from tests.helpers.fakes import greedy_continuation, tiny_model
from tests.helpers.gguf_files import CONTROL, TEXT, byte_level_values, sentencepiece_values, write_model

IDS = torch.arange(3, 43)[None] * 7 % 400


def model_of(kind="llama", **shape):
    return tiny_model(
        kind, vocab=400, **{"width": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "layers": 2, **shape}
    )


def logits(model):
    with torch.inference_mode():
        return model(IDS).logits.float()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", [*PLAIN_TYPES, *BLOCK_TYPES])
def test_the_target_computes_with_the_files_values(tmp_path, family, kind):
    model = model_of(family)
    path = write_model(tmp_path / "m.gguf", model, kind)
    checkpoint = open_checkpoint(path)
    found = checkpoint.model(torch.float32)
    assert float((logits(found) - logits(model)).norm() / logits(model).norm()) < 0.05
    if kind not in ("F32", "F16"):  # the target's values are those of the file in bfloat16
        for weight in model.parameters():
            weight.data = weight.data.bfloat16().float()
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters(), strict=True))
    assert torch.equal(logits(found), logits(model))
    own = torch.float32 if kind in ("F32", "F16") else torch.bfloat16
    assert checkpoint.model().dtype == checkpoint.config().dtype == own


def test_a_target_is_served_as_any_other(tmp_path):
    model = model_of("llama", width=64, head_dim=16)
    path = write_model(tmp_path / "m.gguf", model, "Q4_1")
    check_target(path)
    target = read_target(path, dtype="float32")
    assert target.is_fast_path and target.context_tokens == 512 and target.eos_token_ids == {0, 2}
    assert greedy_continuation(target, [5, 6, 7], 8) == greedy_continuation(read_target(path, dtype="float32", fast_path=False), [5, 6, 7], 8)  # fmt: skip
    assert read_target(path).dtype == torch.bfloat16
    assert target.version == model_version(path) == read_target(path).version and len(target.version) == 16
    assert read_target(path, dtype="int8").version == f"{target.version}-int8"
    handle = load_target_handle(path)
    assert (handle.version, handle.vocab_size, handle.num_layers) == (target.version, 400, 2)
    assert torch.equal(handle.head_weight.float(), target.head_weight) and target_shape(path).head_dim == 16


def test_a_file_without_a_head_has_its_embedding_for_one(tmp_path):
    model = model_of("qwen3")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    path = write_model(tmp_path / "m.gguf", model)
    found = open_checkpoint(path).model()
    assert found.lm_head.weight is found.model.embed_tokens.weight and load_target_handle(path).untied_head is None
    assert torch.equal(logits(found), logits(model))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 8.0, "beta_slow": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    ],
)  # fmt: skip
def test_rope_scaling_is_the_models(tmp_path, rope):
    model = model_of("llama")
    plain = logits(model)
    model.config.rope_parameters = {"rope_theta": 500000.0, **rope}
    model = type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict())
    values = {f"llama.rope.scaling.{k}": v for k, v in (("type", rope["rope_type"]), ("factor", rope["factor"]))}
    values["llama.rope.scaling.original_context_length"] = 128
    values |= {f"llama.rope.scaling.yarn_{k}": rope[k] for k in ("beta_fast", "beta_slow") if k in rope}
    tensors = {}
    if rope["rope_type"] == "llama3":
        base = 500000.0 ** (-torch.arange(0, 64, 2).float() / 64)
        values, tensors = {}, {ROPE_FACTORS: (base / model.model.rotary_emb.inv_freq).numpy()}
    path = write_model(tmp_path / "m.gguf", model, values=values, tensors=tensors)
    found = logits(open_checkpoint(path).model())
    assert torch.allclose(found, logits(model), atol=1e-4) and not torch.allclose(found, plain, atol=1e-2)


@pytest.mark.parametrize(
    "values", [{"scaling.factor": 4.0}, {"scale_linear": 4.0}, {"scaling.type": "linear", "scale_linear": 4.0}]
)
def test_a_factor_without_a_kind_is_linear_as_it_is_to_llama_cpp(tmp_path, values):
    path = write_model(tmp_path / "m.gguf", model_of(), values={f"llama.rope.{k}": v for k, v in values.items()})
    assert open_checkpoint(path).config().rope_parameters == {
        "rope_type": "linear",
        "rope_theta": 10000.0,
        "factor": 4.0,
    }
    values = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}
    path = write_model(tmp_path / "n.gguf", model_of(), values=values)
    assert open_checkpoint(path).config().rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(("pre", "reference"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)])
def test_byte_level_tokens_are_those_of_transformers(tmp_path, pre, reference):
    values, vocab, merges = byte_level_values(pre)
    path = write_model(tmp_path / "m.gguf", model_of(layers=1), tokenizer=values)
    tokenizer, expected = open_checkpoint(path).tokenizer(), reference(vocab=vocab, merges=merges)
    expected.add_special_tokens({"additional_special_tokens": CONTROL})
    for text in [*TEXT, "<|im_start|>user\nHi<|im_end|>\n", "".join(TEXT)]:
        ids = tokenizer.encode(text)
        assert ids == expected.encode(text) and tokenizer.decode(ids) == text
    assert len(tokenizer) == len(vocab) and set(tokenizer.all_special_ids) == {0, 1, 2}
    assert tokenizer.decode([1, 50, 2], skip_special_tokens=True) == tokenizer.decode([50])
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n" and tokenizer.encode(text)[0] == 1


@pytest.mark.parametrize(("pre", "width"), [("smollm", 1), ("qwen2", 1), ("llama-bpe", 3)])
def test_digits_are_cut_as_the_file_says(tmp_path, pre, width):
    values = {**byte_level_values(pre)[0], "tokenizer.ggml.bos_token_id": 1}
    del values["tokenizer.ggml.add_bos_token"]
    path = write_model(tmp_path / "m.gguf", model_of(layers=1), tokenizer=values)
    tokenizer = open_checkpoint(path).tokenizer()
    parts = [text for text, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a1234567")]
    assert max(len(p) for p in parts[1:]) == width and "".join(parts) == "a1234567"
    assert all(tokenizer.decode(tokenizer.encode(t), skip_special_tokens=True) == t for t in TEXT)
    assert (tokenizer.encode("a")[0] == 1) is (pre == "llama-bpe")


def test_sentencepiece_merges_follow_from_scores(tmp_path):
    values, vocab, learner = sentencepiece_values()
    path = write_model(tmp_path / "m.gguf", tiny_model("llama", vocab=len(vocab), layers=1), tokenizer=values)
    tokenizer = open_checkpoint(path).tokenizer()
    for text in TEXT:
        ids = tokenizer.encode(text)
        assert ids == [1, *learner.encode(text).ids], "the beginning is marked unless the file says otherwise"
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    bare = {**values, "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False}
    path = write_model(tmp_path / "n.gguf", tiny_model("llama", vocab=len(vocab), layers=1), tokenizer=bare)
    tokenizer = open_checkpoint(path).tokenizer()
    assert all(tokenizer.decode(tokenizer.encode(t)) == t for t in TEXT)


def test_a_folder_of_such_a_name_is_a_checkpoint(tmp_path):
    model_of(layers=1).save_pretrained(tmp_path / "m.gguf")
    path = resolve_model(str(tmp_path / "m.gguf"))
    assert open_checkpoint(path).config().hidden_size == 256 and len(model_version(path)) == 16


REFUSED = [
    ({"general.architecture": "gemma3"}, "dense Llama or Qwen3.*'gemma3'"),
    ({"llama.expert_count": 8}, "expert_count 8"),
    ({"split.count": 3}, "one of 3 parts"),
    ({"llama.block_count": None}, "llama.block_count"),
    ({"llama.block_count": 4_000_000_000}, "block_count 4000000000"),
    ({"llama.block_count": 3}, "blk.2"),
    ({"llama.block_count": 1}, "a tensor 'blk.1"),
    ({"llama.embedding_length": 512}, "token_embd"),
    ({"llama.context_length": 1 << 30}, "a context of 1073741824"),
    ({"llama.rope.dimension_count": 32}, "rope.dimension_count 32"),
    ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
    ({"llama.attention.layer_norm_rms_epsilon": "small"}, "layer_norm_rms_epsilon"),
    ({"tokenizer.ggml.model": "t5"}, "gpt2 or llama"),
    ({"tokenizer.ggml.pre": "deepseek-v3"}, "tokenizer.ggml.pre 'deepseek-v3'"),
    ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre 'none'"),
    ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
    ({"tokenizer.ggml.tokens": ["a"] * 400}, "400 different tokens"),
    ({"tokenizer.ggml.merges": ["x y z", "qq"]}, "merges of two"),
    ({"tokenizer.ggml.merges": ["日 本"]}, "merges of its own tokens"),
    ({"tokenizer.ggml.eos_token_id": 999}, "999 beyond"),
    ({"tokenizer.ggml.bos_token_id": 999}, "999 beyond"),
    ({"tokenizer.ggml.bos_token_id": "<s>"}, "bos_token_id, it has a value of another kind"),
    ({"tokenizer.ggml.tokens": 5}, "tokenizer.ggml.tokens, it has a value of another kind"),
    ({"tokenizer.ggml.token_type": 5}, "token_type, it has a value of another kind"),
    ({"tokenizer.chat_template": ["a"]}, "chat_template, it has a value of another kind"),
    ({"llama.attention.head_count": 7}, "sizes that do not go together .*not a multiple"),
    ({"llama.rope.freq_base": float("inf")}, "rope.freq_base inf"),
    ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon nan"),
    ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, "rope.scaling.factor 0.0"),
    ({"llama.rope.scaling.attn_factor": 0.5}, "rope.scaling.attn_factor 0.5"),
    ({"llama.rope.scaling.yarn_attn_factor": 0.5}, "rope.scaling.yarn_attn_factor 0.5"),
    ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "rope.scaling.yarn_log_multiplier 0.1"),
    ({"llama.rope.scaling.of_tomorrow": True}, "rope.scaling.of_tomorrow True"),
]


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_a_file_cannot_mean_is_refused_in_one_sentence(tmp_path, values, words):
    path = write_model(tmp_path / "m.gguf", model_of(), values=values)
    with pytest.raises(ConfigError, match=words) as e:
        read_target(path)
    assert "\n" not in str(e.value) and str(path) in str(e.value)


@pytest.mark.parametrize("scores", [["best"] * 500, [float("nan")] * 500], ids=["words", "nan"])
def test_scores_that_are_no_numbers_are_refused(tmp_path, scores):
    values, vocab, _ = sentencepiece_values()
    values["tokenizer.ggml.scores"] = scores[: len(vocab)]
    path = write_model(tmp_path / "m.gguf", tiny_model("llama", vocab=len(vocab), layers=1), tokenizer=values)
    with pytest.raises(ConfigError, match="a score for each token"):
        open_checkpoint(path).tokenizer()


def test_a_beginning_that_no_text_can_have_is_refused(tmp_path):
    values = byte_level_values()[0]
    values["tokenizer.ggml.tokens"][1] = "a:b"
    values |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": True}
    path = write_model(tmp_path / "m.gguf", model_of(layers=1), tokenizer=values)
    with pytest.raises(ConfigError, match="mark a text's beginning, got 'a:b'"):
        open_checkpoint(path).tokenizer()


def test_weights_that_are_no_numbers_are_refused(tmp_path):
    model = model_of()
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.inf
    with pytest.raises(ConfigError, match=r"non-finite weights in blk\.0\.ffn_up"):
        read_target(write_model(tmp_path / "m.gguf", model))


def test_every_cut_and_every_flipped_byte_ends_in_one_sentence_or_a_model(tmp_path):
    whole = write_model(tmp_path / "m.gguf", model_of(layers=1, width=32, head_dim=16), "Q8_0").read_bytes()
    draws, path = torch.Generator().manual_seed(0), tmp_path / "n.gguf"
    cuts = [0, 3, 4, 8, 20, 24, 100, len(whole) // 2, len(whole) - 32]
    broken = [whole[:cut] for cut in cuts]
    for at in torch.randint(0, len(whole) // 2, (60,), generator=draws).tolist() + list(range(4, 60)):
        broken.append(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
    num_refused = 0
    for data in broken:
        path.write_bytes(data)
        try:
            checkpoint = open_checkpoint(path)
            checkpoint.model(), checkpoint.tokenizer()
        except ConfigError as e:
            num_refused += 1
            assert "\n" not in str(e)
    assert num_refused >= len(cuts) + 20


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"not a model at all, only text", "begins with b'not '"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "version is 1"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 0), "claims 1152921504606846976 tensors"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**60), "claims 1152921504606846976 values"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**62) + bytes(64), "in the middle of its header"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 0, 2**61) + bytes(64), "claims .* numbers"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 9, 1) + bytes(64), "unknown type 9"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 0), "general.architecture"),
        (
            struct.pack("<4sIQQ", b"GGUF", 3, 2, 0)
            + b"".join(struct.pack("<Q1sIQIQ", 1, name, 1, 1024, 0, 0) for name in (b"a", b"b"))
            + bytes(4200),
            "less bytes than its tensors take",
        ),
    ],
)
def test_a_hostile_header_costs_nothing(tmp_path, data, words):
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ConfigError, match=words) as e:
        open_checkpoint(tmp_path / "m.gguf")
    assert "\n" not in str(e.value)
