"""Tokens are known by their digests, belong to tenants, and change with their file while the service runs."""

import hashlib
import os
import time

import pytest
from fastapi import Request

from paceline.config import ServiceConfig, load_token_file
from paceline.errors import ConfigError
from paceline.serving.wire import credentials
from paceline.serving.wire.credentials import Holder, Tokens, is_foreign_page, is_loopback
from tests.helpers.api_server import wait_until

FILE = """
tokens:
  - {token: s3cret-a, tenant: acme}
  - {sha256: %s, tenant: bolt}
  - {token: s3cret-own}
  - {token: s3cret-ops, role: admin, name: alice}
tenants:
  acme: {requests_per_minute: 60, max_unfinished: 2}
"""
SHA256 = hashlib.sha256(b"s3cret").hexdigest()


def write(path, text: str) -> None:
    """As editors and mounted secrets do: a new file takes the name."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tokens.yaml"
    write(path, FILE % hashlib.sha256(b"s3cret-b").hexdigest())
    return path


def request(headers: dict[str, str] | None = None) -> Request:
    raw = [(k.encode(), v.encode()) for k, v in (headers or {}).items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": raw, "client": ("127.0.0.1", 1)})


def held(tokens: Tokens, token: str) -> Holder | None:
    return tokens.holder(request({"authorization": f"Bearer {token}"}))


def test_a_file_says_whose_each_token_is(path):
    tokens = Tokens(api_token="front", file=path)
    assert held(tokens, "s3cret-a") == Holder(role="client", name=held(tokens, "s3cret-a").name, tenant="acme")
    assert held(tokens, "s3cret-b").tenant == "bolt", "a digest does in place of the token"
    own = held(tokens, "s3cret-own").tenant
    assert own.startswith("~") and "s3cret" not in own, "a token without a tenant is one that nobody can name"
    assert held(tokens, "s3cret-ops") == Holder(role="admin", name="alice")
    assert held(tokens, "front") == Holder(role="api", name="api_token")
    assert held(tokens, "s3cret") is None and held(tokens, "") is None
    assert tokens.holder(request({"authorization": "Basic s3cret-a"})) is None
    assert tokens.limits["acme"].max_unfinished == 2


def test_a_changed_file_is_taken_without_a_restart_and_a_broken_one_changes_nothing(path, caplog):
    tokens = Tokens(file=path, reload_s=0.01).start()
    try:
        write(path, "tokens: [{token: s3cret-new, tenant: acme}]")
        wait_until(lambda: held(tokens, "s3cret-new") is not None)
        assert held(tokens, "s3cret-a") is None, "withdrawn"
        twice = "tokens: [{token: s3cret-x, tenant: acme}, {token: s3cret-x, role: admin}]"
        for broken in ("tokens: [{token: s3cret-x, rol: admin}]", "tokens: [s3cret-y", "- s3cret-z", twice):
            caplog.clear()
            write(path, broken)
            wait_until(lambda: "is not used" in caplog.text)
            assert "s3cret" not in caplog.text, "no log tells a token"
            assert held(tokens, "s3cret-new") is not None and held(tokens, "s3cret-x") is None
        path.unlink()
        caplog.clear()
        wait_until(lambda: "must be a readable file" in caplog.text)
        assert held(tokens, "s3cret-new") is not None
        write(path, "tokens: [{token: s3cret-back, tenant: acme}]")
        wait_until(lambda: held(tokens, "s3cret-back") is not None)
    finally:
        tokens.close()


def test_a_file_that_is_emptied_and_then_written_shuts_nobody_out(path, monkeypatch):
    monkeypatch.setattr(credentials, "SETTLE_S", 1.0)
    tokens = Tokens(file=path, reload_s=0.001).start()
    try:
        with path.open("w") as file:  # as an editor writes: truncated first
            time.sleep(0.1)
            file.write("tokens:\n  - {token: s3cret-new, tenant: acme}\n")
            file.flush()
            time.sleep(0.1)  # half of it is a valid file, too
            assert held(tokens, "s3cret-a") is not None and tokens.num_reloads == 0
            file.write("  - {token: s3cret-a, tenant: acme}\n")
        wait_until(lambda: held(tokens, "s3cret-new") is not None)
        assert held(tokens, "s3cret-a") is not None and tokens.num_reloads == 1
    finally:
        tokens.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens: [{tenant: acme}]", "either token or sha256"),
        ("tokens: [{token: s3cret, sha256: aa}]", "either token or sha256"),
        ("tokens: [{sha256: s3cret}]", "64 hexadecimal digits"),
        ("tokens: [{token: ' s3cret'}]", "must be ASCII"),
        ("tokens: [{token: s3cret, tenant: '~own'}]", "tokens.tenant must be 1 to 64"),
        ("tokens: [{token: s3cret, tenant: acme, role: admin}]", "tokens.tenant must be absent"),
        ("tokens: [{token: s3cret, role: root}]", "must be one of client, admin"),
        ("tokens: [{token: 123456}]", r"tokens\[0\].token must be"),
        ("tenants: {acme: {max_unfinished: 0}}", "max_unfinished must be >= 1"),
        (
            "tokens:\n- {token: a}\n- {token: s3cret,\n   token: s3cret-b}\n",
            "must give each key once: that of line 4 is in line 3",
        ),
        ("tokens: [", "must be YAML: an error at line 1"),
        ("tenants: {'~x': {}}", "tenants must be 1 to 64"),
        (
            "tokens: [{token: a}, {token: s3cret}, {token: s3cret, role: admin}]",
            r": tokens\[2\] is the same .* tokens\[1\];",
        ),
        (
            f"tokens: [{{token: s3cret}}, {{sha256: {SHA256.upper()}}}]",
            r": tokens\[1\] is the same token as tokens\[0\];",
        ),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_without_telling_a_token(tmp_path, text, message):
    path = tmp_path / "tokens.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_token_file(path)
    assert "s3cret" not in str(error.value) and "123456" not in str(error.value)
    assert str(error.value).count("token_file") == 1
    with pytest.raises(ConfigError, match="token_file"):
        Tokens.of(ServiceConfig(token_file=str(path)))


def test_an_empty_file_shuts_everybody_out(tmp_path):
    path = tmp_path / "tokens.yaml"
    path.write_text("")
    assert Tokens(file=path).guards_api and not Tokens().guards_api


@pytest.mark.parametrize(
    ("headers", "is_foreign"),
    [
        ({"host": "127.0.0.1:8000"}, False),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}, False),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:9000"}, True),
        ({"host": "127.0.0.1:8000", "origin": "http://evil.example"}, True),
        ({"host": "127.0.0.1:8000", "origin": "null"}, True),
        ({"host": "127.0.0.1:8000", "sec-fetch-site": "cross-site"}, True),
        ({"host": "127.0.0.1:8000", "sec-fetch-site": "same-site"}, True),
        ({"host": "127.0.0.1:8000", "sec-fetch-site": "none"}, False),
    ],
)
def test_browsers_say_when_another_site_asks(headers, is_foreign):
    assert is_foreign_page(request(headers)) == is_foreign


@pytest.mark.parametrize(
    ("name", "is_here"),
    [("localhost", True), ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("10.0.0.1", False)]
    + [(n, False) for n in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "", "0.0.0.0", "2130706433")],
)  # fmt: skip
def test_only_names_that_nobody_can_point_elsewhere_are_this_computer(name, is_here):
    assert is_loopback(name) == is_here
