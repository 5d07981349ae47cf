"""Stop strings are found wherever tokens cut them."""

from __future__ import annotations

import pytest

from paceline.serving.engine.running import StopStringChecker
from paceline.serving.sampling.text_stream import TextStream, TokenText
from tests.helpers.fakes import tiny_tokenizer


@pytest.mark.parametrize("vocab", [64, 300])  # whole-text and byte-level tokenizers, one character a token
@pytest.mark.parametrize("stop", ["b", "cd", "abcde", "abcdefghijk"])
def test_a_stop_string_of_any_length_is_found_when_every_token_is_a_character(vocab: int, stop: str) -> None:
    tokenizer = tiny_tokenizer(vocab)
    ids = tokenizer.encode("xxabcdefghijklm", add_special_tokens=False)
    want = "xxabcdefghijklm".index(stop) + len(stop)
    for size in (1, 2, 5):
        checker = StopStringChecker(TokenText(tokenizer), (stop, "never there"))
        done = 0
        for start in range(0, len(ids), size):
            found = checker.first_match(ids[start : start + size])
            if found is not None:
                assert (done + found[0], found[1]) == (want, stop)
                break
            done += size
        else:
            pytest.fail(f"{stop!r} was not found with {size} tokens a call")


@pytest.mark.parametrize("vocab", [64, 300])
@pytest.mark.parametrize("min_tokens", [0, 1, 2, 4, 5, 6, 9, 10, 11])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_stop_string_counts_when_a_token_behind_min_tokens_completes_it(
    vocab: int, min_tokens: int, size: int
) -> None:
    tokenizer, text, stops = tiny_tokenizer(vocab), "xabxabcxaby", ("ab", "abcx")
    tokens = TokenText(tokenizer)
    ends = [(e, s) for e in range(min_tokens + 1, len(text) + 1) for s in stops if text[:e].endswith(s)]
    want = ends[0] if ends else None
    ids = tokenizer.encode(text, add_special_tokens=False)
    checker, stream = StopStringChecker(tokens, stops, min_tokens=min_tokens), TextStream(tokens, stop=stops, min_tokens=min_tokens)  # fmt: skip
    sent, found = "", None
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        hit = checker.first_match(part)
        sent += stream.push(part if hit is None else part[: hit[0]])
        if hit is not None:
            found = (start + hit[0], hit[1])
            break
    sent += stream.finish(None if found is None else found[1])
    assert found == want
    assert sent == (text if want is None else text[: want[0] - len(want[1])])
