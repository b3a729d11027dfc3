"""Refuses requests for which an error of Lightning hides whether they are model calls.

Everything else that goes wrong in Lightning leaves the host alone (`record`). Here that would send the call of a trained agent to its
provider.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from lightning_core.capture.context import is_outside
from lightning_core.capture.recording import record
from lightning_core.capture.run import live_runs
from lightning_core.capture.scope import current_rollout
from lightning_core.errors import StrayCallError
from lightning_core.propagation.providers import host_of, is_listed

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def attempt(method: Any, read: Callable[[], _T], *, reported: tuple[type[Exception], ...] = ()) -> _T | None:
    """The parts of a request from ``read``; None after an error in ``reported``: the client finds it too, and reports it.

    Raises StrayCallError after another error, which is counted, if a request with ``method`` may be a model call.
    """
    with record("client.stamp"):
        try:
            return read()
        except reported:
            return None
    refuse_unrouted(method, None)
    return None


def refuse_unrouted(method: Any, url: str | None) -> None:
    """Raise StrayCallError if a request whose routing failed may be a model call: a POST while a rollout has an endpoint."""
    if is_outside() or (isinstance(method, str) and method.upper() != "POST"):
        return
    run = current_rollout()
    runs = [other for other in (live_runs() if run is None else [run]) if other.endpoint is not None]
    host = "an unknown host"
    with suppress(ValueError):  # a URL that cannot be parsed may be the reason
        target = urlsplit(url or "")
        host = host_of(target) or host
        if any(is_listed(target, other.ignore_hosts) for other in runs):
            return
    if not runs:
        return
    message = (
        f"a request to {host} on thread {threading.current_thread().name!r} was refused: it may be a model call, and an error in "
        "Lightning, which the log shows, prevented its routing. If it is not one, make it inside "
        "lightning_core.capture.outside_rollout(), or list its host under rollouts.ignore_hosts."
    )
    logger.error("%s", message)
    for other in runs:
        other.count_infrastructure_failure(message)
    raise StrayCallError(message)
