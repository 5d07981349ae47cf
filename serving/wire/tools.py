"""Tools: how a chat template shows functions to its model, what the model's calls look like, and the grammar that forces one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.serving.sampling.grammar import check_bounds, json_schema_with_blanks
from paceline.serving.sampling.request import GrammarSpec
from paceline.serving.wire.calls import (
    CODER,
    HERMES,
    LLAMA,
    MARKED,
    MISTRAL,
    MISTRAL_NAMED,
    CallFormat,
    branches,
    properties_of,
)
from paceline.serving.wire.fields import FieldError
from paceline.serving.wire.messages import Conversation, FunctionSpec, NamedTool


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolStyle:
    """What a chat template does with tools."""

    form: CallFormat | None
    """How its model writes calls; None = in a way that is not read here."""
    writes_tools: bool
    """It shows `tools` to the model; otherwise the first message does."""
    writes_calls: bool
    """It writes calls and their results; otherwise they are put into the text of messages."""
    wants_objects: bool
    """Arguments of calls are given to it as objects, not as JSON."""


def style_of(template: Any) -> ToolStyle:
    """The style of a tokenizer's chat template, which is a text or several by name."""
    text = "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template or "")
    writes_tools = re.search(r"\btools\b", text) is not None
    if "<|channel|>" in text or "<arg_key>" in text:  # gpt-oss and GLM, which share marks with formats that are read
        form: CallFormat | None = None
    elif MARKED.begin in text:
        form = MARKED
    elif MISTRAL.begin in text:
        form = MISTRAL_NAMED if MISTRAL.behind_name in text else MISTRAL
    elif HERMES.begin in text and "<function=" in text:
        form = CODER if "<parameter=" in text else None
    elif HERMES.begin in text or not writes_tools:
        form = HERMES
    else:
        form = LLAMA if '"parameters"' in text else None
    return ToolStyle(
        form=form, writes_tools=writes_tools, writes_calls="tool_calls" in text,
        wants_objects="tojson" in text or form is CODER,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class CallPlan:
    """How the calls of one answer are read and, where one is asked for, forced."""

    form: CallFormat
    functions: dict[str, dict[str, Any]]
    """Name -> JSON schema of the arguments."""
    is_parallel: bool
    is_forced: bool
    """The answer is nothing but calls."""
    grammar: GrammarSpec | None
    """None = the answer is free, or has the form that it was asked for."""


def plan_calls(
    body: Conversation, form: GrammarSpec | None, style: ToolStyle, special: Mapping[str, int], *, is_parallel: bool
) -> CallPlan | None:
    """The plan of an answer; None where nothing may be called.

    Args:
        form: what the answer is asked to look like; a JSON schema is one of an answer that is no call.
        special: written form of each of the tokenizer's special tokens -> its id.
    Raises: FieldError where tools and form exclude each other, or calls of this model cannot be read.
    """
    tools = body.callable_tools
    if not tools:
        return None
    if style.form is None:
        raise FieldError(
            "tools must be absent: this model's chat template writes calls in a way that is not read; describe them in "
            "the messages",
            "tools",
        )
    is_forced = isinstance(body.tool_choice, NamedTool) or body.tool_choice == "required"
    if form is not None and not form.kind.startswith("json"):
        raise FieldError(
            "tools must be absent, or tool_choice 'none', where the answer has a form that is no JSON schema", "tools"
        )
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    functions = {t.function.name: _arguments(t.function) for t in tools}
    schemas = {name: schema for name, schema in functions.items() if named in (None, name)}
    grammar = None
    if is_forced or form is not None:
        answer = None if is_forced or form is None else form.text or '{"type": "object"}'
        text = _grammar(style.form, schemas, special, is_parallel=is_parallel and named is None, answer=answer)
        grammar = GrammarSpec(kind="calls", text=text)
    return CallPlan(form=style.form, functions=functions, is_parallel=is_parallel, is_forced=is_forced, grammar=grammar)


_SAYS_NOTHING = {"type", "properties", "required", "title", "description", "$schema", "$id", "$comment"}
"""What libraries write into the schema of a function without arguments."""


def _arguments(function: FunctionSpec) -> dict[str, Any]:
    """The schema of a function's arguments; one that describes none takes none."""
    schema = function.parameters or {}
    takes_none = not (schema.get("properties") or schema.get("required")) and schema.keys() <= _SAYS_NOTHING
    return {"additionalProperties": False} if takes_none else schema


def _grammar(
    form: CallFormat, schemas: Mapping[str, dict[str, Any]], special: Mapping[str, int], *, is_parallel: bool, answer: str | None
) -> str:  # fmt: skip
    """Lark of nothing but calls, or with `answer`, a JSON schema, of calls or such an answer."""

    def marker(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else _quoted(text) if text else ""

    tagged: dict[str, str] = {}
    calls = f"call ({_quoted(form.between) if form.between else ''} call)*" if is_parallel else "call"
    if form.shape == "list":  # older tokenizers put a space behind the mark
        calls = f'{marker(form.begin)} " "? "[" {calls} "]"'
    rules = [f"calls: {calls}"]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(schemas))))
    for i, (name, schema) in enumerate(schemas.items()):
        check_bounds(schema)
        if form.shape == "tagged":
            parts = _tagged(name, schema, tagged)
        else:
            parts = [_quoted(f'{{"name": {json.dumps(name)}, "{form.key}": '), f"args_{i}", _quoted("}")]
            rules.append(f"args_{i}: %json {json_schema_with_blanks({**schema, 'type': 'object'})}")
        if form.shape == "named":
            parts = [marker(form.begin), _quoted(name), marker(form.behind_name), f"args_{i}", marker(form.end)]
        elif form.begin and form.shape != "list":
            parts = [marker(form.begin), _quoted("\n"), *parts, _quoted("\n"), marker(form.end)]
        rules.append(f"call_{i}: {' '.join(parts)}")
    if form.shape == "tagged":
        rules += [r"text[lazy]: /(?s:.*)\n<\/parameter>\n/", *(f"{name}: {rule}" for rule, name in tagged.items())]
    if answer is not None:
        try:
            own = json.loads(answer)
        except (ValueError, RecursionError):
            own = None
        if not isinstance(own, dict):
            raise FieldError("response_format must have a JSON schema that is an object", "response_format")
        check_bounds(own)
        rules.append(f"answer: %json {json_schema_with_blanks(own)}")
    start = "start: calls | answer" if answer is not None else "start: calls"
    return "\n".join([start, *rules])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_TAG_END = "\n</parameter>\n"
