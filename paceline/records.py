"""Records: frozen dataclasses whose fields say their bounds, their help and their option once, checked when one is made.

Configuration files, the command line and Python callers build the same records, so that each reads the same errors:
`name must <rule>, got <value>`, under the dotted name of a setting or the name of the option that a user types.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import math
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic
from annotated_types import GroupedMetadata
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from paceline.errors import ConfigError
from paceline.paths import BUNDLED_DRAFTER, BUNDLED_DRAFTERS, TEXT_DRAFTERS

C = TypeVar("C")
DRAFTER_NAMES = (*BUNDLED_DRAFTERS, *TEXT_DRAFTERS)
"""Drafters that an option may name; besides them folders, and where it makes sense 'none'."""
DRAFTERS = f"{' | '.join(DRAFTER_NAMES)} | DIR; 'bundled' is {BUNDLED_DRAFTER}"
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""No unknown names, no text where a number belongs, no infinite numbers."""


def require(ok: bool, rule: str, value: object) -> None:
    """Raise ConfigError unless ok; for rules over several fields. rule: 'name must ...'."""
    if not ok:
        raise ConfigError(f"{rule}, got {shown(value)}")


@dataclass(frozen=True, slots=True)
class Setting(GroupedMetadata):
    """What a field's annotation says of it; bounds hold for each item of a tuple. Without help it is no option."""

    help: str = ""
    flag: str = ""
    """Option, such as 'threads' or 'resume/--no-resume'; default: the field's name. The name that errors use."""
    short: str | None = None
    """One-letter option, such as '-v'."""
    env: str | tuple[str, ...] | None = None
    """Environment variables that give the value where the command line does not."""
    panel: str | None = None
    """Heading under which --help lists the option."""
    is_argument: bool = False
    """Given by position."""
    is_repeated: bool = False
    """A tuple is given by repeating the option (or argument), not as a comma list."""
    is_output: bool = False
    """A file that the command writes: refused before the work begins where that is impossible."""
    is_folder: bool = False
    """A folder that must exist."""
    changes: type | None = None
    """Of a mapping: the configuration whose dotted names are its keys; its settings with help are the options."""
    parser: Callable[[str], Any] | None = None
    """How the command line reads the value, where the type does not say."""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str, ...] = ()
    non_empty: bool = False

    def __iter__(self) -> Iterator[object]:
        yield AfterValidator(self.check)
        yield _Rule(self)

    def name(self, field: str) -> str:
        """What a user calls the field."""
        return (self.flag.split("/")[0].strip() or field.replace("_", "-")) if self.help else field

    def check(self, value: Any) -> Any:
        """The value; raises ValueError with the rule that it breaks."""
        if value is None:
            return None
        if self.non_empty and not value:
            raise ValueError("must not be empty")
        if self.is_folder and not value.is_dir():
            raise ValueError("must be a folder")
        for item in value if isinstance(value, tuple) else (value,):
            if self.choices and item not in self.choices:
                words = "among" if isinstance(value, tuple) else "one of"
                raise ValueError(f"must be {words} {', '.join(self.choices)}")
            if not self._is_within(item):
                raise ValueError(f"must be {self._range()}")
        return value

    def _is_within(self, value: Any) -> bool:
        return (
            (self.ge is None or value >= self.ge) and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le) and (self.lt is None or value < self.lt)
        )  # fmt: skip

    def _range(self) -> str:
        low = f">= {self.ge}" if self.ge is not None else f"> {self.gt}" if self.gt is not None else ""
        high = f"<= {self.le}" if self.le is not None else f"< {self.lt}" if self.lt is not None else ""
        if not low or not high:
            return low or high
        begin = f"[{self.ge}" if self.ge is not None else f"({self.gt}"
        return f"in {begin}, {f'{self.le}]' if self.le is not None else f'{self.lt})'}"


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def record(path: str | None = None) -> Callable[[type[C]], type[C]]:
    """Make a class a frozen dataclass that checks types and bounds when one is made.

    path: of a section of a configuration, 'engine.', for its errors; None: errors name options, as a user types them.
    The record's `__post_init__` may check several fields together. Records raise ConfigError.
    """

    def make(cls: type[C]) -> type[C]:
        kind = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)(cls)
        check = kind.__init__

        def init(self: Any, **values: Any) -> None:
            try:
                check(self, **values)
            except ValidationError as e:
                raise ConfigError(_words(kind, e, path)) from None

        init.__wrapped__ = check  # type: ignore[attr-defined]
        kind.__init__ = init  # type: ignore[method-assign]
        kind.record_path = path or ""  # type: ignore[attr-defined]
        return typing.cast(type[C], kind)

    return make


