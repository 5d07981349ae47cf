"""Where does a request end: EOS or stop token, stop string, token limit?"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.serving.running_request import RunningRequest
from paceline.serving.text_stream import TextStream, TokenText


class StopStringChecker:
    """Incremental detokenisation of one request; made only when it has stop strings."""

    def __init__(
        self,
        tokens: TokenText,
        stop: Sequence[str],
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special: bool = True,
    ) -> None:
        self._stream = TextStream(tokens, prompt_token_ids=prompt_token_ids, skip_special=skip_special)
        self._stop = tuple(stop)
        self._keep = max(len(s) for s in stop) - 1
        self._tail = ""  # text that a match may still begin in

    def first_match(self, token_ids: Sequence[int]) -> tuple[int, str] | None:
        """Append tokens; returns (number of them up to and including the one that completes a match, stop string).

        Among matches completed by the same token the one that begins first in the text wins.
        """
        for i, token_id in enumerate(token_ids):
            piece = self._stream.push((token_id,))
            if not piece:
                continue
            text = self._tail + piece
            found = [(at, s) for s in self._stop if (at := text.find(s)) >= 0]
            if found:
                return i + 1, min(found)[1]
            self._tail = text[-self._keep :] if self._keep else ""
        return None


def cut_tokens(request: RunningRequest, token_ids: list[int]) -> tuple[list[int], str | None, str | None]:
    """Cut one round's new tokens where the request ends.

    Returns: (tokens to emit, finish reason or None, stop string or None). A stop token or the token that completes a
    stop string is the last one emitted; at the token limit the reason is 'length' unless the last token stops anyway.
    When the request's grammar cannot be followed behind one of these tokens, the reason is 'error' and that is the last
    one emitted.
    """
    grammar = request.grammar
    # Tokens that a shortage of pages has cut may end before the failure: then it is met again by a later round.
    if grammar is not None and grammar.error is not None and len(token_ids) > grammar.num_ahead:
        # What was drawn before the grammar failed counts, and may end the answer before the failure would.
        token_ids, reason, match = _cut(request, token_ids[: grammar.num_ahead])
        return token_ids, reason or "error", match
    return _cut(request, token_ids)


def _cut(request: RunningRequest, token_ids: list[int]) -> tuple[list[int], str | None, str | None]:
    room = request.token_limit - len(request.tokens)
    if len(token_ids) > room:
        token_ids = token_ids[:room]
    reason: str | None = "length" if len(token_ids) == room else None
    stops = request.stop_token_ids
    if stops:
        for i, token_id in enumerate(token_ids):
            if token_id in stops:
                token_ids, reason = token_ids[: i + 1], "stop"
                break
    if request.stop_checker is not None:
        found = request.stop_checker.first_match(token_ids)
        if found is not None:
            return token_ids[: found[0]], "stop", found[1]
    return token_ids, reason, None
