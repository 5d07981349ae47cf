"""Peer weights: one model as every server wants it, a transformers folder and a GGUF file, both in bfloat16."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.bench.engine.gguf import copy_gguf
from paceline.paths import is_gguf
from paceline.serving.loading.checkpoint import open_checkpoint


def transformers_folder(model: Path, room: Path) -> Path:
    """The model's folder, of a GGUF file one that is written below `room`. Raises: ConfigError."""
    if not is_gguf(model):
        return model
    folder = room / "folder"
    if not (folder / "config.json").is_file():
        checkpoint = open_checkpoint(model)
        checkpoint.tokenizer().save_pretrained(folder)
        checkpoint.model(torch.bfloat16).save_pretrained(folder)  # config.json is written here
    return folder


def gguf_file(model: Path, given: Path | None, room: Path) -> Path | None:
    """The file given, or a copy of the model's own without quantization, which llama.cpp would compute in other numbers.

    Returns: None for a transformers folder: its tokenizer is llama.cpp's own script's to convert. Raises: ConfigError.
    """
    if given is not None or not is_gguf(model):
        return given
    path = room / "model.gguf"
    if not path.is_file():
        copy_gguf(model, path, torch.bfloat16)
    return path