def build(kind: type[C], values: Mapping[str, Any], path: str | None = None) -> C:
    """A record (or a dataclass with `__pydantic_config__ = STRICT`) of plain values, as YAML and JSON have them.

    path: before the names in errors; None = the record's own. Raises: ConfigError on an unknown name, a wrong type or a
    value out of bounds.
    """
    path = getattr(kind, "record_path", "") if path is None else path
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path.rstrip('.') or 'configuration'} must be a mapping, got {type(values).__name__}")
    try:
        text = json.dumps(values, default=str)
    except (TypeError, ValueError, RecursionError) as e:  # a date for a name, or an alias inside what it stands for
        raise ConfigError(f"{path.rstrip('.') or 'configuration'} must be plain values under names: {e}") from None
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as e:
        raise ConfigError(_words(kind, e, path)) from None


def settings(kind: type) -> dict[str, tuple[Any, Setting]]:
    """(type, setting) of every field of a record, in order."""
    hints = typing.get_type_hints(kind, include_extras=True)
    out = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        found = [m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Setting)]
        out[field.name] = (hint.__origin__ if found else hint, found[-1] if found else Setting())
    return out


def changed(values: Any) -> set[str]:
    """Names of the fields of a record that are not at their defaults; every field must have one."""
    usual = type(values)()
    return {f.name for f in dataclasses.fields(values) if getattr(values, f.name) != getattr(usual, f.name)}


_TYPES = {"int": "int", "float": "float", "string": "str", "bool": "bool", "tuple": "a list", "dict": "a mapping", "dataclass": "a mapping"}  # fmt: skip


