"""Propagates a rollout's scope into the threads that an agent starts.

A new thread or pool job starts with an empty context, so a model call made there would have no agent and go to the provider.
Inside a rollout, the current scope (and nothing else of the context) is bound to the thread or job. A pool's own threads outlive
the job and serve other rollouts, so they are started outside any scope.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lightning_core.capture.patching import Patches
from lightning_core.capture.scope import bind, outside_rollout


def _start(wrapped: Callable[..., Any], instance: threading.Thread, args: Any, kwargs: Any) -> Any:
    bound = bind(instance.run)

    def run(self: threading.Thread, *args: Any, **kwargs: Any) -> None:
        bound(*args, **kwargs)

    # Set on the instance, it replaces Thread.run and a subclass's own. It is a method like the one it replaces: tools that patch
    # Thread.start as well, such as Sentry, take its ``__func__`` and pass the thread themselves.
    instance.run = types.MethodType(run, instance)
    return wrapped(*args, **kwargs)


def _submit(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    function, *rest = args
    job = bind(function)
    with outside_rollout():
        return wrapped(job, *rest, **kwargs)


def install_threads(patches: Patches) -> None:
    """Make threads and jobs of thread pools run in the scope that started them."""
    patches.wrap(threading.Thread, "start", _start)
    patches.wrap(ThreadPoolExecutor, "submit", _submit)
