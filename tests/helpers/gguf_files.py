"""GGUF files written by the format's own package: random weights in every type, tokenizers of both kinds."""

import json

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from paceline.bench.engine.gguf import key_values, named_tensors
from paceline.serving.loading.gguf_model import halve_rows, has_turned_rows

TEXT = [
    "Hello, who are you? I'm a small model; it's 2024 and we've 1234567 tokens.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n\n\n",
    "  two spaces, a tab\tand trailing blanks   \r\n naïve café, 日本語 and 🙂",
]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_values(pre="smollm", vocab=400):
    """(Values of a byte-level tokenizer, its vocabulary, its merges), learned from TEXT."""
    learner = Tokenizer(BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), special_tokens=CONTROL,
        show_progress=False,
    )  # fmt: skip
    learner.train_from_iterator(TEXT * 4, trainer)
    return _values(learner, "gpt2", [3] * len(CONTROL), {"pre": pre, "add_bos_token": False, "eos_token_id": 2})


def sentencepiece_values(vocab=500):
    """The same for a SentencePiece one, whose scores stand for its merges; also the tokenizer they were taken from."""
    learner = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    learner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    learner.decoder = decoders.Sequence(steps)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    learner.train_from_iterator(
        [t for t in TEXT if t.isascii()] * 4,
        trainers.BpeTrainer(vocab_size=vocab, special_tokens=special, show_progress=False),
    )
    values, vocab_of, merges = _values(
        learner, "llama", [2, 3, 3, *[6] * 256], {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    )
    rank = {left + right: i for i, (left, right) in reversed(list(enumerate(merges)))}
    values["tokenizer.ggml.scores"] = [-float(rank.get(t, 0)) for t in values["tokenizer.ggml.tokens"]]
    del values["tokenizer.ggml.merges"]
    return values, vocab_of, learner


def _values(learner, kind, types, more):
    vocab = learner.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = _merges(learner)
    values = {
        "tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types + [1] * (len(tokens) - len(types)),
        "tokenizer.ggml.merges": [" ".join(m) for m in merges], "tokenizer.chat_template": TEMPLATE,
        **{f"tokenizer.ggml.{k}": v for k, v in more.items()},
    }  # fmt: skip
    return values, vocab, merges


def _merges(learner):
    return [
        tuple(m) if isinstance(m, list) else tuple(m.split(" "))
        for m in json.loads(learner.to_str())["model"]["merges"]
    ]


def write_model(path, model, kind="F32", *, values=None, tokenizer=None, tensors=None):
    """Write a model with its matrices in a type; the model's own values become those of the file, in float32.

    values, tensors: replace or, as None, remove what the file says.
    """
    config, type_ = model.config, GGMLQuantizationType[kind]
    rope = config.rope_parameters
    tokenizer = byte_level_values(vocab=config.vocab_size)[0] if tokenizer is None else tokenizer
    said = {**key_values(config, rope["rope_theta"]), **tokenizer, **(values or {})}
    writer = GGUFWriter(path, said.pop("general.architecture", config.model_type))
    for key, value in said.items():
        _write_value(writer, key, value)
    state = model.state_dict()
    for (own, _), (name, tensor) in zip(state.items(), named_tensors(model), strict=False):
        if name in (tensors or {}):
            continue
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor.float().numpy())
            continue
        data = _encode(tensor.float().numpy(), type_)
        found = torch.from_numpy(dequantize(data, type_).copy())
        if has_turned_rows(config.model_type, own):
            found = halve_rows(found, len(found) // config.head_dim)
        state[own].copy_(found)
        writer.add_tensor(name, data, raw_dtype=type_ if data.dtype == np.uint8 else None)
    for name, tensor in (tensors or {}).items():
        if tensor is not None:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _encode(values, kind):
    try:
        return quantize(values, kind)
    except NotImplementedError:  # types that the package only reads: random blocks with small factors
        block, size = GGML_QUANT_SIZES[kind]
        draws = np.random.default_rng(values.size)
        blocks = draws.integers(0, 256, (values.size // block, size), dtype=np.uint8)
        for at in (208,) if kind.name == "Q6_K" else (0, 2):
            blocks[:, at : at + 2] = draws.uniform(1e-4, 3e-4, (len(blocks), 1)).astype(np.float16).view(np.uint8)
        return blocks.reshape(len(values), -1)


def _write_value(writer, key, value):
    if value is None:
        return
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
