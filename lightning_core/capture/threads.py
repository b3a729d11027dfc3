"""Carries a rollout's scope into the threads that an agent starts.

A new thread, or a job in a pool, begins with an empty context: a model call made there would belong to nobody and go to the
provider. Inside a rollout this binds the current scope, and nothing else of the context, to the thread or job. The threads
that a pool starts for itself outlive the job and serve other rollouts, so they are started outside any scope.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lightning_core.capture.patching import Patches
from lightning_core.capture.scope import bind, outside


def _start(wrapped: Callable[..., Any], instance: threading.Thread, args: Any, kwargs: Any) -> Any:
    # An attribute of the instance shadows the class's method, whether that is Thread.run or a subclass's own.
    instance.run = bind(instance.run)
    return wrapped(*args, **kwargs)


def _submit(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    function, *rest = args
    job = bind(function)
    with outside():
        return wrapped(job, *rest, **kwargs)


def install_threads(patches: Patches) -> None:
    """Make threads and thread pools keep the scope that they were started in."""
    patches.wrap(threading.Thread, "start", _start)
    patches.wrap(ThreadPoolExecutor, "submit", _submit)
