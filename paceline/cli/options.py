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


def command(app: typer.Typer, name: str, record: str) -> Callable[[Run], Run]:
    """Make the decorated function a command of `app`.

    record: 'module:Class', whose fields are the options and whose docstring follows the function's in --help.
    """

    def register(run: Run) -> Run:
        summary = inspect.cleandoc(run.__doc__ or "")
        kind = functools.partial(_Lazy, built=lambda: _build(name, record, run, summary))
        app.command(name, cls=typing.cast(type[TyperCommand], kind), help=summary)(lambda: None)
        return run

    return register


class _Lazy(TyperCommand):
    """Stands for a command until it is invoked."""

    def __init__(self, *args: Any, built: Callable[[], TyperCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.built = functools.cache(built)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        return self.built().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        return self.built().invoke(ctx)


@dataclasses.dataclass(frozen=True, slots=True)
class _Option:
    """One parameter: the way to its field, its type, default and setting."""

    path: tuple[str, ...]
    hint: Any
    default: Any
    setting: Any
    is_change: bool
    """Of a configuration: without a default, and left out where nothing was given."""

    @property
    def name(self) -> str:
        return self.setting.name(self.path[-1])

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.hint) is tuple

    def parameter(self) -> inspect.Parameter:
        """What typer makes the option of."""
        hint, setting, default = self.hint, self.setting, ... if self.default is _MISSING else self.default
        words: dict[str, Any] = {"help": setting.help}
        if self.is_list and setting.is_repeated:
            hint, default = list[typing.get_args(hint)[0]], default if default is ... else list(default)  # type: ignore[misc]
        elif self.is_list:
            hint, default = str, default if default in (..., None) else ",".join(map(_text, default))
        elif setting.parser is not None:
            words |= {"parser": setting.parser, "metavar": "NUMBER"}
        if self.is_change:
            words["show_default"] = False if default is None else _text(default)
        if default is None or self.is_change:
            hint, default = typing.Optional[hint], None
        if setting.is_argument:
            info: Any = typer.Argument(**words)
        else:
            flag = setting.flag or self.path[-1].replace("_", "-")
            yes, _, no = flag.partition("/")
            names = (
                f"--{yes}{f'/{no}' if no else ''}",
                *([setting.short] if setting.short else []),
            )
            info = typer.Option(*names, envvar=_envvar(setting.env), rich_help_panel=setting.panel, **words)
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter("__".join(self.path), kind, default=default, annotation=Annotated[hint, info])

    def value(self, given: Any) -> Any:
        """The field's value of what was typed; raises ConfigError."""
        if given is None:
            return None if self.is_change else _of_file(self.setting.env)
        if isinstance(given, Path):
            given = given.expanduser()
        if self.setting.is_output:
            from paceline.paths import check_output

            return check_output(given, self.name)
        if self.is_list:
            kind = typing.get_args(self.hint)[0]
            given = tuple(given) if self.setting.is_repeated else items(given, kind, self.name)
        if self.is_change:
            from paceline.records import shown

            try:
                self.setting.check(given)
            except ValueError as e:  # under the name that was typed, not that of the setting
                raise ConfigError(f"{self.name} {e}, got {shown(given)}") from None
        return given


def items(text: str, kind: type, option: str) -> tuple[Any, ...]:
    """The parts of a comma list; raises ConfigError where one is no number and should be."""
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return tuple(kind(part) for part in parts)
    except ValueError as e:
        raise ConfigError(f"{option} must be a comma list of numbers, got {text!r}") from e


def given_words(options: Any, *, hidden: tuple[str, ...] = ()) -> str:
    """The options of a record as a command line that gives the same record; paths read DIR, as they stay private.

    Options that have no value or are off are left out, and those named in `hidden`; what is empty by default, too.
    """
    words = []
    for option in _options(type(options)):
        value = functools.reduce(getattr, option.path, options)
        is_empty = value in ((), "") and value == option.default
        if option.path[-1] in hidden or value is None or value is False or is_empty:
            continue
        quoted = ",".join(map(_text, value)) if isinstance(value, tuple) else _text(value)
        word = "DIR" if isinstance(value, Path) else f"'{quoted}'" if re.search(r"[^\w.,+-]|^$", quoted) else quoted
        words.append(f"--{option.name}" + ("" if value is True else f" {word}"))
    return " ".join(words)


def _build(name: str, record: str, run: Run, summary: str) -> TyperCommand:
    """The real command."""
    module, _, attribute = record.partition(":")
    kind = getattr(importlib.import_module(module), attribute)
    options = {"__".join(option.path): option for option in _options(kind)}

    def body(**given: Any) -> None:
        values = {option.path: option.value(given[parameter]) for parameter, option in options.items()}
        if run(_nested(kind, values), console()):
            raise typer.Exit(1)

    body.__signature__ = inspect.Signature([o.parameter() for o in options.values()])  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name, help=f"{summary}\n\n{inspect.cleandoc(kind.__doc__ or '')}")(body)
    return typing.cast(TyperCommand, typer.main.get_command(app))


def _options(kind: type, path: tuple[str, ...] = (), *, is_change: bool = False) -> Iterator[_Option]:
    """The options of a record; a field that is a record, or changes one, gives that one's."""
    from paceline.records import settings

    found = settings(kind)
    for field in dataclasses.fields(kind):
        hint, setting = found[field.name]
        here = (*path, field.name)
        if setting.changes is not None:
            yield from _options(setting.changes, here, is_change=True)
        elif dataclasses.is_dataclass(hint):
            yield from _options(typing.cast(type, hint), here, is_change=is_change)
        elif setting.help:
            default = field.default_factory() if field.default_factory is not _MISSING else field.default
            if typing.get_origin(hint) in (types.UnionType, typing.Union):
                hint = next(a for a in typing.get_args(hint) if a is not type(None))
            yield _Option(here, hint, default, setting, is_change)


def _nested(kind: type, values: dict[tuple[str, ...], Any]) -> Any:
    """A record, the records in it and its changes of a configuration; keys are the ways to the fields."""
    from paceline.records import settings

    own = {path[0]: value for path, value in values.items() if len(path) == 1}
    for name, (hint, setting) in settings(kind).items():
        below = {path[1:]: v for path, v in values.items() if path[0] == name and len(path) > 1}
        if setting.changes is not None:
            own[name] = {".".join(path): v for path, v in below.items() if v is not None}
        elif below:
            own[name] = _nested(hint, below)
    return kind(**own)


def _text(value: Any) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _of_file(env: str | tuple[str, ...] | None) -> str | None:
    """The value in the file that VARIABLE_FILE names, for a variable of ours; None where there is none."""
    ours = [v for v in ((env,) if isinstance(env, str) else env or ()) if v.startswith("PACELINE_")]
    if not ours:
        return None
    from paceline.config import from_environment

    return next((value for v in ours if (value := from_environment(v)) is not None), None)


def _envvar(env: str | tuple[str, ...] | None) -> str | list[str] | None:
    return list(env) if isinstance(env, tuple) else env
