"""Marks a Runnable: returns a copy whose class runs in the agent's scope.

The class is a subclass, because LangChain derives Runnables (``bind``, ``with_config``, ``|``, ``bind_tools``) through ``self``, so
Runnables derived from a marked one run the marked one. A proxy would lose the mark, and a wrapper would not be the chat model or
graph that LangChain and LangGraph expect.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AbstractContextManager, aclosing, closing, nullcontext
from functools import cache, wraps
from typing import Any

from langchain_core.runnables import Runnable, RunnableBinding, RunnableParallel, RunnableSequence
from langchain_core.tools import BaseTool

from lightning_core.capture import ScopeKind, current_rollout, current_scope
from lightning_core.capture.integration import TrainSpec
from lightning_core.capture.marked import change_class, make_marked_class
from lightning_core.capture.wrapping import Kind, scope_function
from lightning_core.errors import ConfigError

RUNS: dict[str, Kind] = {
    "invoke": "call",
    "ainvoke": "coroutine",
    "stream": "generator",
    "astream": "async_generator",
    "transform": "generator",
    "atransform": "async_generator",
    "batch": "call",
    "abatch": "coroutine",
    "batch_as_completed": "generator",
    "abatch_as_completed": "async_generator",
}
"""The methods that run a Runnable, with their kind, which implementations may hide."""


def mark(obj: Any, spec: TrainSpec) -> Any:
    """A copy of the Runnable ``obj`` that runs as the agent ``spec.name``."""
    if not isinstance(obj, Runnable):
        raise ConfigError(f"expected a Runnable, found {obj!r}; mark the function or method that runs it")
    # A sequence inside another sequence is flattened; a binding is not.
    whole = RunnableBinding(bound=obj) if isinstance(obj, RunnableSequence) else obj
    return scope_class(whole, spec)


def scope_class(obj: Any, spec: TrainSpec) -> Any:
    """A copy of ``obj`` whose class opens the agent's scope for each run."""
    return change_class(copy.copy(obj), _make_class(type(obj), spec))


def scope_run(
    method: str, function: Callable[..., Any], name: str, *, scope_kind: ScopeKind = "agent"
) -> Callable[..., Any]:
    """``function`` (one of `RUNS`, bound or not) in the scope ``name``, opened once."""
    scoped = scope_function(function, name, kind=RUNS[method], once=True, scope_kind=scope_kind)
    if method not in ("transform", "atransform"):
        return scoped

    # The input stream comes from the previous step of a sequence. It is pulled inside this step's scope, but must run in its own.
    @wraps(function)
    def transform(*args: Any, **kwargs: Any) -> Any:
        position = 0 if hasattr(function, "__self__") else 1
        if current_rollout() is None or len(args) <= position:
            return scoped(*args, **kwargs)
        upstream = _iterate_in_scope(current_scope(), args[position])
        return scoped(*args[:position], upstream, *args[position + 1 :], **kwargs)

    return transform


def _iterate_in_scope(scope: Callable[[], AbstractContextManager[None]], source: Any) -> Any:
    """``source``, a synchronous or asynchronous iterator, with each step taken in ``scope``."""

    def steps() -> Generator[Any]:
        with closing(source) if hasattr(source, "close") else nullcontext():
            while True:
                with scope():
                    item = next(source, _END)
                if item is _END:
                    return
                yield item

    async def asteps() -> AsyncGenerator[Any]:
        async with aclosing(source) if hasattr(source, "aclose") else nullcontext():
            while True:
                with scope():
                    item = await anext(source, _END)
                if item is _END:
                    return
                yield item

    return asteps() if hasattr(source, "__anext__") else steps()


_END = object()


@cache
def _make_class(cls: type[Any], spec: TrainSpec) -> type[Any]:
    methods: dict[str, Any] = {}
    for name in RUNS:
        method = getattr(cls, name)
        # Runnable's own batch methods call ``invoke`` for each input, each of which is one run of the agent.
        if "batch" not in name or method is not getattr(Runnable, name):
            methods[name] = scope_run(name, method, spec.name)
    if issubclass(cls, BaseTool):
        methods |= {name: scope_function(getattr(cls, name), spec.name, once=True) for name in ("run", "arun")}
    return make_marked_class(cls, spec, _make_class, methods)


def mark_members(obj: Any, specs: Sequence[TrainSpec]) -> Any:
    """A copy of a `RunnableParallel` or `RunnableSequence` with the named steps marked."""
    if isinstance(obj, RunnableParallel):
        steps = dict(obj.steps__)
        check_members(specs, steps)
        return RunnableParallel(steps | {spec.name: mark(steps[spec.name], spec) for spec in specs})
    if isinstance(obj, RunnableSequence):
        by_name = {spec.name: spec for spec in specs}
        check_members(specs, [step.name for step in obj.steps if step.name])
        marked = [mark(step, by_name[step.name]) if step.name in by_name else step for step in obj.steps]
        return RunnableSequence(*marked, name=obj.name)
    raise ConfigError(f"expected a graph, a RunnableParallel or a RunnableSequence, found {type(obj).__name__}")


def check_members(specs: Sequence[TrainSpec], known: Any) -> None:
    """Raise ConfigError if the name of one of ``specs`` is not in ``known``."""
    for spec in specs:
        if spec.name not in known:
            raise ConfigError(f"there is no part named {spec.name!r}; the parts are {sorted(known)!r}")
