"""Claims of bench/common/workloads.py."""

import json

import pytest

from paceline.bench.common.workloads import BUNDLED_BUCKETS, read_questions
from paceline.errors import ConfigError


def write(folder, name, *rows):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")


def test_without_a_folder_the_bundled_prompts_are_read():
    found = read_questions(None)
    assert tuple(found) == BUNDLED_BUCKETS and all(q.is_completion for qs in found.values() for q in qs)


def test_every_format_is_told_by_its_keys(tmp_path):
    write(tmp_path, "spec/question.jsonl", {"question_id": 81, "category": "writing", "turns": ["One", "Two"]}, {"question_id": 90, "category": "qa", "turns": ["Why"], "reference": ["x"]})  # fmt: skip
    write(tmp_path, "HumanEval.jsonl", {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": ""})  # fmt: skip
    write(tmp_path, "math/test.jsonl", {"question": "1 + 1?", "answer": "#### 2"})
    write(tmp_path, "math/train.jsonl", {"question": "2 + 2?", "answer": "#### 4"})
    write(tmp_path, "sgd.jsonl", {"id": "d1", "services": [], "turns": [["U", "Hi"], ["S", "Yes?"], ["U", "A table"], ["S", "When?"]]})  # fmt: skip
    write(tmp_path, "lines.jsonl", {"text": "Say something"})
    write(tmp_path, "mine.jsonl", {"prompt": "Write a poem", "category": "poems"})
    write(tmp_path, "chat.jsonl", {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]})  # fmt: skip
    found = read_questions(tmp_path)
    assert set(found) == {"writing", "qa", "humaneval", "gsm8k", "dialogue", "poems", "chat", "lines"}
    assert found["writing"][0].turns == ("One", "Two") and found["writing"][0].question_id == "81"
    assert found["humaneval"][0].is_completion and not found["gsm8k"][0].is_completion
    assert [q.turns for q in found["gsm8k"]] == [("1 + 1?",)], "the train split is training text"
    assert found["dialogue"][0].messages == (("user", "Hi"), ("assistant", "Yes?"), ("user", "A table"))
    assert found["chat"][0].messages == (("user", "Hello"),), "the answer is the model's to give"


def test_books_give_passages_of_their_last_tenth(tmp_path):
    paragraphs = [f"Paragraph {i}: " + "word " * 40 for i in range(200)]
    (tmp_path / "book.md").write_text("\n\n".join(paragraphs), encoding="utf-8")
    (tmp_path / "NOTICE.md").write_text("\n\n".join(paragraphs), encoding="utf-8")
    found = read_questions(tmp_path)
    assert set(found) == {"books"} and len({q.question_id for q in found["books"]}) == len(found["books"]) > 3
    for question in found["books"]:
        assert 400 <= len(question.turns[0]) <= 1200
        assert int(question.turns[0].split("Paragraph ")[1].split(":")[0]) >= 180


def test_a_folder_without_prompts_says_what_it_looked_for(tmp_path):
    write(tmp_path, "other.jsonl", {"weight": 3})
    with pytest.raises(ConfigError, match=r"question_id, category, turns \| task_id, prompt.*1 other files"):
        read_questions(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        '{"task_id": "a", "prompt": 5}', '{"question": 7, "answer": "x"}', '{"prompt": "a\\ud800b"}', '{"messages": ["hi"]}',
        '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}',
    ],
)  # fmt: skip
def test_what_is_no_text_is_refused_before_anything_is_asked(tmp_path, line):
    (tmp_path / "q.jsonl").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"q\.jsonl line 1 must have the format"):
        read_questions(tmp_path)


def test_a_message_is_the_text_of_its_parts_and_one_without_has_none(tmp_path):
    parts = [{"type": "text", "text": "Two "}, {"type": "text", "text": "lattes"}]
    call = {"role": "assistant", "content": None, "tool_calls": []}
    write(tmp_path, "chat.jsonl", {"messages": [{"role": "user", "content": "Hi"}, call, {"role": "user", "content": parts}]})  # fmt: skip
    (found,) = read_questions(tmp_path)["chat"]
    assert found.messages == (("user", "Hi"), ("assistant", ""), ("user", "Two lattes"))


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "q.jsonl").write_bytes('{"prompt": "Grüße"}\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"q\.jsonl line 1 must have .*utf-8"):
        read_questions(tmp_path)


@pytest.mark.parametrize(
    "second", ['{"question_id": 1, "category": "qa"}', "{", "[1]", '{"question_id": 1, "category": "qa", "turns": []}']
)
def test_a_line_that_breaks_the_format_is_named(tmp_path, second):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question_id": 0, "category": "qa", "turns": ["Why"]}\n' + second + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"q\.jsonl line 2 must have the format of the first line"):
        read_questions(tmp_path)
