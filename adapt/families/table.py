"""Table of the drafter families that can be trained: the training half of each entry of the serving registry.

A new family adds its module and one line here.
"""

from __future__ import annotations

from paceline.adapt.families import eagle3, parallel_head, specblock
from paceline.adapt.families.family import TrainingFamily
from paceline.errors import ConfigError

FAMILIES: dict[str, TrainingFamily] = {
    f.name: f for f in (specblock.FAMILY, eagle3.FAMILY, parallel_head.JETSPEC, parallel_head.DFLASH)
}


def training_family(name: str) -> TrainingFamily:
    """The family of a `drafter_type`. Raises: ConfigError, naming the known ones."""
    if name not in FAMILIES:
        raise ConfigError(f"drafter must be one of {', '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]
