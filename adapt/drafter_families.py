"""Which kinds of drafters can be trained?

A new drafter adds its modules and one line here, next to its line in `serving/drafter_families.py`.
"""

from __future__ import annotations

from paceline.adapt import eagle_family, parallel_head_family, specblock_family
from paceline.adapt.drafter_family import TrainingFamily
from paceline.errors import ConfigError

FAMILIES: dict[str, TrainingFamily] = {
    f.name: f
    for f in (specblock_family.FAMILY, eagle_family.FAMILY, parallel_head_family.JETSPEC, parallel_head_family.DFLASH)
}


def training_family(name: str) -> TrainingFamily:
    """The family of a `drafter_type`. Raises: ConfigError, naming the known ones."""
    if name not in FAMILIES:
        raise ConfigError(f"drafter must be one of {', '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]
