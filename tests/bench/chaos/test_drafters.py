"""Versions of a chaos run: what is damaged stays damaged, however often a run that was cut off strikes again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bench.chaos.drafters import Publisher
from paceline.errors import PacelineError


def test_a_version_damaged_twice_is_damaged(tmp_path: Path) -> None:
    state = {"w": torch.arange(12.0).view(3, 4)}
    registry = DrafterRegistry(tmp_path)
    first = registry.put(state, drafter_type="lookup", config={}, target_version="t").version
    publisher = Publisher(tmp_path, first)
    version = publisher.damaged(3)
    assert version != first and publisher.damaged(3) == version
    with pytest.raises(PacelineError, match=r"damaged|sha256"):
        registry.load_state(version)
    assert publisher.damaged(4) != version, "another seed, another version"
