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
def counted(run: ActiveRollout, key: SentKey, host: str) -> Generator[None]:
    """Count the body as a request of ``run``, and how it ended: with a response, an error of the connection, or cancelled.

    ``host``: the one that the client requested, for messages.
    """
    sent, answered, cancelled = run.sent, False, False
    before = sent.begin()
    try:
        yield
        answered = True
        if sent.has_failed:
            run.counters["recovered"] += sent.recover(key)
    except Exception as error:
        if _is_unanswered(error):
            sent.fail(key, _unanswered(error, key[0], host))
        raise
    except BaseException:
        cancelled = True
        raise
    finally:
        sent.end(key, before, answered=answered, cancelled=cancelled)


def _unanswered(error: Exception, agent: str | None, host: str) -> str:
    """The failure of a request of ``agent`` to ``host`` that ended with ``error``."""
    by = "no agent" if agent is None else f"the agent {agent!r}"
    is_slow = any("Timeout" in kind.__name__ for kind in type(error).__mro__)
    advice = "Raise the client's time-out, or lower rollouts.concurrency" if is_slow else "Lower rollouts.concurrency"
    return f"a model request had no response: {describe(error)} (by {by}, to {host}). {advice}"


def _is_unanswered(error: Exception) -> bool:
    """Whether a client raised ``error`` because a connection or a response failed or took too long."""
    return isinstance(error, OSError) or any(kind.__name__ in _CONNECTION_ERRORS for kind in type(error).__mro__)
