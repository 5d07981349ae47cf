"""Prompts: the tokens of a text or of a conversation through the chat template, and vLLM's tokenize routes."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel, FailFast, Field

from paceline.serving.api.generation import ApiParts
from paceline.serving.api.http import json_response, read_body
from paceline.serving.api.requests import CONTEXT_CODE, check_model, check_token_ids
from paceline.serving.sampling.bans import spellings
from paceline.serving.sampling.text_stream import TokenText
from paceline.serving.wire.fields import FieldError, RequestBody, parse_body, parse_json, parse_values
from paceline.serving.wire.messages import Conversation
from paceline.serving.wire.tools import style_of, template_messages

T = TypeVar("T")

_LONG_CHARS = 16_384  # worked on in a thread, so that the event loop stays free
_LONG_TOKENS = 4_096
_LONG_BYTES = 256 * 2**10
_MANY_WORDS = 64  # a call of the tokenizer for each of the two ways to write one
_BREAK = "\ufdd0"
"""Inside what would be a special token in a client's text: a character that Unicode keeps for use inside of programs."""


class Prompts:
    """Tokenizer and chat template of one replica."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        apply = getattr(tokenizer, "apply_chat_template", None)
        own = inspect.signature(apply).parameters if apply is not None else ()
        self._reserved = frozenset(own) | {"messages", "conversation", "tools", "documents"}
        self.tool_style = style_of(getattr(tokenizer, "chat_template", None))
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        texts = {*getattr(tokenizer, "all_special_tokens", ()), *(str(t.content) for t in added if t.special)}
        texts = {text for text in texts if len(text) > 1}  # one character cannot be broken
        self._special_start = re.compile(f"(?={_beginning(sorted(texts))}).", re.DOTALL) if texts else None

    async def encode_chat(self, body: Conversation, context_tokens: int) -> list[int]:
        """Token ids of a conversation: its special tokens are the template's own, for what the client has written is text.

        Raises: like `render`; FieldError where the special tokens that the client wrote, each some tokens, fill the context.
        """
        text = await self.render(body)
        if text.count(_BREAK) >= context_tokens and getattr(body, "truncate_prompt_tokens", None) is None:
            raise FieldError(
                f"the context has {context_tokens} tokens, which the special tokens that the request writes as text fill alone; shorten it",
                "messages", CONTEXT_CODE,
            )  # fmt: skip

        def encode() -> list[int]:
            first, *rest = text.split(_BREAK)
            token_ids = self.tokenizer.encode(first, add_special_tokens=body.add_special_tokens)
            for part in rest:
                token_ids += self._encode_further(part)
            return token_ids

        return await in_thread(encode, is_long=len(text) > _LONG_CHARS)

    def _encode_further(self, text: str) -> list[int]:
        """Token ids of what follows another text: behind a line break, since some tokenizers begin a text with a space."""
        before = self.tokenizer.encode("\n", add_special_tokens=False)
        token_ids = self.tokenizer.encode("\n" + text, add_special_tokens=False)
        if token_ids[: len(before)] == before:
            return token_ids[len(before) :]
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _as_text(self, value: Any) -> Any:
        """A value of JSON from a client with every special token in it broken."""
        if isinstance(value, str):
            return value if self._special_start is None else self._special_start.sub(rf"\g<0>{_BREAK}", value)
        if isinstance(value, dict):
            return {self._as_text(k): self._as_text(v) for k, v in value.items()}
        return [self._as_text(v) for v in value] if isinstance(value, list) else value

    async def encode_each(self, prompts: Sequence[str | list[int]], *, special: bool = True) -> list[list[int]]:
        """Token ids of the prompts of one body; special: with the tokens that the tokenizer puts around a text."""
        num_chars = sum(len(p) for p in prompts if isinstance(p, str))
        return await in_thread(
            lambda: [
                self.tokenizer.encode(p, add_special_tokens=special) if isinstance(p, str) else p for p in prompts
            ],
            is_long=num_chars > _LONG_CHARS,
        )

    async def spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that words are written with."""
        return await in_thread(lambda: spellings(self.tokenizer, words), is_long=len(words) > _MANY_WORDS)

    async def render(self, body: Conversation) -> str:
        """The conversation as the chat template writes it, with a _BREAK in what would be a client's special tokens.

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
            shown = {"tools": [self._as_text(tool.for_template()) for tool in tools]} if tools else {}
            text = self.tokenizer.apply_chat_template(
                template_messages(body, self.tool_style, self._as_text),
                tokenize=False,
                add_generation_prompt=body.opens_turn,
                continue_final_message=body.continue_final_message,
                **self._as_text(extra),
                **shown,
            )
            text.encode()  # raises for half of a surrogate pair, which the JSON of a call's arguments may hold
            return text

        try:
            is_long = bool(body.callable_tools) or _num_chars([*body.messages, extra]) > _LONG_CHARS
            return await in_thread(apply, is_long=is_long)
        except Exception as e:  # templates raise whatever their author chose, for instance on the order of roles
            raise FieldError(f"the model's chat template refuses these messages: {e}", "messages") from e


def _num_chars(value: Any) -> int:
    """Characters of all texts in a value of JSON or a part of a body."""
    if isinstance(value, str):
        return len(value)
    value = value.__dict__ if isinstance(value, BaseModel) else value
    if isinstance(value, dict):
        return sum(len(k) + _num_chars(v) for k, v in value.items())
    return sum(map(_num_chars, value)) if isinstance(value, list) else 1


async def with_tokens(work: Callable[[], T], token_ids: Sequence[int]) -> T:
    """Run work whose time grows with the tokens: here, or in a thread when they are many."""
    return await in_thread(work, is_long=len(token_ids) > _LONG_TOKENS)


async def parsed(raw: bytes, kind: type[BaseModel]) -> Any:
    """`parse_body`, of a long body in a thread: others go on. Raises what it raises."""
    return await in_thread(partial(parse_body, raw, kind), is_long=len(raw) > _LONG_BYTES)


async def in_thread(work: Callable[[], T], *, is_long: bool) -> T:
    return await asyncio.to_thread(work) if is_long else work()


def _beginning(texts: list[str]) -> str:
    """Pattern of what begins with one of these texts: a character is looked at once, not once for each of thousands of them."""
    if "" in texts:
        return ""
    if len(texts) == 1:
        return re.escape(texts[0])
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[0], []).append(text[1:])
    return "|".join(f"{re.escape(first)}(?:{_beginning(rest)})" for first, rest in by_first.items())


class TokenizePrompt(RequestBody):
    """POST /tokenize with a text."""

    prompt: str
    add_special_tokens: bool = True
    """Add the tokens that the tokenizer puts around a text, as /v1/completions does."""
    return_token_strs: bool = False
    """Add each token as text."""


class TokenizeChat(Conversation, RequestBody):
    """POST /tokenize with a conversation; the chat template writes its own special tokens."""

    return_token_strs: bool = False


class DetokenizeBody(RequestBody):
    """POST /detokenize."""

    tokens: Annotated[list[int], FailFast()] = Field(max_length=2**20)


_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class TokenRoutes:
    """The handlers of one replica."""

    def __init__(self, parts: ApiParts, prompts: Prompts, tokens: TokenText) -> None:
        self._parts, self._prompts, self._tokens = parts, prompts, tokens

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of a conversation."""
        info = self._parts.client.info()
        values = parse_json(await read_body(request))
        body = parse_values(values, TokenizeChat if "messages" in values else TokenizePrompt)
        check_model(body.model, info)
        if isinstance(body, TokenizePrompt):
            (token_ids,) = await self._prompts.encode_each([body.prompt], special=body.add_special_tokens)
        else:
            token_ids = await self._prompts.encode_chat(body, info.context_tokens)
        strings = None
        if body.return_token_strs:
            strings = await with_tokens(lambda: [self._tokens.token_text(t) for t in token_ids], token_ids)
        out = {
            "count": len(token_ids), "max_model_len": info.context_tokens, "tokens": token_ids, "token_strs": strings,
        }  # fmt: skip
        return json_response(out)

    async def tokenizer_info(self) -> Response:
        """What a client needs to write prompts as the model does: special tokens and chat template."""
        tokenizer = self._prompts.tokenizer
        named = {name: getattr(tokenizer, name, None) for name in _NAMED_TOKENS}
        template = getattr(tokenizer, "chat_template", None)
        template = template.get("default") if isinstance(template, dict) else template
        out = {
            "tokenizer_class": type(tokenizer).__name__, "model_max_length": self._parts.client.info().context_tokens,
            **{name: None if token is None else str(token) for name, token in named.items()},
            "chat_template": template if isinstance(template, str) else None,
        }  # fmt: skip
        return json_response(out)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        info = self._parts.client.info()
        body: DetokenizeBody = await parsed(await read_body(request), DetokenizeBody)
        check_model(body.model, info)
        check_token_ids(body.tokens, info, "tokens")
        text = await with_tokens(lambda: self._tokens.decode(body.tokens, skip_special=False), body.tokens)
        return json_response({"prompt": text})
