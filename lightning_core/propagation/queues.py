"""Marks workers that take items of other agents from queues. They may act for any of these agents, so their calls are refused.

Items are not changed: the scopes in which they were put are kept beside them. An agent that reads a queue keeps its own scope, and so
does a reader that created the queue and gets what was put inside its scope.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from http.client import HTTPConnection
from typing import Any

from lightning_core.capture.context import (
    Scope,
    candidates,
    distinct_agents,
    inherited_scope,
    is_outside,
    is_same_agent,
    set_scope,
    settle_with,
)
from lightning_core.capture.execution_context import Owner, current_owner
from lightning_core.capture.patching import Patches
from lightning_core.capture.recording import record

Scopes = tuple[Scope, ...]
"""The scopes of the agents that may own an item: one, or several if a marked worker put it."""

_NOTES = "_lightning_notes"
_SLACK = 256
_LAST_IN_FIRST_OUT = (queue.LifoQueue, asyncio.LifoQueue)
_STORAGE = (queue.Queue, queue.LifoQueue, queue.PriorityQueue)


class _Notes:
    """The scopes of the items in one queue. Thread-safe."""

    def __init__(self, creator: Owner | None) -> None:
        self.creator = creator
        """The thread and task that created the queue; None if that was before the rollouts."""
        self._lock = threading.RLock()  # a finalizer may put into the queue at any time
        # By identity. The item itself is kept, so its id is not reused if it leaves the queue by another way than `take`.
        self._scopes: dict[int, deque[tuple[Any, Scopes]]] = {}

    def add(self, item: Any, scopes: Scopes, size: Callable[[], int]) -> None:
        with self._lock:
            self._scopes.setdefault(id(item), deque()).append((item, scopes))
            surplus = len(self._scopes) - _SLACK
        if surplus > 0 and surplus > 2 * size():  # the queue is cleared from outside
            with self._lock:
                for key in list(self._scopes)[:surplus]:
                    del self._scopes[key]

    def take(self, item: Any, *, newest: bool) -> Scopes:
        with self._lock:
            entries = self._scopes.get(id(item))
            if not entries:
                return ()
            _, scopes = entries.pop() if newest else entries.popleft()
            if not entries:
                del self._scopes[id(item)]
            return scopes


def _create(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    setattr(instance, _NOTES, _Notes(current_owner()))
    return wrapped(*args, **kwargs)


def _put(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    scope = inherited_scope()
    if scope is None or not (args or "item" in kwargs):
        return wrapped(*args, **kwargs)
    item = args[0] if args else kwargs["item"]
    if isinstance(item, HTTPConnection):  # kept in a pool of urllib3: no work
        return wrapped(*args, **kwargs)
    notes = getattr(instance, _NOTES, None)
    if notes is None:
        notes = vars(instance).setdefault(_NOTES, _Notes(None))
    scopes = (*candidates(scope), replace(scope, base=None, submitters=())) if scope.submitters else (scope,)
    notes.add(item, scopes, instance.qsize)  # before the item: its reader may be faster
    try:
        return wrapped(*args, **kwargs)
    except BaseException:
        notes.take(item, newest=True)
        raise


def _get(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    item = wrapped(*args, **kwargs)
    _note_taken(instance, item)
    return item


def _get_from_other_storage(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    item = wrapped(*args, **kwargs)
    if not _has_known_storage(type(instance)):
        _note_taken(instance, item)
    return item


@cache
def _has_known_storage(kind: type[Any]) -> bool:
    """Whether ``_get`` is one of those that are wrapped."""
    return next((owner for owner in kind.__mro__ if "_get" in vars(owner)), None) in _STORAGE


def _note_taken(instance: Any, item: Any) -> None:
    notes: _Notes | None = getattr(instance, _NOTES, None)
    scopes = () if notes is None else notes.take(item, newest=isinstance(instance, _LAST_IN_FIRST_OUT))
    creator = None if notes is None else notes.creator
    if (pickup := _pickup.get()) is not None:
        pickup.taken.append((scopes, creator))
    elif scopes or inherited_scope() is not None:
        with record("queue.get"):
            _mark(scopes, creator)


_earlier: contextvars.ContextVar[tuple[Scope, ...]] = contextvars.ContextVar("lightning_submitters", default=())
"""The submitters that a worker without its own scope had before it took an unowned item."""


def _mark(scopes: Scopes, creator: Owner | None) -> None:
    """Mark the taker of an item that was put into a queue in ``scopes`` as a worker of other agents, if it is one.

    What else it does, such as giving a reward, belongs to the agent whose item it took last.
    """
    held = inherited_scope()
    known = _earlier.get() if held is None else held.submitters
    if is_outside() or (held is not None and not known and _keeps_scope(held, scopes, creator)):
        return
    base = held if held is None or (held.base is None and not known) else held.base
    others = [scope for scope in scopes if base is None or not is_same_agent(scope, base)]
    submitters = distinct_agents((*known, *others))
    _earlier.set(submitters)
    scope = others[-1] if submitters and others else base
    is_worker = bool(scopes or submitters)
    set_scope(replace(scope, owner=None, base=base, submitters=submitters) if scope and is_worker else base)


def _keeps_scope(held: Scope, scopes: Scopes, creator: Owner | None) -> bool:
    """Whether the taker reads the queue for the agent of ``held``: it is that agent, or created the queue for what runs inside ``held``."""
    owner = current_owner()
    if held.owner == owner and not held.run.ended:
        return True
    rollout, path = held.address.rollout, held.path
    return creator == owner and all(s.address.rollout == rollout and s.path[: len(path)] == path for s in scopes)


@dataclass(slots=True)
class _Pickup:
    """The items that a task which only gets one, as `asyncio.wait_for` starts it, took for the task that started it."""

    owner: Owner
    task: asyncio.Task[Any] | None = None
    taken: list[tuple[Scopes, Owner | None]] = field(default_factory=list[Any])


_pickup: contextvars.ContextVar[_Pickup | None] = contextvars.ContextVar("lightning_pickup", default=None)
_pickups: contextvars.ContextVar[tuple[_Pickup, ...]] = contextvars.ContextVar("lightning_pickups", default=())


def _settle() -> None:
    """Mark this task for the items picked up for it. Tasks that it starts inherit the variable, but no items picked up later."""
    settle_with(None)
    owner = current_owner()
    mine = [pickup for pickup in _pickups.get() if pickup.owner == owner]
    for pickup in mine:
        while pickup.taken:
            _mark(*pickup.taken.pop(0))
    waiting = tuple(pickup for pickup in mine if pickup.task is None or not pickup.task.done())
    _pickups.set(waiting)
    settle_with(_settle if waiting else None)


def _create_task(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    inherited_scope()  # settles what was picked up, before the new task inherits the context
    work = args[0] if args else kwargs.get("coro")
    if getattr(work, "cr_code", None) is not asyncio.Queue.get.__code__:
        return wrapped(*args, **kwargs)
    pickup = _Pickup(current_owner())
    token = _pickup.set(pickup)
    try:
        pickup.task = wrapped(*args, **kwargs)
    finally:
        _pickup.reset(token)
    _pickups.set((*_pickups.get(), pickup))
    settle_with(_settle)
    return pickup.task


class _SimpleQueue(queue.SimpleQueue[Any]):
    """`queue.SimpleQueue` is written in C and cannot be wrapped."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        _put(super().put, self, (item, block, timeout), {})

    def put_nowait(self, item: Any) -> None:
        _put(super().put_nowait, self, (item,), {})

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        return _get(super().get, self, (block, timeout), {})

    def get_nowait(self) -> Any:
        return _get(super().get_nowait, self, (), {})


def _create_simple(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    created = _SimpleQueue()
    setattr(created, _NOTES, _Notes(current_owner()))
    return created


def install_queues(patches: Patches) -> None:
    """Mark workers that take items of other agents from queues."""
    for kind in (queue.Queue, asyncio.Queue):
        patches.wrap(kind, "__init__", _create)
    patches.wrap(queue.Queue, "put", _put)
    # A worker that waits in ``get`` since before the rollout takes its item through ``_get``, the documented place to change how
    # items are stored.
    patches.wrap(queue.Queue, "get", _get_from_other_storage)
    for kind in _STORAGE:
        patches.wrap(kind, "_get", _get)
    patches.wrap(queue, "SimpleQueue", _create_simple)
    # asyncio's put and get call these in the same task.
    patches.wrap(asyncio.Queue, "put_nowait", _put)
    patches.wrap(asyncio.Queue, "get_nowait", _get)
    patches.wrap(asyncio.BaseEventLoop, "create_task", _create_task)
