"""Backup: what a service knows in one file, and a service that goes on from such a file.

A backup holds the controller's state, the decision log, the drafter versions and the learners, which hold no text; traces,
which are users' data, only when asked for. It is taken while the service runs: the state is the snapshot that the controller
writes every half minute, and entries of the log that are newer than it count for nothing once both are restored.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import os
import shutil
import stat
import tarfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path, PurePosixPath
from typing import Annotated as A
from typing import Any

import msgspec
import redis
from redis.exceptions import RedisError
from rich.console import Console

from paceline.errors import PacelineError
from paceline.infra.state.redis_clients import Keys, parse_epoch, patient_client, redact
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.machine import SystemClock
from paceline.paths import DECISIONS, LEARNERS, REGISTRY, TRACES, check_private, keep_private, open_atomic, service_home
from paceline.records import Setting, record, require

FORMAT = 1
MANIFEST = "backup.json"
_SNAPSHOTS = "controller*.msgpack"
_CHUNK = 1 << 20
_FRESH_S = 300.0
"""Age of the snapshot of a service that runs, at most: ten of the intervals at which its controller writes it."""
_ROUNDS = 3
"""Times that folders are listed, while a listed file was gone when its turn came: a learner is replaced every 10 s."""


class _File(msgspec.Struct, frozen=True, kw_only=True):
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup holds; its last member, so that a file that was cut off has none."""

    format: int
    paceline: str
    model_name: str
    created: float
    files: dict[str, _File]


@record()
class BackupOptions:
    """State, decision log, drafter versions and learners of a service, which may be running; restore them by `paceline restore`.

    Example: paceline backup --data-dir /mnt/paceline --out paceline.tar.
    """

    out: A[Path, Setting("New file.", is_output=True)]
    data_dir: A[Path, Setting("Data folder of the service.")] = Path("~/.cache/paceline")
    model_name: A[str, Setting("Name of the service in /v1/models.")] = "paceline"
    traces: A[bool, Setting("The captured traces too: token ids and hidden states of users' requests.")] = False

    def __post_init__(self) -> None:
        require(not self.out.exists(), "out must be a new file", str(self.out))


@record()
class RestoreOptions:
    """The service must be stopped. Where it has state already, --replace puts that aside (files) and deletes it (Redis).

    Example: paceline restore paceline.tar --data-dir /mnt/paceline --redis-url redis://redis.internal:6380/0.
    """

    backup: A[Path, Setting("File that `paceline backup` wrote.", is_argument=True)]
    data_dir: A[Path, Setting("Data folder of the service.")] = Path("~/.cache/paceline")
    redis_url: A[
        str | None,
        Setting("Redis of the service; default: the embedded one of the data folder.", env="PACELINE_REDIS_URL"),
    ] = field(default=None, repr=False)  # fmt: skip
    replace: A[bool, Setting("Give up the state that the service has now.")] = False


