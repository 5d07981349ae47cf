"""The target's recipe: resumable, seeded, and what it writes loads."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.adapt.data import corpus
from paceline.adapt.recipes import target as train_target
from paceline.adapt.recipes.target import TargetRecipe, learning_rate
from paceline.errors import ConfigError


def _recipe(**changes):
    return TargetRecipe(
        **(
            {
                "hidden_size": 32, "num_layers": 2, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "vocab_size": 400,
                "context_tokens": 32, "batch_windows": 2, "num_tokens": 64 * 6, "domains": ("code",), "seed": 3,
            }
            | changes
        )
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _few_documents(monkeypatch):
    monkeypatch.setattr(corpus, "_code", lambda data: list(_documents()))


def _documents():
    import random

    rng = random.Random(0)
    for _ in range(120):
        q, a = corpus.generate_code_document(rng)
        yield f"{corpus.USER}{q}\n{corpus.ASSISTANT}{a}\n"


def _weights(path):
    return AutoModelForCausalLM.from_pretrained(path).state_dict()


def test_interrupted_training_ends_with_the_same_weights(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_target.train_target(None, whole, _recipe(), checkpoint_every=3)

    class Stop(Exception):
        pass

    def interrupt(done, total, info):
        if done == 4:
            raise Stop

    with pytest.raises(Stop):
        train_target.train_target(None, parts, _recipe(), checkpoint_every=3, progress=interrupt)
    seen = []
    train_target.train_target(None, parts, _recipe(), checkpoint_every=3, progress=lambda d, t, i: seen.append(d))
    assert seen == [4, 5, 6]
    for name, value in _weights(whole).items():
        assert torch.equal(value, _weights(parts)[name]), name


def test_a_tokenizer_of_a_run_without_a_checkpoint_is_not_taken_over(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_target.train_target(None, whole, _recipe())
    parts.mkdir()
    (parts / "tokenizer.json").write_text("half a tok")  # of other domains, or cut off
    train_target.train_target(None, parts, _recipe())
    assert (parts / "tokenizer.json").read_bytes() == (whole / "tokenizer.json").read_bytes()


def test_written_folder_loads_with_tokenizer_chat_template_and_provenance(tmp_path):
    losses = train_target.train_target(None, tmp_path, _recipe(), command="paceline train-target --data DIR")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|user|>hi\n<|assistant|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text and ids[0] == tokenizer.convert_tokens_to_ids("<|user|>")
    assert tokenizer("12", add_special_tokens=False)["input_ids"] == tokenizer.convert_tokens_to_ids(["1", "2"])
    assert tokenizer.eos_token_id == json.loads((tmp_path / "config.json").read_text())["eos_token_id"]
    provenance = (tmp_path / "PROVENANCE.md").read_text()
    assert "paceline train-target" in provenance and "Seed 3" in provenance and f"{losses['code']:.3f}" in provenance


def test_checkpoint_of_another_recipe_is_refused(tmp_path):
    train_target.train_target(None, tmp_path, _recipe())
    with pytest.raises(ConfigError, match="another recipe"):
        train_target.train_target(None, tmp_path, _recipe(seed=4))


@pytest.mark.parametrize("kept", [0, 1000, None])
def test_a_damaged_checkpoint_is_refused_and_left(tmp_path, kept):
    train_target.train_target(None, tmp_path, _recipe())
    checkpoint = tmp_path / "checkpoint.pt"
    damaged = b"junk" * 100 if kept is None else checkpoint.read_bytes()[:kept]
    checkpoint.write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"checkpoint\.pt is damaged .*; delete it to start again"):
        train_target.train_target(None, tmp_path, _recipe())
    assert checkpoint.read_bytes() == damaged


def test_missing_data_folder_says_which_file(tmp_path):
    with pytest.raises(ConfigError, match=r"gsm8k/train\.jsonl must exist; pass --data"):
        corpus.documents("math", tmp_path, "train")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"question": "a"}', "got KeyError: 'answer'"),
        (b'{"question": "a", "answer": 3}', "got TypeError"),
        (b"[]", "got TypeError"),
        (b'{"question"', "got JSONDecodeError"),
        (b'{"question": "\xe4"}', "got UnicodeDecodeError"),
    ],
)
def test_a_row_that_is_no_document_is_refused_with_its_place(tmp_path, line, words):
    file = tmp_path / "math/gsm8k/train.jsonl"
    file.parent.mkdir(parents=True)
    file.write_bytes(b'{"question": "a", "answer": "b"}\r\n\n' + line)
    with pytest.raises(ConfigError, match=rf"train\.jsonl:3 must be as docs/drafters\.md says, {words}"):
        corpus.documents("math", tmp_path, "train")


def test_a_domain_of_a_few_rows_has_nothing_to_hold_out(tmp_path):
    file = tmp_path / "math/gsm8k/train.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text('{"question": "a", "answer": "b"}\n' * 5)
    with pytest.raises(ConfigError, match=r"domain 'math' must have documents .*, got 5 and 0; add more"):
        corpus.documents("math", tmp_path, "train")


def test_another_models_folder_is_no_place_for_a_target(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"out must be a new folder .* which holds another model's config"):
        train_target.train_target(None, tmp_path, _recipe())
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_learning_rate_warms_up_holds_and_falls_to_zero():
    recipe = _recipe(warmup_steps=10, learning_rate=1.0, decay_share=0.5)
    rates = [learning_rate(s, 100, recipe) for s in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[49] == 1.0
    assert rates[50:] == sorted(rates[50:], reverse=True) and rates[100] == 0.0


def test_splits_are_disjoint_and_depend_on_the_text_only():
    train, held = corpus.documents("code", None, "train"), corpus.documents("code", None, "held_out")
    assert not set(train) & set(held) and len(train) + len(held) == 120
