"""Target: from a checkpoint to the model that serves it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from paceline.errors import ConfigError
from paceline.serving.loading.checkpoint import open_checkpoint
from paceline.serving.target_model.model import TargetModel, check_decoder, first_line, unservable
from paceline.serving.target_model.paged_attention import ATTENTION, register_attention


def pick_device(name: str) -> str:
    """What auto stands for. Raises: ConfigError where there is no such device."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda needs a GPU that torch can use; use --device cpu")
    return name


def read_target(
    path: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    tap_layers: tuple[int, ...] | None = None,
    fast_path: bool | None = None,
    split: Callable[[Any], Any] | None = None,
    num_ranks: int = 1,
) -> TargetModel:
    """Load a local checkpoint: a transformers folder (safetensors only) or a GGUF file.

    Args:
        path: folder with config.json, *.safetensors and tokenizer.json, or the file.
        device: cpu | cuda | auto.
        dtype: auto (the checkpoint's) | float32 | bfloat16 | float16 | int8 (linear weights of the checkpoint rounded to
            8 bits, for the compiled forward on the CPU).
        tap_layers: None = SpecBlock's three; () = no taps.
        fast_path: None = a forward with fewer operators where there is one that was checked equal; False = never; True = required.
        split: keeps this rank's share of the model, on its device, of `num_ranks` (tensor_parallel.py).
    Raises: ConfigError when there is no usable checkpoint.
    """
    checkpoint = open_checkpoint(path)
    device = pick_device(device) if device == "auto" else device
    is_int8 = dtype == "int8"
    if is_int8 and (device != "cpu" or num_ranks > 1):
        raise ConfigError(
            f"dtype must not be int8 on {device} over {num_ranks} rank(s): 8-bit weights run on one CPU process; choose "
            "--device cpu, or dtype auto"
        )
    pick_device(device)  # refuses a GPU that is not there
    register_attention()
    model = checkpoint.model(None if is_int8 or dtype == "auto" else getattr(torch, dtype), ATTENTION)
    tokenizer, version = checkpoint.tokenizer(), checkpoint.version()
    model = model.to(device) if split is None else split(model)
    return TargetModel(
        model,
        tokenizer,
        tap_layers=tap_layers,
        version=version,
        fast_path=fast_path,
        num_ranks=num_ranks,
        is_int8=is_int8,
    )


def check_target(path: str | Path) -> None:
    """Refuse a checkpoint that cannot be served, as far as that shows without its weights. Raises: ConfigError."""
    checkpoint = open_checkpoint(path)
    config = checkpoint.config()
    checkpoint.tokenizer()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError) as e:
        raise unservable(config.model_type, first_line(e)) from e
    check_decoder(model)
