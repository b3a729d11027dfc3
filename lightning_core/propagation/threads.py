"""Propagates a rollout's scope into threads, jobs of thread pools, and event loops that outlive a rollout.

A new thread or pool job starts with an empty context, so a model call made there would have no agent. The current scope (and nothing
else of the context) is bound to the thread or job. A pool's own threads outlive the job and serve other rollouts, so they are started
in no scope. A loop that is run again runs in the scope of its caller.
"""

from __future__ import annotations

import asyncio
import inspect
import sched
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any

from lightning_core.capture.context import bind, bind_coroutine, hand_on, inherit, without_scope
from lightning_core.capture.execution_context import INHERITS
from lightning_core.capture.import_hooks import when_imported
from lightning_core.capture.patching import Patches


def _start(wrapped: Callable[..., Any], instance: threading.Thread, args: Any, kwargs: Any) -> Any:
    if hand_on() is None:
        return wrapped(*args, **kwargs)
    bound = inherit(instance.run)
    setattr(instance, INHERITS, True)

    def run(self: threading.Thread, *args: Any, **kwargs: Any) -> None:
        bound(*args, **kwargs)

    # Set on the instance, it replaces Thread.run and a subclass's own. It is a method like the one it replaces: tools that patch
    # Thread.start as well, such as Sentry, take its ``__func__`` and pass the thread themselves.
    instance.run = types.MethodType(run, instance)
    return wrapped(*args, **kwargs)


def _submit(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    if not args:
        return wrapped(*args, **kwargs)
    job = inherit(args[0])
    with without_scope():
        return wrapped(job, *args[1:], **kwargs)


def call_unscoped(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Call ``wrapped`` in no scope: what it starts or fills brings its own, such as the jobs of a pool."""
    with without_scope():
        return wrapped(*args, **kwargs)


def _apply(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """A method of a pool whose first argument is the function; callbacks run on a thread of the pool."""
    args = [inherit(arg) if i in (0, 3, 4) and callable(arg) else arg for i, arg in enumerate(args)]
    functions = {name: inherit(kwargs[name]) for name in _FUNCTIONS if callable(kwargs.get(name))}
    return wrapped(*args, **kwargs | functions)


def _enter_event(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """``scheduler.enterabs(time, priority, action, …)``: another thread may run the scheduler."""
    if len(args) > 2:
        args = (*args[:2], bind(args[2]), *args[3:])
    elif "action" in kwargs:
        kwargs = {**kwargs, "action": bind(kwargs["action"])}
    return wrapped(*args, **kwargs)


def _run(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """``Runner.run``, which keeps the context of its first use, and ``loop.run_until_complete``."""
    if args and inspect.iscoroutine(args[0]) and kwargs.get("context") is None:
        args = (bind_coroutine(args[0]), *args[1:])
    return wrapped(*args, **kwargs)


_FUNCTIONS = ("func", "callback", "error_callback")
_POOL_METHODS = ("apply_async", "map", "map_async", "starmap", "starmap_async", "imap", "imap_unordered")


def _wrap_anyio(patches: Patches, module: Any) -> None:
    patches.wrap(module, "WorkerThread.start", call_unscoped)  # private; seen in anyio 4.5 to 4.16


def install_threads(patches: Patches) -> None:
    """Make threads, jobs of thread pools and reused event loops run in the scope that started them."""
    patches.wrap(threading.Thread, "start", _start)
    patches.wrap(ThreadPoolExecutor, "submit", _submit)
    patches.wrap(ThreadPool, "__init__", call_unscoped)
    when_imported(patches, "anyio._backends._asyncio", partial(_wrap_anyio, patches))
    for name in _POOL_METHODS:
        patches.wrap(ThreadPool, name, _apply)
    patches.wrap(sched.scheduler, "enterabs", _enter_event)
    patches.wrap(asyncio.Runner, "run", _run)
    patches.wrap(asyncio.BaseEventLoop, "run_until_complete", _run)