_FOREIGN_REF = re.compile(r'"\$ref":\s*"(?!#/(?:\$defs|definitions)/)')


def _check_tagged(name: str, argument: str, found: Sequence[dict[str, Any]]) -> None:
    """Refuse an argument that cannot stand between tags. found: its schema's branches. Raises: FieldError."""
    of = f"{argument!r} of {name}"
    if not re.fullmatch(r"[^<>\n]+", argument):
        raise FieldError(f"tools must have parameters without <, > and line breaks in their names, got {of}", "tools")
    for values in (branch["enum"] for branch in found if branch.get("type") == "string" and "enum" in branch):
        if not (isinstance(values, list) and values):
            raise FieldError(f"tools must have an enum that lists values, got {values!r} for {of}", "tools")
        if any(_TAG_END.strip() in str(value) or "\0" in str(value) for value in values):
            raise FieldError(f"tools must have an enum without {_TAG_END.strip()} and NUL, got {of}", "tools")


def _tagged(name: str, schema: dict[str, Any], rules: dict[str, str]) -> list[str]:
    """The parts of a call between tags; rules: those that they need -> their names, shared by all calls."""

    def named(rule: str) -> str:
        return rules.setdefault(rule, f"part_{len(rules)}")

    parts, described = [_quoted(f"<function={name}>\n")], properties_of(schema)
    required = branches(schema, schema)[0].get("required")
    required = [r for r in required if isinstance(r, str)] if isinstance(required, list) else []
    guided = {k: schema[k] for k in ("x-guidance",) if k in schema}
    defined = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
    for argument, own in (described | {r: {} for r in required if r not in described}).items():
        ways, found = list[str](), branches(own, schema)
        _check_tagged(name, argument, found)
        for branch in found:
            if branch.get("type") != "string":
                rule = json_schema_with_blanks(branch | guided)
                rule = json_schema_with_blanks(branch | guided | defined) if '"$ref"' in rule else rule
                if _FOREIGN_REF.search(rule):
                    raise FieldError(f"tools must have references to $defs only, got another in {argument} of {name}", "tools")  # fmt: skip
                ways.append(f"{named(f'%json {rule}')} {_quoted(_TAG_END)}")
            elif "enum" in branch:
                ways += [_quoted(f"{value}{_TAG_END}") for value in branch["enum"]]
            else:
                ways = ["text"]  # whatever else it may be is written as a text, too
                break
        begin = _quoted(f"<parameter={argument}>\n")
        parts.append(named(f"{begin} ({' | '.join(ways)})") + ("" if argument in required else "?"))
    return [*parts, _quoted("</function>")]


def template_messages(body: Conversation, style: ToolStyle, as_text: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """The messages of a conversation for a template of this style; as_text: makes of the client's values what is written."""
    messages = [as_text(m.for_template(wants_objects=style.wants_objects)) for m in body.messages]
    form = style.form or HERMES
    if form.begin == MISTRAL.begin:
        for part in [*messages, *(call for m in messages for call in m.get("tool_calls", ()))]:
            part |= {key: _short_id(part[key]) for key in ("id", "tool_call_id") if key in part}
    if not style.writes_calls:
        messages = [_written(m, form) for m in messages]
    tools = body.callable_tools
    if tools and not style.writes_tools:
        shown = _described([as_text(t.for_template()["function"]) for t in tools], form)
        # in the first message, whoever speaks: not every template takes one of the system
        messages[0]["content"] = f"{shown}\n\n{messages[0]['content']}"
    return messages


def _short_id(known: str) -> str:
    """The id of a call in nine letters and digits, as Mistral's templates demand it; one that is such is left alone."""
    if re.fullmatch("[A-Za-z0-9]{9}", known):
        return known
    return hashlib.sha256(known.encode(errors="surrogatepass")).hexdigest()[:9]


def _described(functions: Sequence[dict[str, Any]], form: CallFormat) -> str:
    """What a template that knows no tools is given to show."""
    lines = [json.dumps(f, ensure_ascii=False) for f in functions]
    example = _call_text("NAME", "{...}", form)
    return "\n".join(["You may call these functions:", *lines, f"To call one, write:\n{example}"])


def _written(message: dict[str, Any], form: CallFormat) -> dict[str, Any]:
    """A message with its calls in its text; a result is told by the user."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.pop("tool_calls", None) or []
    texts = []
    for call in calls:
        arguments = call["function"]["arguments"]
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        texts.append(_call_text(call["function"]["name"], arguments, form))
    message["content"] = "\n".join([*([message["content"]] if message["content"] else []), *texts])
    return message


def _call_text(name: str, arguments: str, form: CallFormat) -> str:
    if form.shape == "named":
        return f"{form.begin}{name}{form.behind_name}{arguments}"
    call = f'{{"name": {json.dumps(name)}, "{form.key}": {arguments}}}'
    if form.shape == "list":
        return f"{form.begin}[{call}]"
    return f"{form.begin}\n{call}\n{form.end}" if form.begin else call
