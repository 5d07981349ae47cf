"""Which drafters without weights are there, by name?"""

from __future__ import annotations

from paceline.errors import ConfigError
from paceline.paths import TEXT_DRAFTERS
from paceline.serving.lookup_drafter import PromptLookupDrafter
from paceline.serving.suffix_drafter import SuffixDrafter
from paceline.serving.text_drafter import TextDrafter

RECENT_TOKENS = 65536
"""Tokens of others' answers that `suffix-recent` keeps (a few MB)."""


def make_text_drafter(name: str) -> TextDrafter:
    """A new one. Raises: ConfigError for other names than TEXT_DRAFTERS."""
    if name == "lookup":
        return PromptLookupDrafter()
    if name == "suffix":
        return SuffixDrafter()
    if name == "suffix-recent":
        return SuffixDrafter(recent_tokens=RECENT_TOKENS)
    raise ConfigError(f"a drafter without weights must be one of {', '.join(TEXT_DRAFTERS)}, got {name!r}")
