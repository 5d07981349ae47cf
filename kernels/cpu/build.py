"""Build of the native round: compiles round.cpp once for each instruction set, the rest once, and links one shared library.

The library has a plain C interface: it depends on neither Python nor torch, so a built wheel serves any version of both.
`python -m paceline.kernels.cpu.build` builds it in place where that of these sources is not there yet. Imports nothing of the project: setup.py runs it, too.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
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


def find_compilers() -> list[list[str]]:
    """The commands of C++ compilers, best first: CXX alone, or the system's and that of the wheel `ziglang`. Raises: BuildError."""
    if os.environ.get("CXX"):
        return [os.environ["CXX"].split()]
    found = [[name] for name in ("c++", "g++", "clang++") if shutil.which(name)][:1]
    if importlib.util.find_spec("ziglang") is not None:
        found.append([sys.executable, "-m", "ziglang", "c++"])
    if not found:
        raise BuildError("no C++ compiler was found: install g++ or clang, or `pip install ziglang`")
    return found


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


def has_all(library: Path) -> bool:
    """Whether no instruction set was left out of a library; False when there is none."""
    try:
        found = ctypes.CDLL(str(library))
    except OSError:
        return False
    return all(hasattr(found, f"forward_{isa}") for isa in VARIANTS.get(_machine(), {}))


def _machine() -> str:
    return platform.machine().lower().replace("amd64", "x86_64")


def provide(folder: Path, *, with_all: bool = False) -> Path:
    """Have the library in `folder`: a copy of the one beside the sources if it is theirs, else compiled. Raises: BuildError.

    One process at a time: what another one of the same sources is compiling is waited for.
    with_all: a library without an instruction set is compiled anew: there may be a newer compiler.
    """
    try:
        import fcntl
    except ImportError:  # Windows: `build` says that there is none for it
        return build(folder)
    with open(__file__, encoding="utf-8") as own:
        with contextlib.suppress(OSError):  # NFS locks no file that is open for reading only: two may compile then
            fcntl.flock(own, fcntl.LOCK_EX)
        there = HERE / NAME
        is_theirs = built_version(there) == source_version() and (has_all(there) or not with_all)
        return _put(there, folder) if is_theirs else build(folder)


def _put(library: Path, folder: Path) -> Path:
    """Copy a library to a folder. Renamed into place: a process that has the old one mapped keeps it. Raises: BuildError."""
    temporary = folder / f".{NAME}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, temporary)
        os.replace(temporary, folder / NAME)
    except OSError as e:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise BuildError(f"the library cannot be written to {folder}: {e}") from e
    return folder / NAME


def build(folder: Path = HERE) -> Path:
    """Compile into `folder`, by the first compiler that knows all instruction sets, or else the one that knows most.

    Returns the library. Raises: BuildError with what the compilers said.
    """
    variants = VARIANTS.get(_machine())
    if variants is None or sys.platform not in ("linux", "darwin"):
        raise BuildError(f"there is no native round for {platform.machine()} on {sys.platform}")
    with tempfile.TemporaryDirectory() as room:
        refused: dict[Path, dict[str, str]] = {}
        said = []
        for number, compiler in enumerate(find_compilers()):
            try:
                library, without = _compile(compiler, variants, Path(room, str(number)))
            except BuildError as e:
                said.append(str(e))
                continue
            refused[library] = without
            if not without:
                break
        if not refused:
            raise BuildError("\n".join(said))
        best = min(refused, key=lambda library: len(refused[library]))
        for isa, why in refused[best].items():
            print(f"the library is built without {isa}, which this compiler refuses: {why}", file=sys.stderr)
        return _put(best, folder)


def _compile(compiler: list[str], variants: dict[str, tuple[str, ...]], room: Path) -> tuple[Path, dict[str, str]]:
    """The library, and the instruction sets that it lacks with what the compiler said; at least one is there. Raises: BuildError."""
    room.mkdir()
    version = f"-DSOURCE_VERSION={source_version()}"
    jobs: dict[str, tuple[str, ...]] = {
        name: (f"{name}.cpp", version, "-ffp-contract=off") for name in ("isa", "suffix", "threads", "trees")
    }
    jobs |= {isa: ("round.cpp", *flags, f"-DISA={isa}") for isa, flags in variants.items()}
    refused: dict[str, BuildError] = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        done = {
            name: pool.submit(
                _run, [*compiler, *FLAGS, *flags, "-c", str(HERE / source), "-o", str(room / f"{name}.o")]
            )
            for name, (source, *flags) in jobs.items()
        }
        for name, job in done.items():
            try:
                job.result()
            except BuildError as e:
                if name not in variants or _knows(compiler, variants[name]):  # no memory, or a mistake of ours
                    raise
                refused[name] = e
    if not variants.keys() - refused:
        raise next(iter(refused.values()))
    objects = [str(room / f"{n}.o") for n in jobs if n not in refused]
    link = [*compiler, "-shared", *objects, "-o", str(room / NAME), "-lpthread"]
    has_static = "ziglang" not in compiler and sys.platform == "linux"
    try:  # a wheel's library is for any machine
        _run([*link, *(["-static-libstdc++", "-static-libgcc"] if has_static else [])])
    except BuildError:  # Fedora and its kin have the static ones in a package of their own
        _run(link)
    return room / NAME, {isa: str(e) for isa, e in refused.items()}


def _knows(compiler: list[str], flags: tuple[str, ...]) -> bool:
    try:
        _run([*compiler, *flags, "-x", "c++", "-fsyntax-only", os.devnull])
    except BuildError:
        return False
    return True


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError as e:
        raise BuildError(f"{command[0]} cannot be run: {e}") from e
    if result.returncode != 0:
        raise BuildError(f"{' '.join(command[:3])} ... failed:\n{result.stderr[-2000:]}")


if __name__ == "__main__":
    try:
        print(provide(HERE, with_all=True))
    except BuildError as e:
        sys.exit(str(e))
