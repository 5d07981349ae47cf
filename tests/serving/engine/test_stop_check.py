"""Stop strings are found wherever tokens cut them."""

from __future__ import annotations

import pytest

from paceline.serving.engine.running import StopStringChecker
from paceline.serving.sampling.text_stream import TokenText
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
