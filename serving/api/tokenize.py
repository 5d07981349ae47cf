"""Tokenize routes: POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from fastapi import Request, Response
from pydantic import Field

from paceline.serving.api.bodies import parse_body, parse_json, parse_values
from paceline.serving.api.generation import ApiParts
from paceline.serving.api.http import json_response, read_body
from paceline.serving.api.messages import Conversation, StrictModel
from paceline.serving.api.prompts import Prompts, with_tokens
from paceline.serving.api.requests import check_model, check_token_ids
from paceline.serving.sampling.text_stream import TokenText


class TokenizePrompt(StrictModel):
    """POST /tokenize with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    """Add the tokens that the tokenizer puts around a text, as /v1/completions does."""
    return_token_strs: bool = False
    """Add each token as text."""


class TokenizeChat(Conversation):
    """POST /tokenize with a conversation; the chat template writes its own special tokens."""

    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeBody(StrictModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int] = Field(max_length=2**20)


class TokenRoutes:
    """The two handlers of one replica."""

    def __init__(self, parts: ApiParts, prompts: Prompts, tokens: TokenText) -> None:
        self._parts, self._prompts, self._tokens = parts, prompts, tokens

    async def tokenize(self, request: Request) -> Response:
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
        info = self._parts.client.info()
        body: DetokenizeBody = parse_body(await read_body(request), DetokenizeBody)
        check_model(body.model, info)
        check_token_ids(body.tokens, info, "tokens")
        text = await with_tokens(lambda: self._tokens.decode(body.tokens, skip_special=False), body.tokens)
        return json_response({"prompt": text})
