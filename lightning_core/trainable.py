"""The mark on an agent: from here on, whoever speaks is ``name``.

A mark scopes; it never patches. Around each run of a marked function or host object stands a `capture.scope`, which is a no-op
outside a rollout. Whether a marked agent is trained is decided elsewhere; without a configuration, the marked ones are.

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
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast, overload

import wrapt

from lightning_core.capture import StepScope, current_run, outside, speaks
from lightning_core.errors import ConfigError
from lightning_core.integration import TrainSpec, find_integration

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
    """Mark an agent; ``obj`` is a function, an object of a framework, or, as ``@trainable("writer")``, the agent's name.

    Returns what the host still accepts: a function of the same kind, name and signature, or an object of the same class. ``agents``
    marks parts of ``obj`` (nodes of a graph) by exact name instead of the whole. Marking twice with the same name does nothing;
    with another name it raises `ConfigError`, since one speaker cannot be two agents.
    """
    if obj is None or isinstance(obj, str):
        if agents:
            raise ConfigError("agents=… marks parts of an object: trainable(graph, agents=[…])")
        return functools.partial(_mark, name=obj or name, policy=policy)
    if not agents:
        return _mark(obj, name=name, policy=policy)
    if name is not None:
        raise ConfigError(
            f"name={name!r} marks the whole object and agents={list(agents)!r} its parts; give one of them"
        )
    if isinstance(agents, str):
        raise ConfigError(f"agents must be a list of names, found {agents!r}")
    return _integration(obj).mark_members(obj, [_register(agent, policy) for agent in agents])


def marked_agents() -> Mapping[str, TrainSpec]:
    """Every agent that this process has marked so far, by name."""
    with _lock:
        return dict(_marked)


def get_mark(obj: Any) -> TrainSpec | None:
    """What ``obj`` is marked as, or None."""
    mark = getattr(obj, _MARK, None)
    return mark if isinstance(mark, TrainSpec) else None


def set_mark(obj: T, spec: TrainSpec) -> T:
    """Note on ``obj`` that it is marked; for integrations, whose `mark` has seen to the scope."""
    setattr(obj, _MARK, spec)
    return obj


def _mark(obj: Any, *, name: str | None, policy: str | None) -> Any:
    if isinstance(obj, (staticmethod, classmethod)):
        descriptor = cast("staticmethod[..., Any] | classmethod[Any, ..., Any]", obj)
        return type(descriptor)(_mark(descriptor.__func__, name=name, policy=policy))
    name = name or _name_of(obj)
    spec = _register(name, policy)
    if (mark := get_mark(obj)) is not None:
        if mark != spec:
            raise ConfigError(f"{obj!r} is marked as {mark.name!r} already and cannot be {name!r} too")
        return obj
    if inspect.isroutine(obj) or isinstance(obj, functools.partial):
        return set_mark(scope_function(cast(Callable[..., Any], obj), name), spec)
    if isinstance(obj, type):
        raise ConfigError(
            f"mark instances or methods, not the class {obj!r}: trainable({obj.__name__}(…), name={name!r})"
        )
    if (integration := find_integration(obj)) is not None:
        return integration.mark(obj, spec)
    if callable(obj):
        return _mark_callable(obj, spec)
    raise _unknown(obj)


def _name_of(obj: Any) -> str:
    name = getattr(obj, "__name__", None) or getattr(obj, "name", None)
    if not isinstance(name, str) or name == "<lambda>":
        raise ConfigError(f"{obj!r} has no name of its own: trainable(obj, name=…)")
    return name


def _register(name: object, policy: str | None) -> TrainSpec:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"an agent's name must be a string that is not empty, found {name!r}")
    spec = TrainSpec(name=name, policy=policy)
    with _lock:
        if _marked.setdefault(name, spec) != spec:
            raise ConfigError(f"agent {name!r} is marked with policy {_marked[name].policy!r} and with {policy!r}")
    return spec


def _integration(obj: Any) -> Any:
    integration = find_integration(obj)
    if integration is None:
        raise _unknown(obj)
    return integration


def _unknown(obj: Any) -> ConfigError:
    cls = type(obj)
    return ConfigError(
        f"no integration knows objects of type {cls.__module__}.{cls.__qualname__}; mark the function or method that runs them"
    )


def _mark_callable(obj: Any, spec: TrainSpec) -> Any:
    # Frameworks look at the kind of ``obj.__call__`` (is it a coroutine function?), so the proxy's must be of the same kind.
    call = staticmethod(scope_function(obj.__call__, spec.name))
    proxy = type(type(obj).__name__, (wrapt.ObjectProxy,), {"__call__": call, _MARK: spec})
    return proxy(obj)


Kind = Literal["call", "coroutine", "generator", "async_generator"]


def scope_function(
    function: Callable[..., Any], name: str, *, kind: Kind | None = None, once: bool = False
) -> Callable[..., Any]:
    """``function`` with the scope of the agent ``name`` around each run: same name and signature, same results and errors.

    Its kind is kept too, and found by looking at it; ``kind`` overrules that, for a plain function that returns an iterator. With ``once``
    no scope is opened where this agent speaks already, so that methods that call each other count as one run.
    """

    def open_scope() -> StepScope:
        if once and speaks(name):
            with outside():
                return StepScope(name)
        return StepScope(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if current_run() is None:
            return function(*args, **kwargs)
        steps = open_scope()
        try:
            with steps.step():
                result = function(*args, **kwargs)
        except BaseException as error:
            steps.close(error)
            raise
        return _finish(result, steps)

    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        if current_run() is None:
            return await function(*args, **kwargs)
        return await _await(function(*args, **kwargs), open_scope())

    match kind or _kind_of(function):
        case "call":
            wrapper = call
        case "coroutine":
            wrapper = coroutine
        case "generator":
            wrapper = _generator_function(function, open_scope)
        case "async_generator":
            wrapper = _async_generator_function(function, open_scope)
    return functools.wraps(function)(wrapper)


def _kind_of(function: Callable[..., Any]) -> Kind:
    if inspect.iscoroutinefunction(function):
        return "coroutine"
    if inspect.isgeneratorfunction(function):
        return "generator"
    return "async_generator" if inspect.isasyncgenfunction(function) else "call"


def _finish(result: Any, steps: StepScope) -> Any:
    """A plain function may hand back work that is yet to be done, as one that only passes a coroutine on does."""
    if inspect.iscoroutine(result):
        return _await(result, steps)
    if inspect.isgenerator(result):
        return _generator_function(lambda: result, lambda: steps)()
    if inspect.isasyncgen(result):
        return _async_generator_function(lambda: result, lambda: steps)()
    steps.close()
    return result


async def _await(awaitable: Awaitable[Any], steps: StepScope) -> Any:
    ending: BaseException | None = None
    try:
        with steps.step():
            return await awaitable
    except BaseException as error:
        ending = error
        raise
    finally:
        steps.close(ending)


# The scope of a generator stands around each of its steps and never across a ``yield``: between steps the code that consumes it
# runs, in the same context. Values and exceptions that are sent in reach the generator inside the scope as well.


def _generator_function(
    make: Callable[..., Any], open_scope: Callable[[], StepScope]
) -> Callable[..., Generator[Any, Any, Any]]:
    def generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        steps = open_scope()
        thrown: BaseException | None = None
        sent: Any = None
        ending: BaseException | None = None
        try:
            with steps.step():
                inner = make(*args, **kwargs)
            while True:
                try:
                    with steps.step():
                        if thrown is not None:
                            item = inner.throw(thrown)
                        else:
                            item = next(inner) if sent is None else inner.send(sent)
                except StopIteration as stop:
                    return stop.value
                thrown = sent = None
                try:
                    sent = yield item
                except GeneratorExit:
                    with steps.step():
                        inner.close()
                    raise
                except BaseException as error:  # noqa: BLE001 - handed on, at the next step
                    thrown = error
        except BaseException as error:
            ending = error
            raise
        finally:
            steps.close(ending)

    return generator


def _async_generator_function(
    make: Callable[..., Any], open_scope: Callable[[], StepScope]
) -> Callable[..., AsyncGenerator[Any, Any]]:
    async def generator(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        steps = open_scope()
        thrown: BaseException | None = None
        sent: Any = None
        ending: BaseException | None = None
        try:
            with steps.step():
                inner = make(*args, **kwargs)
            while True:
                try:
                    with steps.step():
                        if thrown is not None:
                            item = await inner.athrow(thrown)
                        else:
                            item = await (anext(inner) if sent is None else inner.asend(sent))
                except StopAsyncIteration:
                    return
                thrown = sent = None
                try:
                    sent = yield item
                except GeneratorExit:
                    with steps.step():
                        await inner.aclose()
                    raise
                except BaseException as error:  # noqa: BLE001 - handed on, at the next step
                    thrown = error
        except BaseException as error:
            ending = error
            raise
        finally:
            steps.close(ending)

    return generator
