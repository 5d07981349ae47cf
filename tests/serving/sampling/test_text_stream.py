"""Text leaves in whole characters, never with a part of a stop string, and adds up to the decoded answer."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from paceline.serving.sampling.text_stream import TextStream, TokenText
from tests.helpers.fakes import tiny_tokenizer


@pytest.fixture(scope="module")
def byte_tokens() -> TokenText:
    return TokenText(tiny_tokenizer(300))


def metaspace_tokenizer(further: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    words = ["<unk>", "</s>", "▁hello", "▁world", "ly", ".", *(f"<0x{b:02X}>" for b in range(256)), *further]
    tok = Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tok.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="</s>", unk_token="<unk>")


def push_all(stream: TextStream, token_ids: list[int], sizes: list[int]) -> list[str]:
    out, at = [], 0
    for size in sizes:
        out.append(stream.push(token_ids[at : at + size]))
        at += size
    out.append(stream.push(token_ids[at:]))
    return out


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語テキスト", "👩‍👩‍👧 done", "a\U0001f600b"])
def test_no_piece_has_a_broken_character_and_pieces_add_up(byte_tokens: TokenText, text: str) -> None:
    ids = byte_tokens.tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(byte_tokens)
    pieces = [stream.push([i]) for i in ids]
    assert all("�" not in p for p in pieces)
    assert "".join(pieces) + stream.finish() == text


def test_random_bytes_decode_as_the_tokenizer_decodes_them(byte_tokens: TokenText) -> None:
    rng = random.Random(0)
    for _ in range(100):
        ids = [rng.randrange(3, 259) for _ in range(rng.randrange(1, 30))]
        stream = TextStream(byte_tokens)
        got = "".join(push_all(stream, ids, [3, 1, 4])) + stream.finish()
        assert got == byte_tokens.decode(ids, True)


def test_special_tokens_are_left_out_or_kept_as_asked(byte_tokens: TokenText) -> None:
    ids = [*byte_tokens.tokenizer.encode("ab", add_special_tokens=False), 1]
    assert TextStream(byte_tokens).push(ids) == "ab"
    assert TextStream(byte_tokens, skip_special=False).push(ids) == "ab<|end|>"


def test_sentencepiece_style_spaces_and_byte_tokens() -> None:
    tokens = TokenText(metaspace_tokenizer())
    euro = [6 + b for b in "€".encode()]
    ids = [2, 3, 4, 5, *euro, 3]
    stream = TextStream(tokens, prompt_token_ids=[2])
    pieces = [stream.push([i]) for i in ids]
    assert all("�" not in p for p in pieces)
    assert "".join(pieces) + stream.finish() == " hello worldly.€ world"
    assert tokens.token_bytes(euro[0]) == "€".encode()[:1]


@pytest.mark.parametrize("prompt", ["€€", "😀", "日é"])
def test_a_first_word_keeps_its_space_behind_a_character_of_byte_tokens(prompt: str) -> None:
    prompt_ids = [6 + b for b in prompt.encode("utf-8")]
    for ids in (prompt_ids, prompt_ids[:-1]):  # a prompt may end inside a character, too
        stream = TextStream(TokenText(metaspace_tokenizer()), prompt_token_ids=ids)
        assert stream.push([2, 3]) + stream.finish() == " hello world"


def test_a_special_token_that_is_kept_is_text_of_a_sentencepiece_tokenizer() -> None:
    tok = metaspace_tokenizer()
    tok.add_tokens([AddedToken(text, special=True) for text in ("[A]", "[B]")])
    hello, a, b, end = tok.convert_tokens_to_ids(["▁hello", "[A]", "[B]", "</s>"])
    stream = TextStream(TokenText(tok), prompt_token_ids=[hello, b], kept_ids=[a])
    assert "".join(stream.push([i]) for i in (hello, a, b, hello, end)) + stream.finish() == " hello[A] hello"


def test_tokens_that_are_no_text_cost_the_same_however_many_come() -> None:
    tok, sizes = metaspace_tokenizer(), []
    hello, end = tok.convert_tokens_to_ids(["▁hello", "</s>"])
    text = TokenText(tok)
    decode = text.decode
    text.decode = lambda ids, *rest: (sizes.append(len(ids)), decode(ids, *rest))[1]  # type: ignore[method-assign]
    stream = TextStream(text, prompt_token_ids=[hello])
    found = "".join(stream.push([i]) for i in (hello, *[end] * 2000, hello)) + stream.finish()
    assert found == " hello hello" and max(sizes) < 10
    assert len(stream._window) < 10


def test_a_sentencepiece_token_keeps_its_space_and_two_never_share_a_text() -> None:
    tokens = TokenText(metaspace_tokenizer(("▁a", "a", "▁")))
    ids = tokens.tokenizer.convert_tokens_to_ids(["▁a", "a", "▁", "▁hello"])
    assert [tokens.token_bytes(i) for i in ids] == [b" a", b"a", b" ", b" hello"]
    stream = TextStream(tokens, prompt_token_ids=[2])
    assert stream.push(ids) + stream.finish() == "".join(tokens.token_text(i) for i in ids)


def test_special_tokens_that_only_the_tokenizers_own_file_marks_are_no_text() -> None:
    tokenizer = tiny_tokenizer(300)
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("<|eot|>", special=True, normalized=False)])
    eot = tokenizer.convert_tokens_to_ids("<|eot|>")
    assert eot not in tokenizer.all_special_ids
    ids = [*tokenizer.encode("ab", add_special_tokens=False), eot]
    assert TextStream(TokenText(tokenizer)).push(ids) == "ab" == tokenizer.decode(ids, skip_special_tokens=True)
    assert TextStream(TokenText(tokenizer), skip_special=False).push(ids) == "ab<|eot|>"


def test_invalid_bytes_do_not_hold_the_text_back_for_ever() -> None:
    tokens = TokenText(metaspace_tokenizer())
    stream = TextStream(tokens)
    text = "".join(stream.push([6 + 0xFF]) for _ in range(40))
    assert "�" in text


@pytest.mark.parametrize("seed", range(20))
def test_stop_string_never_leaks_whatever_the_chunks(byte_tokens: TokenText, seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(60))
    stop = tuple("".join(rng.choice("ab") for _ in range(rng.randrange(2, 6))) for _ in range(2))
    wanted = text[: min([text.find(s) for s in stop if s in text], default=len(text))]
    ids = byte_tokens.tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(byte_tokens, stop=stop)
    sent = ""
    for i in ids:
        sent += stream.push([i])
        assert wanted.startswith(sent)
    assert sent + stream.finish() == wanted
    assert stream.is_stopped == (wanted != text)


def test_text_that_only_began_like_a_stop_string_is_sent(byte_tokens: TokenText) -> None:
    def ids(s: str) -> list[int]:
        return byte_tokens.tokenizer.encode(s, add_special_tokens=False)

    stream = TextStream(byte_tokens, stop=["END"])
    assert stream.push(ids("xEN")) == "x"
    assert stream.push(ids("T")) == "ENT"
    assert stream.push(ids("E")) == ""
    assert stream.finish() == "E"


def test_starts_are_character_offsets(byte_tokens: TokenText) -> None:
    stream = TextStream(byte_tokens)
    stream.push(byte_tokens.tokenizer.encode("aéb", add_special_tokens=False))
    assert stream.starts == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("raw", "starts"),
    [
        ([b"a", b"\xc3", b"\xa9", b"b"], [0, 1, 1, 2]),
        ([b"a", b"\xc3", b"b", b"c"], [0, 1, 2, 3]),
        ([b"\xe6", b"\x97", b"x", b"y"], [0, 0, 1, 2]),
        ([b"\xc3", b"\xc3", b"\xa9", b"x"], [0, 1, 1, 2]),
        ([b"\xff", b"\xe6", b"\xff", b"x"], [0, 1, 2, 3]),
    ],
)
def test_a_token_after_an_unfinished_character_starts_behind_it(
    byte_tokens: TokenText, raw: list[bytes], starts: list[int]
) -> None:
    ids = {byte_tokens.token_bytes(i): i for i in reversed(range(len(byte_tokens.tokenizer)))}
    stream = TextStream(byte_tokens)
    stream.push([ids[b] for b in raw])
    assert stream.starts == starts


def test_a_word_after_an_unfinished_byte_token_starts_behind_it() -> None:
    stream = TextStream(TokenText(metaspace_tokenizer()))
    for token_id in [2, 6 + 0xC3, 3, 5, *(6 + b for b in "é".encode()), 5]:
        stream.push([token_id])
    assert stream.text == "hello� world.é."
    assert stream.starts == [0, 5, 6, 12, 13, 13, 14]


@pytest.mark.parametrize("seed", range(10))
def test_texts_between_starts_are_the_tokens_wherever_these_are_whole_characters(
    byte_tokens: TokenText, seed: int
) -> None:
    rng = random.Random(seed)
    ids = [rng.randrange(3, 259) for _ in range(40)]
    stream = TextStream(byte_tokens)
    stream.push(ids)
    stream.finish()
    for token_id, start in zip(ids, stream.starts, strict=True):
        raw = byte_tokens.token_bytes(token_id)
        if raw.isascii():
            assert stream.text[start : start + 1] == raw.decode()
