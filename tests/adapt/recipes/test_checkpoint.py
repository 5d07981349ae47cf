"""A checkpoint is whole or not there, and a disk that is full is said to be."""

import errno
import resource

import pytest
import torch

from paceline.adapt.recipes.checkpoint import load_checkpoint, save_checkpoint


def test_a_full_disk_is_an_os_error_and_leaves_the_checkpoint_before(tmp_path):
    path, limits = tmp_path / "checkpoint.pt", resource.getrlimit(resource.RLIMIT_FSIZE)
    save_checkpoint(path, {"step": 1})
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (200_000, limits[1])
    )  # a write beyond it fails, as one to a full disk does
    try:
        with pytest.raises(OSError) as e:
            save_checkpoint(path, {"step": 2, "model": torch.zeros(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert e.value.errno == errno.EFBIG, "which the command line says in one sentence"
    assert load_checkpoint(path, "cpu", ("step",)) == {"step": 1} and list(tmp_path.iterdir()) == [path]
