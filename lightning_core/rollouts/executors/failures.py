"""Exceptions as plain data, to carry them from one process to another.

Pickling runs the code of the exception's class, in a process that runs no code of agents, and fails for many. Plain data has
the names and texts. The exception that is made from it has the same name and text, and is an instance of the nearest class that is
Python's or Lightning's own.
"""

from __future__ import annotations

import builtins
import traceback
from functools import cache
from typing import Any

from lightning_core import errors
from lightning_core.trace import describe

_MAX_TEXT = 4_000
_MAX_CHAIN = 20
_MODULES = {"builtins": builtins, "lightning_core.errors": errors}


class CarriedError(Exception):
    """An exception of another process. Its class has the name of the original one."""

    names: tuple[str, ...] = ()
    """The original class and its bases, as ``module.name``."""
    text: str = ""
    traceback_text: str = ""

    def __str__(self) -> str:
        return self.text


def dump(error: BaseException) -> dict[str, Any]:
    """``error`` and the exceptions it was raised from, as JSON values."""
    chain: list[dict[str, Any]] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(chain) < _MAX_CHAIN:
        seen.add(id(current))
        names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(current).__mro__[:-1]]
        chain.append({"names": names, "text": _text(current)})
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return {"chain": chain, "traceback": clean(_traceback(error))[-_MAX_TEXT:]}


def load(data: dict[str, Any]) -> CarriedError:
    """The exception that `dump` wrote, raised from the same chain."""
    error: CarriedError | None = None
    for item in reversed(data["chain"]):
        outer = _make(tuple(item["names"]), item["text"])
        outer.__cause__ = error
        error = outer
    assert error is not None
    error.traceback_text = data["traceback"]
    return error


def clean(text: str) -> str:
    """``text`` without halves of surrogate pairs, which cannot be encoded."""
    return text.encode(errors="backslashreplace").decode()


def _text(error: BaseException) -> str:
    try:
        return clean(str(error))[:_MAX_TEXT]
    except Exception as broken:  # noqa: BLE001 - the agent's own __str__ may fail
        return f"its text cannot be read: {clean(describe(broken))}"


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error, limit=-30))
    except Exception as broken:  # noqa: BLE001 - as above
        return f"its traceback cannot be read: {describe(broken)}"


def _make(names: tuple[str, ...], text: str) -> CarriedError:
    kind = _class(names)
    error = kind.__new__(kind, text)
    error.text = text
    return error


@cache
def _class(names: tuple[str, ...]) -> type[CarriedError]:
    base = next(filter(None, map(_known, names)), Exception)
    bases = (CarriedError,) if base is Exception else (CarriedError, base)
    module, _, name = names[0].rpartition(".")
    return type(name, bases, {"names": names, "__module__": module})


def _known(name: str) -> type[Exception] | None:
    """The class ``name`` if it is Python's or Lightning's own, and an ordinary exception."""
    module, _, attribute = name.rpartition(".")
    found = getattr(_MODULES.get(module), attribute, None)
    # StopIteration cannot be set on a future, and asyncio treats none of the rest as an error of a task.
    usable = isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, (StopIteration, StopAsyncIteration))
    return found if usable else None
