"""Checkpoint: the files of a target, a transformers folder or a GGUF file, behind one face."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging

from paceline.errors import ConfigError
from paceline.paths import is_gguf, model_version
from paceline.serving.target_model.model import first_line, unservable

_UNREADABLE = (OSError, ValueError, KeyError, TypeError, StrictDataclassError)
_ADDED = re.compile(r"(?:model\.)?layers\.(\d+)\..*(?:\.bias|norm\.weight)$")
"""Parameters that change what a decoder layer computes; what lies behind the last layer is a head of its own."""
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


class Checkpoint(Protocol):
    """What of a target lies on disk."""

    path: Path

    def version(self) -> str:
        """16 hex digits that follow from every byte that decides what the target says."""
        ...

    def config(self) -> Any:
        """The transformers configuration. Raises: ConfigError."""
        ...

    def model(self, dtype: torch.dtype | None = None, attention: str | None = None) -> Any:
        """The transformers model on the CPU, all weights finite; dtype None = the checkpoint's. Raises: ConfigError."""
        ...

    def tokenizer(self) -> Any:
        """The tokenizer, with the chat template if there is one. Raises: ConfigError."""
        ...

    def embeddings(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The token embedding (V, Dm), and the output head where it is another matrix. Raises: ConfigError."""
        ...


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at a path. Raises: ConfigError when there is none that can be read."""
    transformers_logging.disable_progress_bar()  # it would write over the command line's own output
    if is_gguf(path):
        from paceline.serving.loading.gguf_model import GgufCheckpoint

        return GgufCheckpoint(path)
    return FolderCheckpoint(path)


class FolderCheckpoint:
    """A transformers folder: config.json, *.safetensors, tokenizer.json."""

    def __init__(self, path: str | Path) -> None:
        """Raises: ConfigError without a config.json."""
        self.path = Path(path)
        if not (self.path / "config.json").is_file():
            raise ConfigError(
                f"model must be the folder of a transformers checkpoint with a config.json, or a GGUF file, got {self.path}"
            )

    def version(self) -> str:
        return model_version(self.path)

    def config(self) -> Any:
        try:
            return AutoConfig.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        except _UNREADABLE as e:
            raise ConfigError(
                f"model folder {self.path} must hold a config.json that transformers knows: {first_line(e)}"
            ) from e

    def model(self, dtype: torch.dtype | None = None, attention: str | None = None) -> Any:
        from transformers import AutoModelForCausalLM  # seconds of imports, which a trainer does without

        self.config()  # it says better what is wrong with it
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.path,
                dtype=dtype or "auto",
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                **({} if attention is None else {"attn_implementation": attention}),
            )
        except KeyError as e:  # a family with its own table of attention functions
            raise unservable(self.config().model_type, f"its attention is not that of transformers ({e})") from e
        except (OSError, ValueError, RuntimeError, SafetensorError, ImportError) as e:  # quantized ones need packages
            raise ConfigError(
                f"model folder {self.path} must hold a readable transformers checkpoint: {first_line(e)}"
            ) from e
        model, info = loaded  # a pair because of output_loading_info
        if info["missing_keys"]:
            # transformers would fill them with random numbers and serve nonsense
            first = sorted(info["missing_keys"])[0]
            raise ConfigError(f"model {self.path} lacks weights, first {first}; download it again")
        # transformers would leave them out, and serve another model
        extra = sorted(
            name
            for name in info["unexpected_keys"]
            if (found := _ADDED.match(name)) and int(found[1]) < getattr(model.config, "num_hidden_layers", 0)
        )
        if extra:
            raise ConfigError(f"model {self.path} has weights that its config.json knows nothing of, first {extra[0]}")
        bad = next((n for n, p in model.named_parameters() if not bool(torch.isfinite(p).all())), None)
        if bad is not None:
            raise ConfigError(f"model {self.path} has non-finite weights in {bad}; download it again")
        return model

    def tokenizer(self) -> Any:
        try:
            return AutoTokenizer.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as e:
            raise ConfigError(f"model folder {self.path} must hold a readable tokenizer: {first_line(e)}") from e

    def embeddings(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Nothing but these is read from disk.

        As transformers loads them: of tied ones the file may hold either, and two that differ are not tied whatever
        config.json says.
        """
        is_tied = getattr(self.config().get_text_config(), "tie_word_embeddings", False)
        embed, head = self._tensor(_EMBEDDING), self._tensor(_HEAD)
        if embed is None and is_tied:
            embed, head = head, None
        if embed is None:
            raise ConfigError(f"weights in {self.path} must hold a tensor named *.{_EMBEDDING}")
        return embed, None if is_tied and head is not None and torch.equal(head, embed) else head

    def _tensor(self, ending: str) -> torch.Tensor | None:
        """The tensor whose name ends so, None when there is none."""
        index = self.path / "model.safetensors.index.json"
        try:
            if index.is_file():
                names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                files = [self.path / file for name, file in names.items() if name.endswith(ending)]
            else:
                files = sorted(self.path.glob("*.safetensors"))
            for file in files:
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 - not a mapping
                        if name.endswith(ending):
                            return tensors.get_tensor(name)
        except (OSError, ValueError, KeyError, SafetensorError) as e:
            raise ConfigError(f"weights in {self.path} must be readable safetensors: {e}") from e
        return None
