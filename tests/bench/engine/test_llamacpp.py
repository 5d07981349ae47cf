"""Claims of the llama.cpp arms: the file holds the checkpoint's weights, and their answers are the target's greedy ones."""

import json
import struct
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from paceline.bench.engine import llamacpp
from paceline.bench.engine.arms import make_groups
from paceline.bench.engine.gguf import copy_gguf, write_gguf
from paceline.bench.engine.llamacpp import LlamaCppArm, LlamaCppModel, accepted
from paceline.cli.main import app
from paceline.errors import ConfigError
from paceline.serving.loading.checkpoint import open_checkpoint
from paceline.serving.loading.gguf_file import GgufFile
from paceline.serving.loading.target import read_target
from tests.helpers.fakes import greedy_continuation, tiny_model, tiny_tokenizer
from tests.helpers.gguf_files import TEXT, write_model

NUMBERS = {0: np.float32, 1: np.float16, 30: np.uint16}


def read_gguf(path):
    """(Key -> value, name -> (type, shape, bytes)) of a version 3 file, by the format's description."""
    data, at = path.read_bytes(), 0

    def take(form):
        nonlocal at
        found = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return found[0] if len(found) == 1 else found

    def text():
        nonlocal at
        size = take("Q")
        at += size
        return data[at - size : at].decode()

    magic, version, num_tensors, num_values = take("4sIQQ")
    assert (magic, version) == (b"GGUF", 3)
    values, records, tensors = {}, {}, {}
    for _ in range(num_values):
        key, kind = text(), take("I")
        values[key] = text() if kind == 8 else take({4: "I", 6: "f"}[kind])
    for _ in range(num_tensors):
        name, rank = text(), take("I")
        shape = [take("Q") for _ in range(rank)]
        records[name] = (take("I"), tuple(reversed(shape)), take("Q"))
    start = -(-at // 32) * 32
    for name, (kind, shape, offset) in records.items():
        assert offset % 32 == 0
        tensors[name] = np.frombuffer(data, NUMBERS[kind], int(np.prod(shape)), start + offset).reshape(shape)
    assert len(data) % 32 == 0
    return values, tensors


def save(folder, kind, *, is_tied=False, dtype=torch.float32, **shape):
    model = tiny_model(kind, dtype=dtype, **shape)
    if is_tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_file_holds_sizes_and_weights(tmp_path, is_tied):
    model = save(tmp_path, "qwen3", is_tied=is_tied, layers=2)
    write_gguf(tmp_path, tmp_path / "m.gguf", torch.bfloat16)
    values, tensors = read_gguf(tmp_path / "m.gguf")
    assert values["general.architecture"] == "qwen3" and values["qwen3.block_count"] == 2
    assert values["qwen3.attention.head_count_kv"] == 2 and values["tokenizer.ggml.model"] == "none"
    assert ("output.weight" in tensors) is not is_tied and len(tensors) == 2 * 11 + (2 if is_tied else 3)
    query = model.model.layers[1].self_attn.q_proj.weight.detach().bfloat16().view(torch.uint16)
    assert np.array_equal(tensors["blk.1.attn_q.weight"], query.numpy())
    norm = model.model.layers[0].self_attn.k_norm.weight.detach()
    assert np.array_equal(tensors["blk.0.attn_k_norm.weight"], norm.numpy())


def test_rows_of_a_llamas_queries_and_keys_are_interleaved(tmp_path):
    model = save(tmp_path, "llama", layers=1)
    write_gguf(tmp_path, tmp_path / "m.gguf", torch.float32)
    _, tensors = read_gguf(tmp_path / "m.gguf")
    for name, own in (("attn_k", "k_proj"), ("attn_q", "q_proj")):
        weight = getattr(model.model.layers[0].self_attn, own).weight.detach().numpy()
        heads = weight.reshape(-1, 16, 32)
        for i in range(8):  # values i and i + 8 of a head are turned together: neighbours in the file
            found = tensors[f"blk.0.{name}.weight"].reshape(-1, 16, 32)
            assert np.array_equal(found[:, 2 * i], heads[:, i]) and np.array_equal(found[:, 2 * i + 1], heads[:, i + 8])


def test_models_that_it_cannot_express_are_refused(tmp_path):
    save(tmp_path, "qwen3_moe")
    with pytest.raises(ConfigError, match="model must be a dense Llama or Qwen3"):
        write_gguf(tmp_path, tmp_path / "m.gguf", torch.float32)


def test_without_the_package_it_says_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ConfigError, match="pip install llama-cpp-python"):
        llamacpp.load_package()


