"""Ports in front of a server that several computers share: by TLS if it should be, and cut for some of its clients."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil


class CutPort:
    """A port on loopback that passes everything on to a server, by TLS where there is a certificate; a context manager."""

    def __init__(self, server_port: int, cert: tuple[Path, Path] | None = None) -> None:
        """cert: files of certificate and key."""
        self._server_port, self._tls = server_port, None
        if cert is not None:
            self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._tls.load_cert_chain(*cert)
        self._loop, self._is_ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="cut port", daemon=True)
        self._writers: dict[int, list[asyncio.StreamWriter]] = {}
        """The client's port -> both directions of its connection."""
        self._is_cut: Callable[[int], bool] = _never
        self._is_silent = False
        self._held: set[int] = set()
        """Clients' ports whose bytes wait."""
        self.port = 0

    def __enter__(self) -> CutPort:
        self._thread.start()
        assert self._is_ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    @contextlib.contextmanager
    def cut_off(self, pids: Callable[[], Iterable[int]], *, is_silent: bool = False) -> Iterator[None]:
        """Let no byte of these processes through for so long.

        is_silent: what they send gets no answer and arrives afterwards, as where packets are lost; else connections break,
        and new ones end at once.
        """

        def ports() -> set[int]:
            found = set()
            for pid in pids():
                with contextlib.suppress(psutil.Error):
                    found |= {c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.laddr}
            return found

        self._is_cut, self._is_silent = lambda port: port in ports(), is_silent
        asyncio.run_coroutine_threadsafe(self._cut(ports()), self._loop).result(30)
        try:
            yield
        finally:
            self._is_cut = _never
            self._loop.call_soon_threadsafe(self._held.clear)

    async def _cut(self, ports: set[int]) -> None:
        if self._is_silent:
            self._held |= ports
            return
        for port in ports & self._writers.keys():
            for writer in self._writers[port]:
                writer.transport.abort()

    def _run(self) -> None:
        self._loop.run_until_complete(self._listen())
        self._loop.run_forever()

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._take, "127.0.0.1", 0, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        self._is_ready.set()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info("peername")[1]
        try:
            if await asyncio.to_thread(self._is_cut, port):
                if not self._is_silent:
                    raise ConnectionError
                self._held.add(port)
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers[port] = [writer, inner_writer]
        await asyncio.gather(self._pump(port, reader, inner_writer), self._pump(port, inner_reader, writer))
        del self._writers[port]

    async def _pump(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                while port in self._held:
                    await asyncio.sleep(0.02)
                writer.write(data)
                await writer.drain()
        writer.close()


def _never(_: int) -> bool:
    return False
