"""Claims of bench/common/engine_run.py."""

import json

import pytest

from paceline.bench.common.engine_run import trained_domains


@pytest.mark.parametrize("name", ["none", "lookup", "suffix", "suffix-recent"])
def test_drafters_without_weights_have_no_domains(name):
    assert trained_domains(name) == ()


@pytest.mark.parametrize(("config", "domains"), [({"domains": ["tools", "code"]}, ("tools", "code")), ({}, ())])
def test_domains_are_those_of_the_config(tmp_path, config, domains):
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert trained_domains(str(tmp_path)) == domains
