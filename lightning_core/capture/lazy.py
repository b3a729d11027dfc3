"""Keeps the scope of an agent for results that do their work later.

A marked function may return a coroutine, an iterator, an awaitable or a context manager whose model calls happen when its
consumer awaits, iterates or enters it. Such a result is returned as an object of the same class (``isinstance`` holds) that
enters the scope for each of these steps, never for the consumer's code between them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import io
from collections.abc import Callable
from functools import cache
from typing import Any, cast

from lightning_core.capture.stepping import StepScope, await_in_scope, step_async_generator, step_generator

_STEPS = ("__next__", "send", "throw", "close", "__exit__")
_ASYNC_STEPS = ("__anext__", "asend", "athrow", "aclose", "__aexit__")
_ENDS = ("close", "__exit__", "aclose", "__aexit__")
_LAST = (StopIteration, StopAsyncIteration)
_RUNNING = (asyncio.Future, concurrent.futures.Future, io.IOBase)
"""Futures run in the scope in which they were started; files are containers."""
_OWN = {
    *("__new__", "__init__", "__del__", "__init_subclass__", "__class_getitem__", "__subclasshook__", "__set_name__"),
    *("__class__", "__getattribute__", "__getattr__", "__setattr__", "__delattr__", "__get__", "__set__", "__delete__"),
}
_LAZY_BUILTINS = (map, filter, zip, enumerate, reversed, type(iter(int, 1)))


def keep_scope(result: Any, steps: StepScope, inputs: tuple[Any, ...] = ()) -> Any:
    """``result``, if it is lazy, as an object that runs in the scope; otherwise close the scope.

    ``inputs``: the arguments of the function that returned it. A context manager among them is returned as it is.
    """
    if not steps.is_active:
        return result
    if inspect.iscoroutine(result):
        return _await(result, steps)
    if inspect.isgenerator(result):
        return step_generator(lambda: result, lambda: steps)()
    if inspect.isasyncgen(result):
        return step_async_generator(lambda: result, lambda: steps)()
    cls = cast("type[Any]", type(result))
    if _is_single_use(cls):
        return _make_class(cls)(result, steps)
    # It may live longer than the rollout, so the span ends here.
    steps.close()
    if _is_reusable(cls) and not any(result is given for given in inputs) and not hasattr(result, "fileno"):
        return _make_class(cls)(result, steps)
    return result


async def _await(awaitable: Any, steps: StepScope) -> Any:
    return keep_scope(await await_in_scope(awaitable, steps), steps)


def _method(cls: type[Any], name: str) -> Any:
    """The attribute ``name`` of instances of ``cls``, without looking at its metaclass."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


@cache
def _is_single_use(cls: type[Any]) -> bool:
    """Whether instances of ``cls`` are iterators or awaitables whose steps may run code of the program."""
    if issubclass(cls, _RUNNING):
        return False
    if _method(cls, "__await__") is not None:
        # Awaitables written in C, except coroutines, are handles of work elsewhere (Ray's).
        return inspect.isfunction(_method(cls, "__await__")) or _method(cls, "send") is not None
    if cls.__module__ == "builtins" and not issubclass(cls, _LAZY_BUILTINS):
        return False
    return any(_method(cls, name) is not None for name in ("__next__", "__anext__"))


@cache
def _is_reusable(cls: type[Any]) -> bool:
    """Whether instances of ``cls`` are context managers, or iterables that are not containers, and written in Python."""
    if issubclass(cls, _RUNNING):
        return False
    if any(inspect.isfunction(_method(cls, name)) for name in ("__enter__", "__aenter__", "__aiter__")):
        return True
    # What has a length, members or fields is a container, even if its ``__iter__`` is a generator.
    container = ("__len__", "__contains__", "__getitem__", "__dataclass_fields__", "__attrs_attrs__", "__fields__")
    return inspect.isgeneratorfunction(_method(cls, "__iter__")) and not any(
        _method(cls, name) is not None for name in (*container, "__pydantic_fields__", "__pydantic_validator__")
    )


