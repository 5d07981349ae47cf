"""The machine's ports: taken ones are refused with the fix; free ones stay out of the range that the kernel gives to connections."""

from __future__ import annotations

import os
import socket

import httpx
import pytest

from paceline import machine
from paceline.errors import ConfigError
from paceline.machine import claim_port, free_port, spare_loopback


def test_a_taken_port_is_refused_with_the_fix() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        with pytest.raises(ConfigError, match="choose another"):
            claim_port("127.0.0.1", port)
    assert claim_port("127.0.0.1", 0) > 0


@pytest.mark.parametrize("host", ["300.1.1.1", "nowhere.invalid", "203.0.113.9"])
def test_a_host_that_is_no_address_of_this_computer_is_what_is_refused(host: str) -> None:
    for port in (0, 8000):
        with pytest.raises(ConfigError, match=f"host must be an address of this computer, got '{host}'"):
            claim_port(host, port)


def test_a_free_port_lies_where_no_connection_of_this_computer_gets_one() -> None:
    lowest = int(machine._KERNEL_RANGE.read_text().split()[0]) if machine._KERNEL_RANGE.is_file() else 49_152
    found = [free_port() for _ in range(50)]
    assert all(20_000 <= port < lowest for port in found) and len(set(found)) > 40
    for port in found:  # as a server would, later
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # its last server's connections may not be over
            s.bind(("127.0.0.1", port))


def test_where_the_kernel_gives_every_port_one_of_its_own_is_taken(tmp_path, monkeypatch) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(machine, "_KERNEL_RANGE", tmp_path / "range")
    assert free_port() > 0


def test_an_address_of_another_computer_is_refused() -> None:
    with pytest.raises(ConfigError, match="address of this computer"):
        free_port("192.0.2.1")


@pytest.mark.parametrize(
    ("given", "kept"), [(None, []), ("a.example, 127.0.0.1", ["a.example", "127.0.0.1"]), ("*", ["*"])]
)
def test_a_proxy_is_not_asked_for_this_computer(given, kept, monkeypatch):
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    if given is not None:
        monkeypatch.setenv("NO_PROXY", given)
    spare_loopback()
    names = os.environ["no_proxy"].split(",")
    assert names[: len(kept)] == kept and {"127.0.0.1", "localhost", "::1"} <= {*names} and len({*names}) == len(names)
    with httpx.Client() as client:
        for host in ("127.0.0.1:8000", "localhost:8000", "[::1]:8000"):
            assert client._transport_for_url(httpx.URL(f"http://{host}/")) is client._transport
        elsewhere = client._transport_for_url(httpx.URL("http://b.example/"))
        assert (elsewhere is client._transport) == (given == "*")
