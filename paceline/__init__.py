"""Paceline: lossless speculative decoding on Ray Serve with a drafter that stays sharp while traffic shifts."""

import os
from pathlib import Path

__version__ = "0.1.0"

SPINS = ("GOMP_SPINCOUNT", "10000")
"""Environment variable of libgomp, and turns that its threads wait actively after a stage of torch: some 20 µs.

Unasked they spin for milliseconds, in which the threads of compiled forwards get half a core. libgomp reads it when torch
is imported.
"""
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault(*SPINS)

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").is_file():  # a checkout: adapt/, serving/, ... sit beside this package
    __path__.append(str(_ROOT))
