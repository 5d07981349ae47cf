"""The handle agrees with the loaded target and needs one tensor only."""

import pytest
import torch

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


def test_unusable_folders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_target_handle(tmp_path)
    tiny_model().config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="must hold a tensor"):
        load_target_handle(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ConfigError, match="readable safetensors"):
        load_target_handle(tmp_path)
