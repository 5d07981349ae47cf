"""Claims of the catalog of peers: what is here is found, what is not is named with the way to install it."""

import sys

import pytest

from paceline.bench.peers.catalog import (
    FIELDS,
    PACELINE,
    Given,
    MissingPeer,
    chosen,
    filled,
    find_peer,
    kinds,
    parse_given,
)
from paceline.errors import ConfigError

KNOWN = kinds(("specblock", "eagle3"), "specblock")


def test_a_command_is_variables_and_a_program_or_the_whole():
    found = parse_given(["vllm=A=1 /venv/bin/python", "mine=B='x y' serve --port {port}", "llamacpp=PYTHONPATH=/lib"])
    assert found["vllm"] == Given({"A": "1"}, ("/venv/bin/python",)) and not found["vllm"].is_whole
    assert found["mine"] == Given({"B": "x y"}, ("serve", "--port", "{port}")) and found["mine"].is_whole
    assert found["llamacpp"] == Given({"PYTHONPATH": "/lib"}, ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm", "must be NAME=COMMAND"), ("vllm=", "must be NAME=COMMAND"), ("=python", "must be NAME=COMMAND"),
        ("Two Words=python", "must be NAME=COMMAND"), ("vllm='python", "in a shell's quotes"),
        ("vllm=python -m vllm", "must name {port} in a whole command"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_in_one_sentence(text, message):
    with pytest.raises(ConfigError, match=r"^peer must") as error:
        parse_given([text])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_patterns_choose_in_the_order_of_the_catalog():
    assert chosen(["llamacpp*", PACELINE], KNOWN, {}) == [PACELINE, "llamacpp", "llamacpp-lookup"]
    mine = parse_given(["mine=serve {port}", "vllm=python"])
    assert chosen(["*"], KNOWN, mine) == [*KNOWN, "mine"]
    with pytest.raises(ConfigError, match=r"peers must be names or patterns of .*'sglang'"):
        chosen(["sglang"], KNOWN, mine)


def test_paceline_has_one_arm_for_every_drafter_and_is_always_here():
    names = [name for name in KNOWN if name.split("-")[0] == PACELINE]
    assert names == ["paceline-none", "paceline", "paceline-eagle3", "paceline-lookup", "paceline-suffix"]
    assert "paceline-suffix" not in kinds((), "suffix")
    peer = find_peer("paceline-eagle3", KNOWN, {})
    assert peer.command[0] == sys.executable and peer.command[-2:] == ("--drafter", "eagle3")
    assert not peer.needs("folder") and peer.needs("model") and sys.executable not in peer.shown


def test_a_missing_peer_is_named_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    for name, kind in KNOWN.items():
        if not name.startswith(PACELINE):
            with pytest.raises(MissingPeer) as error:
                find_peer(name, KNOWN, parse_given([f"{name}=/nowhere/python"]))
            assert kind.install in str(error.value) and f"--peer {name}=" in str(error.value)
            assert "\n" not in str(error.value)
    with pytest.raises(MissingPeer, match="'gone' is no program in PATH"):
        find_peer("mine", KNOWN, parse_given(["mine=gone {port}"]))
    with pytest.raises(MissingPeer, match="its Python lacks vllm"):
        find_peer("vllm", KNOWN, parse_given([f"vllm={sys.executable}"]))


def test_a_program_stands_for_its_family_and_a_command_for_its_name_alone(tmp_path):
    server = tmp_path / "llama-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    given = parse_given([f"llamacpp=LD_LIBRARY_PATH=/lib {server}"])
    lookup = find_peer("llamacpp-lookup", KNOWN, given)
    assert lookup.command[0] == str(server) and "ngram-simple" in lookup.command and lookup.needs("total_context")
    assert lookup.env["LD_LIBRARY_PATH"] == "/lib"
    whole = parse_given([f"vllm-ngram=A=1 {server} {{port}}"])
    assert find_peer("vllm-ngram", KNOWN, whole).command == (str(server), "{port}")
    with pytest.raises(MissingPeer):
        find_peer("vllm", KNOWN, {**whole, **parse_given(["vllm=/nowhere/python"])})


def test_only_fields_are_filled_in():
    values = dict.fromkeys(FIELDS, "x") | {"port": "8000"}
    words = ["--port={port}", '{"method": "ngram"}', "{model}/{unknown}"]
    assert filled(words, values) == ["--port=8000", '{"method": "ngram"}', "x/{unknown}"]
