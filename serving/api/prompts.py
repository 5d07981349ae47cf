"""Prompts: the tokens of a text, a list of ids, or a conversation through the model's chat template."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from paceline.serving.api.bodies import FieldError
from paceline.serving.api.messages import Conversation

T = TypeVar("T")

_LONG_CHARS = 16_384  # worked on in a thread, so that the event loop stays free
_LONG_TOKENS = 4_096


class Prompts:
    """Tokenizer and chat template of one replica."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        apply = getattr(tokenizer, "apply_chat_template", None)
        own = inspect.signature(apply).parameters if apply is not None else ()
        self._reserved = frozenset(own) | {"messages", "conversation", "tools", "documents"}

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text; special: with the tokens that the tokenizer puts around a text."""
        return await in_thread(
            lambda: self.tokenizer.encode(text, add_special_tokens=special), is_long=len(text) > _LONG_CHARS
        )

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

        def apply() -> str:
            return self.tokenizer.apply_chat_template(
                [m.for_template() for m in body.messages],
                tokenize=False,
                add_generation_prompt=body.opens_turn,
                continue_final_message=body.continue_final_message,
                **extra,
            )

        try:
            return await in_thread(apply, is_long=sum(len(m.text()) for m in body.messages) > _LONG_CHARS)
        except Exception as e:  # templates raise whatever their author chose, for instance on the order of roles
            raise FieldError(f"the model's chat template refuses these messages: {e}", "messages") from e


async def with_tokens(work: Callable[[], T], token_ids: Sequence[int]) -> T:
    """Run work whose time grows with the tokens: here, or in a thread when they are many."""
    return await in_thread(work, is_long=len(token_ids) > _LONG_TOKENS)


async def in_thread(work: Callable[[], T], *, is_long: bool) -> T:
    return await asyncio.to_thread(work) if is_long else work()
