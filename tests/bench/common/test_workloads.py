"""Bundled prompts."""

import pytest

from paceline.bench.common.workloads import BUNDLED_BUCKETS, asked_text, bundled_prompts, load_prompts
from paceline.errors import ConfigError
from tests.helpers.fakes import tiny_tokenizer

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}: {{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}[assistant: {% endif %}"


@pytest.mark.parametrize("bucket", BUNDLED_BUCKETS)
def test_every_bucket_has_at_least_40_distinct_prompts(bucket):
    prompts = bundled_prompts(bucket)
    assert len({p.text for p in prompts}) >= 40
    assert {p.bucket for p in prompts} == {bucket}


def test_order_is_seeded_and_repeats_only_when_the_list_is_used_up():
    first = load_prompts("math", None, 240, seed=3)
    assert [p.prompt_id for p in first] == [p.prompt_id for p in load_prompts("math", None, 240, seed=3)]
    assert len({p.prompt_id for p in first}) == 240
    assert [p.prompt_id for p in first] != [p.prompt_id for p in load_prompts("math", None, 240, seed=4)]


def test_unknown_bucket_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="tools, code, math, facts"):
        bundled_prompts("poems")


def test_chats_are_written_by_the_project_and_end_where_the_answer_begins():
    prompts = load_prompts("chat", None, 60)
    assert len({p.text for p in prompts}) == 60
    assert all(p.text.startswith("<|user|>") and p.text.endswith("<|assistant|>") for p in prompts)


def test_a_chat_template_stands_for_marks_that_a_tokenizer_does_not_know():
    tokenizer = tiny_tokenizer(300)
    prompt = "<|system|>Be brief.\n<|user|>Hi?\n<|assistant|>"
    tokenizer.chat_template = None
    assert asked_text(prompt, tokenizer) == prompt
    tokenizer.chat_template = TEMPLATE
    assert asked_text(prompt, tokenizer) == "[system: Be brief.][user: Hi?][assistant: "
    assert asked_text("<|user|>Hi?\n<|assistant|>I am", tokenizer) == "[user: Hi?][assistant: I am"
    assert asked_text("Once upon", tokenizer) == "[user: Once upon][assistant: "
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|assistant|>"]})
    assert asked_text(prompt, tokenizer) == prompt