class _Lazy:
    """A lazy result and the scope in which it runs. Attributes and all other methods are the result's own.

    Unlike a ``wrapt.ObjectProxy`` it has only the special methods that the result has: hosts test for them with ``hasattr``.
    """

    __slots__ = ("__lightning_result__", "__lightning_steps__", "__weakref__")

    __lightning_result__: Any
    __lightning_steps__: StepScope

    def __init__(self, result: Any, steps: StepScope) -> None:
        object.__setattr__(self, "__lightning_result__", result)
        object.__setattr__(self, "__lightning_steps__", steps)

    def __del__(self) -> None:
        self.__lightning_steps__.close()

    @property
    def __class__(self) -> type[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self.__lightning_result__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__lightning_result__, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__lightning_result__, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__lightning_result__, name)


def _close(self: _Lazy, error: BaseException) -> None:
    self.__lightning_steps__.close(None if isinstance(error, _LAST) else error)


def _run(self: _Lazy, name: str, *args: Any) -> Any:
    """Call the method ``name`` of the result in the scope; close it when that ends or fails."""
    try:
        with self.__lightning_steps__.step():
            result = getattr(self.__lightning_result__, name)(*args)
    except BaseException as error:
        _close(self, error)
        raise
    if name in _ENDS:
        self.__lightning_steps__.close()
    return result


async def _arun(self: _Lazy, name: str, *args: Any) -> Any:
    try:
        with self.__lightning_steps__.step():
            result = await getattr(self.__lightning_result__, name)(*args)
    except BaseException as error:
        _close(self, error)
        raise
    if name in _ENDS:
        self.__lightning_steps__.close()
    return result


def _keep(self: _Lazy, value: Any) -> Any:
    return self if value is self.__lightning_result__ else keep_scope(value, self.__lightning_steps__)


def _step(name: str) -> Callable[..., Any]:
    def step(self: _Lazy, *args: Any) -> Any:
        result = _run(self, name, *args)
        if name == "close" and inspect.iscoroutine(result):
            return await_in_scope(result, self.__lightning_steps__)
        return result

    return step


def _async_step(name: str) -> Callable[..., Any]:
    async def step(self: _Lazy, *args: Any) -> Any:
        return await _arun(self, name, *args)

    return step


def _enter(name: str) -> Callable[..., Any]:
    """``__enter__``, ``__iter__`` or ``__aiter__``: what it returns belongs to the result."""
    return lambda self: _keep(self, _run(self, name))


async def _aenter(self: _Lazy) -> Any:
    return _keep(self, await _arun(self, "__aenter__"))


def _await_result(self: _Lazy) -> Any:
    return _await(self.__lightning_result__, self.__lightning_steps__).__await__()


def _forward(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self.__lightning_result__, name)(*args, **kwargs)


def _forwarded(cls: type[Any]) -> set[str]:
    """The special methods of ``cls`` that its lazy results forward to it."""
    names = {name for base in cls.__mro__[:-1] for name, value in vars(base).items() if callable(value)}
    # Copies and pickles are of the result: a scope belongs to one rollout of one process.
    names |= {"__reduce_ex__", "__repr__", "__str__", "__eq__", "__hash__", "__dir__", "__format__"}
    return {name for name in names if name.startswith("__") and name.endswith("__")} - _OWN


@cache
def _make_class(cls: type[Any]) -> type[Any]:
    """The class of lazy results of class ``cls``: it has those methods that ``cls`` has."""
    methods: dict[str, Callable[..., Any]] = {name: _step(name) for name in _STEPS}
    methods |= {name: _async_step(name) for name in _ASYNC_STEPS}
    methods |= {name: _enter(name) for name in ("__enter__", "__iter__", "__aiter__")}
    methods |= {"__aenter__": _aenter, "__await__": _await_result}
    body = {name: method for name, method in methods.items() if _method(cls, name) is not None}
    forwarded = {name: _forward(name) for name in _forwarded(cls)}
    return type(cls.__name__, (_Lazy,), {"__slots__": (), "__module__": cls.__module__, **forwarded, **body})
