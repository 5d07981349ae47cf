"""Checkpoint: how far a training run came, in one file from which it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.paths import open_atomic


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write plain values and tensors, whole or not at all. Raises: OSError."""
    with open_atomic(path) as file:
        torch.save(state, file)


def load_checkpoint(path: Path, device: str) -> dict[str, Any]:
    """What was saved, with its tensors on the device. Raises: ConfigError when the file is damaged."""
    try:
        return torch.load(path, weights_only=True, map_location=device)
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as e:  # an unpickler of other bytes raises anything
        raise ConfigError(f"{path} is damaged ({type(e).__name__}); delete it to start again") from e
