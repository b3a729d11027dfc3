"""Observations and scores from the API of a Langfuse server."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import httpx

from lightning_core.errors import ConfigError, describe, redact_urls
from lightning_core.tools.interchange.messages import mapping, sequence
from lightning_core.tools.interchange.source_format import Document

KEYS = ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY")
"""The environment variables with the keys of a project."""
_ATTEMPTS = 6
_SECONDS = 60.0
"""The time limit of a request."""


def fetch_documents(url: str, since: str | None = None) -> Iterator[Document]:
    """The observations and scores of a project on the server ``url``, page by page.

    ``since``: only those from this time on, in ISO 8601. Raises `ConfigError` without keys, and if the server cannot be read.
    """
    missing = [key for key in KEYS if not os.environ.get(key)]
    if missing:
        raise ConfigError(
            f"--url needs the keys of a project of Langfuse: set the environment variables {', '.join(missing)}"
        )
    keys = (os.environ[KEYS[0]], os.environ[KEYS[1]])
    time_key: dict[str, str] = {} if since is None else {"fromStartTime": since}
    score_key: dict[str, str] = {} if since is None else {"fromTimestamp": since}
    fields = "core,basic,io,metadata,model,usage"
    with httpx.Client(base_url=url.rstrip("/"), auth=keys, timeout=_SECONDS) as client:
        yield from _pages(client, "/api/public/v2/observations", {"fields": fields, "limit": "1000", **time_key})
        yield from _pages(client, "/api/public/v3/scores", {"fields": "subject", "limit": "100", **score_key})


def _pages(client: httpx.Client, path: str, query: dict[str, str]) -> Iterator[Document]:
    cursor: str | None = None
    while True:
        page = _get(client, path, query if cursor is None else {**query, "cursor": cursor})
        yield from (mapping(item) for item in sequence(page.get("data")))
        following = mapping(page.get("meta")).get("cursor")
        if not following or following == cursor:
            return
        cursor = str(following)


def _get(client: httpx.Client, path: str, query: dict[str, str]) -> Document:
    """One page. Rate limits and errors of the server are waited for."""
    problem = ""
    for attempt in range(_ATTEMPTS):
        wait = 0.5 * 2**attempt
        try:
            response = client.get(path, params=query)
        except httpx.TransportError as error:
            problem = describe(error)
        else:
            if response.is_success:
                return mapping(response.json())
            problem = f"status {response.status_code}: {response.text[:200]}"
            if response.status_code < 500 and response.status_code != 429:
                break
            if (given := response.headers.get("retry-after", "")).isdecimal():
                wait = min(float(given), _SECONDS)
        if attempt + 1 < _ATTEMPTS:
            time.sleep(wait)
    raise ConfigError(f"{redact_urls(str(client.base_url))}: {path} could not be read: {problem}")
