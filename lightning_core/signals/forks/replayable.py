"""`replayable`: marks a function whose results a fork may take from the record.

The function runs as before. With ``rollouts.forks.tools`` its results are recorded, and the forks of a rollout get them again instead of
running the function. It may be a tool of any framework, or what a tool calls:

    @tool
    @replayable                      # below a framework's decorator
    def search(query: str) -> str: ...

    @replayable("weather")           # sync and async functions and methods
    async def fetch_weather(city: str) -> Weather: ...
"""

from __future__ import annotations

import functools
import inspect
import json
import types
from collections.abc import Callable
from typing import Any, TypeVar, overload

from pydantic_core import to_jsonable_python

from lightning_core.capture.context import find_scope
from lightning_core.capture.recording import record
from lightning_core.capture.scope import scope
from lightning_core.capture.tools import arun_tool, keeps_result, run_tool
from lightning_core.errors import ConfigError
from lightning_core.trace import TOOL, TOOL_ARGUMENTS, TOOL_CALL_ID

F = TypeVar("F", bound=Callable[..., Any])


@overload
def replayable(function: str, /) -> Callable[[F], F]: ...
@overload
def replayable(function: F, /) -> F: ...
def replayable(function: Any, /) -> Any:
    """Mark a function, as ``@replayable`` or with a name as ``@replayable("name")``.

    Only for functions whose effects need not happen again. Results are matched by agent, tool call of the model in which the function
    runs, name, arguments and order of equal calls. Arguments are compared by value; objects other than plain data, dataclasses and
    pydantic models by their class. Raises `ConfigError` for anything but a function, and for a generator function, whose results are
    not values.
    """
    if isinstance(function, str):
        return functools.partial(_mark, name=function)
    return _mark(function, name=getattr(function, "__name__", ""))


def _mark(function: Any, *, name: str) -> Any:
    if not isinstance(function, types.FunctionType):
        raise ConfigError(
            f"found {function!r}, expected a function: put @replayable directly above def, below all other decorators"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{name!r} is a generator function; @replayable marks functions that return a value")
    signature = inspect.signature(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not keeps_result(name, marked=True):
            return function(*args, **kwargs)
        with scope(name, kind="function", attributes=_attributes(name, signature, args, kwargs)) as handle:
            return run_tool(handle, lambda: function(*args, **kwargs), marked=True)

    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        if not keeps_result(name, marked=True):
            return await function(*args, **kwargs)
        with scope(name, kind="function", attributes=_attributes(name, signature, args, kwargs)) as handle:
            return await arun_tool(handle, lambda: function(*args, **kwargs), marked=True)

    return functools.wraps(function)(coroutine if inspect.iscoroutinefunction(function) else call)


def _attributes(name: str, signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = {TOOL: name}
    with record("tool.arguments"):
        current = find_scope()
        if current is not None and current.tool_call is not None:
            attributes[TOOL_CALL_ID] = current.tool_call
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = {key: _plain(value) for key, value in bound.arguments.items()}
        attributes[TOOL_ARGUMENTS] = json.dumps(values, sort_keys=True)
    return attributes


def _plain(value: Any) -> Any:
    try:
        return to_jsonable_python(value, bytes_mode="base64", fallback=_class_name)
    except ValueError:  # circular references
        return _class_name(value)


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
