import json
import resource

import pytest
import torch

from paceline.bench.common.padded import NUM_NEURONS, copy_drafter, pad_target
from paceline.errors import ConfigError
from paceline.paths import BUNDLED_TARGET, bundled, model_version
from paceline.serving.loading.checkpoint import open_checkpoint
from paceline.serving.loading.families import load_drafter
from paceline.serving.loading.target import read_target


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    return pad_target(tmp_path_factory.mktemp("padded") / "target")


def test_the_padded_target_says_what_the_bundled_one_says_at_the_size_of_a_larger_model(padded):
    own = open_checkpoint(bundled(BUNDLED_TARGET)).model().float().eval()
    larger = open_checkpoint(padded).model().eval()
    ids = torch.randint(own.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, got = own(input_ids=ids).logits, larger(input_ids=ids).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)  # zeros are added to sums, which may be cut elsewhere
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
    assert {p.dtype for p in larger.parameters()} == {torch.float32}
    more = [p.numel() for p in larger.parameters()], [p.numel() for p in own.parameters()]
    layers, width = own.config.num_hidden_layers, own.config.hidden_size
    assert sum(more[0]) - sum(more[1]) == 3 * layers * width * (NUM_NEURONS - own.config.intermediate_size)


def test_a_drafter_of_the_bundled_target_drafts_for_the_padded_one(padded, tmp_path):
    folder = copy_drafter("bundled", padded, tmp_path / "drafter")
    assert load_drafter(folder, read_target(padded)).caps.name == "specblock"
    assert copy_drafter("suffix", padded, tmp_path / "none") == "suffix" and not (tmp_path / "none").exists()


def test_a_drafter_of_something_else_is_left_to_be_refused(padded, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for text in (json.dumps({"drafter_type": "specblock", "target_version": "0" * 16}), "{", "[1]"):
        (foreign / "config.json").write_text(text)
        assert copy_drafter(str(foreign), padded, tmp_path / "copy") == str(foreign)
    assert not (tmp_path / "copy").exists() and model_version(padded) != model_version(bundled(BUNDLED_TARGET))


def test_no_room_for_the_padded_target_is_said_with_what_to_do(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))  # a write beyond it fails, as one to a full disk does
    try:
        with pytest.raises(ConfigError, match=r"100 MB.*File too large.*TMPDIR"):
            pad_target(tmp_path / "target")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
