"""What the context variable holds, and whom a worker works for, given what it inherited and what it took from queues.

A worker that takes a job or a request works for its submitter. A worker that takes data may be the submitter's worker or its reader
(`items`). What it took is unfinished until the reply is done or it makes a model call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from lightning_core.capture.address import Address
from lightning_core.capture.execution_context import Owner
from lightning_core.capture.items import reach, read_item
from lightning_core.capture.run import Run

_MOST_HELD = 64


@dataclass(frozen=True, slots=True)
class Scope:
    """What the context variable holds: a rollout and the agent or node in it."""

    run_reference: weakref.ref[Run]
    """Weak, because contexts of threads that outlive the rollout hold the scope. A live run is held by the module `run`."""
    address: Address
    marked: bool
    """The current agent is marked or selected: unmarked nodes inside do not replace it."""
    name: str | None = None
    """The innermost agent or node; None directly inside a tool or the rollout."""
    path: tuple[str, ...] = ()
    """The names of the enclosing agents and nodes, outermost first."""
    auxiliary: bool = False
    """Inside an auxiliary scope, up to the next agent."""
    principal: str | None = None
    """The marked or selected agent around the innermost agent or node."""
    has_span: bool = True
    """False in `aside`, which opens no span: an agent of that name is not open yet."""
    tool_call: str | None = None
    """The model's id of the innermost tool call."""
    owner: Owner | None = None
    """The thread and task that entered it. Others inherited it, and may work for another agent."""
    work: Work | None = None
    """Set if a worker has the scope because of what it took from queues."""
    around: Work | None = None
    """What a worker took before it opened the scope, whose name settles whose calls these are."""

    @property
    def run(self) -> Run:
        """The rollout. If it has ended and nothing else holds it, an empty one that has ended."""
        return self.run_reference() or _COLLECTED

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the scope for another process, without what belongs to this one."""
        carried = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _PROCESS_ONLY}
        return _load, (self.run, carried)


_PROCESS_ONLY = frozenset({"run_reference", "owner", "work", "around"})
"""Fields of a scope that mean nothing in another process."""


def _load(run: Run, carried: Mapping[str, Any]) -> Scope:
    return Scope(weakref.ref(run), **carried)


_COLLECTED = Run(task=None, task_id="", agents=frozenset(), endpoint=None, api_key=None, strict=False)
_COLLECTED.ended = True


@dataclass(slots=True, eq=False)
class Held:
    """The items of one agent that a worker took and may not have finished."""

    scope: Scope
    items: list[object] | None
    """Not read before several agents may own the work. None: too many; only a model call finishes them."""
    spoke: bool = False
    """A model call was routed since they were taken."""
    is_long: bool = False
    """Enough were added for `drop_done` to look at them."""

    @property
    def is_over(self) -> bool:
        """Whether they are finished, as far as that is known without reading them."""
        return self.spoke or self.scope.run.ended

    def drop_done(self) -> None:
        """Forget items whose submitters have the reply, if there are many. Call it outside the lock of the queue."""
        if self.items is not None and self.is_long:
            self.is_long = False
            self.items = [item for item in self.items if not read_item(item).is_done]


@dataclass(frozen=True, slots=True)
class Work:
    """What a worker took from queues and may not have finished. Tasks that it starts share it."""

    base: Scope | None
    """The scope that the worker inherited."""
    held: tuple[Held, ...]
    """One for each agent."""

    def rivals(self) -> tuple[Scope, ...]:
        """The scopes that the work may belong to, one for each agent."""
        if len(self.held) == 1 and not self.held[0].is_over and not self._is_readers(self.held[0].scope):
            return (self.held[0].scope,)
        found: list[Scope] = []
        for held in self.held:
            if held.is_over:
                continue
            items = None if held.items is None else [known for i in held.items if not (known := read_item(i)).is_done]
            is_data = items is None or any(item.kind == "data" for item in items)
            if self.base is not None and is_data and self._is_readers(held.scope):
                found.append(self.base)
            if items is None or items:
                found.append(held.scope)
        return tuple(s for i, s in enumerate(found) if not any(is_same_agent(s, earlier) for earlier in found[:i]))

    def finish(self) -> None:
        """What the worker takes next is new work."""
        for held in self.held:
            held.spoke = True

    def narrow(self, carried: Iterable[object]) -> Work:
        """The part of the work that is handed on with the objects ``carried``; all of it if they carry none of the items."""
        known = reach(carried)
        handed: list[Held] = []
        for held in self.held:
            items = [] if held.is_over or held.items is None else held.items
            of = [item for item in items if id(item) in known or any(id(r) in known for r in read_item(item).replies)]
            if of:
                handed.append(held if len(of) == len(items) else Held(held.scope, of))
        return Work(self.base, tuple(handed)) if handed else self

    def _is_readers(self, scope: Scope) -> bool:
        """Whether the worker may have read what was put in ``scope`` for an agent of its own, in the same rollout."""
        return self.base is not None and self.base.run is scope.run and not is_same_agent(self.base, scope)


def take(work: Work | None, base: Scope | None, scopes: Sequence[Scope], item: object) -> Work:
    """The work of someone who had ``work``, inherited ``base``, and takes an ``item`` that was put in one of ``scopes``."""
    held = [] if work is None else [h for h in work.held if not h.is_over]
    for scope in scopes:
        of = next((h for h in held if is_same_agent(h.scope, scope)), None)
        if of is None:
            held.append(Held(scope, [item]))
        elif of.items is not None and len(of.items) < _MOST_HELD:
            of.items.append(item)
            of.is_long = len(of.items) % (_MOST_HELD // 2) == 0
        else:
            of.items = None
    return Work(base, tuple(held))


def submitters(scope: Scope, item: object) -> tuple[Scope, ...]:
    """Whose an ``item`` may be that is put into a queue in ``scope``."""
    rivals = () if scope.work is None else scope.work.narrow((item,)).rivals()
    if len(rivals) < 2 and not (rivals and not is_same_agent(rivals[0], scope)):
        return (scope if scope.work is None else replace(scope, work=None),)
    return rivals


def is_same_agent(one: Scope, other: Scope) -> bool:
    """Whether model calls in both scopes belong to the same agent of the same rollout."""
    return one.address.rollout == other.address.rollout and one.address.agent == other.address.agent
