"""The handle agrees with the loaded target and needs one tensor only."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.adapt.families.target_handle import load_target_handle
from paceline.errors import ConfigError
from paceline.serving.loading.target import read_target
from tests.helpers.fakes import tiny_model, tiny_tokenizer


@pytest.mark.parametrize("shard_size", ["50GB", "20KB"])
def test_handle_agrees_with_the_loaded_target(tmp_path, shard_size):
    tiny_model().save_pretrained(tmp_path, max_shard_size=shard_size)
    tiny_tokenizer().save_pretrained(tmp_path)
    handle, target = load_target_handle(tmp_path), read_target(tmp_path)
    assert (handle.version, handle.vocab_size, handle.feature_size) == (
        target.version, target.vocab_size, target.feature_size,
    )  # fmt: skip
    assert torch.equal(handle.embed_weight, target.embed_weight)
    assert torch.equal(handle.head_weight, target.head_weight)
    assert not torch.equal(handle.head_weight, handle.embed_weight), "the case must have a head of its own"


def test_a_tied_head_is_the_token_embedding(tmp_path):
    model = tiny_model()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    handle, target = load_target_handle(tmp_path), read_target(tmp_path)
    assert handle.head_weight is handle.embed_weight
    assert torch.equal(handle.head_weight, target.head_weight)


def test_the_head_is_the_one_that_is_served_whatever_the_config_says_of_ties(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    handle, target = load_target_handle(tmp_path), read_target(tmp_path)
    assert not torch.equal(target.head_weight, target.embed_weight), "transformers ties equal tensors only"
    assert torch.equal(handle.head_weight, target.head_weight)
    tensors = load_file(weights)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    handle, target = load_target_handle(tmp_path), read_target(tmp_path)
    assert handle.head_weight is handle.embed_weight and torch.equal(handle.embed_weight, target.embed_weight)
    assert torch.equal(target.head_weight, target.embed_weight)


def test_unusable_folders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_target_handle(tmp_path)
    tiny_model().config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="must hold a tensor"):
        load_target_handle(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ConfigError, match="readable safetensors"):
        load_target_handle(tmp_path)
