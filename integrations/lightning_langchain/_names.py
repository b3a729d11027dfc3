"""The names of Runnables, as LangChain's own traces show them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, cast

from langchain_core.runnables import Runnable

_PARTS = ("steps", "steps__", "bound", "branches", "default", "runnable", "runnables", "fallbacks", "alternatives")
"""Attributes of LangChain's Runnables that hold other Runnables."""


def run_name(runnable: Any, config: Any) -> str | None:
    """The name of this run in LangChain's own traces, or None if that is the class's name."""
    for source in (config, getattr(runnable, "config", None)):
        first = source[0] if isinstance(source, Sequence) and source else source
        if isinstance(first, Mapping) and (name := cast("Mapping[str, Any]", first).get("run_name")):
            return name
    name = getattr(runnable, "name", None)
    return name if isinstance(name, str) else None


def internal_source(config: Any) -> str | None:
    """The purpose for which LangChain makes this model call (``summarization``, ``tool_selection``); None for the program's own calls."""
    if not isinstance(config, Mapping):
        return None
    metadata = cast("Mapping[str, Any]", config).get("metadata")
    source = cast("Mapping[str, Any]", metadata).get("lc_source") if isinstance(metadata, Mapping) else None
    return source if isinstance(source, str) else None


@cache
def enclosing_names(selectors: frozenset[str]) -> frozenset[str]:
    """The names that enclose others in ``selectors``: ``team`` in ``team/writer``."""
    return frozenset(name for selector in selectors for name in selector.split("/")[:-1])


def names_inside(runnable: Any) -> set[str]:
    """The names of ``runnable`` and of all Runnables that it consists of."""
    names: set[str] = set()
    seen: set[int] = set()
    waiting = [runnable]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Runnable):
            if name := run_name(part, None):
                names.add(name)
            waiting += [getattr(part, attribute) for attribute in _PARTS if attribute in _fields(part)]
        else:
            waiting += _members(part)
    return names


def _fields(part: Any) -> Mapping[str, Any]:
    return getattr(part, "__dict__", {})


def _members(part: Any) -> Iterator[Any]:
    if isinstance(part, Mapping):
        yield from cast("Mapping[str, Any]", part).values()
    elif isinstance(part, (list, tuple)):
        yield from cast("Sequence[Any]", part)
