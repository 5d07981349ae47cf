"""Layout: where a service keeps its files below a data folder, and how files of older releases get there.

    DATA_DIR/redis/                       the embedded Redis, where there is one
    DATA_DIR/services/MODEL_NAME/         one folder a service
        traces/ registry/                 what it learned from and what came of it, by target version
        decisions.jsonl                   the log of its decisions
        controller-TARGET_VERSION.msgpack the state that carries it over a loss of Redis' data
        *.log

Older releases kept everything in DATA_DIR itself, whatever the service.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import uuid
from pathlib import Path
from urllib.parse import quote

from paceline.paths import DECISIONS, REGISTRY, TRACES, make_private

logger = logging.getLogger(__name__)


def snapshot_name(target_version: str) -> str:
    """Name of the file with the controller's state of a target."""
    return f"controller-{quote(target_version, safe='')}.msgpack" if target_version else "controller.msgpack"


def make_home(home: Path) -> None:
    """Make a service's folder, and the data folder around it, for their owner alone. Raises OSError."""
    make_private(home.parent.parent)
    make_private(home)


def prepare_home(home: Path) -> None:
    """Make a service's folder and take over the traces and versions that an older release kept beside it.

    Versions are linked, not moved: they serve every service of their target, and the older release too if it comes back.
    Safe to call from many processes at once. Raises OSError.
    """
    make_home(home)
    old = home.parent.parent
    if (old / REGISTRY).is_dir() and not (home / REGISTRY).exists():
        part = home / f".{REGISTRY}.{uuid.uuid4().hex}"
        shutil.copytree(old / REGISTRY, part, copy_function=_link)
        try:
            part.rename(home / REGISTRY)
            logger.info("drafter versions of %s taken over into %s", old, home)
        except OSError:  # another process was first
            shutil.rmtree(part, ignore_errors=True)
    if (old / TRACES).is_dir():
        (home / TRACES).mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process has taken all
            for shard in (old / TRACES).iterdir():
                with contextlib.suppress(FileNotFoundError):
                    os.replace(shard, home / TRACES / shard.name)
        with contextlib.suppress(OSError):  # a replica of the older release has written another one
            (old / TRACES).rmdir()


def unnamed_snapshot(home: Path) -> Path | None:
    """The state that an older release kept beside the service's folder, for whichever service; None = there is none."""
    old = home.parent.parent / snapshot_name("")
    return old if home.parent.name == "services" and old.is_file() else None


def adopt_state(home: Path, target_version: str) -> None:
    """Take over log and snapshot that an older release kept; the caller knows by Redis that they are this service's.

    Raises OSError.
    """
    old = unnamed_snapshot(home)
    log = home.parent.parent / DECISIONS
    moves = [(old, home / snapshot_name(target_version))] if old is not None else []
    if home.parent.name == "services" and log.is_file():
        moves.append((log, home / DECISIONS))
    for source, target in moves:
        if not target.exists():
            with contextlib.suppress(FileNotFoundError):
                os.replace(source, target)
                logger.info("%s taken over into %s", source, home)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)
