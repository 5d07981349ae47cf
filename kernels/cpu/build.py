"""Build of the native round: compiles round.cpp once for each instruction set, the rest once, and links one shared library.

The library has a plain C interface: it depends on neither Python nor torch, so a built wheel serves any version of both.
`python -m paceline.kernels.cpu.build` builds it in place where that of these sources is not there yet. Imports nothing of the project: setup.py runs it, too.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAME = "libround.so"
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-fno-rtti",
    "-fno-exceptions",
    "-Wall",
    "-Wno-psabi",
    "-Wno-ignored-attributes",
)
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma")
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx2": ("-mavx2", "-mfma"),
        "avx512": _AVX512,
        "avx512_bf16": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    },
    "aarch64": {"baseline": ()},  # NEON is a part of it
}
"""Machine -> instruction set of library.py -> compiler flags."""


class BuildError(RuntimeError):
    """The library could not be built."""


def find_compiler() -> list[str]:
    """The command of a C++ compiler: CXX, the system's, or that of the wheel `ziglang`. Raises: BuildError."""
    if os.environ.get("CXX"):
        return os.environ["CXX"].split()
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++"]
    raise BuildError("no C++ compiler was found: install g++ or clang, or `pip install ziglang`")


def source_version() -> int:
    """A number that the sources and flags give: a library that was built from others must not be called."""
    digest = hashlib.sha256(repr((FLAGS, VARIANTS)).encode())
    for path in sorted((*HERE.glob("*.cpp"), *HERE.glob("*.h"))):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:7], "big")


def built_version(library: Path) -> int | None:
    """The `source_version` that a library was built from; None when it has none or cannot be loaded on this machine."""
    try:
        version = ctypes.CDLL(str(library)).source_version
    except (OSError, AttributeError):
        return None
    version.restype = ctypes.c_int64
    return int(version())


def provide(folder: Path) -> Path:
    """Have the library in `folder`: a copy of the one beside the sources if it is theirs, else compiled. Raises: BuildError.

    One process at a time: what another one of the same sources is compiling is waited for.
    """
    try:
        import fcntl
    except ImportError:  # Windows: `build` says that there is none for it
        return build(folder)
    with open(__file__, encoding="utf-8") as own:
        fcntl.flock(own, fcntl.LOCK_EX)
        there = HERE / NAME
        return _put(there, folder) if built_version(there) == source_version() else build(folder)


def _put(library: Path, folder: Path) -> Path:
    """Copy a library to a folder. Renamed into place: a process that has the old one mapped keeps it."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{NAME}.{os.getpid()}"
    shutil.copyfile(library, temporary)
    os.replace(temporary, folder / NAME)
    return folder / NAME


def build(folder: Path = HERE) -> Path:
    """Compile into `folder`; returns the library. Raises: BuildError with what the compiler said."""
    variants = VARIANTS.get(platform.machine().lower().replace("amd64", "x86_64"))
    if variants is None or sys.platform not in ("linux", "darwin"):
        raise BuildError(f"there is no native round for {platform.machine()} on {sys.platform}")
    compiler = find_compiler()
    with tempfile.TemporaryDirectory() as room:
        jobs: dict[Path, tuple[str, tuple[str, ...]]] = {
            Path(room, f"{n}.o"): (f"{n}.cpp", (f"-DSOURCE_VERSION={source_version()}", "-ffp-contract=off"))
            for n in ("isa", "suffix", "threads", "trees")
        }
        jobs |= {
            Path(room, f"round_{isa}.o"): ("round.cpp", (*flags, f"-DISA={isa}")) for isa, flags in variants.items()
        }
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            done = [
                pool.submit(_run, [*compiler, *FLAGS, *flags, "-c", str(HERE / source), "-o", str(out)])
                for out, (source, flags) in jobs.items()
            ]
            for job in done:
                job.result()
        static = (
            ["-static-libstdc++", "-static-libgcc"] if "ziglang" not in compiler and sys.platform == "linux" else []
        )
        library = Path(room, NAME)
        _run([*compiler, "-shared", *static, *map(str, jobs), "-o", str(library), "-lpthread"])
        return _put(library, folder)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildError(f"{' '.join(command[:3])} ... failed:\n{result.stderr[-2000:]}")


if __name__ == "__main__":
    try:
        print(provide(HERE))
    except BuildError as e:
        sys.exit(str(e))
