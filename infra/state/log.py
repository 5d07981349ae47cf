"""Logs: the handlers of a process, the decision log (a stream and the file that copies it), counted errors."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.infra.state.redis_clients import Keys

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
logger = logging.getLogger(__name__)


class TextFormatter(logging.Formatter):
    """One line of text; the fields of a structured record follow its message as JSON."""

    def __init__(self) -> None:
        super().__init__(_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None)
        return super().format(record) + (f" {json.dumps(fields)}" if fields else "")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts, level, logger, message, a record's own `fields`, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        out: dict[str, Any] = {
            "ts": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            out["error"] = self.formatException(record.exc_info)
        return json.dumps(out)


def configure_logging(
    level: str = "INFO", *, file: Path | None = None, to_stderr: bool = True, access_file: Path | None = None
) -> None:
    """Set the handlers of the `paceline` logger; a second call replaces those of the first.

    Args:
        file: JSON lines, rotated at 10 MB with three old files.
        to_stderr: False for programs that draw on the terminal.
        access_file: the same for the lines of `paceline.access`, which then go nowhere else; None = like all others.
    """
    root, access = logging.getLogger("paceline"), logging.getLogger("paceline.access")
    root.setLevel(level)
    for logger_ in (root, access):
        for handler in [h for h in logger_.handlers if getattr(h, "is_paceline", False)]:
            logger_.removeHandler(handler)
            handler.close()
    access.propagate = access_file is None
    if access_file is not None:
        _add_handlers(access, [_rotating_file(access_file)])
    handlers: list[logging.Handler] = []
    if to_stderr:
        stream = logging.StreamHandler(sys.stderr)
        stream.setFormatter(TextFormatter())
        handlers.append(stream)
    if file is not None:
        handlers.append(_rotating_file(file))
    _add_handlers(root, handlers)


def _rotating_file(path: Path) -> logging.Handler:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=10_000_000, backupCount=3, encoding="utf-8")
    handler.setFormatter(JsonFormatter())
    return handler


def _add_handlers(target: logging.Logger, handlers: list[logging.Handler]) -> None:
    for handler in handlers:
        handler.is_paceline = True  # type: ignore[attr-defined]
        target.addHandler(handler)


def quiet_libraries(level: str) -> None:
    """Let Ray and Serve write to this terminal from `level` on; their own files keep everything."""
    for name in ("ray", "ray.serve", "ray.data", "httpx"):
        logging.getLogger(name).setLevel(level)


class LogFile:
    """JSON-lines copy of the log stream: a projection by stream id, so no entry is lost or doubled by a crash."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last_id: str | None = None

    def last_id(self) -> str:
        """Stream id of the last complete line; a torn last line is cut off. '0' when the file is new."""
        if self._last_id is None:
            self._last_id = self._recover()
        return self._last_id

    def sync(self, client: Any, keys: Keys, *, count: int = 500) -> int:
        """Append the entries that the file does not hold yet; returns how many."""
        total = 0
        while True:
            entries = client.xrange(keys.log, min=f"({self.last_id()}" if self.last_id() != "0" else "-", count=count)
            if not entries:
                return total
            self._append([(i.decode(), f) for i, f in entries])
            total += len(entries)

    def newest_first(self) -> Iterator[dict[str, Any]]:
        """The lines of the file, the latest first; those that are damaged are left out."""
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return
        while lines:
            try:
                yield json.loads(lines.pop())
            except ValueError:
                continue

    def _append(self, entries: list[tuple[str, dict[bytes, bytes]]]) -> None:
        self._last_id = None  # a disk that fills up tears a line: then the file is read anew and cut
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as f:
            for entry_id, fields in entries:
                f.write(json.dumps(_line(entry_id, fields)) + "\n")
            f.flush()
            os.fsync(f.fileno())
        self._last_id = entries[-1][0]

    def _recover(self) -> str:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return "0"
        complete = data[: data.rfind(b"\n") + 1]
        if len(complete) < len(data):
            with self.path.open("r+b") as f:
                f.truncate(len(complete))
        return next((str(line["log_id"]) for line in self.newest_first() if "log_id" in line), "0")


def stream_newest_first(client: Any, keys: Keys, *, count: int = 500) -> Iterator[dict[str, Any]]:
    """What the log stream holds, as lines of its file, the latest first. Raises redis errors."""
    end = "+"
    while entries := client.xrevrange(keys.log, max=end, count=count):
        for entry_id, fields in entries:
            yield _line(entry_id.decode(), fields)
        end = f"({entries[-1][0].decode()}"


def _line(entry_id: str, fields: dict[bytes, bytes]) -> dict[str, Any]:
    return {"log_id": entry_id, "kind": fields[b"kind"].decode(), **json.loads(fields[b"v"])}


class ErrorCount:
    """Errors that a loop survives: each is logged, counted, and the last one is shown."""

    def __init__(self) -> None:
        self.num, self.last = 0, ""

    def note(self, text: str, error: Exception) -> None:
        """Call it inside the `except`."""
        self.num += 1
        self.last = f"{text}: {error}"
        logger.exception("%s", text)
