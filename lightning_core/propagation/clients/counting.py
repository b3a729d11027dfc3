"""Counts the requests that an HTTP client sends to the endpoint, and how they ended."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from lightning_core.capture.run import ActiveRollout
from lightning_core.capture.sent_requests import SentKey
from lightning_core.errors import describe

_HTTPX = ("NetworkError", "ProtocolError", "TimeoutException")
_AIOHTTP = ("ClientConnectionError",)
_URLLIB3 = ("MaxRetryError", "TimeoutError")
_HTTP_CLIENT = ("HTTPException",)
_CONNECTION_ERRORS = frozenset((*_HTTPX, *_AIOHTTP, *_URLLIB3, *_HTTP_CLIENT))
"""Classes of clients: errors of a connection, besides `OSError`."""


@contextmanager
def counted(run: ActiveRollout, key: SentKey) -> Generator[None]:
    """Count the body as a request of ``run``, and how it ended: with a response, an error of the connection, or cancelled."""
    sent, answered, cancelled = run.sent, False, False
    before = sent.begin()
    try:
        yield
        answered = True
        if sent.has_failed:
            run.counters["recovered"] += sent.recover(key)
    except Exception as error:
        if _is_unanswered(error):
            sent.fail(key, f"a model request had no response: {describe(error)}")
        raise
    except BaseException:
        cancelled = True
        raise
    finally:
        sent.end(key, before, answered=answered, cancelled=cancelled)


def _is_unanswered(error: Exception) -> bool:
    """Whether a client raised ``error`` because a connection or a response failed or took too long."""
    return isinstance(error, OSError) or any(kind.__name__ in _CONNECTION_ERRORS for kind in type(error).__mro__)
