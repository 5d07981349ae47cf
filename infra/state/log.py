"""Logs: the handlers of a process, the decision log (a stream and the file that copies it), counted errors."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import itertools
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.infra.state.redis_clients import Keys

MAX_FILE_BYTES = 10_000_000
NUM_OLD_FILES = 3
MAX_GONE_LOGS = 50
"""Logs of processes that are gone which stay, the newest: of 25 replicas with their access logs, at most 2 GB."""
GONE_AFTER_S = 24 * 3600.0
"""Whatever was written since stays."""
MAX_QUEUED_LINES = 10_000
"""Lines that wait for the disk: about 4 MB, 20 s of 500 requests a second."""
_PATIENCE_S = 2.0
_BLOCK_BYTES = 2**18
"""Of the decision log, whose file has no limit, as much is read at a time, from its end."""
_LOGGERS = ("paceline", "paceline.access", "paceline.audit")
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
    level: str = "INFO", *, file: Path | None = None, to_stderr: bool = True, access_file: Path | None = None,
    audit_file: Path | None = None,
) -> None:  # fmt: skip
    """Set the handlers of the `paceline` logger; a second call replaces those of the first.

    Args:
        file: JSON lines, rotated at 10 MB with three old files; written by a thread, see QueuedFile.
        to_stderr: False for programs that draw on the terminal.
        access_file: the same for the lines of `paceline.access`, which then go nowhere else; None = like all others.
        audit_file: a second place for commands that were carried out: whoever can make a process log cannot move them out.
    """
    root, access, audit = (logging.getLogger(name) for name in _LOGGERS)
    root.setLevel(level)
    for logger_ in (root, access, audit):
        for handler in [h for h in logger_.handlers if getattr(h, "is_paceline", False)]:
            logger_.removeHandler(handler)
            handler.close()
    audit.setLevel(logging.NOTSET)
    access.propagate = access_file is None
    if access_file is not None:
        _add_handlers(access, [QueuedFile(access_file)])
    if audit_file is not None:
        keep_audit(audit_file)
    handlers: list[logging.Handler] = []
    if to_stderr:
        stream = logging.StreamHandler(sys.stderr)
        stream.setLevel(level)  # commands are logged for their file whatever this level is
        stream.setFormatter(TextFormatter())
        handlers.append(stream)
    if file is not None:
        handlers.append(QueuedFile(file))
    _add_handlers(root, handlers)


def keep_audit(file: Path) -> None:
    """Write commands that were carried out to a file, too, however little the process says otherwise."""
    audit, done = logging.getLogger("paceline.audit"), QueuedFile(file)
    done.addFilter(lambda record: record.levelno < logging.WARNING)  # refusals are warnings
    audit.setLevel(logging.INFO)
    _add_handlers(audit, [done])


class _RotatingFile:
    """Lines appended to a file, which moves aside when it is full. Every call may take as long as the disk does.

    Not logging's own handler: at a process' end that one waits for whoever writes, which is for ever on a folder that hangs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: io.FileIO | None = None
        self._num_bytes = 0
        self._is_torn = False

    def write(self, line: bytes) -> None:
        """Append a line. Raises OSError; what was written of it then gets a line's end before the next."""
        if self._file is not None and self._num_bytes + len(line) > MAX_FILE_BYTES:
            self._rotate()
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - it stays open
            with contextlib.suppress(OSError):  # a file system without locks, where delete_gone_logs deletes nothing
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._num_bytes = os.fstat(self._file.fileno()).st_size
        data = b"\n" + line if self._is_torn else line
        written = self._file.write(data)
        self._num_bytes += written
        self._is_torn = 0 < written < len(data) or (self._is_torn and written == 0)
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def _rotate(self) -> None:
        self.close()
        names = [self._path, *(self._path.with_name(f"{self._path.name}.{i}") for i in range(1, NUM_OLD_FILES + 1))]
        for newer, older in reversed(list(itertools.pairwise(names))):
            if newer.exists():
                os.replace(newer, older)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class QueuedFile(logging.Handler):
    """A log file whose lines wait in a bounded queue for a thread that writes them: who logs never waits for the disk.

    What does not fit, and what the disk refuses, is dropped and counted.
    """

    def __init__(self, path: Path, max_lines: int = MAX_QUEUED_LINES) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self._file = _RotatingFile(path)
        self._waiting: queue.Queue[bytes | threading.Event | None] = queue.Queue(maxsize=max_lines)
        self._num_full = self._num_refused = 0  # counted by who logs, under the handler's lock, and by the thread
        self._thread = threading.Thread(target=self._run, name=f"log-{path.name}", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        return self._num_full + self._num_refused

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line; never blocks."""
        try:
            self._waiting.put_nowait(self.format(record).encode() + b"\n")
        except queue.Full:
            self._num_full += 1
        except (TypeError, ValueError):  # arguments that do not fit the message
            self.handleError(record)

    def flush(self) -> None:
        """Wait until what was logged so far is written, or _PATIENCE_S."""
        done = threading.Event()
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._waiting.put(done, timeout=_PATIENCE_S)
                done.wait(_PATIENCE_S)

    def close(self) -> None:
        """Write what waits, or give up after _PATIENCE_S."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=_PATIENCE_S)
            self._thread.join(_PATIENCE_S)
        super().close()

    def _run(self) -> None:
        while (line := self._waiting.get()) is not None:
            if isinstance(line, threading.Event):
                line.set()
                continue
            try:
                self._file.write(line)
            except (
                OSError
            ):  # nowhere to say so but in the count: a line on the terminal for each would be a second flood
                self._num_refused += 1
        self._file.close()


def delete_gone_logs(home: Path, now: float) -> None:
    """Delete the logs of replicas and ingresses that are gone: all but the newest MAX_GONE_LOGS, after GONE_AFTER_S.

    A process that lives holds a lock on its file. Audit logs are kept. Safe to call from many processes at once.
    """
    logs: dict[Path, list[Path]] = {}
    for kind in ("replica", "access", "ingress"):
        for path in home.glob(f"{kind}-*.log*"):
            logs.setdefault(path.with_name(path.name.rpartition(".log")[0] + ".log"), []).append(path)
    written = {log: max(_written_at(path) for path in paths) for log, paths in logs.items()}
    for log in sorted(written, key=written.__getitem__)[:-MAX_GONE_LOGS]:
        if now - written[log] > GONE_AFTER_S and not _is_held(log):
            for path in logs[log]:
                with contextlib.suppress(OSError):  # another user's, for one
                    path.unlink()


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_held(path: Path) -> bool:
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


def num_dropped_lines() -> int:
    """Lines that the log files of this process lost, to a full queue or a disk that refused them."""
    found = [h for name in _LOGGERS for h in logging.getLogger(name).handlers if isinstance(h, QueuedFile)]
    return sum(handler.num_dropped for handler in found)


def _add_handlers(target: logging.Logger, handlers: list[logging.Handler]) -> None:
    for handler in handlers:
        handler.is_paceline = True  # type: ignore[attr-defined]
        target.addHandler(handler)


def quiet_libraries(level: str) -> None:
    """Let Ray and Serve write to this terminal from `level` on; their own files keep everything."""
    for name in ("ray", "ray.serve", "ray.data", "httpx"):
        logging.getLogger(name).setLevel(level)


def _at_once(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


def parsed_line(data: bytes) -> dict[str, Any] | None:
    """A line of the decision log's file; None of one that is damaged."""
    try:
        line = json.loads(data)
    except (ValueError, RecursionError):  # the latter of what nests without end
        return None
    return line if isinstance(line, dict) else None


class LogFile:
    """JSON-lines copy of the log stream: a projection by stream id, so no entry is lost or doubled by a crash."""

    def __init__(self, path: Path, run: Callable[..., Any] = _at_once) -> None:
        """run: makes the calls of the file, `run(fn, *args)`; see adapt/data/storage_calls.py."""
        self.path, self._run = path, run
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
            last = self._run(self.last_id)
            entries = client.xrange(keys.log, min=f"({last}" if last != "0" else "-", count=count)
            if not entries:
                return total
            self._run(self._append, [(i.decode(), f) for i, f in entries])
            total += len(entries)

    def newest_first(self) -> Iterator[dict[str, Any]]:
        """The lines of the file, the latest first; those that are damaged are left out."""
        return self._parsed(lambda end: self._run(self._block, end))

    def _block(self, end: int | None) -> tuple[int, bytes]:
        """Where the block before `end` begins, and its bytes; None = the file's end."""
        try:
            with self.path.open("rb") as f:
                end = f.seek(0, os.SEEK_END) if end is None else end
                begin = f.seek(max(0, end - _BLOCK_BYTES))
                return begin, f.read(end - begin)
        except FileNotFoundError:
            return 0, b""

    @staticmethod
    def _parsed(read: Callable[[int | None], tuple[int, bytes]]) -> Iterator[dict[str, Any]]:
        end, rest = None, b""
        while end != 0:
            end, block = read(end)
            lines = (block + rest).split(b"\n")
            rest = lines.pop(0) if end else b""  # the block before has its begin
            while lines:
                if (line := parsed_line(lines.pop())) is not None:
                    yield line

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
        begin, data = self._block(None)
        size = begin + len(data)
        while begin and b"\n" not in data:
            begin, block = self._block(begin)
            data = block + data
        complete = begin + data.rfind(b"\n") + 1
        if complete < size:
            with self.path.open("r+b") as f:
                f.truncate(complete)
        return next((str(line["log_id"]) for line in self._parsed(self._block) if "log_id" in line), "0")


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
