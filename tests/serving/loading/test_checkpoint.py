"""What a transformers folder cannot be read for is said in one sentence."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import ConfigError
from paceline.serving.loading.checkpoint import open_checkpoint
from paceline.serving.loading.target import read_target
from tests.helpers.fakes import tiny_model, tiny_tokenizer


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_quantized_weights_whose_package_is_not_here_are_refused(tmp_path, method):
    tiny_model("llama", layers=1).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"must hold a readable transformers checkpoint: .*pip install") as e:
        read_target(tmp_path)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("extra", "is_refused"),
    [
        ("model.layers.1.self_attn.q_proj.bias", True),
        ("model.layers.0.self_attn.q_norm.weight", True),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", False),  # as older transformers saved
        ("model.layers.2.input_layernorm.weight", False),  # a head that predicts further tokens
    ],
)
def test_weights_that_the_configuration_knows_nothing_of_are_refused_where_they_would_be_left_out(
    tmp_path, extra, is_refused
):
    tiny_model("llama", layers=2).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, extra: torch.ones(64)}, tmp_path / "model.safetensors", {"format": "pt"})
    if is_refused:
        with pytest.raises(ConfigError, match=f"knows nothing of, first {extra}"):
            open_checkpoint(tmp_path).model()
    else:
        assert open_checkpoint(tmp_path).model() is not None
