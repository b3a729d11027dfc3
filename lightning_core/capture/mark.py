"""`trainable`: marks a function or a framework's object as an agent.

A marked function or object runs in a `capture.scope`; nothing is patched, and outside a rollout the mark does nothing. The
configuration decides whether a marked agent is trained; by default all marked agents are.

    @trainable                              # the agent "plan"
    def plan(state): ...

    @trainable("writer")                    # sync, async, generator and async-generator functions and methods
    async def write_query(state): ...

    writer = trainable(chain, name="writer")               # an object of a framework that has an integration
    graph = trainable(graph, agents=["writer", "rewriter"])   # parts of one, by the framework's own names
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast, overload

from lightning_core.capture.integration import find_integration
from lightning_core.capture.marked import get_mark, mark_callable, set_mark
from lightning_core.capture.marks import TrainSpec, marked_agents, register_mark
from lightning_core.capture.wrapping import scope_function
from lightning_core.errors import ConfigError

T = TypeVar("T")

__all__ = ["get_mark", "marked_agents", "set_mark", "trainable"]


@overload
def trainable(obj: str, /, *, policy: str | None = None) -> Callable[[T], T]: ...
@overload
def trainable(*, name: str | None = None, policy: str | None = None) -> Callable[[T], T]: ...
@overload
def trainable(obj: T, /, *, name: str | None = None, agents: Sequence[str] = (), policy: str | None = None) -> T: ...
def trainable(
    obj: Any = None, /, *, name: str | None = None, agents: Sequence[str] = (), policy: str | None = None
) -> Any:
    """Mark a function or a framework's object as an agent.

    As a decorator with a name, ``@trainable("writer")``, or as a call, ``trainable(obj, name="writer")``. Returns a
    function of the same kind, name and signature, or an object of the same class. ``agents`` marks parts of ``obj`` (nodes
    of a graph) by exact name instead of the whole object. Marking again with the same name does nothing. Raises
    `ConfigError` if ``obj`` cannot be marked or is already marked with another name.

    A returned coroutine, awaitable, generator, iterator (``map(…)``) or asynchronous iterator runs in the agent's scope when
    it is awaited or iterated. A returned context manager is entered and exited in it; the body of ``with`` is not part of the
    agent, but an iterator that the manager yields is. Containers and the items of a result are not followed.

    Put ``@trainable`` above ``@staticmethod``, ``@classmethod``, ``@contextmanager``, ``@lru_cache`` or a framework's
    decorator, and below ``@property``. Marked objects copy and pickle with their mark if the original does; a function
    pickles by its name, so decorate it at module level.
    """
    if obj is None or isinstance(obj, str):
        if agents:
            raise ConfigError("agents=… marks parts of an object; pass the object: trainable(graph, agents=[…])")
        return functools.partial(_mark, name=name if obj is None else obj, policy=policy)
    if not agents:
        return _mark(obj, name=name, policy=policy)
    if name is not None:
        raise ConfigError(
            f"found both name={name!r}, which marks the whole object, and agents={list(agents)!r}, which marks its parts; "
            "pass only one of them"
        )
    if isinstance(agents, str):
        raise ConfigError(f"agents must be a list of names, found {agents!r}")
    return _integration(obj).mark_members(obj, [register_mark(agent, policy) for agent in agents])


def _mark(obj: Any, *, name: str | None, policy: str | None) -> Any:
    if isinstance(obj, (property, functools.cached_property, functools.singledispatchmethod)):
        kind = type(cast(object, obj)).__name__
        raise ConfigError(f"found a {kind}, expected the function in it: put @trainable below @{kind}")
    name = _name_of(obj) if name is None else name
    spec = register_mark(name, policy)
    if (mark := get_mark(obj)) is not None:
        if mark != spec:
            raise ConfigError(f"{obj!r} is already marked as {mark.name!r} and cannot be marked as {name!r}")
        return obj
    return _apply(obj, spec)


def _apply(obj: Any, spec: TrainSpec) -> Any:
    if isinstance(obj, (staticmethod, classmethod)):
        descriptor = cast("staticmethod[..., Any] | classmethod[Any, ..., Any]", obj)
        return type(descriptor)(_apply(descriptor.__func__, spec))
    if isinstance(obj, functools.partialmethod):
        method = cast("functools.partialmethod[Any]", obj)
        return functools.partialmethod(_apply(method.func, spec), *method.args, **method.keywords)
    if type(obj) is functools.partial:
        partial = cast("functools.partial[Any]", obj)
        # The mark is on its function: hosts unwrap partials.
        marked = functools.partial(mark_callable(partial.func, spec), *partial.args, **partial.keywords)
        vars(marked).update(vars(partial))
        return marked
    if isinstance(obj, type):
        raise ConfigError(
            f"found the class {obj!r}, expected an instance or a method: trainable({obj.__name__}(…), name={spec.name!r})"
        )
    if type(obj) is types.FunctionType:
        return set_mark(scope_function(obj, spec.name), spec)
    if inspect.isroutine(obj):
        return mark_callable(obj, spec)
    if (integration := find_integration(obj)) is not None:
        return integration.mark(obj, spec)
    if callable(obj):
        return mark_callable(obj, spec)
    raise _unsupported(obj)


def _name_of(obj: Any) -> str:
    name = getattr(obj, "__name__", None) or getattr(obj, "name", None)
    if not isinstance(name, str) or name == "<lambda>":
        raise ConfigError(f"{obj!r} has no name; pass one: trainable(obj, name=…)")
    return name


def _integration(obj: Any) -> Any:
    integration = find_integration(obj)
    if integration is None:
        raise _unsupported(obj)
    return integration


def _unsupported(obj: Any) -> ConfigError:
    cls = type(obj)
    return ConfigError(
        f"no integration supports objects of type {cls.__module__}.{cls.__qualname__}; mark the function or method that runs them"
    )
