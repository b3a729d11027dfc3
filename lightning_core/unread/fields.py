"""Fields of a frozen dataclass with slots whose values are read when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any


class UnreadField:
    """Descriptor of a field that contains a value, its JSON text until it is first read, or a `partial` that each read calls."""

    def __init__(self, slot: Any, parse: Callable[[str], Any]) -> None:
        self.slot, self._parse = slot, parse

    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        if instance is None:
            return self
        value = self.slot.__get__(instance, owner)
        if isinstance(value, str):
            value = self._parse(value)
            self.slot.__set__(instance, value)
        return value() if isinstance(value, partial) else value

    def __set__(self, instance: object, value: Any) -> None:
        self.slot.__set__(instance, value)


def leave_unread(cls: type, parsers: Mapping[str, Callable[[str], Any]]) -> None:
    """Make the fields of the dataclass ``cls`` that have ``parsers`` such fields."""
    for name, parse in parsers.items():
        setattr(cls, name, UnreadField(getattr(cls, name), parse))


def shared_state(instance: Any) -> list[Any]:
    """The values of all fields; unread ones stay so, and refer to what instances have in common."""
    found = ((f.name, vars(type(instance))[f.name]) for f in fields(instance))
    return [d.slot.__get__(instance) if isinstance(d, UnreadField) else getattr(instance, name) for name, d in found]


def own_state(instance: Any) -> list[Any]:
    """The values of all fields, read from what instances have in common; JSON text stays so."""
    return [value() if isinstance(value, partial) else value for value in shared_state(instance)]


def set_state(instance: Any, state: Sequence[Any]) -> None:
    """Set all fields of ``instance``, which is new."""
    for f, value in zip(fields(instance), state, strict=True):
        object.__setattr__(instance, f.name, value)


def restore(cls: type, state: Sequence[Any]) -> Any:
    """An instance with the fields ``state``."""
    instance = object.__new__(cls)
    set_state(instance, state)
    return instance
