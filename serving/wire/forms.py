"""Forms: what an answer must look like, under the names that OpenAI, vLLM and SGLang have for it; one grammar comes of it."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from paceline.errors import RequestError
from paceline.serving.sampling.request import MAX_TEXT_BYTES, GrammarSpec
from paceline.serving.wire.fields import StrictModel


class Form(StrictModel):
    """What `response_format` may be; a field that is null is not there."""

    @model_validator(mode="before")
    @classmethod
    def _given(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values


class TextFormat(Form):
    type: Literal["text"]


class JsonObjectFormat(Form):
    type: Literal["json_object"]
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    """Extension of other servers: the object keeps to this schema."""


class JsonSchema(StrictModel):
    """OpenAI's wrapper of a schema; name, description and strict change nothing: the schema is always kept to."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Form):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def _texts(values: Any) -> Any:
    """One look at every element; each bad one would cost an error of its own."""
    if isinstance(values, list) and not all(isinstance(v, str) and v for v in values):
        raise ValueError("must be a list of texts that are not empty")
    return values


Texts = Annotated[list[str], BeforeValidator(_texts), Field(min_length=1)]


class StructuredOutputs(StrictModel):
    """vLLM's `structured_outputs`: exactly one form."""

    json_form: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: None = None
    """Blanks between the parts of JSON are the model's; so are those of the next fields."""
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    disable_fallback: Literal[False] | None = None


def form_of(body: Any) -> GrammarSpec | None:
    """What the engine is asked for by a GenerateBody, which has the fields that ask for a form; None = any text.

    Raises: ValueError when more than one form is given; RequestError when a text is empty.
    """
    specs: dict[str, GrammarSpec | None] = {"response_format": _of_format(body.response_format)}
    other = body.structured_outputs
    own = {"guided_json": body.guided_json, "json_schema": body.json_schema}
    own |= {"structured_outputs.json": other.json_form} if other else {}
    specs |= {name: schema_spec(schema) for name, schema in own.items() if schema is not None}
    texts = {"guided_regex": body.guided_regex, "regex": body.regex}
    texts |= {"structured_outputs.regex": other.regex} if other else {}
    specs |= {name: GrammarSpec(kind="regex", text=text) for name, text in texts.items() if text is not None}
    texts = {"guided_grammar": body.guided_grammar}
    texts |= {"structured_outputs.grammar": other.grammar} if other else {}
    specs |= {name: _of_grammar(text) for name, text in texts.items() if text is not None}
    if body.ebnf is not None:
        specs["ebnf"] = GrammarSpec(kind="gbnf", text=body.ebnf)
    lists = {"guided_choice": body.guided_choice}
    lists |= {"structured_outputs.choice": other.choice} if other else {}
    specs |= {name: _of_choices(each) for name, each in lists.items() if each is not None}
    if other is not None and other.json_object:
        specs["structured_outputs.json_object"] = GrammarSpec(kind="json_object")
    given = {name: spec for name, spec in specs.items() if spec is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other; give one of them")
    return next(iter(given.values()), None)


def schema_spec(schema: dict[str, Any] | str) -> GrammarSpec:
    """The form of a JSON schema. The order of its properties is kept: it is the order in which the answer has them."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return GrammarSpec(kind="json_schema", text=text)


def _of_format(value: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> GrammarSpec | None:
    if isinstance(value, JsonObjectFormat):
        return GrammarSpec(kind="json_object") if value.json_schema is None else schema_spec(value.json_schema)
    return schema_spec(value.json_schema.json_schema) if isinstance(value, JsonSchemaFormat) else None


def _of_grammar(text: str) -> GrammarSpec:
    """GBNF, which llama.cpp and vLLM's users write, has '::=' and no rule `start:`."""
    is_gbnf = "::=" in text and not re.search(r"^(start|%llguidance)\b[ \t]*(:(?!:=)|\{)", text, re.MULTILINE)
    return GrammarSpec(kind="gbnf" if is_gbnf else "lark", text=text)


def _of_choices(texts: list[str]) -> GrammarSpec:
    if sum(map(len, texts)) > MAX_TEXT_BYTES["lark"]:  # before all of them are written
        raise RequestError(f"the choices must have at most {MAX_TEXT_BYTES['lark']} bytes together")
    words = " | ".join(json.dumps(t, ensure_ascii=False) for t in texts)
    return GrammarSpec(kind="lark", text="start: " + words.replace("\x7f", "\\u007f"))  # which JSON leaves as it is
