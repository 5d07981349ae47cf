"""Options: the command line of a record, one option for each field that has help.

A command is a record and a function of it. `paceline --help` needs only the one line that the function's docstring
begins with; the record's module, which may load torch, is imported when its command is invoked.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.console import Console
from typer.core import TyperCommand

from paceline.errors import ConfigError

Run = Callable[[Any, Console], Any]
"""Carries a command out; True: exit code 1."""
_MISSING = dataclasses.MISSING


def console() -> Console:
    """The terminal; a log file, which has no width of its own, gets room for the widest table."""
    return Console() if sys.stdout.isatty() else Console(width=190)


def command(app: typer.Typer, name: str, record: str, *, changes: str | None = None) -> Callable[[Run], Run]:
    """Make the decorated function a command of `app`.

    Args:
        record: 'module:Class', whose fields are the options and whose docstring follows the function's in --help.
        changes: name of the field of the record that is a configuration: its options have no defaults, and the field
            gets a mapping of dotted names to what was given.
    """

    def register(run: Run) -> Run:
        summary = inspect.cleandoc(run.__doc__ or "")
        kind = functools.partial(_Lazy, built=lambda: _build(name, record, run, summary, changes))
        app.command(name, cls=typing.cast(type[TyperCommand], kind), help=summary)(lambda: None)
        return run

    return register


class _Lazy(TyperCommand):
    """Stands for a command until it is invoked."""

    def __init__(self, *args: Any, built: Callable[[], click.Command], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.built = functools.cache(built)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        return self.built().make_context(*args, **kwargs)


@dataclasses.dataclass(frozen=True, slots=True)
class _Option:
    """One parameter: the way to its field, its type, default and setting."""

    path: tuple[str, ...]
    hint: Any
    default: Any
    setting: Any

    @property
    def name(self) -> str:
        return self.setting.name(self.path[-1])

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.hint) is tuple

    def parameter(self, *, is_change: bool) -> inspect.Parameter:
        """What typer makes the option of."""
        setting, default = self.setting, self.default
        hint = next((a for a in typing.get_args(self.hint) if a is not type(None)), self.hint) if _is_optional(self.hint) else self.hint  # fmt: skip
        if default is dataclasses.MISSING:
            default = ...
        words: dict[str, Any] = {"help": setting.help}
        if self.is_list and setting.is_repeated:
            hint, default = list[typing.get_args(hint)[0]], default if default is ... else list(default)  # type: ignore[misc]
        elif self.is_list:
            hint, default = str, default if default is ... else ",".join(map(_text, default))
        elif setting.parser is not None:
            words |= {"parser": setting.parser, "metavar": "NUMBER"}
        if is_change:
            words["show_default"] = False if default is None else _text(default)
        if default is None or is_change:
            hint, default = typing.Optional[hint], None
        if setting.is_argument:
            info: Any = typer.Argument(**words)
        else:
            flag = setting.flag or self.path[-1].replace("_", "-")
            yes, _, no = flag.partition("/")
            names = (f"--{yes}{f'/{no}' if no else ''}" if yes else f" /{no}", *([setting.short] if setting.short else []))
            info = typer.Option(*names, envvar=_envvar(setting.env), rich_help_panel=setting.panel, **words)
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter("__".join(self.path), kind, default=default, annotation=Annotated[hint, info])

    def value(self, given: Any) -> Any:
        """The field's value of what was typed; raises ConfigError."""
        if given is None:
            return None
        if self.setting.is_output:
            from paceline.paths import check_output

            return check_output(given, self.name)
        if self.is_list and self.setting.is_repeated:
            return tuple(given)
        return items(given, typing.get_args(self.hint)[0], self.name) if self.is_list else given


def items(text: str, kind: type, option: str) -> tuple[Any, ...]:
    """The parts of a comma list; raises ConfigError where one is no number and should be."""
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return tuple(kind(part) for part in parts)
    except ValueError as e:
        raise ConfigError(f"{option} must be a comma list of numbers, got {text!r}") from e


def given_words(options: Any, *, hidden: tuple[str, ...] = ()) -> str:
    """The options of a record as a command line that gives the same record; paths read DIR, as they stay private.

    Options that have no value or are off are left out, and those named in `hidden`.
    """
    words = []
    for option in _options(type(options)):
        value = functools.reduce(getattr, option.path, options)
        if option.path[-1] in hidden or value in (None, (), False, ""):
            continue
        quoted = ",".join(map(_text, value)) if isinstance(value, tuple) else _text(value)
        word = "DIR" if isinstance(value, Path) else f"'{quoted}'" if re.search(r"[^\w.+-]", quoted) else quoted
        words.append(f"--{option.name}" + ("" if value is True else f" {word}"))
    return " ".join(words)


def _build(name: str, record: str, run: Run, summary: str, changes: str | None) -> click.Command:
    """The real command."""
    module, _, attribute = record.partition(":")
    kind = getattr(importlib.import_module(module), attribute)
    options = {"__".join(option.path): option for option in _options(kind)}

    def body(**given: Any) -> None:
        values: dict[tuple[str, ...], Any] = {}
        changed: dict[str, Any] = {}
        for parameter, option in options.items():
            value = option.value(given[parameter])
            if changes is None or option.path[0] != changes:
                values[option.path] = value
            elif value is not None:
                changed[".".join(option.path[1:])] = _checked(option, value)
        if changes is not None:
            values[(changes,)] = changed
        if run(_nested(kind, values), console()):
            raise typer.Exit(1)

    body.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [o.parameter(is_change=changes is not None and o.path[0] == changes) for o in options.values()]
    )
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name, help=f"{summary}\n\n{inspect.cleandoc(kind.__doc__ or '')}")(body)
    return typer.main.get_command(app)


def _options(kind: type, path: tuple[str, ...] = ()) -> Iterator[_Option]:
    """The options of a record; a field that is a record gives its own."""
    from paceline.records import settings

    found = settings(kind)
    for field in dataclasses.fields(kind):
        hint, setting = found[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _options(typing.cast(type, hint), (*path, field.name))
        elif setting.help:
            default = field.default_factory() if field.default_factory is not _MISSING else field.default
            yield _Option((*path, field.name), hint, default, setting)


def _nested(kind: type, values: dict[tuple[str, ...], Any]) -> Any:
    """A record and the records in it; keys are the ways to the fields."""
    own = {path[0]: value for path, value in values.items() if len(path) == 1}
    for field in dataclasses.fields(kind):
        if below := {path[1:]: v for path, v in values.items() if path[0] == field.name and len(path) > 1}:
            own[field.name] = _nested(typing.get_type_hints(kind)[field.name], below)
    return kind(**own)


def _checked(option: _Option, value: Any) -> Any:
    """The value of a changed setting, refused under the name that was typed."""
    try:
        return option.setting.check(value)
    except ValueError as e:
        raise ConfigError(f"{option.name} {e}, got {value!r}") from None


def _is_optional(hint: Any) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _envvar(env: str | tuple[str, ...] | None) -> str | list[str] | None:
    return list(env) if isinstance(env, tuple) else env