def _words(kind: type, error: ValidationError, path: str | None) -> str:
    """One sentence about the first thing that is wrong."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    names: list[str] = []
    at: Any = kind
    is_secret = False
    for part in first["loc"]:
        if dataclasses.is_dataclass(at):
            is_secret |= any(f.name == part and not f.repr for f in dataclasses.fields(at))
        if not isinstance(part, str):
            names[-1:] = [f"{names[-1]}[{part}]"] if path is not None and names else names[-1:]
        elif part != "args":
            known = settings(typing.cast(type, at)) if dataclasses.is_dataclass(at) else {}
            names.append(known[part][1].name(part) if path is None and part in known else part)
        at = _within(at, part)
    name, what = (path or "") + ".".join(names), first["type"]
    if what == "json_invalid":  # what `build` wrote is JSON but for half a character
        return f"{name.rstrip('.') or 'configuration'} must be text of whole characters, got half a surrogate pair (\\ud800)"
    if what == "unexpected_keyword_argument":
        owner = kind
        for part in first["loc"][:-1]:
            owner = _within(owner, part)
        known = settings(owner)
        return f"{name} is not a setting; known settings: {', '.join(sorted(known))}"
    if what.startswith("missing"):
        return f"{name} must be given"
    if isinstance(cause, ValueError):
        rule = str(cause)
    elif what == "finite_number":
        rule = "must be a finite number"
    else:
        rule = f"must be {_TYPES.get(what.split('_')[0], first['msg'])}"
    return f"{name} {rule}, got {'something else' if is_secret else shown(first['input'])}"


def shown(value: object) -> str:
    """A value in an error; a path as text and a tuple as the comma list that a user types."""
    if isinstance(value, Path):
        return repr(str(value))
    return repr(",".join(map(str, value)) if isinstance(value, tuple) else value)


def _within(kind: Any, part: int | str) -> Any:
    """Type of what a record, mapping or list of that type holds under a name or index; None = not said."""
    while typing.get_origin(kind) is Annotated:
        kind = kind.__origin__
    if dataclasses.is_dataclass(kind):
        return settings(typing.cast(type, kind)).get(str(part), (None,))[0]
    held = typing.get_args(kind)
    return held[-1] if typing.get_origin(kind) is dict else held[0] if held else None


@dataclass(frozen=True, slots=True)
class _Rule:
    """A setting's bounds, where a JSON schema is made."""

    setting: Setting

    def __get_pydantic_json_schema__(self, core: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        schema, s = handler(core), self.setting
        bounds = {"minimum": s.ge, "exclusiveMinimum": s.gt, "maximum": s.le, "exclusiveMaximum": s.lt}
        sizes = {"array": "minItems", "object": "minProperties", "string": "minLength"}
        for part in schema.get("anyOf", [schema]):
            if part.get("type") in ("number", "integer"):
                part.update({k: v for k, v in bounds.items() if v is not None})
            if s.non_empty and part.get("type") in sizes:
                part[sizes[part["type"]]] = 1
            if s.choices:
                part["enum"] = list(s.choices)
        return schema


def json_schema(kind: type, title: str) -> dict[str, Any]:
    """The JSON schema (2020-12) of a record: types, bounds, defaults, and the text under each field as its description."""
    schema = TypeAdapter(kind).json_schema()
    for name, own in [(kind.__name__, schema), *schema.get("$defs", {}).items()]:
        found = _described(kind, name)
        own["description"] = inspect.cleandoc(found.__doc__ or "")
        for field, text in _texts(found).items():
            own["properties"][field]["description"] = text
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": title}


def _described(kind: type, name: str) -> type:
    """The record of a name, among the one and those that stand in its module."""
    return typing.cast(type, getattr(sys.modules[kind.__module__], name))


def _texts(kind: type) -> dict[str, str]:
    """Field -> the string that stands under it."""
    (body,) = ast.parse(inspect.cleandoc(inspect.getsource(kind))).body
    out = {}
    for before, after in itertools.pairwise(typing.cast(ast.ClassDef, body).body):
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            out[typing.cast(ast.Name, before.target).id] = inspect.cleandoc(str(after.value.value))
    return out


def count(text: str) -> int:
    """A whole number, also written as 4e5."""
    value = float(text)
    if not math.isfinite(value) or value != int(value):
        raise ValueError(f"must be a whole number, got {text!r}")
    return int(value)


DataFolder = Annotated[
    Path | None, Setting("Folder of text data (docs/drafters.md); default: the bundled prompts.", is_folder=True)
]
JsonFile = Annotated[Path | None, Setting("Write the result as JSON to this file.", is_output=True)]
HtmlFile = Annotated[
    Path | None, Setting("Write plots and tables to this file, which needs no network.", is_output=True)
]
MODELS = (
    "'bundled' (a toy) | 'smollm2' (a small real model, a package) | DIR of a transformers checkpoint, or OWNER/NAME[@REVISION] "
    "from this computer's Hugging Face cache | FILE.gguf."
)
Model = Annotated[str, Setting(MODELS)]
Drafter = Annotated[str, Setting(f"none | {DRAFTERS}.")]
DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
DEVICES = ("auto", "cpu", "cuda")
Dtype = Annotated[
    str, Setting("auto (as the service) | float32 | bfloat16 | float16 | int8 (CPU only).", choices=DTYPES)
]
Device = Annotated[str, Setting("auto | cpu | cuda.", choices=DEVICES)]
Threads = Annotated[int | None, Setting("torch threads; default: torch's choice.", flag="threads", ge=1)]
