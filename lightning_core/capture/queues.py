"""Makes queues carry the scope of what is put into them.

A worker that takes an item from a queue works for its submitter, until it takes the next. Items are not changed: their scopes
are kept beside them. An agent that reads a queue keeps its own scope, and so does the reader that created the queue.
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
from typing import Any

from lightning_core.capture.context import enter, inherited_scope, is_outside, set_scope, settle_with
from lightning_core.capture.execution_context import Owner, current_owner
from lightning_core.capture.patching import Patches
from lightning_core.capture.recording import record
from lightning_core.capture.work import Scope, Work, is_same_agent, submitters, take

Scopes = tuple[Scope, ...]
"""Whose an item may be: one scope, unless it was put by a worker that served several agents at once."""

_NOTES = "_lightning_notes"
_SLACK = 256
_LAST_IN_FIRST_OUT = (queue.LifoQueue, asyncio.LifoQueue)
_STORAGE = (queue.Queue, queue.LifoQueue, queue.PriorityQueue)


class _Notes:
    """The scopes of the items in one queue. Thread-safe."""

    def __init__(self, creator: Owner | None) -> None:
        self.creator = creator
        """Who created the queue; None if that was before the rollouts."""
        self._lock = threading.RLock()  # a finalizer may put into the queue at any time
        # By identity. The item itself is kept, so that its id is not reused if it leaves the queue by another way than `take`.
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
    notes = getattr(instance, _NOTES, None)
    if notes is None:
        notes = vars(instance).setdefault(_NOTES, _Notes(None))
    notes.add(item, submitters(scope, item), instance.qsize)  # before the item: its reader may be faster
    try:
        return wrapped(*args, **kwargs)
    except BaseException:
        notes.take(item, newest=True)
        raise


def _get(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    item = wrapped(*args, **kwargs)
    _took(instance, item)
    return item


def _get_outside_of_lock(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    item = wrapped(*args, **kwargs)
    if not _has_known_storage(type(instance)):
        _took(instance, item)
    scope = inherited_scope()
    if scope is not None and scope.work is not None:
        with record("queue.get"):
            for held in scope.work.held:
                held.drop_done()
    return item


@cache
def _has_known_storage(kind: type[Any]) -> bool:
    """Whether ``_get`` is one of those that are wrapped."""
    return next((owner for owner in kind.__mro__ if "_get" in vars(owner)), None) in _STORAGE


def _took(instance: Any, item: Any) -> None:
    notes: _Notes | None = getattr(instance, _NOTES, None)
    scopes = () if notes is None else notes.take(item, newest=isinstance(instance, _LAST_IN_FIRST_OUT))
    creator = None if notes is None else notes.creator
    if (pickup := _pickup.get()) is not None:
        pickup.taken.append((item, scopes, creator))
    elif scopes or inherited_scope() is not None:
        with record("queue.get"):
            _serve(item, scopes, creator)


_left: contextvars.ContextVar[Work | None] = contextvars.ContextVar("lightning_left", default=None)
"""The work of a worker that took an item of nobody afterwards."""


def _serve(item: Any, scopes: Scopes, creator: Owner | None) -> None:
    """Work for the agent that put ``item`` into its queue in ``scopes``, unless this is an agent or the queue's ``creator``."""
    held = inherited_scope()
    work = None if held is None else held.work
    if is_outside() or (held is None and not scopes):
        return
    owner = current_owner()
    if creator == owner or (held is not None and work is None and held.owner == owner and not held.run.ended):
        return
    base = held if work is None else work.base
    if not scopes:
        _left.set(work or _left.get())
        set_scope(base)
        return
    scope = scopes[-1]
    if base is not None and is_same_agent(base, scope):
        scope = base  # nothing changes, but the item counts as taken
    set_scope(replace(scope, owner=None, work=take(work or _left.get(), base, scopes, item)))


@dataclass(slots=True)
class _Pickup:
    """What a task that only gets an item, as `asyncio.wait_for` starts one, took for the task that started it."""

    owner: Owner
    task: asyncio.Task[Any] | None = None
    taken: list[tuple[Any, Scopes, Owner | None]] = field(default_factory=list[Any])


_pickup: contextvars.ContextVar[_Pickup | None] = contextvars.ContextVar("lightning_pickup", default=None)
_pickups: contextvars.ContextVar[tuple[_Pickup, ...]] = contextvars.ContextVar("lightning_pickups", default=())


def _settle() -> None:
    """Serve what was picked up for this task. The tasks that it starts inherit the variable, but not the work."""
    settle_with(None)
    owner = current_owner()
    mine = [pickup for pickup in _pickups.get() if pickup.owner == owner]
    for pickup in mine:
        while pickup.taken:
            _serve(*pickup.taken.pop(0))
    waiting = tuple(pickup for pickup in mine if pickup.task is None or not pickup.task.done())
    _pickups.set(waiting)
    settle_with(_settle if waiting else None)


def _create_task(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    work = args[0] if args else kwargs.get("coro")
    if getattr(work, "cr_code", None) is not asyncio.Queue.get.__code__:
        scope = inherited_scope()
        if scope is None or scope.work is None or (narrowed := scope.work.narrow((work,))) is scope.work:
            return wrapped(*args, **kwargs)
        with enter(replace(scope, work=narrowed), as_owner=False):
            return wrapped(*args, **kwargs)
    inherited_scope()
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
        return _get_outside_of_lock(super().get, self, (block, timeout), {})

    def get_nowait(self) -> Any:
        return _get_outside_of_lock(super().get_nowait, self, (), {})


def _create_simple(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    created = _SimpleQueue()
    setattr(created, _NOTES, _Notes(current_owner()))
    return created


def install_queues(patches: Patches) -> None:
    """Make work that is put into a queue keep its scope."""
    for kind in (queue.Queue, asyncio.Queue):
        patches.wrap(kind, "__init__", _create)
    patches.wrap(queue.Queue, "put", _put)
    # A worker that waits in ``get`` since before the rollout takes its item through ``_get``, the documented place to change how
    # items are stored.
    patches.wrap(queue.Queue, "get", _get_outside_of_lock)
    for kind in _STORAGE:
        patches.wrap(kind, "_get", _get)
    patches.wrap(queue, "SimpleQueue", _create_simple)
    # asyncio's put and get call these in the same task.
    patches.wrap(asyncio.Queue, "put_nowait", _put)
    patches.wrap(asyncio.Queue, "get_nowait", _get_outside_of_lock)
    patches.wrap(asyncio.BaseEventLoop, "create_task", _create_task)
