"""Checkpoint: how far a training run came, in one file from which it goes on, in a folder that is a training's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.paths import check_folder, held_folder, open_atomic

CHECKPOINT_FILE = "checkpoint.pt"


@contextmanager
def own_folder(folder: Path, own: Sequence[str]) -> Iterator[None]:
    """Keep a folder for one training. Raises: ConfigError where another one is at work, and where it holds a model's config.json.

    own: files that a training leaves beside its config.json.
    """
    check_folder(folder, "config.json", "out")
    if (folder / "config.json").is_file() and not any((folder / name).is_file() for name in own):
        raise ConfigError(
            f"out must be a new folder or one that a training of this kind has written, got {str(folder)!r}, which holds another "
            "model's config.json"
        )
    with held_folder(
        folder, f"out must not be a folder that another training writes now, got {str(folder)!r}; wait for its end"
    ):
        yield


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write plain values and tensors, whole or not at all. Raises: OSError."""
    with open_atomic(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as e:  # torch's words for a write that failed say nothing of the disk
            raise (e.__context__ if isinstance(e.__context__, OSError) else e) from None


def load_checkpoint(path: Path, device: str, names: Sequence[str]) -> dict[str, Any]:
    """What was saved, with its tensors on the device. Raises: ConfigError when the file is damaged, or no such training's.

    names: among those that the training saves.
    """
    try:
        state = torch.load(path, weights_only=True, map_location=device)
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as e:  # an unpickler of other bytes raises anything
        raise ConfigError(f"{path} is damaged ({type(e).__name__}); delete it to start again") from e
    if not isinstance(state, dict) or not set(names) <= state.keys():
        raise ConfigError(f"{path} belongs to another kind of training; delete it to start again")
    return state
