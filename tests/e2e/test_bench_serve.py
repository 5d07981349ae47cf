"""`paceline bench serve` measures a whole local service: HTTP proxy, replica, engine, bundled models."""

import json

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_local_service_is_started_measured_and_stopped(tmp_path):
    path = tmp_path / "serve.json"
    arguments = ["--concurrency", "4", "--rate", "6", "--requests", "16", "--warmup", "2", "--max-tokens", "24", "--json", str(path)]  # fmt: skip
    result = CliRunner().invoke(app, ["bench", "serve", "--serve", *arguments])
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert document["server"] == {"model": "paceline", "has_token_ids": True, "has_usage": True, "has_done": True}
    assert len(document["cells"]) == 2
    for cell in document["cells"]:
        assert cell["num_whole"] == cell["num_requests"] == 16
        assert cell["token_count"] == "token ids" and cell["output_tokens_per_s"]["value"] > 0
        assert cell["acceptance"]["source"] == "answers" and cell["acceptance"]["acceptance_length"]["value"] >= 1
        assert cell["acceptance"]["metrics"]["tokens_per_engine_round"] > 0  # /metrics was read, too
