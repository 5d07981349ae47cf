"""Native forward of a dense target on the CPU: its weights packed for kernels/cpu."""

from __future__ import annotations

from typing import Any

import torch

from paceline.kernels.cpu.library import (
    NativeDecoder,
    NativeLayer,
    PackedLinear,
    choose_isa,
    fits_native,
    interleave,
)
from paceline.serving.target_model.device import available_ram_bytes
from paceline.serving.target_model.fused import is_plain_on_cpu, rope_table, weight_bytes
from paceline.serving.target_model.int8 import lend_head, lend_layer, pack_int8

_MEMORY_SHARE = 0.7
"""Part of the free memory that the copy of the weights may take: K/V and the rest of the process need some, too."""


def supports_native(model: Any, *, is_int8: bool = False) -> bool:
    """Whether the model is plain and its weights fit the memory that is left once more, unless they are freed as they are
    packed (is_int8)."""
    config, copied_bytes = model.config, 0 if is_int8 else weight_bytes(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (
        choose_isa() is not None
        and is_plain_on_cpu(model)
        and fits_native(config.hidden_size, head_dim)
        and copied_bytes < available_ram_bytes() * _MEMORY_SHARE
    )


def new_native(
    model: Any, tap_layers: tuple[int, ...], isa: str | None = None, *, is_int8: bool = False, is_lent: bool = False
) -> NativeDecoder:
    """The native forward of a model that `supports_native`; its linear weights are copied.

    Args:
        isa: instruction set; None = the best one.
        is_int8: linear weights in 8 bits, a scale for each output.
        is_lent: each layer's own weights are freed once they are packed, and its modules read the packed ones (int8 only).
    """
    assert is_int8 or not is_lent
    pack = pack_int8 if is_int8 else PackedLinear.pack
    isa = isa or choose_isa()
    assert isa is not None
    config, decoder = model.config, model.get_decoder()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    has_head_norm = config.model_type == "qwen3"
    layers = []
    for i, layer in enumerate(decoder.layers):
        attention, mlp = layer.self_attn, layer.mlp
        qkv = torch.cat([p.weight.detach() for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
        layers.append(
            NativeLayer(
                qkv=pack(qkv),
                attention_out=pack(attention.o_proj.weight.detach()),
                gate_up=pack(interleave(mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach())),
                down=pack(mlp.down_proj.weight.detach()),
                norm1=layer.input_layernorm.weight.detach().float(),
                norm2=layer.post_attention_layernorm.weight.detach().float(),
                q_norm=attention.q_norm.weight.detach().float() if has_head_norm else None,
                k_norm=attention.k_norm.weight.detach().float() if has_head_norm else None,
                tap=sum(1 << j for j, tap in enumerate(tap_layers) if tap == i),
            )
        )
        if is_lent:
            lend_layer(layer, layers[-1])
    head = pack(model.get_output_embeddings().weight.detach())
    if is_lent:
        lend_head(model, head)
    embedding = model.get_input_embeddings().weight.detach()
    cos, sin = rope_table(model)
    half = head_dim // 2
    return NativeDecoder(
        layers=layers,
        head=head,
        embedding=embedding,
        final_norm=decoder.norm.weight.detach().float(),
        rope=torch.cat((cos[:, :half], sin[:, :half]), 1).float().contiguous(),
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        num_logits=config.vocab_size,
        eps=config.rms_norm_eps,
        scale=decoder.layers[0].self_attn.scaling,
        num_taps=len(tap_layers),
        isa=isa,
    )
