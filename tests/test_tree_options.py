"""Tree options of `paceline serve` reach the configuration that replicas are built from."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import paceline.infra.serve as serve_command
from paceline.cli.main import app
from paceline.config import ServiceConfig, TreeConfig, build_config, to_dict
from paceline.errors import ConfigError


def served(monkeypatch, *options: str) -> ServiceConfig:
    """What `paceline serve OPTIONS` would serve."""
    found: list[ServiceConfig] = []
    monkeypatch.setattr(serve_command, "serve_forever", lambda config, console: found.append(config))
    result = CliRunner().invoke(app, ["serve", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found[0]


def test_serve_takes_policy_budget_mix_and_a_suffix_drafter(monkeypatch):
    config = served(
        monkeypatch, "--tree-policy", "bastion", "--max-draft-tokens", "32", "--mix", "suffix", "--drafter", "suffix-recent"
    )  # fmt: skip
    tree = config.engine.tree
    assert (tree.policy, tree.max_draft_tokens, tree.mix, config.drafter) == ("bastion", 32, "suffix", "suffix-recent")
    assert build_config(ServiceConfig, to_dict(config)) == config, "replicas get it as plain values"


def test_without_options_nothing_changes(monkeypatch):
    assert served(monkeypatch).engine.tree == TreeConfig()


def test_options_change_a_configuration_file_only_where_given(monkeypatch, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("engine: {tree: {policy: bundle, bundle_width: 3, max_frontier: 2}}\n", encoding="utf-8")
    tree = served(monkeypatch, "--config", str(path), "--max-draft-tokens", "8").engine.tree
    assert (tree.policy, tree.bundle_width, tree.max_frontier, tree.max_draft_tokens) == ("bundle", 3, 2, 8)


@pytest.mark.parametrize("values", [{"policy": "beam"}, {"mix": "eagle"}, {"bundle_width": 0}])
def test_unknown_values_are_refused_by_name(values):
    with pytest.raises(ConfigError, match=f"tree.{next(iter(values))} must be"):
        TreeConfig(**values)


@pytest.mark.parametrize("mix", ["lookup", "suffix"])
def test_a_mix_without_a_drafter_to_mix_with_is_refused_with_what_to_give_instead(monkeypatch, mix):
    assert served(monkeypatch, "--drafter", mix).drafter == mix
    with pytest.raises(ConfigError, match=f"mix must be none with drafter none .*give drafter {mix}.*, got '{mix}'"):
        served(monkeypatch, "--drafter", "none", "--mix", mix)
