"""Tiny targets for tests: real transformers models with random weights and a real tokenizer, built in memory."""

from __future__ import annotations

import string
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from paceline.serving.target_model.kv_cache import KVPool, PageAllocator
from paceline.serving.target_model.model import TargetBatch, TargetModel

PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_tokenizer(vocab: int = 64) -> PreTrainedTokenizerFast:
    """A tokenizer of exactly `vocab` ids: one per character below 259 ids, byte-level from 259 on.

    ids 0, 1, 2 are <pad>, <|end|> (end of text) and <unk>.
    """
    is_bytes = vocab >= 259
    if is_bytes:
        symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        symbols = [
            *string.ascii_lowercase,
            " ",
            "\n",
            *string.digits,
            *".,:;!?'\"()[]{}<>+-*/=_",
            *string.ascii_uppercase,
        ]
    symbols += [chr(0x4E00 + i) for i in range(vocab)]
    table = {"<pad>": PAD_ID, "<|end|>": EOS_ID, "<unk>": UNK_ID}
    for symbol in symbols[: vocab - 3]:
        table[symbol] = len(table)
    tok = Tokenizer(models.BPE(vocab=table, merges=[], unk_token="<unk>"))
    if is_bytes:
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tok.decoder = decoders.ByteLevel()
    else:
        tok.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|end|>", pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(
    kind: str = "qwen3",
    *,
    vocab: int = 64,
    layers: int = 6,
    width: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    context: int = 512,
) -> Any:
    """A random model of a tested family: llama, qwen3 or qwen3_moe; large initial weights give clear argmaxes."""
    shared: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": width}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "llama":
            model: Any = LlamaForCausalLM(LlamaConfig(**shared))
        elif kind == "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**shared))
        elif kind == "qwen3_moe":
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shared, **moe))
        else:
            raise ValueError(f"kind must be llama, qwen3 or qwen3_moe, got {kind!r}")
    return model.to(dtype).eval()


def tiny_target(
    kind: str = "qwen3",
    *,
    vocab: int = 64,
    layers: int = 6,
    width: int = 32,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tap_layers: tuple[int, ...] | None = None,
    **model_args: Any,
) -> TargetModel:
    """A TargetModel over a random tiny model; equal arguments give equal weights and version."""
    model = tiny_model(kind, vocab=vocab, layers=layers, width=width, seed=seed, dtype=dtype, **model_args)
    return TargetModel.from_model(model, tiny_tokenizer(vocab), tap_layers=tap_layers)


def prefill(
    target: TargetModel, kv: KVPool, pages: PageAllocator, request_id: str, token_ids: list[int], start: int = 0
) -> Any:
    """Run positions start..start+n-1 of one request through the target into canonical rows; return TargetOutput."""
    stop = start + len(token_ids)
    assert pages.ensure(request_id, stop)
    return target.forward(
        TargetBatch(
            token_ids=torch.tensor(token_ids),
            positions=torch.arange(start, stop),
            cu_rows=torch.tensor([0, len(token_ids)]),
            context_lens=torch.tensor([start]),
            slot_table=pages.table([request_id], stop),
            out_rows=pages.rows(request_id, start, stop),
        ),
        kv,
    )


@torch.inference_mode()
def plain_logits(target: TargetModel, token_ids: list[int]) -> torch.Tensor:
    """(T, V) float32 logits of one ordinary full forward of the transformers model: the oracle."""
    return target.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()


def greedy_continuation(target: TargetModel, token_ids: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens after `token_ids` by repeated full forwards (slow, obvious); does not stop at end of text."""
    tokens = list(token_ids)
    for _ in range(num_tokens):
        tokens.append(int(plain_logits(target, tokens)[-1].argmax()))
    return tokens[len(token_ids) :]
