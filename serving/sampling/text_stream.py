"""Text stream: turns token ids into text that can be sent at once, with no broken character and nothing of a stop string.

Byte-level tokenizers (Llama 3, Qwen, the bundled one) are decoded byte by byte with an incremental UTF-8 decoder; other
tokenizers by decoding a short window before and after the new token and sending the difference.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from functools import cached_property, lru_cache
from typing import Any

_WINDOW_TOKENS = 5
"""Prompt tokens decoded together with the first output token, so that a leading space is neither lost nor invented."""
_MAX_PENDING_TOKENS = 16
"""After so many tokens without a complete character the bytes are invalid, not incomplete."""


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """The GPT-2 table of printable stand-ins for bytes, inverted."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(b): b for b in plain}
    rest = [b for b in range(256) if b not in set(plain)]
    table.update({chr(256 + i): b for i, b in enumerate(rest)})
    return table


class TokenText:
    """Text and bytes of single tokens of one tokenizer; made once and shared by all requests."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.added = {int(i): str(t.content) for i, t in added.items()}
        # tokenizer.json marks more of them than tokenizer_config.json names: Llama 3's <|eom_id|>
        self.special_ids = frozenset(map(int, tokenizer.all_special_ids)) | {
            int(i) for i, t in added.items() if t.special
        }
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.is_byte_level = backend is not None and "ByteLevel" in repr(getattr(backend, "decoder", None))
        self._bytes: dict[int, bytes] = {}

    @cached_property
    def special_texts(self) -> dict[str, int]:
        """Written form of each special token -> its id."""
        return {text: i for i, text in self.added.items() if i in self.special_ids}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for (special tokens: their written form)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """A token alone as text; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def decode(self, token_ids: Sequence[int], skip_special: bool) -> str:
        return self.tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )

    def _compute(self, token_id: int) -> bytes:
        if token_id in self.added:
            return self.added[token_id].encode()
        if self.is_byte_level:
            written = self.tokenizer.convert_ids_to_tokens(token_id)
            table = _byte_of_char()
            if written is not None and all(c in table for c in written):
                return bytes(table[c] for c in written)
            return (written or "").encode()
        written = self.tokenizer.convert_ids_to_tokens(token_id) or ""
        if len(written) == 6 and written.startswith("<0x") and written.endswith(">"):  # SentencePiece byte token
            return bytes([int(written[3:5], 16)])
        return self.decode([*self.letters, token_id], skip_special=False)[self._num_letters :].encode()

    @cached_property
    def letters(self) -> tuple[int, ...]:
        """A token of letters, behind which others are decoded, as a text's first space is stripped; none where there is none."""
        names = (
            (i, self.tokenizer.convert_ids_to_tokens(i)) for i in range(len(self.tokenizer)) if i not in self.added
        )
        return next(((i,) for i, name in names if name and name.isascii() and name.isalpha()), ())

    @cached_property
    def _num_letters(self) -> int:
        return len(self.decode(self.letters, skip_special=False))


