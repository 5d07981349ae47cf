"""What a transformers folder cannot be read for is said in one sentence."""

import json

import pytest

from paceline.errors import ConfigError
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
