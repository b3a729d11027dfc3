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
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast, overload

import wrapt

from lightning_core.capture.integration import TrainSpec, find_integration
from lightning_core.capture.wrapping import scope_function
from lightning_core.errors import ConfigError

T = TypeVar("T")

_MARK = "__lightning__"
_marked: dict[str, TrainSpec] = {}
_lock = threading.Lock()


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
    return _integration(obj).mark_members(obj, [_register(agent, policy) for agent in agents])


def marked_agents() -> Mapping[str, TrainSpec]:
    """All agents marked in this process so far, by name."""
    with _lock:
        return dict(_marked)


def get_mark(obj: Any) -> TrainSpec | None:
    """The mark of ``obj``, or None."""
    mark = getattr(obj, _MARK, None)
    return mark if isinstance(mark, TrainSpec) else None


def set_mark(obj: T, spec: TrainSpec) -> T:
    """Set the mark of ``obj`` and return it, for integrations that open the scope themselves."""
    setattr(obj, _MARK, spec)
    return obj


def _mark(obj: Any, *, name: str | None, policy: str | None) -> Any:
    if isinstance(obj, (staticmethod, classmethod)):
        descriptor = cast("staticmethod[..., Any] | classmethod[Any, ..., Any]", obj)
        return type(descriptor)(_mark(descriptor.__func__, name=name, policy=policy))
    name = _name_of(obj) if name is None else name
    spec = _register(name, policy)
    if (mark := get_mark(obj)) is not None:
        if mark != spec:
            raise ConfigError(f"{obj!r} is already marked as {mark.name!r} and cannot be marked as {name!r}")
        return obj
    if inspect.isroutine(obj) or isinstance(obj, functools.partial):
        return set_mark(scope_function(cast(Callable[..., Any], obj), name), spec)
    if isinstance(obj, type):
        raise ConfigError(
            f"found the class {obj!r}, expected an instance or a method: trainable({obj.__name__}(…), name={name!r})"
        )
    if (integration := find_integration(obj)) is not None:
        return integration.mark(obj, spec)
    if callable(obj):
        return _mark_callable(obj, spec)
    raise _unsupported(obj)


def _name_of(obj: Any) -> str:
    name = getattr(obj, "__name__", None) or getattr(obj, "name", None)
    if not isinstance(name, str) or name == "<lambda>":
        raise ConfigError(f"{obj!r} has no name; pass one: trainable(obj, name=…)")
    return name


def _register(name: object, policy: object) -> TrainSpec:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"an agent's name must be a non-empty string, found {name!r}")
    if policy is not None and not isinstance(policy, str):
        raise ConfigError(f"policy must be the name of a policy, found {policy!r}")
    spec = TrainSpec(name=name, policy=policy)
    with _lock:
        if _marked.setdefault(name, spec) != spec:
            raise ConfigError(
                f"agent {name!r} is already marked with policy {_marked[name].policy!r}, found policy {policy!r}; "
                "use one policy for an agent"
            )
    return spec


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


def _mark_callable(obj: Any, spec: TrainSpec) -> Any:
    # Frameworks inspect ``obj.__call__`` (is it a coroutine function?), so the proxy's must be of the same kind.
    call = staticmethod(scope_function(obj.__call__, spec.name))
    proxy = type(type(obj).__name__, (wrapt.ObjectProxy,), {"__call__": call, _MARK: spec})
    return proxy(obj)
