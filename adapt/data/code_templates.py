"""Templated Python code written by the project: a low-entropy training domain without third-party text."""

from __future__ import annotations

import random

_WORDS = """
    order user invoice ticket product customer payment device sensor message task project account album author book
    branch bucket cache camera channel city client color comment company contract country course delivery document
    driver employee event feature flight folder game group hotel image item job key label lesson license list location
    machine meeting member metric model movie network note offer package page parcel part patient plan player point
    policy post price printer process profile queue recipe record region report request reservation result review road
    room route rule school score screen server service session shelf ship shop signal song station stock store stream
    student subject supplier survey table tag team template token tool track train transfer trip unit update vehicle
    vendor version video visit wallet warehouse worker zone
"""
_ENTITIES = _WORDS.split()
_FIELDS = {
    "name": "str", "id": "int", "price": "float", "count": "int", "title": "str", "email": "str", "status": "str",
    "size": "int", "weight": "float", "active": "bool", "owner": "str", "rate": "float", "code": "str", "limit": "int",
    "level": "int", "tags": "list[str]", "total": "float", "color": "str", "address": "str", "age": "int",
    "score": "float", "enabled": "bool", "category": "str", "created": "str", "priority": "int", "duration": "float",
}  # fmt: skip
_CHECKS = {"int": "< 0", "float": "< 0", "str": '== ""', "list[str]": "== []", "bool": "is None"}


def _camel(name: str) -> str:
    return name[:1].upper() + name[1:]


def _args(fields: list[str]) -> str:
    return ", ".join(f"{f}: {_FIELDS[f]}" for f in fields)


def _dataclass(rng: random.Random, e: str, fields: list[str]) -> tuple[str, str]:
    body = "\n".join(f"    {f}: {_FIELDS[f]}" for f in fields)
    checks = "\n".join(
        f'        if self.{f} {_CHECKS[_FIELDS[f]]}:\n            raise ValueError("{f} is not valid")' for f in fields
    )
    code = (
        f"from dataclasses import dataclass\n\n\n@dataclass\nclass {_camel(e)}:\n{body}\n\n"
        f"    def validate(self) -> None:\n{checks}\n\n    def to_dict(self) -> dict:\n        return {{\n"
        + "".join(f'            "{f}": self.{f},\n' for f in fields)
        + "        }"
    )
    return f"Write a Python dataclass for a {e} with the fields {', '.join(fields)}.", code


def _class(rng: random.Random, e: str, fields: list[str]) -> tuple[str, str]:
    init = "\n".join(f"        self.{f} = {f}" for f in fields)
    getters = "\n\n".join(
        f"    def get_{f}(self) -> {_FIELDS[f]}:\n        return self.{f}\n\n"
        f"    def set_{f}(self, {f}: {_FIELDS[f]}) -> None:\n        self.{f} = {f}"
        for f in fields
    )
    code = f"class {_camel(e)}:\n    def __init__(self, {_args(fields)}) -> None:\n{init}\n\n{getters}"
    return f"Write a Python class {_camel(e)} with getters and setters for {', '.join(fields)}.", code


def _repository(rng: random.Random, e: str, fields: list[str]) -> tuple[str, str]:
    c = _camel(e)
    code = (
        f"class {c}Repository:\n    def __init__(self) -> None:\n        self._{e}s: dict[int, {c}] = {{}}\n\n"
        f"    def add(self, {e}_id: int, {e}: {c}) -> None:\n        if {e}_id in self._{e}s:\n"
        f'            raise KeyError(f"{e} {{{e}_id}} already exists")\n        self._{e}s[{e}_id] = {e}\n\n'
        f"    def get(self, {e}_id: int) -> {c}:\n        if {e}_id not in self._{e}s:\n"
        f'            raise KeyError(f"{e} {{{e}_id}} not found")\n        return self._{e}s[{e}_id]\n\n'
        + "".join(
            f"    def find_by_{f}(self, {f}: {_FIELDS[f]}) -> list[{c}]:\n"
            f"        return [{e} for {e} in self._{e}s.values() if {e}.{f} == {f}]\n\n"
            for f in fields
        )
        + f"    def remove(self, {e}_id: int) -> None:\n        if {e}_id not in self._{e}s:\n"
        f'            raise KeyError(f"{e} {{{e}_id}} not found")\n        del self._{e}s[{e}_id]'
    )
    return f"Write a repository class for {e} objects that finds them by {' and '.join(fields)}.", code


def _functions(rng: random.Random, e: str, fields: list[str]) -> tuple[str, str]:
    parts = []
    for f in fields:
        if _FIELDS[f] in ("int", "float"):
            parts.append(
                f"def total_{f}({e}s: list[dict]) -> {_FIELDS[f]}:\n    total = 0\n    for {e} in {e}s:\n"
                f'        total += {e}["{f}"]\n    return total'
            )
        else:
            parts.append(
                f"def group_by_{f}({e}s: list[dict]) -> dict:\n    groups = {{}}\n    for {e} in {e}s:\n"
                f'        groups.setdefault({e}["{f}"], []).append({e})\n    return groups'
            )
    return f"Write Python functions over a list of {e}s for {', '.join(fields)}.", "\n\n\n".join(parts)


def _tests(rng: random.Random, e: str, fields: list[str]) -> tuple[str, str]:
    vals = {"str": '"abc"', "int": "3", "float": "2.5", "bool": "True", "list[str]": '["a", "b"]'}
    c = _camel(e)
    args = ", ".join(f"{f}={vals[_FIELDS[f]]}" for f in fields)
    parts = [f"def test_{e}_{f}():\n    {e} = {c}({args})\n    assert {e}.{f} == {vals[_FIELDS[f]]}" for f in fields]
    return f"Write pytest tests for the class {c} with the fields {', '.join(fields)}.", "\n\n\n".join(parts)


_KINDS = (_dataclass, _class, _repository, _functions, _tests)


def generate_code_document(rng: random.Random) -> tuple[str, str]:
    """Return one (request, code answer) pair drawn from the templates."""
    fields = rng.sample(sorted(_FIELDS), rng.randint(2, 5))
    return rng.choice(_KINDS)(rng, rng.choice(_ENTITIES), fields)