class TextStream:
    """The text of one answer as it grows; `push` returns what may be sent, `finish` the rest."""

    def __init__(
        self,
        tokens: TokenText,
        *,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special: bool = True,
        kept_ids: Collection[int] = (),
    ) -> None:
        """No text is sent yet.

        Args:
            min_tokens: a stop string counts that a token behind so many completes.
            kept_ids: special tokens that are text all the same.
        """
        self._tokens = tokens
        self._hidden_ids = tokens.special_ids.difference(kept_ids) if skip_special else frozenset[int]()
        self._stop = tuple(stop)
        self._skip_special = skip_special and not kept_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        window = list(prompt_token_ids[-_WINDOW_TOKENS:]) if not tokens.is_byte_level else []
        if window and self._decode(window).endswith("�"):
            # The prompt ends, or is cut here, inside a character; a difference of texts would cut the wrong place.
            window = list(tokens.letters)
        self._window = window
        self._window_read = len(window)
        self._held = ""
        self.is_stopped = False
        """A stop string was met; no further text will be sent."""
        self.text = ""
        """Everything sent so far."""
        self.starts: list[int] = []
        """For each token pushed, the number of characters before it; a character's bytes all begin where it does."""
        self._num_decoded = 0
        self._min_tokens = min_tokens
        self._num_early = 0
        """Characters of the first min_tokens tokens."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens and return the text that is complete and cannot be part of a stop string."""
        fresh = ""
        for token_id in token_ids:
            piece, num_earlier = self._decode_one(int(token_id))
            self.starts.append(self._num_decoded + num_earlier)
            self._num_decoded += len(piece)
            if len(self.starts) <= self._min_tokens:
                self._num_early = self._num_decoded
            fresh += piece
        return self._send(fresh)

    def skip(self, number: int) -> None:
        """Take tokens that end the text and are no part of it."""
        self.starts += [self._num_decoded] * number

    def finish(self, stop_match: str | None = None) -> str:
        """Return the text still held back; with `stop_match` only what comes before that string."""
        tail = self._utf8.decode(b"", final=True) if self._tokens.is_byte_level else self._flush_window()
        self._num_decoded += len(tail)
        if self.is_stopped:
            return ""
        rest = self._held + tail
        cut = self._find_stop(rest)
        if cut is None and stop_match:
            at = rest.find(stop_match)
            cut = at if at >= 0 else None
        if cut is not None:
            rest, self.is_stopped = rest[:cut], True
        self._held = ""
        self.text += rest
        return rest

    def _send(self, fresh: str) -> str:
        if self.is_stopped or not fresh:
            return ""
        if not self._stop:
            self.text += fresh
            return fresh
        text = self._held + fresh
        cut = self._find_stop(text)
        if cut is not None:
            self.is_stopped, self._held = True, ""
            out = text[:cut]
        else:
            keep = self._num_held(text)
            out, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self.text += out
        return out

    def _find_stop(self, text: str) -> int | None:
        """Where the first stop string begins in the newest `text`, of those that end behind the early characters."""
        num_early = self._num_early - (self._num_decoded - len(text))
        found = [at for at in (text.find(s, max(num_early + 1 - len(s), 0)) for s in self._stop) if at >= 0]
        return min(found) if found else None

    def _num_held(self, text: str) -> int:
        """Characters at the end of `text` that begin a stop string."""
        best = 0
        for stop in self._stop:
            for n in range(min(len(stop) - 1, len(text)), best, -1):
                if text.endswith(stop[:n]):
                    best = n
                    break
        return best

    def _decode_one(self, token_id: int) -> tuple[str, int]:
        """The text that a token completes, and how many of its characters stand for bytes of earlier tokens alone."""
        if self._tokens.is_byte_level:
            if token_id in self._hidden_ids:
                return "", 0
            raw = self._tokens.token_bytes(token_id)
            num_broken = _num_broken(self._utf8.getstate()[0], raw)
            return self._utf8.decode(raw), num_broken
        if token_id in self._hidden_ids:  # however many come, the window stays short
            return "", 0
        pending = self._window[self._window_read :]
        self._window.append(token_id)
        before = self._decode(self._window[: self._window_read])
        after = self._decode(self._window)
        is_incomplete = after.endswith("�") and len(self._window) - self._window_read < _MAX_PENDING_TOKENS
        if len(after) <= len(before) or is_incomplete:
            return "", 0
        num_earlier = 0
        if pending:
            earlier = self._decode(self._window[:-1])
            num_earlier = len(earlier) - len(before) if after.startswith(earlier) else 0
        self._window = self._window[self._window_read :]
        self._window_read = len(self._window)
        return after[len(before) :], num_earlier

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokens.decode([t for t in token_ids if t not in self._hidden_ids], self._skip_special)

    def _flush_window(self) -> str:
        before = self._decode(self._window[: self._window_read])
        after = self._decode(self._window)
        self._window_read = len(self._window)
        return after[len(before) :]


def _num_broken(pending: bytes, raw: bytes) -> int:
    """Characters (0 or 1) that the bytes of an unfinished character become because `raw` does not go on with it."""
    if not pending or not raw:
        return 0
    try:
        codecs.getincrementaldecoder("utf-8")().decode(pending + raw[:1])
    except UnicodeDecodeError:
        return 1
    return 0
