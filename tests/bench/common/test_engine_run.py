"""Claims of bench/common/engine_run.py."""

import json
from types import SimpleNamespace

import pytest
from tokenizers import processors

from paceline.bench.common.engine_run import encode, trained_domains
from tests.helpers.fakes import tiny_tokenizer


@pytest.mark.parametrize("name", ["none", "lookup", "suffix", "suffix-recent"])
def test_drafters_without_weights_have_no_domains(name):
    assert trained_domains(name) == ()


@pytest.mark.parametrize(("config", "domains"), [({"domains": ["tools", "code"]}, ("tools", "code")), ({}, ())])
def test_domains_are_those_of_the_config(tmp_path, config, domains):
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert trained_domains(str(tmp_path)) == domains


def test_a_prompt_begins_as_a_service_begins_it_unless_a_chat_template_has():
    tokenizer = tiny_tokenizer(64)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=["<pad>", "$A"], special_tokens=[("<pad>", 0)]
    )
    plain = tokenizer("hello", add_special_tokens=False)["input_ids"]
    assert encode(SimpleNamespace(tokenizer=tokenizer), "hello") == plain
    tokenizer.chat_template = None
    assert encode(SimpleNamespace(tokenizer=tokenizer), "hello") == [0, *plain] == tokenizer.encode("hello")
