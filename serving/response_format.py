"""Which form may an HTTP request ask its answer to have: OpenAI's response_format, a regular expression, a grammar?"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.serving.api_messages import StrictModel
from paceline.serving.request import GrammarSpec


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    type: Literal["json_object"]


class JsonSchema(StrictModel):
    """OpenAI's wrapper of a schema; name, description and strict change nothing: the schema is always kept to."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def grammar_spec(
    response_format: ResponseFormat | None, guided_regex: str | None, guided_grammar: str | None
) -> GrammarSpec | None:
    """What the engine is asked for; None = any text.

    Raises: ValueError when more than one form is given; RequestError when a text is empty.
    """
    specs = []
    if isinstance(response_format, JsonObjectFormat):
        specs.append(GrammarSpec(kind="json_object"))
    elif isinstance(response_format, JsonSchemaFormat):
        # The order of a schema's properties is kept: it is the order in which the answer has them.
        text = json.dumps(response_format.json_schema.json_schema, ensure_ascii=False, separators=(",", ":"))
        specs.append(GrammarSpec(kind="json_schema", text=text))
    if guided_regex is not None:
        specs.append(GrammarSpec(kind="regex", text=guided_regex))
    if guided_grammar is not None:
        specs.append(GrammarSpec(kind="lark", text=guided_grammar))
    if len(specs) > 1:
        raise ValueError("response_format, guided_regex and guided_grammar exclude each other; give one of them")
    return specs[0] if specs else None
