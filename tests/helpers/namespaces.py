"""Computers: network namespaces on one bridge, whose links can be cut so that packets are lost in silence."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil

from paceline.bench.chaos.load import wait_for


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def namespaces_problem() -> str | None:
    """Why this user has no network namespaces, None where it has."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "needs root and iproute2"
    try:
        with Computers(("try",)):
            return None
    except subprocess.CalledProcessError as e:
        return f"namespaces are not allowed: {e.stderr.strip()}"


class Computers:
    """Named computers with an address each; a context manager that ends what still runs on them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._tag = f"{os.getpid() % 100_000}"
        self._bridge, self._net = f"br{self._tag}", f"10.{os.getpid() % 200 + 20}.77"
        self.addresses = {name: f"{self._net}.{i + 1}" for i, name in enumerate(names)}

    def __enter__(self) -> Computers:
        with ExitStack() as stack:  # what was made goes again where the rest is not allowed
            _ip("link", "add", self._bridge, "type", "bridge")
            stack.callback(_ip, "link", "del", self._bridge)
            _ip("addr", "add", f"{self._net}.254/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for name, address in self.addresses.items():
                space, outer, inner = self._space(name), self._link(name), f"i{name}{self._tag}"
                _ip("netns", "add", space)
                stack.callback(self._end, name)
                _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
                _ip("link", "set", outer, "master", self._bridge, "up")
                _ip("link", "set", inner, "netns", space)
                _ip("-n", space, "addr", "add", f"{address}/24", "dev", inner)
                _ip("-n", space, "link", "set", inner, "up")
                _ip("-n", space, "link", "set", "lo", "up")
            self._made = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._made.close()

    def _end(self, name: str) -> None:
        for process in self.processes(name):
            process.kill()
        wait_for(lambda: not self.processes(name), "the end of a computer's processes")
        _ip("netns", "del", self._space(name))

    def _space(self, name: str) -> str:
        return f"{name}{self._tag}"

    def _link(self, name: str) -> str:
        return f"o{name}{self._tag}"

    def start(self, name: str, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a program there. options: of Popen."""
        return subprocess.Popen(["ip", "netns", "exec", self._space(name), *command], text=True, **options)

    def processes(self, name: str) -> list[psutil.Process]:
        """What runs there."""
        return [psutil.Process(int(pid)) for pid in _ip("netns", "pids", self._space(name)).split()]

    def where(self, command: str) -> list[str]:
        """Names of the computers on which processes run whose command begins so, one a process."""
        found = []
        for name in self.addresses:
            for process in self.processes(name):
                try:
                    found += [name] * " ".join(process.cmdline()).startswith(command)
                except psutil.Error:
                    continue
        return sorted(found)

    @contextmanager
    def cut(self, name: str) -> Iterator[None]:
        """Lose every packet from and to a computer, for so long."""
        _ip("link", "set", self._link(name), "down")
        try:
            yield
        finally:
            _ip("link", "set", self._link(name), "up")
