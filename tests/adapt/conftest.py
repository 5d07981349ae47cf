"""Folders that recipes read: a tiny target and prompts."""

import json

import pytest

from tests.helpers.fakes import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_model("qwen3", layers=6, width=32).save_pretrained(folder)
    tiny_tokenizer(64).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    rows = [{"prompt": f"say the number {i} twice, then add {i * 3}"} for i in range(60)]
    (folder / "p.jsonl").write_text("\n".join(json.dumps(r) for r in rows), encoding="utf-8")
    return folder
