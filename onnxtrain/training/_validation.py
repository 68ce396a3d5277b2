"""Checks of what users give: single values, and nested dicts of options against a schema, all that is wrong at once.

Errors of dicts have the form that scripts of onnxruntime-training know: ``{key: [message, ..., {key below: [...]}]}``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Errors = dict[Any, Sequence["str | Errors"]]  # by the name of an option, or the place in a list


def check(condition: bool, message: str) -> None:
    """Raises AssertionError, which scripts expect, where the condition does not hold."""
    if not condition:
        raise AssertionError(message)


def is_number(value: object, least: float = -math.inf) -> bool:
    """Whether it is an int or float of at least so much."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= least


def is_count(value: object, least: int = 0) -> bool:
    """Whether it is an int of at least so much."""
    return isinstance(value, int) and is_number(value, least)


@dataclasses.dataclass(frozen=True)
class Field:
    """One option.

    kind names its type in messages; accepts says whether a value has it.
    """

    kind: str
    accepts: Callable[[object], bool]
    default: object  # a function makes it where it is mutable
    low: int | None = None
    high: int | None = None
    nullable: bool = False

    def errors(self, value: Any) -> Sequence[str | Errors]:
        """What is wrong with a value."""
        if value is None:
            return [] if self.nullable else ["null value not allowed"]
        if not self.accepts(value):
            return [f"must be of {self.kind} type"]
        if self.low is not None and value < self.low:
            return [f"min value is {self.low}"]
        if self.high is not None and value > self.high:
            return [f"max value is {self.high}"]
        return []


Schema = dict[str, "Field | Schema"]  # by name


def filled(schema: Schema, given: Mapping[str, Any]) -> tuple[dict[str, Any], Errors]:
    """The options, complete, in the schema's order; and what is wrong with those that were given, by sorted keys."""
    values: dict[str, Any] = {}
    errors: Errors = {name: ["unknown field"] for name in given if name not in schema}
    for name, field in schema.items():
        if isinstance(field, Field):
            values[name] = given[name] if name in given else field.default() if callable(field.default) else (
                field.default)
            found = field.errors(values[name])
        elif name in given and not isinstance(given[name], dict):
            found = ["null value not allowed" if given[name] is None else "must be of dict type"]
        else:
            values[name], below = filled(field, given.get(name, {}))
            found = [below] if below else []
        if found:
            errors[name] = found
    return values, dict(sorted(errors.items(), key=lambda item: str(item[0])))


def _is(*kinds: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def integer(default: int, low: int, high: int | None = None) -> Field:
    """A whole number from low to high."""
    return Field("integer", _is(int), default, low, high)


def flag(default: bool) -> Field:
    """True or False."""
    return Field("boolean", _is(bool), default)


def string(default: str) -> Field:
    """A text."""
    return Field("string", _is(str), default)


def listed() -> Field:
    """A list, empty unless given."""
    return Field("list", _is(list), list)


def mapping() -> Field:
    """A dict, empty unless given."""
    return Field("dict", _is(dict), dict)


def instance(kind: str, accepts: Callable[[object], bool]) -> Field:
    """An object of some type, or None, which is the default."""
    return Field(kind, accepts, None, nullable=True)
