"""What is known of an item of a queue: who waits for what it leads to.

An item is a *job* (something to call), a *request* (it says where the reply goes) or *data*.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import dropwhile, islice
from typing import Any, Literal, cast

_FUTURES = (asyncio.Future, concurrent.futures.Future)
_EVENTS = (threading.Event, asyncio.Event)
_SETTABLE = (*_FUTURES, *_EVENTS)
_QUEUES = (queue.Queue, queue.SimpleQueue, asyncio.Queue)
_MOST_PARTS = 64


@dataclass(frozen=True, slots=True)
class Item:
    """What is known of an item of a queue."""

    kind: Literal["job", "request", "data"]
    replies: tuple[Any, ...] = ()
    """Where the reply goes: futures, events, queues and callbacks."""

    @property
    def is_done(self) -> bool:
        """Whether its submitter is known to have the reply."""
        states = [r.done() if isinstance(r, _FUTURES) else r.is_set() for r in self.replies if isinstance(r, _SETTABLE)]
        return bool(states) and all(states)


def read_item(item: object) -> Item:
    """The kind of ``item``, and where its reply goes."""
    parts = islice(_parts(item, 2), _MOST_PARTS)
    replies = tuple(part for part in parts if isinstance(part, (*_SETTABLE, *_QUEUES)) or _is_callable(part))
    return Item("job" if _is_job(item) else "request" if replies else "data", replies)


def reach(carried: Iterable[object]) -> set[int]:
    """The identities of what coroutines, functions and their arguments refer to."""
    found: set[int] = set()
    for thing in carried:
        inner: list[object] = [thing, getattr(thing, "__self__", None), getattr(thing, "args", None)]
        inner += [_content(cell) for cell in getattr(thing, "__closure__", None) or ()]
        if inspect.iscoroutine(thing) and thing.cr_frame is not None:
            inner += thing.cr_frame.f_locals.values()
        found.update(id(part) for thing in inner for part in islice(_parts(thing, 2), _MOST_PARTS))
    return found


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later
        return None


def _is_job(item: object) -> bool:
    """Whether it is a function, or a tuple that begins with one, after numbers such as a priority."""
    if isinstance(item, (tuple, list)):
        rest = list(dropwhile(lambda part: isinstance(part, (int, float)), cast("Iterable[object]", item)))
        return bool(rest) and _is_job(rest[0])
    return _is_callable(item) or inspect.iscoroutine(item)


def _is_callable(part: object) -> bool:
    return callable(part) and not isinstance(part, type)


def _parts(item: object, depth: int) -> Iterator[object]:
    yield item
    if depth == 0 or isinstance(item, (str, bytes, *_SETTABLE, *_QUEUES)):
        return
    inner: Iterable[object]
    if isinstance(item, Mapping):
        inner = cast("Mapping[object, object]", item).values()
    elif isinstance(item, (tuple, list)):
        inner = cast("Iterable[object]", item)
    else:
        inner = list(getattr(item, "__dict__", {}).values()) or [
            getattr(item, name, None) for name in getattr(type(item), "__slots__", ())
        ]
    for part in islice(inner, _MOST_PARTS):
        yield from _parts(part, depth - 1)
