"""Exceptions of agents as plain data, to carry them to the runner from another process or thread.

The runner's loop runs no code of agents, such as ``__str__`` of an exception's class or what unpickling calls. Plain data has the names and
texts. The exception that is made from it has the same name and text, and is an instance of the nearest class that is
Python's or Lightning's own.
"""

from __future__ import annotations

import builtins
from functools import lru_cache
from itertools import islice
from typing import Any

from lightning_core import errors
from lightning_core.errors import TimeLimitError, explain, text_of
from lightning_core.rollouts.containment import chain

_MAX_TEXT = 4_000
_MAX_CHAIN = 20
_MAX_NAMES = 50
_MAX_NAME = 200
_SPECIAL = (StopIteration, StopAsyncIteration, BaseExceptionGroup, MemoryError)
"""A coroutine cannot raise the first two, and the others have no subclasses that are made from a text."""
_TIME_LIMIT = f"{TimeLimitError.__module__}.{TimeLimitError.__qualname__}"
"""Only executors raise it. One that an agent raises is the agent's own failure."""
_MODULES = {"builtins": builtins, "lightning_core.errors": errors}


class CarriedError(Exception):
    """An exception of an agent. Its class has the name of the original one."""

    names: tuple[str, ...] = ()
    """The original class and its bases, as ``module.name``."""
    text: str = ""
    explained: str = ""
    """The lines of the program that raised it, and its message; see `errors.explain`."""

    def __str__(self) -> str:
        return self.text


def dump(error: BaseException) -> dict[str, Any]:
    """``error`` and the exceptions it was raised from, as JSON values."""
    return {
        "chain": [
            {
                "names": [f"{kind.__module__}.{kind.__qualname__}" for kind in type(cause).__mro__[:-1]],
                "text": _text(cause),
            }
            for cause in islice(chain(error), _MAX_CHAIN)
        ],
        "explained": text_of(error, _explained)[-_MAX_TEXT:],
    }


def load(data: dict[str, Any]) -> CarriedError:
    """The exception that `dump` wrote, raised from the same chain."""
    error: CarriedError | None = None
    for item in reversed(data["chain"]):
        outer = _make(tuple(_name(name) for name in item["names"][:_MAX_NAMES]), item["text"])
        outer.__cause__ = error
        error = outer
    assert error is not None
    error.explained = data["explained"]
    return error


def _name(name: str) -> str:
    """A name that a class can have: agents choose them."""
    return text_of(name)[:_MAX_NAME].replace("\0", "")


def _text(error: BaseException) -> str:
    return text_of(error)[:_MAX_TEXT]


def _explained(error: Any) -> str:
    return explain(error)


def _make(names: tuple[str, ...], text: str) -> CarriedError:
    kind = _class(names)
    error = kind.__new__(kind, text)
    error.text = text
    return error


@lru_cache(maxsize=256)
def _class(names: tuple[str, ...]) -> type[CarriedError]:
    known = () if _TIME_LIMIT in names else map(_known, names)
    base = next(filter(None, known), Exception)
    bases = (CarriedError,) if base is Exception else (CarriedError, base)
    module, _, name = names[0].rpartition(".")
    return type(name, bases, {"names": names, "__module__": module})


def _known(name: str) -> type[Exception] | None:
    """The class ``name`` if it is Python's or Lightning's own, and an ordinary exception."""
    module, _, attribute = name.rpartition(".")
    found = getattr(_MODULES.get(module), attribute, None)
    usable = isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, _SPECIAL)
    return found if usable else None