def run_backup(options: BackupOptions, console: Console) -> Manifest:
    """Write the backup and return what it holds; the file appears whole or not at all.

    Raises: PacelineError when there is no state to save; OSError.
    """
    home, out = service_home(options.data_dir, options.model_name), options.out.expanduser().absolute()
    if not any(home.glob(_SNAPSHOTS)):
        raise PacelineError(
            f"data-dir must hold the state of service {options.model_name!r}, got no controller-*.msgpack in {home}; a "
            "running controller writes it within half a minute of its first decision; a service with a store_url has it there: "
            "copy that prefix instead"
        )
    age_s = time.time() - max(path.stat().st_mtime for path in home.glob(_SNAPSHOTS))
    if age_s > _FRESH_S:
        console.print(
            f"[yellow]the state in it was written {age_s / 3600.0:.1f} hours ago:[/yellow] right for a service that was stopped "
            "then; a service with a store_url has its state there, copy that prefix instead",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    files: dict[str, _File] = {}
    with open_atomic(out) as raw, tarfile.open(fileobj=raw, mode="w") as tar:
        os.fchmod(raw.fileno(), 0o600)
        for _ in range(_ROUNDS):
            names = {path.relative_to(home).as_posix(): path for path in _members(home, with_traces=options.traces)}
            added = {name: _add(tar, path, name) for name, path in names.items() if name not in files}
            files |= {name: facts for name, facts in added.items() if facts is not None}
            if None not in added.values():
                break
        manifest = Manifest(
            format=FORMAT, paceline=importlib.metadata.version("paceline"), model_name=options.model_name,
            created=SystemClock().now(), files=files,
        )  # fmt: skip
        data = msgspec.json.encode(manifest)
        info = tarfile.TarInfo(MANIFEST)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    total = sum(f.bytes for f in files.values())
    console.print(f"{len(files)} files, {total} bytes, written to {options.out}", highlight=False, soft_wrap=True)
    return manifest


def _members(home: Path, *, with_traces: bool) -> Iterator[Path]:
    """The state first: what is newer in the log and the registry behind it counts for nothing, and a learner scores again."""
    yield from sorted(home.glob(_SNAPSHOTS))
    yield home / DECISIONS
    for name in (REGISTRY, LEARNERS, *((TRACES,) if with_traces else ())):
        yield from sorted(p for p in (home / name).rglob("*") if p.is_file() and p.suffix != ".tmp")


def _add(tar: tarfile.TarFile, path: Path, name: str) -> _File | None:
    """Add a file as long as it was when it was opened; None when it is gone, as a trace may be by its limits, or a learner's file,
    which another one has replaced."""
    try:
        with path.open("rb") as source:
            info, digest = tarfile.TarInfo(name), hashlib.sha256()
            info.size = os.fstat(source.fileno()).st_size
            tar.addfile(info, _Hashed(source, digest))  # type: ignore[arg-type]
            return _File(bytes=info.size, sha256=digest.hexdigest())
    except FileNotFoundError:
        return None


class _Hashed:
    """A file whose bytes are hashed while they are read."""

    def __init__(self, source: Any, digest: Any) -> None:
        self._source, self._digest = source, digest

    def read(self, size: int) -> bytes:
        data = self._source.read(size)
        self._digest.update(data)
        return data


def run_restore(options: RestoreOptions, console: Console) -> Manifest:
    """Put a backup in the place of a stopped service's state; it goes on from there at its next start.

    Nothing is changed before the whole backup was read and its checksums are right.
    Raises: PacelineError with what to do.
    """
    keep_private()
    data_dir = options.data_dir.expanduser()
    services = data_dir.resolve() / "services"
    made = [folder for folder in (services, *services.parents) if not folder.exists()]
    mode = data_dir.stat().st_mode if data_dir.exists() else None
    check_private(data_dir, "data-dir")
    services.mkdir(exist_ok=True)
    part = services / f".restore.{uuid.uuid4().hex}"
    try:
        try:
            manifest = _unpack(options.backup, part)
        except (PacelineError, OSError):
            if mode is not None:  # of another one, perhaps, who mistyped
                with contextlib.suppress(OSError):
                    data_dir.chmod(stat.S_IMODE(mode))
            raise
        home = service_home(data_dir, manifest.model_name)
        is_embedded = not options.redis_url and (data_dir / "redis").is_dir()
        if home.exists() and not options.redis_url and not is_embedded:
            raise PacelineError(
                f"redis-url must name the Redis of service {manifest.model_name!r}, which has no embedded one beside {home}: what "
                "its Redis holds would count more than the backup; move that folder away if there is none, as after a restore "
                "without a start"
            )
        server = EmbeddedRedis(data_dir).start() if is_embedded else None
        try:
            url = options.redis_url or (server.url if server is not None else None)
            keys = Keys(manifest.model_name)
            held = _held_keys(url, keys) if url else []
            if (held or home.exists()) and not options.replace:
                where = " and ".join([*([redact(str(url))] if held else []), *([str(home)] if home.exists() else [])])
                raise PacelineError(
                    f"restore must not overwrite the state of service {manifest.model_name!r} in {where}; give --replace "
                    "to put it aside"
                )
            if url:
                _fence(url, keys)
            if home.exists():
                aside = home.with_name(f".{home.name}.before.{time.strftime('%Y%m%d-%H%M%S')}.{uuid.uuid4().hex[:4]}")
                home.rename(aside)
                console.print(
                    f"the files of before are in {aside}; with them users' traces, which no limit deletes there: remove the folder "
                    "once it is not needed",
                    highlight=False, soft_wrap=True,
                )  # fmt: skip
            part.rename(home)
            if url:
                _delete(url, [name for name in held if name != keys.epoch.encode()])
        finally:
            if server is not None:
                server.stop()
    finally:
        shutil.rmtree(part, ignore_errors=True)
        for folder in made:  # empty ones, where nothing was restored
            with contextlib.suppress(OSError):
                folder.rmdir()
    console.print(
        f"service {manifest.model_name!r}: {len(manifest.files)} files restored to {home}; start it with this data folder",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if not options.redis_url:
        console.print(
            "[yellow]no --redis-url was given:[/yellow] with a Redis of its own the service would go on from what that one holds, "
            "not from the backup; name it, with --replace, before the start",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    return manifest


def _unpack(backup: Path, folder: Path) -> Manifest:
    """Write the members of a backup below a new folder. Raises PacelineError when it is not a whole one."""
    found: dict[str, _File] = {}
    manifest = None
    try:
        with tarfile.open(backup.expanduser(), "r:") as tar:
            for info in tar:
                source = tar.extractfile(info) if info.isreg() else None
                if source is None:
                    raise PacelineError(f"backup {backup} holds {info.name!r}, which is no plain file")
                if info.name == MANIFEST:
                    manifest = msgspec.json.decode(source.read(), type=Manifest)
                    continue
                name = PurePosixPath(info.name)
                if name.is_absolute() or ".." in name.parts:
                    raise PacelineError(f"backup {backup} holds a file outside its folder: {info.name!r}")
                found[info.name] = _copy(source, folder / name)
    except (tarfile.TarError, EOFError, msgspec.DecodeError) as e:
        raise PacelineError(f"backup must be a file that `paceline backup` wrote, got {backup}: {e}") from e
    except (FileNotFoundError, IsADirectoryError, PermissionError) as e:
        raise PacelineError(f"backup must be a file that `paceline backup` wrote, got {backup}: {e.strerror}") from e
    if manifest is None:
        raise PacelineError(f"backup {backup} was cut off: it has no {MANIFEST}")
    if manifest.format != FORMAT:
        raise PacelineError(
            f"backup {backup} must have format {FORMAT}, got {manifest.format}; use the release that wrote it"
        )
    if wrong := sorted(n for n in found.keys() | manifest.files.keys() if found.get(n) != manifest.files.get(n)):
        raise PacelineError(f"backup {backup} is damaged: {', '.join(wrong[:3])} is not what {MANIFEST} says")
    return manifest


def _copy(source: Any, path: Path) -> _File:
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as out:
        while data := source.read(_CHUNK):
            out.write(data)
            digest.update(data)
            size += len(data)
        out.flush()
        os.fsync(out.fileno())
    return _File(bytes=size, sha256=digest.hexdigest())


def _held_keys(url: str, keys: Keys) -> list[bytes]:
    """Keys of the service in Redis. Raises PacelineError while replicas of it run."""
    try:
        with patient_client(url) as client:
            found = list(client.scan_iter(match=f"{keys.base}:*", count=1000))
            if any(name.startswith(f"{keys.base}:replica:".encode()) for name in found):
                raise PacelineError(
                    f"service {keys.model!r} must be stopped first: its replicas report to {redact(url)}"
                )
            return found
    except RedisError as e:
        raise PacelineError(f"redis-url must name a reachable Redis, got {redact(url)}: {e}") from e


def _fence(url: str, keys: Keys) -> None:
    """Take the epoch from a controller that still lives, as one does for a while behind its replicas: to it, keys that are
    gone would be a Redis that lost its data, and it would write its own back. The next start takes a higher one."""
    try:
        with patient_client(url) as client:
            client.delete(keys.reserve, keys.feedback)  # room, where Redis is full
            value: Any = client.get(keys.epoch)
            client.set(keys.epoch, f"{parse_epoch(value)[0] + 1}:restore")
    except RedisError as e:
        raise PacelineError(f"redis-url must name a Redis that takes writes, got {redact(url)}: {e}") from e


def _delete(url: str, names: list[bytes]) -> None:
    try:
        client: redis.Redis
        with patient_client(url) as client:
            for name in names:
                client.delete(name)
    except RedisError as e:
        raise PacelineError(
            f"the files are restored, but Redis at {redact(url)} still holds the state of before ({e}): delete its keys"
        ) from e
