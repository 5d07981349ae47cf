"""Paceline: lossless speculative decoding on Ray Serve with a drafter that stays sharp while traffic shifts."""

from pathlib import Path

__version__ = "0.1.0"

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").is_file():  # a checkout: adapt/, serving/, ... sit beside this package
    __path__.append(str(_ROOT))
