"""Shared pytest set-up: the repository root is importable, Ray starts without telemetry or tokens, kernels interpreted.

Triton decides between compiler and interpreter when it is first imported, and transformers imports it: without an
accelerator the interpreter is chosen here, before any test module. TRITON_INTERPRET=0 or 1 overrides.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")
_has_accelerator = any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))
os.environ.setdefault("TRITON_INTERPRET", "0" if _has_accelerator else "1")
