"""Nodes: raylets that stand for computers, each with a home of its own; and ports in front of what they share, which can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray._private import services
from ray.cluster_utils import Cluster

from paceline.bench.chaos.load import wait_for

_LOOK = services.get_node


class Nodes:
    """A Ray cluster whose nodes share no folder: `~` is another one on each."""

    def __init__(self, folder: Path, **head: Any) -> None:
        """folder: holds a home a node. head: what the first node has, as for `add`."""
        self.folder, self._nodes = folder, {}  # type: ignore[var-annotated]
        self.cluster = Cluster()
        self.add("head", **head)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def home(self, name: str) -> Path:
        return self.folder / name

    def add(self, name: str, **options: Any) -> None:
        """Start a node, also one that was killed. options: of Ray's Cluster.add_node."""
        self.home(name).mkdir(parents=True, exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", str(self.home(name)))
            patch.setattr(services, "get_node", _get_node)
            self._nodes[name] = self.cluster.add_node(
                object_store_memory=80 * 2**20, include_dashboard=False, **options
            )

    def kill(self, name: str) -> None:
        """kill -9 of a node's raylet; what ran on it ends with it."""
        self.cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def processes(self, name: str) -> list[psutil.Process]:
        """What runs on a node."""
        raylets = self._nodes[name].all_processes["raylet"]
        return [p for info in raylets for p in psutil.Process(info.process.pid).children(recursive=True)]

    def where(self, command: str) -> set[str]:
        """Names of the nodes on which processes run whose command begins so."""
        found = set()
        for name in self._nodes:
            for process in self.processes(name):
                with contextlib.suppress(psutil.Error):
                    if " ".join(process.cmdline()).startswith(command):
                        found.add(name)
        return found


def _get_node(gcs_address: str, node_id: str) -> Any:
    """Ray's look at a node that starts; on a busy computer that takes longer than the 30 s that Ray waits."""

    def look() -> Any:
        try:
            return _LOOK(gcs_address, node_id)
        except RuntimeError:
            return None

    return wait_for(look, "the raylet", every_s=0.5)


class Front:
    """A port on loopback that passes everything on to a server, by TLS where there is a certificate; a context manager."""

    def __init__(self, port: int, cert: tuple[Path, Path] | None = None) -> None:
        """port: of the server. cert: certificate and key."""
        self._server_port, self._tls = port, None
        if cert is not None:
            self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._tls.load_cert_chain(*cert)
        self._loop, self._ready = asyncio.new_event_loop(), threading.Event()
        self._open: dict[int, list[asyncio.StreamWriter]] = {}
        self._is_cut: Callable[[int], bool] = lambda port: False
        self.port = 0

    def __enter__(self) -> Front:
        threading.Thread(target=self._run, name="front", daemon=True).start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    @contextmanager
    def cut_off(self, pids: Callable[[], set[int]]) -> Iterator[None]:
        """Let no byte of these processes through for so long: connections break, new ones end at once."""

        def ports() -> set[int]:
            found = set()
            for pid in pids():
                with contextlib.suppress(psutil.Error):
                    found |= {c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.laddr}
            return found

        self._is_cut = lambda port: port in ports()
        for port in ports() & set(self._open):
            for writer in self._open[port]:
                self._loop.call_soon_threadsafe(writer.transport.abort)
        try:
            yield
        finally:
            self._is_cut = lambda port: False

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._loop.run_forever()

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._take, "127.0.0.1", 0, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info("peername")[1]
        if await asyncio.to_thread(self._is_cut, port):
            writer.transport.abort()
            return
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            writer.transport.abort()
            return
        self._open[port] = [writer, inner_writer]
        await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))
        self._open.pop(port, None)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
