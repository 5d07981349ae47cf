"""GGUF tokenizer: byte-level BPE (kind `gpt2`) and SentencePiece (kind `llama`) as a transformers tokenizer."""

from __future__ import annotations

import math
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from paceline.errors import ConfigError
from paceline.serving.loading.gguf_file import GgufFile

_KEY = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_SPLITS = {
    "gpt-2": None, "smollm": None, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "llama-bpe": _LLAMA3, "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
}  # fmt: skip
"""How text is cut before merging, by the name that files give it; None: GPT-2's expression, which is built in."""
_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe")
"""Ways whose tokenizers take a word that is a token as it is, and mark the beginning unless the file says otherwise."""
_END_NAMES = frozenset({"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>"})
"""Control tokens that end an answer; many files name one of them only."""


def read_tokenizer(file: GgufFile) -> Any:
    """The file's tokenizer, with special tokens and chat template. Raises: ConfigError for kinds that are not known."""
    kind = file.value(_KEY + "model", str)
    tokens = _tokens(file)
    if kind == "gpt2":
        backend = _byte_level(file, tokens)
    elif kind == "llama":
        backend = _sentencepiece(file, tokens)
    else:
        raise ConfigError(
            f"model {file.path} must have a tokenizer of kind gpt2 or llama, got {kind!r}; give the folder of its transformers "
            "checkpoint"
        )
    types = file.optional(_KEY + "token_type", list) or []
    marked = [(t, k) for t, k in zip(tokens, types, strict=False) if k in (_CONTROL, _USER_DEFINED)]
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t, k in marked if k == _USER_DEFINED])
    named = {
        f"{name}_token": tokens[i]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (i := token_id(file, f"{key}_token_id")) is not None
    }
    marks_beginning = kind == "llama" or file.values.get(_KEY + "pre") in _LLAMA3_NAMES
    if file.value(_KEY + "add_bos_token", bool, marks_beginning) and "bos_token" in named:
        bos = named["bos_token"]
        try:
            backend.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, tokens.index(bos))]
            )
        except ValueError as e:
            raise ConfigError(
                f"model {file.path} must have a token that can mark a text's beginning, got {bos!r}; download or convert it again"
            ) from e
    out = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        chat_template=file.optional("tokenizer.chat_template", str),
        **named,
    )
    control = [AddedToken(t, normalized=False, special=True) for t, k in marked if k == _CONTROL]
    out.add_special_tokens({"additional_special_tokens": control}, replace_extra_special_tokens=False)  # type: ignore[dict-item]
    return out


def end_token_ids(file: GgufFile) -> list[int]:
    """Ids that end an answer: those that the file names, and control tokens that mean it everywhere."""
    named = [token_id(file, f"{name}_token_id") for name in ("eos", "eot", "eom")]
    types = file.optional(_KEY + "token_type", list) or []
    pairs = zip(file.optional(_KEY + "tokens", list) or [], types, strict=False)
    known = [i for i, (text, kind) in enumerate(pairs) if kind == _CONTROL and text in _END_NAMES]
    return list(dict.fromkeys(i for i in (*named, *known) if i is not None))


def token_id(file: GgufFile, name: str) -> int | None:
    """A special token's id, None where the file names none. Raises: ConfigError beyond the vocabulary."""
    if _KEY + name not in file.values:
        return None
    found, count = file.value(_KEY + name, int), len(file.optional(_KEY + "tokens", list) or ())
    if count and not 0 <= found < count:
        raise ConfigError(
            f"model {file.path} has {name} {found} beyond its {count} tokens; download or convert it again"
        )
    return found


def _tokens(file: GgufFile) -> list[str]:
    tokens, rows = file.value(_KEY + "tokens", list), file.tensors["token_embd.weight"].shape[0]
    if len(tokens) > rows or not all(isinstance(t, str) for t in tokens) or len(set(tokens)) < len(tokens):
        raise ConfigError(
            f"model {file.path} must have {rows} different tokens, as many as rows in its embedding, got "
            f"{len(tokens)}; download or convert it again"
        )
    return tokens


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    name = file.value(_KEY + "pre", str, "none")
    if name not in _SPLITS:
        raise ConfigError(
            f"model {file.path} must cut its text in one of the ways {', '.join(_SPLITS)}, got tokenizer.ggml.pre {name!r}; "
            "give the folder of its transformers checkpoint"
        )
    merges = [tuple(str(m).split(" ")) for m in file.value(_KEY + "merges", list)]
    if any(len(m) != 2 for m in merges):
        raise ConfigError(f"model {file.path} must have merges of two tokens each; download or convert it again")
    split = _SPLITS[name]
    backend = Tokenizer(_bpe(file, tokens, merges, ignore_merges=name in _LLAMA3_NAMES))
    if split is _QWEN2:
        backend.normalizer = normalizers.NFC()
    parts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if name == "smollm" else []
    parts += [pre_tokenizers.Split(Regex(split), behavior="isolated")] if split else []
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """Pairs merge in the order of their scores, which files hold instead of merges."""
    scores = file.value(_KEY + "scores", list)
    if len(scores) != len(tokens) or not all(isinstance(s, float) and math.isfinite(s) for s in scores):
        raise ConfigError(f"model {file.path} must have a score for each token; download or convert it again")
    ids = {token: i for i, token in enumerate(tokens)}
    pairs = [
        (-scores[i], ids[token[:cut]], ids[token[cut:]], token[:cut], token[cut:])
        for token, i in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    merges = [(left, right) for _, _, _, left, right in sorted(pairs)]
    unknown = token_id(file, "unknown_token_id")
    options = {} if unknown is None else {"unk_token": tokens[unknown]}
    backend = Tokenizer(_bpe(file, tokens, merges, fuse_unk=True, byte_fallback=True, **options))
    has_prefix = file.value(_KEY + "add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if has_prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return backend


def _bpe(file: GgufFile, tokens: list[str], merges: list[Any], **options: Any) -> BPE:
    try:
        return BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, **options)
    except Exception as e:  # the package raises bare Exceptions for merges that lead nowhere
        raise ConfigError(
            f"model {file.path} must have merges of its own tokens: {e}; download or convert it again"
        ) from e
