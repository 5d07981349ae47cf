"""Prompts: the tokens of a text or of a conversation through the chat template, and vLLM's tokenize routes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import Field

from paceline.serving.api.generation import ApiParts
from paceline.serving.api.http import json_response, read_body
from paceline.serving.api.requests import check_model, check_token_ids
from paceline.serving.sampling.bans import spellings
from paceline.serving.sampling.text_stream import TokenText
from paceline.serving.wire.fields import FieldError, RequestBody, parse_body, parse_json, parse_values
from paceline.serving.wire.messages import Conversation
from paceline.serving.wire.tools import style_of, template_messages

T = TypeVar("T")

_LONG_CHARS = 16_384  # worked on in a thread, so that the event loop stays free
_LONG_TOKENS = 4_096
_MANY_WORDS = 64  # a call of the tokenizer for each of the two ways to write one


class Prompts:
    """Tokenizer and chat template of one replica."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        apply = getattr(tokenizer, "apply_chat_template", None)
        own = inspect.signature(apply).parameters if apply is not None else ()
        self._reserved = frozenset(own) | {"messages", "conversation", "tools", "documents"}
        self.tool_style = style_of(getattr(tokenizer, "chat_template", None))

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text; special: with the tokens that the tokenizer puts around a text."""
        return await in_thread(
            lambda: self.tokenizer.encode(text, add_special_tokens=special), is_long=len(text) > _LONG_CHARS
        )

    async def encode_each(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Token ids of the prompts of one body, with the tokens that the tokenizer puts around a text."""
        num_chars = sum(len(p) for p in prompts if isinstance(p, str))
        return await in_thread(
            lambda: [self.tokenizer.encode(p, add_special_tokens=True) if isinstance(p, str) else p for p in prompts],
            is_long=num_chars > _LONG_CHARS,
        )

    async def spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that words are written with."""
        return await in_thread(lambda: spellings(self.tokenizer, words), is_long=len(words) > _MANY_WORDS)

    async def render(self, body: Conversation) -> str:
        """The conversation as the chat template writes it.

        Raises: FieldError when there is no template, it refuses the messages, or a variable has a reserved name.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise FieldError("this model has no chat template; use /v1/completions", "messages")
        extra = body.chat_template_kwargs or {}
        taken = sorted(self._reserved & set(extra))
        if taken:
            raise FieldError(f"chat_template_kwargs must not set {taken[0]}", "chat_template_kwargs")

        tools = body.callable_tools if self.tool_style.writes_tools else []

        def apply() -> str:
            shown = {"tools": [tool.for_template() for tool in tools]} if tools else {}
            text = self.tokenizer.apply_chat_template(
                template_messages(body, self.tool_style),
                tokenize=False,
                add_generation_prompt=body.opens_turn,
                continue_final_message=body.continue_final_message,
                **extra,
                **shown,
            )
            text.encode()  # raises for half of a surrogate pair, which the JSON of a call's arguments may hold
            return text

        calls = [c for m in body.messages for c in m.tool_calls or ()]
        num_chars = sum(len(m.text()) for m in body.messages) + sum(len(c.function.arguments) for c in calls)
        try:
            return await in_thread(apply, is_long=bool(body.callable_tools) or num_chars > _LONG_CHARS)
        except Exception as e:  # templates raise whatever their author chose, for instance on the order of roles
            raise FieldError(f"the model's chat template refuses these messages: {e}", "messages") from e


async def with_tokens(work: Callable[[], T], token_ids: Sequence[int]) -> T:
    """Run work whose time grows with the tokens: here, or in a thread when they are many."""
    return await in_thread(work, is_long=len(token_ids) > _LONG_TOKENS)


async def in_thread(work: Callable[[], T], *, is_long: bool) -> T:
    return await asyncio.to_thread(work) if is_long else work()


class TokenizePrompt(RequestBody):
    """POST /tokenize with a text."""

    prompt: str
    add_special_tokens: bool = True
    """Add the tokens that the tokenizer puts around a text, as /v1/completions does."""
    return_token_strs: bool = False
    """Add each token as text."""


class TokenizeChat(Conversation, RequestBody):
    """POST /tokenize with a conversation; the chat template writes its own special tokens."""

    add_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeBody(RequestBody):
    """POST /detokenize."""

    tokens: list[int] = Field(max_length=2**20)


class TokenRoutes:
    """The two handlers of one replica."""

    def __init__(self, parts: ApiParts, prompts: Prompts, tokens: TokenText) -> None:
        self._parts, self._prompts, self._tokens = parts, prompts, tokens

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of a conversation."""
        info = self._parts.client.info()
        values = parse_json(await read_body(request))
        body = parse_values(values, TokenizeChat if "messages" in values else TokenizePrompt)
        check_model(body.model, info)
        text = body.prompt if isinstance(body, TokenizePrompt) else await self._prompts.render(body)
        token_ids = await self._prompts.encode(text, special=body.add_special_tokens)
        strings = None
        if body.return_token_strs:
            strings = await with_tokens(lambda: [self._tokens.token_text(t) for t in token_ids], token_ids)
        out = {
            "count": len(token_ids), "max_model_len": info.context_tokens, "tokens": token_ids, "token_strs": strings,
        }  # fmt: skip
        return json_response(out)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        info = self._parts.client.info()
        body: DetokenizeBody = parse_body(await read_body(request), DetokenizeBody)
        check_model(body.model, info)
        check_token_ids(body.tokens, info, "tokens")
        text = await with_tokens(lambda: self._tokens.decode(body.tokens, skip_special=False), body.tokens)
        return json_response({"prompt": text})
