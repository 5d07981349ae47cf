"""GGUF model: a dense Llama or Qwen3 as a transformers model, with the file's weights, sizes, tokenizer and end tokens.

Values of quantized tensors are rounded to bfloat16 once, and so are the vectors beside them: these are the target's weights,
whatever number type serves them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen3Config, Qwen3ForCausalLM

from paceline.errors import ConfigError
from paceline.paths import model_version
from paceline.serving.loading.gguf_file import BLOCK_TYPES, GgufFile
from paceline.serving.loading.gguf_tokenizer import end_token_ids, read_tokenizer, token_id
from paceline.serving.target_model.model import first_line

LAYER_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
_MAX_CONTEXT = 2**24
_SCALING = ("type", "factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow")
"""Keys of RoPE scaling that are read, or that say nothing of how it is computed."""
_NO_SCALING = {
    "attn_factor": 1.0,
    "alpha": 0.0,
    "yarn_attn_factor": 1.0,
    "yarn_ext_factor": 1.0,
    "yarn_log_multiplier": 0.0,
}
"""Others, and what they hold where they change nothing."""
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0}
"""Of YaRN, where a file says nothing."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Settings of every released Llama with scaled RoPE; files hold only the factors that follow from them."""


def gguf_name(name: str) -> str:
    """The file's name of a parameter of transformers' Llama or Qwen3."""
    own, _, ending = name.rpartition(".")
    if own in NAMES:
        return f"{NAMES[own]}.{ending}"
    _, _, layer, part = own.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{ending}"


def has_turned_rows(family: str, name: str) -> bool:
    """Whether a parameter's rows are interleaved in the file: llama.cpp's Llama turns neighbouring values of a head."""
    return family == "llama" and name.endswith((".self_attn.q_proj.weight", ".self_attn.k_proj.weight"))


