"""Propagates a rollout's scope into Python processes: processes, process pools and their jobs.

Inside a rollout, the current scope is bound to a process for its whole life, and to each job of a pool. A pool's own processes serve
other rollouts too, so they are started outside any scope. Pools are those of the standard library and of loky, joblib's default.
"""

from __future__ import annotations

import multiprocessing.connection
import multiprocessing.pool
import multiprocessing.process
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_core.capture.context import bind, current_scope, without_scope
from lightning_core.capture.import_hooks import when_imported
from lightning_core.capture.patching import Patches, Wrapper
from lightning_core.capture.scope import current_rollout
from lightning_core.propagation.children.scope import ChildCall, ChildScope, child_scope
from lightning_core.propagation.children.sender import sender
from lightning_core.propagation.threads import call_unscoped


@dataclass(frozen=True, slots=True, eq=False)
class _ChildRun:
    """Replaces ``run`` of one process object: runs the process in a scope."""

    process: multiprocessing.process.BaseProcess
    scope: ChildScope
    own: Callable[[], Any] | None
    """``run`` if it was set on the object; None if its class defines it."""

    def __call__(self) -> Any:
        with self.scope():
            return type(self.process).run(self.process) if self.own is None else self.own()


def _start(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    if current_rollout() is None:
        return wrapped(*args, **kwargs)
    own = vars(instance).get("run")
    # The attribute travels with the object, by pickle or by fork. The class may have its own ``run``.
    instance.run = _ChildRun(instance, child_scope(), own)
    try:
        return wrapped(*args, **kwargs)
    finally:
        if own is None:
            del instance.run
        else:
            instance.run = own


def _submit(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    if current_rollout() is None or not args:
        return wrapped(*args, **kwargs)
    function, *rest = args
    job = ChildCall(function, child_scope())
    with without_scope():  # it may start processes and the pool's own thread
        return wrapped(job, *rest, **kwargs)


def _is_process_pool(pool: Any) -> bool:
    return not isinstance(pool, multiprocessing.pool.ThreadPool)


def _pool_init(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    return call_unscoped(wrapped, instance, args, kwargs) if _is_process_pool(instance) else wrapped(*args, **kwargs)


def _pool_method(*names: str) -> Wrapper:
    """Wraps a method of `multiprocessing.Pool` whose parameters are ``names``, so its jobs carry the scope."""

    def wrapper(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        if current_rollout() is None or not _is_process_pool(instance):
            return wrapped(*args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > len(names) or "func" not in given:
            return wrapped(*args, **kwargs)  # raises TypeError
        given["func"] = ChildCall(given["func"], child_scope())
        for callback in ("callback", "error_callback"):  # called by the pool's own thread
            if given.get(callback) is not None:
                given[callback] = bind(given[callback])
        if "iterable" in given and "callback" not in names:  # iterated by the pool's own thread
            given["iterable"] = _in_scope(given["iterable"])
        return wrapped(**given)

    return wrapper


class _in_scope:
    """``iterable``, iterated in the current scope by any thread."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._items = iter(iterable)
        self._scope = current_scope()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._scope():
            return next(self._items)


_METHODS = {
    "apply_async": _pool_method("func", "args", "kwds", "callback", "error_callback"),
    # map, map_async, starmap and starmap_async (private: CPython 3.11 to 3.14, Lib/multiprocessing/pool.py).
    "_map_async": _pool_method("func", "iterable", "mapper", "chunksize", "callback", "error_callback"),
    "imap": _pool_method("func", "iterable", "chunksize"),
    "imap_unordered": _pool_method("func", "iterable", "chunksize"),
}


def _flush(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Send what this process recorded before it ends, or before another process acts on its results and ends the rollout."""
    sender.flush()
    return wrapped(*args, **kwargs)


def _wrap_loky(patches: Patches, module: Any) -> None:
    patches.wrap(module.ProcessPoolExecutor, "submit", _submit)
    # Private (loky 3.5): it also starts processes when a pool is made larger.
    patches.wrap(module.ProcessPoolExecutor, "_adjust_process_count", call_unscoped)


_LOKY = ("loky.process_executor", "joblib.externals.loky.process_executor")


def install_processes(patches: Patches) -> None:
    """Make processes and jobs of process pools run in the scope that started them, and send what they record."""
    patches.wrap(multiprocessing.process.BaseProcess, "start", _start)
    patches.wrap(ProcessPoolExecutor, "submit", _submit)
    patches.wrap(multiprocessing.pool.Pool, "__init__", _pool_init)
    for name, wrapper in _METHODS.items():
        patches.wrap(multiprocessing.pool.Pool, name, wrapper)
    for name in _LOKY:
        when_imported(patches, name, partial(_wrap_loky, patches))
    patches.wrap(os, "_exit", _flush)  # ends processes that multiprocessing forks
    # Private (CPython 3.11 to 3.14, Lib/multiprocessing/connection.py): queues keep a bound `send_bytes` from before the patches.
    for kind in ("Connection", "PipeConnection"):  # the second one on Windows
        if hasattr(multiprocessing.connection, kind):
            patches.wrap(multiprocessing.connection, f"{kind}._send_bytes", _flush)