@pytest.mark.parametrize(
    ("feed", "best", "new"),
    [([7], [3], [3]), ([7, 3, 4], [3, 4, 5], [3, 4, 5]), ([7, 3, 9], [3, 4, 5], [3, 4]), ([7, 8, 4], [3, 4, 5], [3])],
)
def test_a_draft_counts_as_far_as_it_is_the_models_own(feed, best, new):
    assert accepted(feed, best) == new


@pytest.mark.parametrize("name", [llamacpp.PLAIN, llamacpp.LOOKUP])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_answers_are_the_targets_greedy_ones(tmp_path, kind, name):
    """More requests than run at once, of unlike lengths; float32 leaves no near ties here."""
    pytest.importorskip("llama_cpp")
    save(tmp_path, kind, width=64)
    target = read_target(tmp_path)
    arm = LlamaCppArm(name, LlamaCppModel(tmp_path, target, num_context=80))
    prompts = [tuple(int(x) for x in np.random.default_rng(i).integers(3, 64, 4 + 5 * i)) for i in range(7)]
    for batch in (1, 3):
        groups = make_groups(
            prompts, bucket="b", batch=batch, group_size=7, temperature=0.0, max_tokens=20, seed=0, ignore_eos=True
        )
        timing = arm.run(groups[0])
        assert [list(t) for t in timing.token_ids] == [greedy_continuation(target, list(p), 20) for p in prompts]
        assert timing.seconds > 0 and len(timing.ttft_s) == batch and timing.full_batch.num_tokens > 0
    assert arm.supports(1, 0.0) and not arm.supports(1, 0.8) and arm.supports(2, 0.0) == (name == llamacpp.PLAIN)


def test_the_engine_benchmark_compares_its_answers_with_plain_ones(tmp_path):
    pytest.importorskip("llama_cpp")
    path = tmp_path / "engine.json"
    words = ["--arms", "plain,llamacpp,llamacpp_lookup", "--batch", "1,2", "--buckets", "tools", "--temperature", "0", "--prompts", "2"]  # fmt: skip
    words += ["--groups", "2", "--warmup", "1", "--waves", "1", "--max-tokens", "8", "--check", "1", "--threads", "1"]
    result = CliRunner().invoke(app, ["bench", "engine", *words, "--json", str(path)])
    assert result.exit_code == 0, result.output
    alone, pair = json.loads(path.read_text())["cells"]
    assert set(alone["peers"]) == {"llamacpp", "llamacpp_lookup"} and set(pair["peers"]) == {"llamacpp"}
    for cell in (alone, pair):
        assert cell["ratios"]["llamacpp"]["whole"]["ratio"] > 0
        assert cell["peers"]["llamacpp"]["num_compared"] == cell["num_requests"]
        assert cell["peers"]["llamacpp"]["num_mismatches"] == 0
    assert "answers differ from plain's" in result.output


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "F16"])
def test_a_copy_without_quantization_has_the_files_values_and_its_tokenizer(tmp_path, kind):
    """The copy is read by our own reader, which reads what llama.cpp's converter writes."""
    model = tiny_model("llama", vocab=400, width=256, heads=4, head_dim=64)
    source, copy = write_model(tmp_path / "model.gguf", model, kind), tmp_path / "copy.gguf"
    copy_gguf(source, copy, torch.bfloat16)
    own, other = (open_checkpoint(path) for path in (source, copy))
    assert {r.type for r in GgufFile(copy).tensors.values()} == {"BF16", "F32"}
    left_out = ("general.file_type", "general.quantization_version")
    assert {k: v for k, v in GgufFile(source).values.items() if k not in left_out} == GgufFile(copy).values
    states = [c.model(torch.bfloat16).state_dict() for c in (own, other)]
    assert states[0].keys() == states[1].keys() and all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    assert [own.tokenizer()(t)["input_ids"] for t in TEXT] == [other.tokenizer()(t)["input_ids"] for t in TEXT]