def interleave_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows as llama.cpp has them, of rows in halves."""
    return weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def halve_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows as transformers has them, of interleaved rows."""
    return weight.view(num_heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


class GgufCheckpoint:
    """A GGUF file as a checkpoint: what `open_checkpoint` returns for one."""

    def __init__(self, path: str | Path) -> None:
        """Raises: ConfigError when the file is damaged, or no dense Llama or Qwen3."""
        self.path = Path(path)
        self._file = GgufFile(path)
        self._family = self._file.value("general.architecture", str)
        if self._family not in _FAMILIES:
            raise ConfigError(
                f"model {self.path} must be a dense Llama or Qwen3 to be read from a GGUF file, got architecture "
                f"{self._family!r}; give the folder of its transformers checkpoint"
            )
        self._refuse_parts()

    def version(self) -> str:
        return model_version(self.path)

    def config(self) -> PretrainedConfig:
        """The sizes as a transformers configuration. Raises: ConfigError."""
        file = self._file
        heads, hidden = self._size("attention.head_count"), self._size("embedding_length")
        head_dim = self._size("attention.key_length", hidden // heads)
        num_layers, context = self._size("block_count"), self._size("context_length")
        if EMBEDDING not in file.tensors or num_layers > len(file.tensors) or context > _MAX_CONTEXT:
            raise self._unfit(f"{num_layers} layers, a context of {context} and {len(file.tensors)} tensors")
        for name in ("attention.value_length", "rope.dimension_count"):
            if self._size(name, head_dim) != head_dim:
                raise self._unfit(f"{name} {self._size(name)} beside heads of {head_dim}")
        ends = end_token_ids(file)
        try:
            config = _FAMILIES[self._family][0](
                hidden_size=hidden,
                intermediate_size=self._size("feed_forward_length"),
                num_hidden_layers=num_layers,
                num_attention_heads=heads,
                num_key_value_heads=self._size("attention.head_count_kv", heads),
                head_dim=head_dim,
                vocab_size=file.tensors[EMBEDDING].shape[0],
                max_position_embeddings=context,
                rms_norm_eps=self._fraction("attention.layer_norm_rms_epsilon"),
                tie_word_embeddings=HEAD not in file.tensors,
                rope_parameters=self._rope(head_dim),
                bos_token_id=token_id(file, "bos_token_id"),
                eos_token_id=ends[0] if len(ends) == 1 else ends or None,
                pad_token_id=None,
            )
        except StrictDataclassError as e:
            raise self._unfit(f"sizes that do not go together ({first_line(e)})") from e
        config.dtype = self._own_dtype()
        return config

    def model(self, dtype: torch.dtype | None = None, attention: str | None = None) -> Any:
        """The transformers model on the CPU; None = the file's type: float32 for F32 and F16 files, bfloat16 for all others.

        Raises: ConfigError when tensors are absent, too many, of other shapes or not finite.
        """
        config = self.config()
        kind, own_dtype = _FAMILIES[self._family][1], self._own_dtype()
        dtype = dtype or own_dtype
        with torch.device("meta"):
            empty = kind(config)
        wanted = {
            n: tuple(t.shape) for n, t in empty.state_dict().items() if n != "lm_head.weight" or not self._is_tied
        }
        names = {name: gguf_name(name) for name in wanted}
        extra = sorted(self._file.tensors.keys() - set(names.values()) - {ROPE_FACTORS})
        if extra:
            raise self._unfit(f"a tensor {extra[0]!r}")
        state = {}
        for name, shape in wanted.items():
            record = self._file.tensors.get(names[name])
            if record is None or record.shape != shape:
                found = "lacks it" if record is None else f"has {record.shape}"
                raise self._unfit(f"{names[name]!r} of shape {shape} in its sizes, and {found} in its tensors")
            own = self._file.tensor(names[name]).to(own_dtype)
            if not bool(torch.isfinite(own).all()):
                raise ConfigError(f"model {self.path} has non-finite weights in {names[name]}; download it again")
            if has_turned_rows(self._family, name):
                is_query = name.endswith("q_proj.weight")
                own = halve_rows(own, config.num_attention_heads if is_query else config.num_key_value_heads)
            state[name] = own.to(dtype)
        options = {} if attention is None else {"attn_implementation": attention}
        model = kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype, **options)
        model.generation_config.eos_token_id = config.eos_token_id
        return model

    def tokenizer(self) -> Any:
        """The file's tokenizer with its chat template. Raises: ConfigError for kinds that are not known."""
        return read_tokenizer(self._file)

    def embeddings(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The token embedding (V, Dm), and the output head where it is another matrix."""
        dtype = self._own_dtype()
        return self._file.tensor(EMBEDDING).to(dtype), None if self._is_tied else self._file.tensor(HEAD).to(dtype)

    @property
    def _is_tied(self) -> bool:
        return HEAD not in self._file.tensors

    def _own_dtype(self) -> torch.dtype:
        kinds = {r.type for r in self._file.tensors.values() if len(r.shape) > 1}
        return torch.bfloat16 if kinds & {"BF16", *BLOCK_TYPES} else torch.float32

    def _size(self, name: str, default: int | None = None) -> int:
        found = self._file.value(f"{self._family}.{name}", int, default)
        if not 0 < found < 2**31:
            raise self._unfit(f"{name} {found}")
        return found

    def _fraction(self, name: str, default: float | None = None) -> float:
        found = self._file.value(f"{self._family}.{name}", float, default)
        if not (math.isfinite(found) and found > 0):
            raise self._unfit(f"{name} {found}")
        return found

    def _refuse_parts(self) -> None:
        """Refuse what would be computed otherwise than by a dense Llama or Qwen3 of one file."""
        values = self._file.values
        if values.get("split.count", 1) not in (0, 1):
            raise ConfigError(
                f"model {self.path} is one of {values['split.count']} parts; join them: llama-gguf-split --merge FIRST OUT"
            )
        for name in ("expert_count", "attention.sliding_window", "attention.scale", "logit_scale", "residual_scale"):
            if values.get(f"{self._family}.{name}"):
                raise self._unfit(f"{name} {values[f'{self._family}.{name}']}")

    def _rope(self, head_dim: int) -> dict[str, Any]:
        """RoPE's parameters as transformers names them. Raises: ConfigError for kinds of scaling that are not known."""
        file, own = self._file, f"{self._family}.rope."
        # As llama.cpp reads them: a factor alone is linear, and older files call it otherwise
        kind, theta = file.values.get(own + "scaling.type", "linear"), self._fraction("rope.freq_base", 10000.0)
        for name, found in file.values.items():
            last = name.removeprefix(own + "scaling.")
            if last != name and last not in _SCALING and found != _NO_SCALING.get(last):
                raise self._unfit(f"rope.scaling.{last} {found}")
        out = {"rope_type": "default", "rope_theta": theta}
        factor = (
            1.0 if kind == "none" else self._fraction("rope.scaling.factor", self._fraction("rope.scale_linear", 1.0))
        )
        if kind == "linear" and factor == 1.0:
            kind = "none"
        if ROPE_FACTORS in file.tensors:
            if kind != "none":
                raise self._unfit(f"RoPE factors beside RoPE scaling {kind!r}")
            return {**out, **_LLAMA3, "rope_type": "llama3", "factor": self._llama3_factor(theta, head_dim)}
        if kind == "none":
            return out
        if kind == "linear":
            return {**out, "rope_type": "linear", "factor": factor}
        if kind == "yarn":
            before = file.value(own + "scaling.original_context_length", int)
            betas = {name: self._fraction(f"rope.scaling.yarn_{name}", beta) for name, beta in _YARN.items()}
            return {**out, **betas, "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": before}
        raise self._unfit(f"RoPE scaling {kind!r}")

    def _llama3_factor(self, theta: float, head_dim: int) -> float:
        """The factor of Llama 3's scaling, if the file's factors (one for each frequency) are those of its rule."""
        found = self._file.tensor(ROPE_FACTORS).float()
        factor = float(found.max())
        wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2).double() / head_dim)
        low, high, before = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"], 8192
        share = ((before / wavelengths - low) / (high - low)).clamp(0, 1)
        expected = 1 / ((1 - share) / factor + share)
        if found.shape != expected.shape or not torch.allclose(found.double(), expected, rtol=1e-3):
            raise self._unfit("RoPE factors that are not Llama 3's")
        return factor

    def _unfit(self, what: str) -> ConfigError:
        return ConfigError(
            f"model {self.path} must be a dense Llama or Qwen3 to be read from a GGUF file, got {what}; give the folder of its "
            "transformers checkpoint, or another file"
        )
