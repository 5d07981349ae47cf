"""Claims of bench/engine/generate.py."""

from paceline.bench.engine.generate import marked_text
from tests.helpers.fakes import tiny_tokenizer


def test_characters_of_several_tokens_are_printed_whole():
    tokenizer, text = tiny_tokenizer(300), "ja, 你好 😀"
    ids = tokenizer.encode(text, add_special_tokens=False)
    num_plain = len(tokenizer.encode("ja, ", add_special_tokens=False))
    assert len(ids) - num_plain > len("你好 😀")  # else nothing is split
    marked = marked_text(tokenizer, (), ids, [i >= num_plain for i in range(len(ids))])
    assert marked.plain == text
    assert {marked.plain[s.start : s.end] for s in marked.spans if s.style} == set("你好 😀")
