"""Requests to servers of others: rate limits and errors of the server are waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import httpx

from lightning_core.errors import describe, fold

_ATTEMPTS = 6
_LONGEST_WAIT = 60.0
"""Seconds."""
_RETRIED = (408, 409, 429)
_SHOWN = 240
"""Characters of a response in an error."""


class NoAnswer(Exception):
    """The server returned no JSON object; the text says what it returned."""


def request_object(send: Callable[[], httpx.Response]) -> Mapping[str, Any]:
    """The JSON object that ``send``, one request, gets. Tried again after 0.5, 1, 2 … seconds, or after ``Retry-After``.

    Raises `NoAnswer` if the last attempt fails, and at once for a status that stays, or for a response that is not a JSON object.
    """
    problem = ""
    for attempt in range(_ATTEMPTS):
        wait = 0.5 * 2**attempt
        try:
            response = send()
        except httpx.RequestError as error:
            problem = describe(error)
            if isinstance(error, httpx.UnsupportedProtocol):
                break
        else:
            if response.is_success:
                return _object(response)
            problem = f"status {response.status_code}: {fold(response.text, _SHOWN)}"
            if response.status_code < 500 and response.status_code not in _RETRIED:
                break
            if (given := response.headers.get("retry-after", "")).isdecimal():
                wait = min(float(given), _LONGEST_WAIT)
        if attempt + 1 < _ATTEMPTS:
            time.sleep(wait)
    raise NoAnswer(problem)


def _object(response: httpx.Response) -> Mapping[str, Any]:
    try:
        found = response.json()
    except ValueError:
        found = None
    if not isinstance(found, Mapping):
        raise NoAnswer(f"expected a JSON object, got: {fold(response.text, _SHOWN)}")
    return cast("Mapping[str, Any]", found)
