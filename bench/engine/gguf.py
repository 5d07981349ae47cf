"""GGUF file of a dense Llama or Qwen3 checkpoint, as llama.cpp reads it: weights and sizes, no tokenizer.

Format: header, key-values, tensor records, then the tensors, each at a multiple of 32 bytes (gguf version 3, little
endian; docs/gguf.md of ggml). Prompts are token ids, so the vocabulary is `none` with its size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from transformers import AutoModelForCausalLM

from paceline.errors import ConfigError

_ALIGNMENT = 32
_UINT32, _FLOAT32, _STRING = 4, 6, 8
_TENSOR_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(checkpoint: Path, path: Path, dtype: torch.dtype) -> None:
    """Write the checkpoint's weights, matrices in `dtype` and vectors in float32.

    Raises: ConfigError for other families than dense Llama and Qwen3, for biases and for scaled RoPE.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, local_files_only=True)
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    is_known = config.model_type in ("llama", "qwen3") and rope.get("rope_type", "default") == "default"
    if not is_known or any(name.endswith(".bias") for name in model.state_dict()):
        raise ConfigError(
            f"model must be a dense Llama or Qwen3 without biases and with plain RoPE to be handed to llama.cpp, got "
            f"{config.model_type}; leave its arms out"
        )
    values = _key_values(config, float(rope.get("rope_theta", 10000.0)))
    tensors = dict(_tensors(model))
    with path.open("wb") as out:
        out.write(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(values)))
        for key, value in values.items():
            _write_value(out, key, value)
        offset = 0
        for name, tensor in tensors.items():
            _write_text(out, name)
            shape = tensor.shape[::-1]  # the fastest dimension first
            out.write(struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, _TENSOR_TYPES[tensor.dtype], offset))
            offset += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        for tensor in tensors.values():
            out.write(bytes(-out.tell() % _ALIGNMENT))
            out.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        out.write(bytes(-out.tell() % _ALIGNMENT))


def _key_values(config: Any, rope_theta: float) -> dict[str, int | float | str]:
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
        "general.architecture": family,
        "general.name": "paceline",
        **{f"{family}.{key}": value for key, value in sizes.items()},
        "tokenizer.ggml.model": "none",
    }


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(Name, tensor) as llama.cpp wants them; its Llama turns neighbouring values, so q and k rows are interleaved."""
    config = model.config
    for name, tensor in model.state_dict().items():
        own = name.removesuffix(".weight")
        if own == "lm_head" and config.tie_word_embeddings:
            continue  # a file without a head has the embedding for it
        if own in _NAMES:
            new = _NAMES[own]
        else:
            _, _, layer, part = own.split(".", 3)
            new = f"blk.{layer}.{_LAYER_NAMES[part]}"
            if config.model_type == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = config.num_attention_heads if part.endswith("q_proj") else config.num_key_value_heads
                tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        yield f"{new}.weight", tensor.float() if tensor.ndim == 1 else tensor


def _write_text(out: BinaryIO, text: str) -> None:
    data = text.encode()
    out.write(struct.pack("<Q", len(data)) + data)


def _write_value(out: BinaryIO, key: str, value: int | float | str) -> None:
    _write_text(out, key)
    if isinstance(value, str):
        out.write(struct.pack("<I", _STRING))
        _write_text(out, value)
    elif isinstance(value, float):
        out.write(struct.pack("<If", _FLOAT32, value))
    else:
        out.write(struct.pack("<II", _UINT32, value))
