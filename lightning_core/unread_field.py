"""Fields of dataclasses whose values are made when they are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any


class UnreadField:
    """Descriptor of a field that contains a value, its JSON text until it is first read, or a `partial` that returns it.

    A `partial` is called at each read, so the value is not kept here.
    """

    def __init__(self, slot: Any, parse: Callable[[str], Any] = json.loads) -> None:
        self.slot = slot
        self._parse = parse

    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        if instance is None:
            return self
        value = self.slot.__get__(instance, owner)
        if isinstance(value, partial):
            return value()
        if isinstance(value, str):
            value = self._parse(value)
            self.slot.__set__(instance, value)
        return value

    def __set__(self, instance: object, value: Any) -> None:
        self.slot.__set__(instance, value)
