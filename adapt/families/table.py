"""Which kinds of drafters can be trained?

A new drafter adds its modules and one line here, next to its line in `serving/loading/families.py`.
"""

from __future__ import annotations

from paceline.adapt.families import eagle3 as eagle_family
from paceline.adapt.families import parallel_head as parallel_head_family
from paceline.adapt.families import specblock as specblock_family
from paceline.adapt.families.family import TrainingFamily
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
