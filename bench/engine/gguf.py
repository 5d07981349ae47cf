"""GGUF files that llama.cpp reads: a dense Llama or Qwen3 checkpoint's weights and sizes, or a copy of a file without quantization.

Of a checkpoint prompts are token ids, so the vocabulary is `none` with its size; a copy keeps the file's tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from paceline.errors import ConfigError
from paceline.serving.loading.checkpoint import open_checkpoint
from paceline.serving.loading.gguf_file import PLAIN_TYPES, GgufFile
from paceline.serving.loading.gguf_model import gguf_name, has_turned_rows, interleave_rows

_FAMILY = "general.architecture"
_OWN = (_FAMILY, "general.file_type", "general.quantization_version", "general.alignment")
"""What the writer says of a file itself."""
_TYPES = {dtype: GGMLQuantizationType[name] for name, dtype in PLAIN_TYPES.items()}


def write_gguf(checkpoint: Path, path: Path, dtype: torch.dtype) -> None:
    """Write the checkpoint's weights, matrices in `dtype` and vectors in float32.

    Raises: ConfigError for other families than dense Llama and Qwen3, for biases and for scaled RoPE.
    """
    model = open_checkpoint(checkpoint).model(dtype)
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    is_known = config.model_type in ("llama", "qwen3") and rope.get("rope_type", "default") == "default"
    if not is_known or any(name.endswith(".bias") for name in model.state_dict()):
        raise ConfigError(
            f"model must be a dense Llama or Qwen3 without biases and with plain RoPE to be handed to llama.cpp, got "
            f"{config.model_type}; leave its arms out"
        )
    writer = GGUFWriter(path, config.model_type)
    for key, value in key_values(config, float(rope.get("rope_theta", 10000.0))).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, tensor in named_tensors(model):
        data = tensor.contiguous().view(torch.uint8).view(*tensor.shape[:-1], -1).numpy()
        writer.add_tensor(name, data, raw_dtype=_TYPES[tensor.dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def copy_gguf(source: Path, path: Path, dtype: torch.dtype) -> None:
    """Write a GGUF file again with its matrices in `dtype` and its vectors in float32; all else stays as it is.

    Raises: ConfigError when the source cannot be read.
    """
    file = GgufFile(source)  # says in one sentence what is wrong with a file
    fields = GGUFReader(source).fields
    writer = GGUFWriter(path, str(file.value(_FAMILY, str)))
    for name, field in fields.items():
        if name in file.values and name not in _OWN:
            kinds = field.types
            writer.add_key_value(
                name, field.contents(), kinds[0], kinds[-1] if kinds[0] == GGUFValueType.ARRAY else None
            )
    for name, record in file.tensors.items():
        tensor = file.tensor(name, dtype if len(record.shape) > 1 else torch.float32).contiguous()
        data = tensor.view(torch.uint8).view(*tensor.shape[:-1], -1).numpy()
        writer.add_tensor(name, data, raw_dtype=_TYPES[tensor.dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def key_values(config: Any, rope_theta: float) -> dict[str, int | float | str]:
    """What a file says of a model's sizes, without its architecture."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes: dict[str, int | float] = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim, "attention.value_length": head_dim, "rope.dimension_count": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps), "rope.freq_base": rope_theta,
        "vocab_size": config.vocab_size,
    }  # fmt: skip
    family = config.model_type
    return {
        "general.name": "paceline",
        **{f"{family}.{key}": value for key, value in sizes.items()},
        "tokenizer.ggml.model": "none",
    }


def named_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(Name, tensor) as llama.cpp wants them; its Llama turns neighbouring values, so q and k rows are interleaved."""
    config = model.config
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue  # a file without a head has the embedding for it
        if has_turned_rows(config.model_type, name):
            is_query = name.endswith("q_proj.weight")
            tensor = interleave_rows(tensor, config.num_attention_heads if is_query else config.num_key_value_heads)
        yield gguf_name(name), tensor.float() if tensor.ndim == 1 else tensor
